"""SGLang's prefix caches alone, from the folder of an unpacked wheel: without SGLang's other requirements.

What the modules of its RadixCache drag in from the rest of SGLang (events, storage, pools) is not called
here; such modules are stood in for by empty ones. The Rust extension is called as SGLang's adapter calls it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PACKAGE = "sglang.srt.mem_cache"
RUST = f"{PACKAGE}.rust_tree_core.mem_cache"
OWN = {
    f"{PACKAGE}.{name}"
    for name in ("base_prefix_cache", "cache_init_params", "evict_policy", "events", "radix_cache", "utils")
}
"""The modules that are SGLang's own. Packages on the way to them are empty, too."""
FULL = 0
"""The number of ordinary attention among SGLang's components."""


class _Empty(types.ModuleType):
    """Every name in it is a class that can be derived from, and does nothing."""

    __path__ = ()  # a package, whose modules the finder makes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "sglang":
            return None
        file = self._folder.joinpath(*fullname.split("."))
        if fullname in OWN:
            return importlib.util.spec_from_file_location(fullname, file.with_suffix(".py"))
        if fullname == RUST:
            (found,) = file.parent.glob("mem_cache.*.so")
            return importlib.util.spec_from_file_location(fullname, found)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Allocator:
    """Takes the slots of evicted nodes, one by one, and counts them."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.freed = 0

    def free_segment(self, slots: Any, start_pos: int) -> None:
        self.freed += 1


class _Tensors:
    """What both take: arrays of ids, tensors of slots."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self._next = 0

    def key(self, ids: npt.NDArray[np.int32]) -> array[int]:
        return array("q", ids.tolist())

    def slots(self, n: int) -> Any:
        self._next += n
        return self.torch.arange(self._next - n, self._next, dtype=self.torch.int64)

    def free(self, slots: Any) -> None:
        pass

    def join(self, parts: list[Any]) -> Any:
        return self.torch.cat(parts)


class RadixCache(_Tensors):
    """SGLang's RadixCache under the operations of bench.radix."""

    name = "sglang"

    def __init__(self, capacity: int) -> None:
        super().__init__()
        module = importlib.import_module(f"{PACKAGE}.radix_cache")
        self._params = importlib.import_module(f"{PACKAGE}.base_prefix_cache")
        self._key = module.RadixKey
        self._allocator = _Allocator(self.torch.device("cpu"))
        self._cache = module.RadixCache.create_simulated(mock_allocator=self._allocator)

    def match(self, key: array[int]) -> int:
        found = self._cache.match_prefix(self._params.MatchPrefixParams(key=self._key(key)))
        return len(self._cache.path_device_indices(found.last_device_node))

    def insert(self, key: array[int], slots: Any) -> int:
        done = self._cache.insert(self._params.InsertParams(key=self._key(key), value=slots))
        return int(done.prefix_len)

    def evict(self, tokens: int) -> int:
        before = self._allocator.freed
        self._cache.evict(self._params.EvictParams(num_tokens=tokens))
        return self._allocator.freed - before


class TreeCore(_Tensors):
    """The Rust tree of SGLang's UnifiedRadixCache under the operations of bench.radix."""

    name = "sglang rust"

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._module = importlib.import_module(RUST)
        options = self._module.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=1, device="cpu")
        self._tree = self._module.RustUnifiedTreeCoreBinding(options, [FULL])
        self._root = self._tree.root_node_handle()

    def match(self, key: array[int]) -> int:
        found = self._tree.match_prefix(self._module.MatchParamsBinding(key=key))
        return len(self._tree.collect_full_device_indices(found.last_device_node_id, self._root))

    def insert(self, key: array[int], slots: Any) -> int:
        step = self._tree.begin_insert(self._module.InsertParamsBinding(key=key, value=slots))
        while step.result is None:
            step = self._tree.resume_insert()
        self._tree.end_insert()
        return int(step.result.prefix_len)

    def evict(self, tokens: int) -> int:
        tree, done, nodes = self._tree, {FULL: 0}, 0
        tree.evict_device_start(FULL, tokens)
        while done[FULL] < tokens:
            step = tree.evict_device_next_node(FULL, done)
            done[FULL] += step.tracker.get(FULL, 0)
            if step.node_id is not None:
                done[FULL] += tree.evict_device_leaf(step.node_id).tracker.get(FULL, 0)
                nodes += 1
            elif not step.made_progress:
                break
        tree.evict_device_end(FULL)
        return nodes


def load(folder: Path) -> dict[str, str]:
    """Make SGLang's caches importable; the versions. Raises SystemExit if they are not in `folder`."""
    import torch

    found = sorted(folder.glob("sglang-*.dist-info"))
    if not found or not (folder / "sglang/srt/mem_cache/radix_cache.py").is_file():
        raise SystemExit(f"{folder} has no unpacked sglang wheel")
    sys.meta_path.insert(0, _Finder(folder))
    version = found[0].name.removeprefix("sglang-").removesuffix(".dist-info")
    return {"sglang": version, "torch": torch.__version__}
