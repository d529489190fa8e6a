"""Opens a model's weights for the worker, after checking that every tensor is there in the right shape."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sapwood.kernels.ops.gemm import PackedWeight
from sapwood.srt.config import ModelSource
from sapwood.srt.errors import ModelError
from sapwood.srt.loader.codes import GROUP
from sapwood.srt.loader.kept_weights import KeptWeights
from sapwood.srt.loader.packing import Matrix, pack_matrices
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING, HEAD, DecoderSpec, tensor_shapes
from sapwood.srt.models.weights import Part, Storage, Stored

_log = logging.getLogger("sapwood")
_SHOWN = 5
_ROWS = 1024
"""Of two matrices that are compared, at a time."""
_NOTED = {"BF16": "BF16: float16 would cut its range"}
"""Why what is stored as it is takes the format that it takes."""
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

    def kind(self, name: str) -> str:
        """What the file calls the type of the tensor."""

    def matrix(self, name: str) -> Matrix: ...


class Weights:
    """The WeightSource over a reader. Raises ModelError for what is missing or of another shape than `spec`
    says. Tensors that the model does not use are warned of, unless it is `quiet`: a rank beside others."""

    def __init__(
        self, reader: Reader, spec: DecoderSpec, kept: KeptWeights | None = None, quiet: bool = False
    ) -> None:
        self._reader, self._kept = reader, kept
        level = logging.DEBUG if quiet else logging.WARNING
        self._packed: list[tuple[PackedWeight, set[str]]] = []
        wanted = tensor_shapes(spec)
        _check_all(reader, wanted)
        if spec.tied and HEAD in reader.shapes and _has_own_head(reader):
            _log.log(
                level, "%s: the config says tie_word_embeddings, but %s differs from %s: it is used as it is",
                reader.place, HEAD, EMBEDDING,
            )  # fmt: skip
            wanted[HEAD] = wanted[EMBEDDING]
            _check_all(reader, wanted)
        self._names = frozenset(wanted)
        unused = sorted(
            n for n in reader.shapes if n not in wanted and n != HEAD and not n.endswith(_BUFFERS)
        )
        if unused:
            _log.log(
                level, "%s: %d tensors are not used by this model: %s",
                reader.place, len(unused), ", ".join(unused[:_SHOWN]) + (", ..." if unused[_SHOWN:] else ""),
            )  # fmt: skip

    def names(self) -> Collection[str]:
        return self._names

    def linear(self, names: Sequence[Part | str], storage: Storage) -> PackedWeight:
        """The rows of these matrices, or parts of them, one after another, as one weight."""
        parts = [Part(name) if isinstance(name, str) else name for name in names]
        labels = [str(part) for part in parts]
        weight = self._kept.get(labels) if self._kept else None
        if weight is None:
            group = GROUP if storage in ("w8", "w4") else 1
            weight = pack_matrices([self._matrix(part, group) for part in parts], storage)
        if self._kept:
            self._kept.add(labels, weight)
        noted = _NOTED if storage == "stored" else {}
        kinds = (self._reader.kind(part.name) for part in parts)
        self._packed.append((weight, {noted.get(kind, kind) for kind in kinds}))
        return weight

    def stored(self, part: Part) -> Stored:
        matrix = self._matrix(part)
        return Stored(matrix.n, matrix.k, matrix.pieces())

    def _matrix(self, part: Part, group: int = 1) -> Matrix:
        whole = self._reader.matrix(part.name)
        return whole if part.rows is part.columns is None else whole.cut(part.rows, part.columns, group)

    def vector(self, name: str) -> Tensor:
        return self._reader.read(name)

    @property
    def formats(self) -> set[str]:
        """The formats of what was packed so far."""
        return {weight.format for weight, _kinds in self._packed}

    def summary(self) -> str:
        """The formats of what was packed so far, the largest first, and what the file calls its types."""
        sizes: Counter[str] = Counter()
        kinds: dict[str, set[str]] = {}
        for weight, own in self._packed:
            sizes[weight.format] += weight.nbytes
            kinds.setdefault(weight.format, set()).update(own)
        return ", ".join(
            f"{name} {size / 2**20:.0f} MiB ({', '.join(sorted(kinds[name]))})"
            for name, size in sizes.most_common()
        )


def open_weights(
    source: ModelSource,
    kept: KeptWeights | None = None,
    device: torch.device | None = None,
    quiet: bool = False,
) -> Weights:
    """The weights of `source`, ready to be packed unless they are `kept`; ModelError names the file or tensor
    at fault. Dummies' floats are drawn on `device`, and are there."""
    return Weights(_reader(source, device), spec_of(source.config), kept, quiet)


def _reader(source: ModelSource, device: torch.device | None) -> Reader:
    if source.format == "gguf":
        from sapwood.srt.loader.gguf_weights import GgufReader

        return GgufReader(source.path)
    if source.format == "safetensors":
        from sapwood.srt.loader.safetensors import SafetensorsReader

        return SafetensorsReader(source.path, source.files)
    from sapwood.srt.loader.dummy import DummyReader

    return DummyReader(spec_of(source.config), device)


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
    if reader.shapes[HEAD] != reader.shapes[EMBEDDING]:
        return True
    head, embedding = reader.matrix(HEAD), reader.matrix(EMBEDDING)
    return any(
        not torch.equal(head.floats(begin, begin + _ROWS), embedding.floats(begin, begin + _ROWS))
        for begin in range(0, head.n, _ROWS)
    )
