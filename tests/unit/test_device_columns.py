"""What the device keeps of rows, and what goes there and comes back, each in one copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.srt.messages import TokenLogprob
from sapwood.srt.worker.device.columns import DeviceColumns
from sapwood.srt.worker.device.logprobs import DeviceFetch
from sapwood.srt.worker.device.transfer import Download, upload
from sapwood.srt.worker.logprobs import token_logprobs
from sapwood.srt.worker.reader import PIECE_ROWS, PromptReader
from sapwood.srt.worker.token_pool import TokenPool
from tests.worker_bench import row_start

ROWS, VOCAB = 6, 200
CPU = torch.device("cpu")


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def numbers(told: TokenLogprob) -> list[float]:
    return [told.logprob, *(value for _, value in told.top)]


def new_columns() -> DeviceColumns:
    return DeviceColumns(TokenPool(ROWS, 9, VOCAB, 8, [3]), CPU, pinned)


def test_inputs_are_the_last_tokens_where_ids_are_not_known() -> None:
    columns = new_columns()
    columns.last.copy_(torch.arange(100, 100 + ROWS))
    ids = torch.tensor([5, -1, 0, -1], dtype=torch.int32)
    columns.inputs(ids, torch.tensor([2, 3, 1, 0], dtype=torch.int32))
    assert ids.tolist() == [5, 103, 0, 100]


def test_a_rows_prefix_is_in_its_line_of_the_slot_table_alone() -> None:
    columns = new_columns()
    columns.seat(4, np.array([9, 8, 7], np.int32))
    columns.seat(5, np.empty(0, np.int32))
    expected = torch.zeros_like(columns.slot_table)
    expected[4, :3] = torch.tensor([9, 8, 7])
    assert torch.equal(columns.slot_table, expected)


def test_arrays_of_any_kind_go_and_come_in_one_copy() -> None:
    sent: list[Tensor] = []

    def counted(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        sent.append(torch.empty(shape, dtype=dtype))
        return sent[-1]

    rng = np.random.default_rng(0)
    arrays: dict[str, npt.NDArray[Any]] = {
        "bytes": rng.integers(0, 255, (3, 5)).astype(np.uint8),
        "doubles": rng.normal(size=(2, 3)),
        "none": np.empty((0, 4), np.int64),
        "ints": rng.integers(0, 9, 7).astype(np.int32)[::-1],
        "longs": rng.integers(0, 9, (4, 2)).T,
        "floats": rng.normal(size=3).astype(np.float32),
    }
    tensors = upload(arrays, CPU, counted)
    assert len(sent) == 1
    for name, array in arrays.items():
        assert tensors[name].numpy().dtype == array.dtype
        assert np.array_equal(tensors[name].numpy(), array)
    download = Download([tensors["ints"], tensors["floats"], tensors["ints"].view(7, 1)], counted)
    download.fetch()
    assert len(sent) == 2
    ints, floats, again = download.read()
    assert ints.tolist() == again[:, 0].tolist() == arrays["ints"].tolist()
    assert floats.tolist() == arrays["floats"].tolist()


def test_what_is_fetched_for_the_reader_is_what_the_host_computes() -> None:
    fetch = DeviceFetch(pinned)
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(size=(6, VOCAB)).astype(np.float32))
    logits[4, 2] = float("nan")
    source = np.array([0, 2, 2, 5, 4], np.int32)
    ids, tops = rng.integers(0, VOCAB, 5).astype(np.int32), np.array([0, 3, 20, 1, 2], np.int32)
    chosen = {1: np.array([7, 1], np.int32), 4: np.array([0], np.int32)}
    expected = token_logprobs(logits, source, ids, tops, chosen)
    read = fetch.logprobs(logits, source, ids, tops, chosen)
    states = torch.from_numpy(rng.normal(size=(2, 8)).astype(np.float32))
    floats, values = fetch.floats(states), states.numpy().astype(np.float64)
    for tensor in (logits, states):  # they may change meanwhile
        tensor.zero_()
    assert [told.id for told in read()] == ids.tolist()
    for ours, theirs in zip(read(), expected, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        for found, right in ((numbers(ours), numbers(theirs)), (ours.chosen, theirs.chosen)):
            assert np.allclose(found, right, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert floats().tolist() == values.tolist()
    assert floats().dtype == np.float64


class Sends(TorchDispatchMode):
    """Of each copy from the host to the device (`meta`) the address of what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not args[0].is_meta and args[1].is_meta:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_meta and not args[0].is_meta:
            assert kwargs["non_blocking"]
            self.sources.append(args[0].untyped_storage().data_ptr())
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            assert args[1].is_meta, "in pieces, and not from pinned memory"
        return result


@pytest.mark.parametrize("asked", [{"read_from": 1, "logprobs": 2}, {"pooling": "mean"}, {"pooling": "last"}])
def test_what_is_read_of_prompts_is_found_by_indices_that_came_from_pinned_memory(
    asked: dict[str, Any],
) -> None:
    """A copy from any other memory may wait for all that was launched, that is for the step itself."""
    n, given, seen = 3 * PIECE_ROWS + 1, [], []
    pool = TokenPool(ROWS, n + 1, VOCAB, 8, [3])

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        given.append(torch.empty(shape, dtype=dtype))
        return given[-1]

    def found(hidden: Tensor, index: Tensor, width: int) -> Tensor:
        assert index.is_meta
        seen.append(len(index))
        return hidden.new_empty((len(index), width))

    decoder: Any = SimpleNamespace(
        spec=SimpleNamespace(vocab=VOCAB),
        logits=lambda hidden, index: found(hidden, index, VOCAB),
        normed=lambda hidden, index: found(hidden, index, 8),
    )
    pool.admit(row_start(2, history=[5] * n, prompt_len=n, **asked))
    reader = PromptReader(decoder, pool, DeviceFetch(room))
    rows, starts, counts = (np.array([value], np.int32) for value in (2, 0, n))
    with Sends() as sends:
        reader.launch(torch.empty((n, 8), device="meta"), rows, starts, counts)
    pieces = {"mean": [PIECE_ROWS] * 3 + [1], "last": [1]}.get(asked.get("pooling", ""), [PIECE_ROWS] * 3)
    assert seen == pieces
    assert set(sends.sources) <= {pinned.untyped_storage().data_ptr() for pinned in given}
    # With logprobs each piece sends its own ids too.
    assert len(sends.sources) == 1 + len(pieces) * ("logprobs" in asked)
