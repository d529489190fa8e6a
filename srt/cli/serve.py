"""`sapwood serve`: a model over HTTP."""

from __future__ import annotations

from sapwood.srt import requirements
from sapwood.srt.cli.arguments import Parser, parse_configured
from sapwood.srt.flags.values import load

HELP = """\
Serve a model over HTTP: OpenAI's routes under /v1, and the native ones (/generate, /health, /metrics, ...).

MODEL is a Hugging Face folder, a .gguf file, org/name on the Hugging Face hub, or a name that `sapwood
models` lists, by default SmolLM2-135M-Instruct; what is not on this machine is fetched once. Every flag can
be given as an environment variable too: --port is SAPWOOD_PORT.

SIGTERM or Ctrl-C finishes what runs (--drain-timeout) and exits with 0; a second one stops at once, with
143 or 130. If a process dies, every request in flight gets an error and the exit code is 1 (for the worker,
see --restart-worker). A wrong flag or model: 2.
"""


def run(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model-path")
    _, values = parse_configured(parser, arguments)
    chosen = load(values)
    requirements.check()

    from sapwood.srt.loader import sources
    from sapwood.srt.serve import serve

    return serve(chosen, sources.resolve)
