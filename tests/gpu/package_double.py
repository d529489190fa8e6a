"""All that the worker calls of FlashInfer, each function one kernel that a graph of the stand-in replays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.gpu import ops_double, sampling_double, wide_double
from tests.gpu.host_accelerator import opaque


def package() -> Any:
    """What stands for the module `flashinfer`; attention takes float32 too, to compare tokens."""

    def whole(kind: Any) -> type:
        return type(kind.__name__, (kind,), {"run": opaque(kind.run)})

    kinds = {name: kind for name, kind in vars(wide_double).items() if name.endswith("Wrapper")}
    operations = {name: opaque(getattr(ops_double, name)) for name in ops_double.SIGNATURES}
    filters = {name: getattr(sampling_double, name) for name in sampling_double.SIGNATURES}
    return SimpleNamespace(
        __version__="of the tests' double, in torch",
        merge_state_in_place=wide_double.merge_state_in_place,
        **{name: whole(kind) for name, kind in kinds.items()},
        **operations,
        **filters,
    )
