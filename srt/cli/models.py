"""`sapwood models`: what lies ready, and what can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sapwood.srt.cli.arguments import Parser, parse
from sapwood.srt.cli.env import show
from sapwood.srt.loader import packaged
from sapwood.srt.models import registry, rope_config

HELP = """\
List the packaged models and whether they have been fetched, what the cache folder holds, and what can be
served: architectures, storage types of GGUF files, kinds of rotary encoding. Starts nothing, fetches nothing.
"""


def run(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    args = parse(parser, arguments)
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    show("packaged models", {p["name"]: _packaged(p) for p in found["packaged"]})
    cached = {c["path"]: _megabytes(c["bytes"]) for c in found["cached"]}
    show(f"cache folder {found['cache_folder']}", cached or {"empty": ""})
    show(
        "served from a Hugging Face folder or a .gguf file",
        {
            "architectures": ", ".join(found["architectures"]),
            "gguf types": ", ".join(found["gguf_types"]) or "unknown without numpy",
            "rope": ", ".join(found["rope_kinds"]),
        },
    )
    return 0


def collect() -> dict[str, Any]:
    """Everything that is told, as JSON values; sizes are in bytes."""
    folder = packaged.cache_folder()
    return {
        "packaged": [
            {
                "name": package.name,
                "description": package.description,
                "licence": package.licence,
                "note": package.note,
                "bytes": package.size,
                "aliases": list(package.aliases),
                "cached": packaged.is_cached(package),
                "default": package is packaged.DEFAULT,
            }
            for package in packaged.PACKAGED.values()
        ],
        "cache_folder": str(folder),
        "cached": [{"path": str(path.relative_to(folder)), "bytes": _size(path)} for path in _files(folder)],
        "architectures": registry.supported(),
        "gguf_types": _gguf_types(),
        "rope_kinds": list(rope_config.KINDS),
    }


def _files(folder: Path) -> list[Path]:
    """What lies in the cache folder, but locks, marks and what is being fetched."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix not in (".checked", ".lock", ".tmp")
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it has gone meanwhile
        return 0


def _gguf_types() -> list[str]:
    try:
        from sapwood.srt.loader.gguf_kinds import KINDS
    except ImportError:
        return []
    return sorted(KINDS)


def _packaged(package: dict[str, Any]) -> str:
    state = "fetched" if package["cached"] else "not fetched"
    parts = [package["description"], _megabytes(package["bytes"]), state, package["licence"], package["note"]]
    return "; ".join(part for part in parts if part)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 50_000 else f"{size / 1e3:.1f} kB"
