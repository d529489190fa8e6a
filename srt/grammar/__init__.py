"""Constraints on outputs: read, refused if they cannot be enforced, compiled within limits, matched."""
