"""The table of every flag of SGLang and vLLM that is known here, and how it is looked up."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable

from sapwood.srt import config
from sapwood.srt.flags.anyway import ANYWAY
from sapwood.srt.flags.entry import Entry
from sapwood.srt.flags.refused import REFUSED
from sapwood.srt.flags.refused_engine import REFUSED_ENGINE
from sapwood.srt.flags.same import ALIASES, OUR_NAMES

TABLE: tuple[Entry, ...] = (*OUR_NAMES, *ALIASES, *ANYWAY, *REFUSED, *REFUSED_ENGINE)


@functools.cache
def by_name() -> dict[str, Entry]:
    """Each entry by its keyword, or its short flag with the dash."""
    return {entry.name: entry for entry in TABLE}


def suggestions(written: str, others: Iterable[str] = ()) -> list[str]:
    """The flags, ours and foreign, that look most like `written`; `others` are further ones."""
    known = {config.option(name) for name, _, _ in config.fields()}
    known |= {entry.flag for entry in TABLE if entry.action == "same"} | set(others)
    close = difflib.get_close_matches(written, sorted(known), n=3)
    return close or difflib.get_close_matches(written, [entry.flag for entry in TABLE], n=1)
