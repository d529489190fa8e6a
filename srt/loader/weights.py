"""Opens a model's weights for the worker, after checking that every tensor is there in the right shape."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from sapwood.srt.config import ModelSource
from sapwood.srt.errors import ModelError
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING, HEAD, DecoderSpec, tensor_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sapwood.kernels.ops.gemm import PackedWeight

_log = logging.getLogger("sapwood")
_SHOWN = 5
_BUFFERS = "rotary_emb.inv_freq"
"""Old checkpoints store this table; it is always computed."""


class Reader(Protocol):
    """One kind of file. Names are Hugging Face's; a tensor without one keeps the file's own."""

    @property
    def place(self) -> str:
        """The file or folder, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor:
        """The tensor in float32, contiguous, of its own memory."""

    def pack(self, names: Sequence[str], dtype: torch.dtype) -> PackedWeight:
        """The rows of these matrices one after another."""


class Weights:
    """The WeightSource over a reader. Raises ModelError for what is missing or of another shape than `spec`
    says; tensors that the model does not use are logged."""

    def __init__(self, reader: Reader, spec: DecoderSpec) -> None:
        self._reader = reader
        wanted = tensor_shapes(spec)
        _check_all(reader, wanted)
        if spec.tied and HEAD in reader.shapes and _has_own_head(reader):
            _log.warning(
                "%s: the config says tie_word_embeddings, but %s differs from %s: it is used as it is",
                reader.place, HEAD, EMBEDDING,
            )  # fmt: skip
            wanted[HEAD] = wanted[EMBEDDING]
            _check_all(reader, wanted)
        self._names = frozenset(wanted)
        unused = sorted(
            n for n in reader.shapes if n not in wanted and n != HEAD and not n.endswith(_BUFFERS)
        )
        if unused:
            _log.warning(
                "%s: %d tensors are not used by this model: %s",
                reader.place, len(unused), ", ".join(unused[:_SHOWN]) + (", ..." if unused[_SHOWN:] else ""),
            )  # fmt: skip

    def names(self) -> Collection[str]:
        return self._names

    def linear(self, names: Sequence[str], dtype: torch.dtype) -> PackedWeight:
        return self._reader.pack(names, dtype)

    def embedding(self, name: str, dtype: torch.dtype) -> PackedWeight:
        return self._reader.pack([name], dtype)

    def vector(self, name: str) -> Tensor:
        return self._reader.read(name)


def open_weights(source: ModelSource) -> Weights:
    """The weights of `source`, ready to be packed; ModelError names the file or tensor at fault."""
    return Weights(_reader(source), spec_of(source.config))


def _reader(source: ModelSource) -> Reader:
    if source.format == "gguf":
        from sapwood.srt.loader.gguf_weights import GgufReader

        return GgufReader(source.path)
    if source.format == "safetensors":
        from sapwood.srt.loader.safetensors import SafetensorsReader

        return SafetensorsReader(source.path, source.files)
    from sapwood.srt.loader.dummy import DummyReader

    return DummyReader(spec_of(source.config))


def _check_all(reader: Reader, wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in wanted if name not in reader.shapes]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if missing[_SHOWN:] else ""
        raise ModelError(f"{reader.place}: has no tensor {', '.join(missing[:_SHOWN])}{more}")
    for name, shape in wanted.items():
        if tuple(reader.shapes[name]) != shape:
            raise ModelError(
                f"{reader.place}: tensor {name} has the shape {list(reader.shapes[name])}, "
                f"but the config asks for {list(shape)}"
            )


def _has_own_head(reader: Reader) -> bool:
    """Whether the file's output head is not the embedding, whatever the config says."""
    import torch

    if reader.shapes[HEAD] != reader.shapes[EMBEDDING]:
        return True
    return not torch.equal(reader.read(HEAD), reader.read(EMBEDDING))
