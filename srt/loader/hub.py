"""Models of a Hugging Face hub by their id: fetched into the hub library's own cache, and found there."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.folder import INDEX, PICKLED
from sapwood.srt.loader.gguf_parts import part_names

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@\s]+))?(:(?P<file>[^:@\s]+\.gguf))?")
ANSWER_SECONDS = 10.0
"""How long the hub may take to say which files there are."""

_DESCRIBING = (".json", ".jinja", ".txt", ".model")
_OTHERWISE = "a local path works too: a Hugging Face folder or a .gguf file"


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, with `@revision` and, where the repository holds several GGUF files, `:file.gguf`."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


def parse(text: str) -> HubName | None:
    """The hub id that `text` spells; None if it does not look like one."""
    found = _ID.fullmatch(text)
    if found is None or text.startswith((".", "-")) or "/." in text or "/-" in text:
        return None
    return HubName(found["repo"], found["revision"], found["file"])


def fetch(name: HubName, *, weights: bool = True) -> Path:
    """The folder, or the GGUF file, of a hub model, downloaded if the hub library's cache lacks files of it.

    Only configs, tokenizers, templates and safetensors or GGUF files are fetched, never pickles; without
    `weights` not even those. `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` count as ever. Without
    a network the cache is enough. Raises ModelError saying what was tried.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, timeout=ANSWER_SECONDS)
    except GatedRepoError as e:
        raise _failure(name, f"{_line(e)} (set HF_TOKEN to the key of an account that may read it)") from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as e:
        raise _failure(name, _line(e)) from None
    except _network_errors() as e:
        return _in_cache(name, _line(e))
    wanted = choose(name, [file.rfilename for file in info.siblings or ()], weights=weights)
    try:
        folder = snapshot_download(
            name.repo, revision=name.revision, allow_patterns=[glob.escape(file) for file in wanted]
        )
    except _network_errors() as e:
        raise _failure(name, _line(e)) from None
    return _result(Path(folder), wanted)


def choose(name: HubName, listing: Collection[str], *, weights: bool) -> list[str]:
    """The files of a repository that are needed; ModelError if they make no model, or if it is not clear
    which of several GGUF files is meant."""
    if name.file is not None:
        return _gguf(name, listing, name.file)
    top = sorted(file for file in listing if "/" not in file)
    safetensors = [file for file in top if file.endswith(".safetensors")]
    if "config.json" in top and (safetensors or not weights):
        # Some repositories hold the same weights twice; the index tells which files belong together.
        shards = [f for f in safetensors if INDEX not in top or not f.startswith("consolidated")]
        describing = [file for file in top if file.endswith(_DESCRIBING)]
        return describing + (shards if weights else [])
    ggufs = [file for file in sorted(listing) if file.endswith(".gguf")]
    # Of a split model the first part stands for all.
    whole = [file for file in ggufs if part_names(file)[0] == file and "mmproj" not in file]
    if len(whole) == 1:
        return _gguf(name, listing, whole[0])
    if whole:
        raise ModelError(
            f"{name} holds several GGUF files: {', '.join(whole)}; name one, as in {name}:{whole[0]}"
        )
    pickled = [file for file in top if PurePosixPath(file).suffix in PICKLED]
    if pickled:
        raise ModelError(
            f"{name} holds only pickled weights ({pickled[0]}), never loaded, since they can run code"
        )
    raise ModelError(f"{name} holds no safetensors with a config.json and no GGUF file; {_OTHERWISE}")


def _gguf(name: HubName, listing: Collection[str], file: str) -> list[str]:
    parts = part_names(file)
    missing = [part for part in parts if part not in listing]
    if missing:
        there = ", ".join(f for f in sorted(listing) if f.endswith(".gguf")) or "none"
        raise ModelError(f"{name} has no file {missing[0]}; GGUF files there: {there}")
    return parts


def _result(folder: Path, wanted: Sequence[str]) -> Path:
    return folder / wanted[0] if wanted[0].endswith(".gguf") else folder


def _in_cache(name: HubName, why: str) -> Path:
    """What an earlier fetch left in the cache: the hub library's documented layout of it."""
    from huggingface_hub import constants

    home = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    revision = name.revision or "main"
    with contextlib.suppress(OSError):  # a commit stands for itself
        revision = (home / "refs" / revision).read_text("utf-8").strip()
    folder = home / "snapshots" / revision
    if not folder.is_dir():
        raise _failure(name, f"{why}, and it is not in the cache ({constants.HF_HUB_CACHE})")
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    return _result(folder, choose(name, files, weights=any(f.endswith(".safetensors") for f in files)))


def _failure(name: HubName, why: str) -> ModelError:
    from huggingface_hub import constants

    return ModelError(
        f"{name} is no path here, and could not be fetched from the hub {constants.ENDPOINT}: {why}; "
        f"{_OTHERWISE}"
    )


def _network_errors() -> tuple[type[Exception], ...]:
    """What the hub library raises when it gets no answer, or a bad one.

    It has changed its HTTP library twice; the root of that library's errors is always a base of its own.
    """
    from huggingface_hub.errors import HfHubHTTPError

    kinds = [k for k in HfHubHTTPError.__mro__ if issubclass(k, Exception) and k is not Exception]
    return (*kinds, ValueError)


def _line(error: Exception) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
