"""FlashInfer, or its double, with every wrapper's construction and plans written down."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.gpu.signatures import bind

HOST = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "indptr", "last_page_len")


class Recorder:
    """Stands for the module. `made` and `plans`: (name of the class, what each argument was)."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.plans: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if not isinstance(real, type):
            return real

        def make(*args: Any, **kwargs: Any) -> _Recorded:
            self.made.append((name, bind(f"{name}.__init__", *args, **kwargs)))
            return _Recorded(name, real(*args, **kwargs), self.plans)

        return make

    def planned(self, name: str) -> list[dict[str, Any]]:
        return [arguments for kind, arguments in self.plans if kind.startswith(name)]


class _Recorded:
    def __init__(self, name: str, wrapper: Any, plans: list[tuple[str, dict[str, Any]]]) -> None:
        self._name, self._wrapper, self._plans = name, wrapper, plans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        method = "_plan_impl" if self._name.startswith("BatchDecode") else "plan"
        given = bind(f"{self._name}.{method}", *args, **kwargs)
        for argument in HOST:
            tensor = given.get(argument)
            if isinstance(tensor, Tensor):
                # What is on the device would be read back, and wait for all that it has to do.
                assert tensor.device.type == "cpu", f"{argument} is on {tensor.device}"
        self._plans.append((self._name, given))
        self._wrapper.plan(*args, **kwargs)
