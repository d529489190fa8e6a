"""Values of the configuration from text: those of flags, and of environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood.srt import config
from sapwood.srt.config import Config
from sapwood.srt.errors import ConfigError

OTHER_VARIABLES = frozenset({"SAPWOOD_CACHE", "SAPWOOD_LISTEN_FD", "SAPWOOD_NO_EXTENSION"})
"""Environment variables that are no fields: the cache folder, the server's socket, and the build's switch."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def parse(name: str, text: str, written: str) -> Any:
    """The value of a field from text, given as `written` (a flag or a variable). Raises ConfigError.

    A number of tokens may end in k, m, g (thousands) or K, M, G (of 1024).
    """
    kind = config.kind_of(name)
    number = text
    if config.plain(kind) is int and (match := _SIZE.fullmatch(text)) is not None:
        number = f"{float(match[1]) * _UNITS[match[2]]:.0f}"
    try:
        return msgspec.convert(number, kind, strict=False)
    except msgspec.ValidationError:
        raise config.wrong(name, written, text) from None


def load(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration from `values`, then environment variables, then defaults.

    A `SAPWOOD_` variable that means nothing raises ConfigError: it is a misspelt one.
    """
    known = {f"SAPWOOD_{name.upper()}" for name in Config.__struct_fields__} | OTHER_VARIABLES
    unknown = sorted(v for v in environ if v.startswith("SAPWOOD_") and v not in known)
    if unknown:
        raise ConfigError(f"unknown environment variable {unknown[0]}; see sapwood serve --help")
    given = {
        name: parse(name, environ[variable], variable)
        for name in Config.__struct_fields__
        if (variable := f"SAPWOOD_{name.upper()}") in environ and name not in values
    }
    return config.make(**given, **values)
