"""Outputs told apart while they come: reasoning, content, calls of tools. Nothing in them is evaluated."""
