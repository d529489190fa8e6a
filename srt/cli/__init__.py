"""The `sapwood` command."""

from sapwood.srt.cli.command import main

__all__ = ["main"]
