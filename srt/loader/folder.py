"""A Hugging Face folder: config, weight files, tokenizer, chat template, EOS ids and sampling defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.found import Found, first, read_json, sampling_defaults, token_ids
from sapwood.srt.loader.slow_tokenizer import can_convert, convert
from sapwood.srt.models.registry import architecture_of

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
INDEX = "model.safetensors.index.json"
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def describe(folder: Path, cache: Path, *, dummy: bool, tokenizer: bool) -> Found:
    """What `folder` holds. With `dummy` no weights are looked for; without `tokenizer` none is needed.

    A tokenizer.json that has to be made of older files is kept in `cache`. Raises ModelError naming the file
    that is missing, damaged, or pickled.
    """
    config = read_json(folder / "config.json")
    if not config:
        raise ModelError(f"{folder}: has no config.json; a Hugging Face model folder is needed")
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "?") if isinstance(method, dict) else method
        raise ModelError(f"{folder}: its weights are quantised ({method}), which is not supported yet")
    architecture_of(config)  # of all that can be wrong, what helps most to know first
    generation = read_json(folder / "generation_config.json")
    settings = read_json(folder / "tokenizer_config.json")
    file = _tokenizer_file(folder, cache / "tokenizers", needed=tokenizer and not dummy)
    ids = _special_ids(file) if file else {}
    words = _template_vars(folder, settings, config, ids)
    return Found(
        name=folder.resolve().name,
        format="dummy" if dummy else "safetensors",
        path=folder,
        files=[] if dummy else weight_files(folder),
        config=config,
        eos_ids=token_ids(
            config.get("eos_token_id"), generation.get("eos_token_id"), ids.get(words.get("eos_token", ""))
        ),
        tokenizer_file=file,
        chat_template=_chat_template(folder, settings),
        template_vars=words,
        sampling_defaults=sampling_defaults(generation),
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order; ModelError if one is missing or there are only others."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        return sorted({_shard(folder, name) for name in weight_map(index).values()})
    files = sorted(folder.glob("*.safetensors"))
    if files:
        _check_numbers(files)
        return files
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        refuse_pickle(folder / pickled[0])
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    if ggufs:
        raise ModelError(f"{folder}: has no *.safetensors; to serve the GGUF in it, give {folder / ggufs[0]}")
    raise ModelError(f"{folder}: has no *.safetensors")


def _check_numbers(files: list[Path]) -> None:
    """Without an index the names alone tell of a shard that is missing."""
    names = {file.name for file in files}
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        for number in range(1, int(shard["count"]) + 1) if shard else ():
            wanted = f"{shard['stem']}-{number:05}-of-{shard['count']}.safetensors" if shard else ""
            if wanted not in names:
                raise ModelError(f"{file.with_name(wanted)}: is missing, but {file.name} is there")


def weight_map(index: Path) -> dict[str, str]:
    """The index's map from tensor to file name; ModelError if it is not one."""
    given = read_json(index).get("weight_map")
    if not isinstance(given, dict) or not given or not all(isinstance(v, str) for v in given.values()):
        raise ModelError(f"{index}: has no `weight_map` from tensor names to files")
    return given


def refuse_pickle(path: Path) -> None:
    raise ModelError(
        f"{path}: pickled weights ({', '.join(PICKLED)}) are never loaded, since they can run code; "
        "convert the model to safetensors"
    )


def _shard(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix in PICKLED:
        refuse_pickle(path)
    if Path(name).name != name or path.suffix != ".safetensors":
        raise ModelError(f"{folder / INDEX}: names the file {name!r}, which is no *.safetensors beside it")
    if not path.is_file():
        raise ModelError(f"{path}: is missing, but {INDEX} names it")
    return path


def _tokenizer_file(folder: Path, cache: Path, *, needed: bool) -> Path | None:
    path = folder / "tokenizer.json"
    if path.is_file():
        return path
    if not needed:
        return None
    if can_convert(folder):
        return convert(folder, cache)
    raise ModelError(
        f"{folder}: has no tokenizer.json, nor a tokenizer.model or vocab.json and merges.txt to make one; "
        "add one, or serve token ids only with --skip-tokenizer-init"
    )


def _special_ids(file: Path) -> dict[str, int]:
    """Token text → id: the added tokens of a tokenizer.json over its vocabulary."""
    content = read_json(file)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {}
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            ids[token["content"]] = token.get("id", -1)
    return ids


def _template_vars(
    folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, str]:
    """The special tokens' texts: the tokenizer's settings, else for BOS and EOS the config's ids."""
    older = read_json(folder / "special_tokens_map.json")
    words = {name: first(_text(place.get(name)) for place in (settings, older)) for name in TOKENS}
    for name in ("bos_token", "eos_token"):
        wanted = token_ids(config.get(f"{name}_id"))
        if words[name] is None and not settings and wanted:
            words[name] = next((text for text, i in ids.items() if i == wanted[0]), None)
    return {name: text for name, text in words.items() if text is not None}


def _text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template: a file of its own before the tokenizer's settings before the older JSON file."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text("utf-8")
        except ValueError as e:
            raise ModelError(f"{own}: is not UTF-8: {e}") from None
    given = first(
        (settings.get("chat_template"), read_json(folder / "chat_template.json").get("chat_template"))
    )
    if isinstance(given, list):
        named = {t["name"]: t.get("template") for t in given if isinstance(t, dict) and "name" in t}
        given = named.get("default", next(iter(named.values()), None) if len(named) == 1 else None)
    return given if isinstance(given, str) else None
