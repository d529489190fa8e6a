"""`python -m sapwood`: the `sapwood` command."""

from __future__ import annotations

import sys

from sapwood.srt.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
