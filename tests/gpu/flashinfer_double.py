"""What FlashInfer's wrappers document, in plain torch on the CPU; our attention gets it as the module.

A wrapper reads in `run` what `plan` has stored, and nothing else. Where the real one would raise, so does
this one; where it would read memory that is not its own, this one raises IndexError. Arguments that we do not
use are refused. Calls are bound to the recorded signatures, so that one the package does not have fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from tests.gpu.host_accelerator import Recorder, pinned
from tests.gpu.paged_double import Buffers, Plan, attend
from tests.gpu.signatures import RECORDED, bind

GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads a KV head for which decode without tensor cores has kernels."""
HALVES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
"""Those that the real one was tried with here, of a few more that it has kernels for."""
PARTIAL_ROWS = 2 * 132 * 128
"""Partial results that a plan may ask room for: of two tiles of 128 queries for each multiprocessor of an
H100."""


def workspace_bytes(head_dim: int) -> int:
    """What a plan may need for partial results and their sums, in float32."""
    return PARTIAL_ROWS * (head_dim + 1) * 4


WORKSPACE = workspace_bytes(max(HEAD_DIMS))
KNOWN = {
    "sm_scale", "window_left", "q_data_type", "kv_data_type", "non_blocking", "fixed_split_size",
    "disable_split_kv", "causal", "kv_layout", "use_cuda_graph", "use_tensor_cores", "backend", "out",
    "return_lse", "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer",
}  # fmt: skip


def _bind(method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """As `bind`; of the arguments that may be left out, only those in KNOWN have a meaning here."""
    given = bind(method, *args, **kwargs)
    for name, parameter in RECORDED[method].parameters.items():
        value, default = given[name], parameter.default
        if default is not Parameter.empty and name not in KNOWN and value != default:
            raise NotImplementedError(f"the double does not know {name}={value!r}")
    return given


class _Paged:
    """Prefill and decode alike: decode is a prefill of one query a row."""

    name = ""
    types: tuple[torch.dtype, ...] = HALVES
    head_dims: Container[int] = HEAD_DIMS
    _plans = itertools.count(1)

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        self._take_floats(workspace)
        # The real one's names, and a part of its 8 MiB each. A view of the workspace's memory is where it is,
        # which its device does not tell: see stream_checks.
        self._take_ints(workspace.new_empty(16))
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        if kv_layout != "NHD":
            raise NotImplementedError("the double knows NHD only")
        self.device = workspace.device
        self.graph = use_cuda_graph
        self.fixed: Buffers | None = None
        self.planned: Plan | None = None
        self._captured: tuple[Any, ...] = ()

    def reset_workspace_buffer(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.name}.reset_workspace_buffer", *args, **kwargs)
        ints = given["int_workspace_buffer"]
        if ints.dtype != torch.uint8 or ints.device != self.device or ints.numel() < 8 << 20:
            raise ValueError("the integer workspace is 8 MiB of uint8 on the device")
        self._take_floats(given["float_workspace_buffer"])
        self._take_ints(ints)

    def _take_floats(self, workspace: Tensor) -> None:
        if workspace.data_ptr() % 16:
            raise ValueError("float_workspace_buffer must be 16-byte aligned")
        self._float_workspace_buffer = workspace

    def _take_ints(self, ints: Tensor) -> None:
        self._int_workspace_buffer = ints
        self._pin_memory_int_workspace_buffer = pinned(tuple(ints.shape), torch.uint8)

    @property
    def _schedule(self) -> Tensor:
        """Where a plan leaves its number, as the real one leaves its schedule: the next plan into the same
        integer workspace overwrites it."""
        return self._int_workspace_buffer[:8].view(torch.int64)

    def _schedules(self, number: int) -> None:
        """Written on the host, and copied from there when the stream comes to it."""
        host = self._pin_memory_int_workspace_buffer[:8].view(torch.int64)
        host.fill_(number)
        self._schedule.copy_(host, non_blocking=True)

    def _plan(self, given: dict[str, Any], qo_indptr: Tensor, causal: bool, head_dim: int) -> None:
        host = Buffers(
            qo_indptr,
            given.get("paged_kv_indptr", given.get("indptr")),
            given.get("paged_kv_indices", given.get("indices")),
            given.get("paged_kv_last_page_len", given.get("last_page_len")),
        )
        self._check(host)
        q_heads, kv_heads = given["num_qo_heads"], given["num_kv_heads"]
        if q_heads % kv_heads:
            raise ValueError(f"num_qo_heads {q_heads} should be divisible by num_kv_heads {kv_heads}")
        q_dtype = _dtype(given["q_data_type"])
        kv_dtype = q_dtype if given["kv_data_type"] is None else _dtype(given["kv_data_type"])
        if q_dtype not in self.types:
            raise ValueError(f"there are no kernels for queries in {q_dtype}")
        if kv_dtype != q_dtype and kv_dtype.itemsize != 1:
            raise NotImplementedError(
                f"K and V in {kv_dtype} under queries in {q_dtype}: kernels misread them"
            )
        if head_dim not in self.head_dims:
            raise ValueError(f"there are no kernels for heads of {head_dim} channels")
        if self._float_workspace_buffer.nbytes < workspace_bytes(head_dim):
            raise RuntimeError("Failed to allocate memory for batch_prefill_tmp_v: buffer overflow")
        scale = given["sm_scale"]
        self.planned = Plan(
            self._store(host),
            # Copied, as what is on the host goes to the device; what is there already is only referred to.
            Buffers(host.qo_indptr.clone(), host.indptr.clone(), host.indices, host.last_page_len.clone()),
            (q_heads, kv_heads, head_dim),
            given["page_size"],
            causal,
            given["window_left"],
            1 / math.sqrt(head_dim) if scale is None else scale,
            q_dtype,
            kv_dtype,
            next(self._plans),
        )
        self._schedules(self.planned.number)

    def _check(self, host: Buffers) -> None:
        for name, tensor in vars(host).items():
            if tensor.dtype != torch.int32 or tensor.dim() != 1:
                raise ValueError(
                    f"{name} should be int32 of one dimension, not {tensor.dtype} {tensor.shape}"
                )
        rows = len(host.last_page_len)
        if not rows:
            raise ValueError("a plan of no rows")
        if len(host.indptr) != rows + 1 or len(host.qo_indptr) != rows + 1:
            raise ValueError(f"indptrs of {rows} rows should have {rows + 1} entries")
        for indptr in (host.indptr, host.qo_indptr):
            if indptr[0] != 0 or (indptr.diff() < 0).any():
                raise ValueError(f"an indptr ascends from 0: {indptr.tolist()}")
        if host.indptr[-1] > len(host.indices):
            raise IndexError(f"{host.indptr[-1]} indices should be there, {len(host.indices)} are")

    def _store(self, host: Buffers) -> Buffers:
        if self.fixed is None:
            qo_indptr, indptr, last = (
                self._float_workspace_buffer.new_empty(len(column), dtype=torch.int32).copy_(column)
                for column in (host.qo_indptr, host.indptr, host.last_page_len)
            )
            return Buffers(qo_indptr, indptr, host.indices, last)
        fixed = self.fixed
        if len(host.last_page_len) != len(fixed.last_page_len):
            raise ValueError(
                "The batch size should be fixed in cudagraph mode, the runtime batch size"
                f" {len(host.last_page_len)} mismatches the batch size set during initialization"
                f" {len(fixed.last_page_len)}"
            )
        if len(host.indices) > len(fixed.indices):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        fixed.qo_indptr.copy_(host.qo_indptr)
        fixed.indptr.copy_(host.indptr)
        fixed.last_page_len.copy_(host.last_page_len)
        fixed.indices[: len(host.indices)].copy_(host.indices)
        return fixed

    def _fix(self, qo_indptr: Tensor, indptr: Any, indices: Any, last_page_len: Any) -> None:
        for name, buffer in {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}.items():
            if not torch.is_tensor(buffer):
                raise ValueError(f"paged_kv_{name}_buffer should be a torch.Tensor in cudagraph mode")
            if buffer.dtype != torch.int32 or buffer.device != self.device:
                raise ValueError(f"paged_kv_{name}_buffer should be int32 on {self.device}")
        if len(indptr) != len(last_page_len) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self.fixed = Buffers(qo_indptr, indptr, indices, last_page_len)

    def _run(self, given: dict[str, Any]) -> Any:
        plan = self.planned
        if plan is None:
            raise AttributeError("run before plan")
        self._capture(plan)
        if int(self._schedule) != plan.number:
            raise RuntimeError("the integer workspace has another plan's schedule")
        q, (k_cache, v_cache) = given["q"], given["paged_kv_cache"]
        q_heads, kv_heads, d = plan.heads
        if q.dtype != plan.q_dtype:
            raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type {plan.q_dtype}")
        if k_cache.dtype != plan.kv_dtype:
            raise ValueError(
                f"The dtype of k {k_cache.dtype} does not match the kv_data_type {plan.kv_dtype}"
            )
        if k_cache.stride() != v_cache.stride():
            raise ValueError("K and V should have the same strides")
        if (
            k_cache.shape[1:] != (plan.page_size, kv_heads, d)
            or q.shape[1:] != (q_heads, d)
            or q.stride(-1) != 1
        ):
            raise ValueError(
                f"planned for {plan.heads}, pages of {plan.page_size}: {q.shape}, {k_cache.shape}"
            )
        if q.shape[0] != int(plan.host.qo_indptr[-1]):
            raise ValueError(
                f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({plan.host.qo_indptr[-1]})"
            )
        if given["window_left"] is not None and given["window_left"] != plan.window_left:
            raise AssertionError("window_left is planned")
        for name in ("qo_indptr", "indptr", "last_page_len"):
            if not torch.equal(getattr(plan.buffers, name), getattr(plan.host, name)):
                raise RuntimeError(f"{name} is not what the schedule was made for")
        out, lse = given["out"], torch.full(q.shape[:2], -math.inf)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        elif out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
            raise ValueError(f"out should be {q.shape} of {q.dtype}, not {out.shape} of {out.dtype}")
        elif not out.is_contiguous():
            raise ValueError("out is written as if it were contiguous")
        for row in range(len(plan.buffers.last_page_len)):
            attend(row, plan, q, k_cache, v_cache, out, lse)
        return (out, lse) if given["return_lse"] else out

    def _capture(self, plan: Plan) -> None:
        """A captured kernel keeps what it was launched with, whatever is planned then."""
        launched = (
            len(plan.buffers.last_page_len), plan.heads, plan.page_size, plan.causal, plan.window_left,
            plan.scale, plan.q_dtype, plan.kv_dtype, self._int_workspace_buffer.data_ptr(),
        )  # fmt: skip
        if Recorder.active is not None:
            if not self.graph:
                raise RuntimeError("a wrapper that was not made for graphs is captured")
            self._captured = launched
        elif self._captured and launched != self._captured:
            raise RuntimeError(f"captured with {self._captured}, and replayed with {launched}")


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.name}.__init__", *args, **kwargs)
        if given["backend"] not in ("auto", "fa2", "fa3"):
            raise ValueError(f"a backend {given['backend']}")
        if given["use_cuda_graph"]:
            raise NotImplementedError("the double captures decodes only")
        self.backend = given["backend"]
        super().__init__(given["float_workspace_buffer"], given["kv_layout"], False)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.name}.plan", *args, **kwargs)
        if self.backend != "fa2" and (given["fixed_split_size"] is not None or given["disable_split_kv"]):
            raise NotImplementedError("only fa2 heeds fixed_split_size and disable_split_kv")
        self._plan(given, given["qo_indptr"], given["causal"], given["head_dim_qk"])

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(_bind(f"{self.name}.run", *args, **kwargs))


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.name}.__init__", *args, **kwargs)
        self.tensor_cores = given["use_tensor_cores"]
        super().__init__(given["float_workspace_buffer"], given["kv_layout"], given["use_cuda_graph"])
        if self.graph:
            last = given["paged_kv_last_page_len_buffer"]
            rows = len(last) if torch.is_tensor(last) else 0
            one_each = torch.arange(rows + 1, dtype=torch.int32)
            self._fix(one_each, given["paged_kv_indptr_buffer"], given["paged_kv_indices_buffer"], last)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        if len(args) > 7:
            raise DeprecationWarning("what comes after page_size is passed by keyword")
        given = _bind(f"{self.name}._plan_impl", *args, **kwargs)
        _bind(f"{self.name}.plan", *args, **kwargs)
        if given["fixed_split_size"] is not None and not self.tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        if given["fixed_split_size"] is not None and self.graph:
            raise NotImplementedError("fixed_split_size does not go with CUDA graphs")
        if given["disable_split_kv"] and not self.tensor_cores:
            raise NotImplementedError("decode without tensor cores does not heed disable_split_kv")
        group = given["num_qo_heads"] // given["num_kv_heads"]
        if not self.tensor_cores and group not in GROUPS:
            raise RuntimeError(f"Unsupported group_size: {group}")
        qo_indptr = torch.arange(len(given["last_page_len"]) + 1, dtype=torch.int32)
        self._plan(given, qo_indptr, False, given["head_dim"])

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(_bind(f"{self.name}.run", *args, **kwargs))


class MultiLevelCascadeAttentionWrapper:
    name = "MultiLevelCascadeAttentionWrapper"
    level = BatchPrefillWithPagedKVCacheWrapper

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.name}.__init__", *args, **kwargs)
        if given["use_cuda_graph"]:
            raise NotImplementedError("the double captures decodes only")
        workspace, layout = given["float_workspace_buffer"], given["kv_layout"]
        self.levels = [self.level(workspace, layout) for _ in range(given["num_levels"])]

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.name}.plan", *args, **kwargs)
        names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        arrays = [given.pop(name) for name in names]
        heads = [given.pop(name) for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")]
        given.pop("self")
        causal = given.pop("causal")
        for level, *tables in zip(self.levels, *arrays, strict=True):
            level.plan(*tables, *heads, causal=causal and level is self.levels[-1], **given)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given = _bind(f"{self.name}.run", *args, **kwargs)
        q, kv = given["q"], given["paged_kv_cache"]
        out, lse = self.levels[-1].run(q, kv, return_lse=True)
        for level in self.levels[:-1]:
            other, other_lse = level.run(q, kv, return_lse=True)
            if not other_lse.isfinite().all():
                raise ValueError("a group without K and V")
            merge_in(self.level.types, out, lse, other, other_lse)
        return out


def merged(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: lse [m, heads] is of base 2."""
    lse = torch.logaddexp2(a_lse, b_lse)
    shares = ((part - lse).exp2()[..., None] for part in (a_lse, b_lse))
    mixed = sum(part.float() * share for part, share in zip((a, b), shares, strict=True))
    assert isinstance(mixed, Tensor)
    return mixed.to(a.dtype), lse


def _dtype(given: Any) -> torch.dtype:
    return getattr(torch, given) if isinstance(given, str) else given


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """v [n, heads, d] and s [n, heads], the base-2 logarithm of its sum, become those of both together."""
    assert mask is None
    merge_in(HALVES, v, s, v_other, s_other)


def merge_in(types: tuple[torch.dtype, ...], v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    """The same of values of one of `types`."""
    for values, sums in ((v, s), (v_other, s_other)):
        if not values.is_contiguous() or not sums.is_contiguous():
            raise ValueError("what is merged is contiguous")
        if values.dtype not in types or sums.dtype != torch.float32:
            raise ValueError(f"states of {values.dtype} and {sums.dtype}")
        if values.shape != v.shape or sums.shape != v.shape[:2] or values.dtype != v.dtype:
            raise ValueError("states of the same queries, heads and type")
    heads, d = v.shape[1:]
    # Every thread has 16 bytes, or a 32nd of the head.
    if heads * (d // max(16 // min(v.element_size(), 2), d // 32)) > 1024:
        raise RuntimeError("MergeStateInPlace kernel launch failed: invalid configuration argument")
    out, lse = merged(v, s, v_other, s_other)
    v.copy_(out)
    s.copy_(lse)
