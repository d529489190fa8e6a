"""A tokenizer.json for folders that have only older files: made once by transformers in a child process."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.kept import kept

FORMAT = 1
"""Part of the cached file's name: raise it when the conversion changes."""

SECONDS = 300.0
"""How long a conversion may take."""

SENTENCEPIECE, WORDS = "tokenizer.model", ("vocab.json", "merges.txt")
_READ = (
    SENTENCEPIECE, *WORDS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "config.json",
)  # fmt: skip
_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "PYTHONUSERBASE", "HOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR",
)  # fmt: skip
"""What the child needs; keys and tokens of the user's may be in the rest."""
_CHILD = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
tokenizer.backend_tokenizer.save(sys.argv[2])
"""


def can_convert(folder: Path) -> bool:
    """Whether the folder has the files of an older tokenizer."""
    return (folder / SENTENCEPIECE).is_file() or all((folder / name).is_file() for name in WORDS)


def convert(folder: Path, cache: Path) -> Path:
    """The tokenizer.json in `cache` that was made of the folder's older files, known by their content.

    Raises ModelError without transformers or sentencepiece, or if they cannot read the files.
    """
    return kept(cache, _label(folder), lambda: _made_by_transformers(folder))


def _label(folder: Path) -> str:
    parts = [f"slow:{FORMAT}"]
    if _is_installed("transformers"):
        parts.append(f"transformers:{importlib.metadata.version('transformers')}")
    for name in _READ:
        file = folder / name
        if file.is_file():
            parts.append(f"{name}:{hashlib.sha256(file.read_bytes()).hexdigest()}")
    return "|".join(parts)


def _made_by_transformers(folder: Path) -> str:
    spm = (folder / SENTENCEPIECE).is_file()
    needed = {"transformers": "transformers"} | (
        {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"} if spm else {}
    )
    missing = [package for module, package in needed.items() if not _is_installed(module)]
    if missing:
        raise ModelError(
            f"{folder}: has no tokenizer.json, and making one of its {SENTENCEPIECE if spm else WORDS[0]} "
            f"needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "tokenizer.json"
        # Not in the user's folder, where a file could be taken for one of transformers' modules.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-c", _CHILD, str(folder.absolute()), str(made)]
        try:
            ran = subprocess.run(
                command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ModelError(
                f"{folder}: transformers did not make a tokenizer.json of its files within {SECONDS:g} s"
            ) from None
        if ran.returncode != 0 or not made.is_file():
            said = ran.stderr.decode("utf-8", "replace").strip().splitlines()
            raise ModelError(
                f"{folder}: transformers could not make a tokenizer.json of its files: "
                f"{said[-1] if said else f'exit status {ran.returncode}'}"
            )
        return made.read_text("utf-8")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False
