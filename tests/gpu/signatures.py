"""The signatures of FlashInfer's wrappers, recorded from flashinfer 0.7.4, and those of what is installed."""

from __future__ import annotations

import inspect
import json
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "data" / "flashinfer_0.7.4.json"


def _parameter(name: str, kind: str, *default: Any) -> Parameter:
    return Parameter(name, getattr(Parameter, kind), default=default[0] if default else Parameter.empty)


RECORDED = {
    name: Signature([_parameter(*parameter) for parameter in parameters])
    for name, parameters in json.loads(FILE.read_text()).items()
}
"""By "class.method". Decode's `plan` hands its keywords on to `_plan_impl`."""


def bind(method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What each parameter of a recorded method gets; TypeError where the real one would not take the call."""
    bound = RECORDED[method].bind(None, *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def installed(flashinfer: Any, method: str) -> Signature:
    """The signature of the installed package's method."""
    owner, name = method.split(".")
    wrapper = getattr(flashinfer, owner)
    # Where plan has its keywords itself, there is no other to hand them on to.
    return inspect.signature(getattr(wrapper, name, wrapper.plan))
