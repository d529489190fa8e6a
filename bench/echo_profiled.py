"""The role module that puts any process of `bench.stack` but its worker under cProfile."""

from __future__ import annotations

from bench.echo_worker import profiled as main

__all__ = ["main"]
