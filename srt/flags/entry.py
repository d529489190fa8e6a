"""One row of the table of foreign flags, and the small language in which its groups are written."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

Vocabulary = Literal["sglang", "vllm", "both"]
Action = Literal["same", "anyway", "refused"]

ANY = "*"
TRUE, FALSE = "true", "false"
_SECRETS = ("api_key", "hf_token", "password", "encryption_key")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one flag of SGLang or vLLM means here.

    `name` is its Python keyword (`max_model_len` is `--max-model-len`), or a short flag with its dash.

    "same": it sets the field `target`; `becomes` maps those values that are written otherwise (to None:
    they ask for the contrary of what the other value sets); `also` maps values to a second field that they
    set, and its value, `elsewhere` to one that they set in place of `target`.
    "anyway": what it asks for is always so.
    "refused": it cannot be had. Of the latter two, `accepts` are the values that ask for what happens anyway.

    `wrong` maps values (`*`: all others) to the reason why they cannot be had, `reason` is why in general
    (for "same", where the meaning differs), `instead` what to use.
    """

    name: str
    vocabulary: Vocabulary
    action: Action
    switch: bool = False
    listed: bool = False
    target: str = ""
    becomes: dict[str, Any] = {}
    also: dict[str, tuple[str, Any]] = {}
    elsewhere: dict[str, tuple[str, Any]] = {}
    accepts: tuple[str, ...] = ()
    wrong: dict[str, str] = {}
    reason: str = ""
    instead: str = ""

    @property
    def flag(self) -> str:
        """The flag as it is written on a command line."""
        return self.name if self.name.startswith("-") else "--" + self.name.replace("_", "-")

    def accepted(self, value: Any) -> bool:
        """Whether `value` of an entry without a target asks for what happens anyway."""
        return ANY in self.accepts or text_of(value) in self.accepts

    def shown(self, written: str, value: Any) -> str:
        """The flag, given as `written`, with its value, unless that is a secret."""
        if self.name.endswith(_SECRETS):
            return written
        if not self.switch:
            return f"{written} {_short(value)}".rstrip()
        if text_of(value) != FALSE:
            return written
        return f"--no-{written.lstrip('-')}" if written.startswith("-") else f"{written}=False"

    def refusal(self, written: str, value: Any) -> str:
        """The sentence that refuses `value`, given as `written`."""
        text = text_of(value)
        reason = self.wrong.get(text) or self.wrong.get(ANY) or self.reason
        parts = [f"{self.shown(written, value)} is refused: {reason}"]
        if self.accepts and not self.switch:
            parts.append(f"accepted: {', '.join(self.accepts)}")
        if self.instead:
            parts.append(self.instead)
        return "; ".join(parts)


def text_of(value: Any) -> str:
    """A value in the form in which entries are compared: numbers as short as they go, names in lower case."""
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, (list, tuple, set, dict)):
        value = json.dumps(sorted(value) if isinstance(value, set) else value, default=str)
    text = str(value).strip().lower()
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:g}" if len(text) <= 12 else text


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if isinstance(value, (list, tuple, dict)) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def group(
    action: Literal["anyway", "refused"],
    reason: str,
    *,
    both: str = "",
    sglang: str = "",
    vllm: str = "",
    instead: str = "",
) -> tuple[Entry, ...]:
    """Entries that share a reason, from words: `name` takes a value, `name?` is a switch, `name+` a list.

    After `=` come the values that are accepted, between bars; `*` is any. Without one a switch accepts true
    if its action is "anyway", else false: what is refused may be switched off. `a/b` are two names of a flag.
    """
    made = []
    for vocabulary, words in (("both", both), ("sglang", sglang), ("vllm", vllm)):
        for word in words.split():
            names, _, values = word.partition("=")
            switch, listed = names.endswith("?"), names.endswith("+")
            accepts = tuple(values.split("|")) if values else ()
            if switch and not accepts:
                accepts = (TRUE,) if action == "anyway" else (FALSE,)
            made += [
                Entry(
                    name=name,
                    vocabulary=vocabulary,  # type: ignore[arg-type]
                    action="anyway" if accepts == (ANY,) else action,
                    switch=switch,
                    listed=listed,
                    accepts=accepts,
                    reason=reason,
                    instead=instead,
                )
                for name in names.rstrip("?+").split("/")
            ]
    return tuple(made)


def same(
    target: str,
    names: str,
    vocabulary: Vocabulary,
    *,
    becomes: dict[str, Any] | None = None,
    also: dict[str, tuple[str, Any]] | None = None,
    elsewhere: dict[str, tuple[str, Any]] | None = None,
    wrong: dict[str, str] | None = None,
    switch: bool = False,
    listed: bool = False,
    note: str = "",
) -> tuple[Entry, ...]:
    """Entries that set the field `target`; `note` says where the meaning differs."""
    return tuple(
        Entry(
            name=name,
            vocabulary=vocabulary,
            action="same",
            switch=switch,
            listed=listed,
            target=target,
            becomes=becomes or {},
            also=also or {},
            elsewhere=elsewhere or {},
            wrong=wrong or {},
            reason=note,
        )
        for name in names.split()
    )
