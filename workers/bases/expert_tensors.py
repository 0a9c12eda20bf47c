"""Says which tensors of a checkpoint fill a mixture's experts, and the vectors beside its router.

Checkpoints store experts one by one or all of a layer in one tensor. The model's own names are those of experts one by
one. ExpertsConfig says how a plain tensor of all experts is laid out. Quantized experts are read one by one: a format
that stores them in one tensor (workers/bases/formats/mxfp4_format.py) takes each out of it.
"""

# E experts · U rows of gate_up: 2I, or I without a gate · I this rank's intermediate size

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lorafleet.kernels.moe.expert_codes import ExpertCodes, ExpertMatrix
from lorafleet.workers.bases.checkpoint_model import CheckpointModel
from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.stored_tensors import Stored
from lorafleet.workers.bases.tensor_parts import (
    ModelPart,
    PlainPart,
    QuantizedPart,
    StackedPart,
    StackedRounding,
    TensorSource,
)
from lorafleet.workers.models.sparse_mlp import SparseMLP

_OF_ERNIE = "moe_statics."  # Ernie stores the vectors in this module as [1, E].


@dataclass(frozen=True, slots=True)
class _Mixture:
    """One layer's mixture on this rank."""

    mlp: str  # Its name in the checkpoint, "model.layers.0.mlp".
    held: SparseMLP
    experts: ExpertsConfig  # The whole mixture's.
    shapes: dict[str, tuple[int, int]]  # (in, out) of an expert's projections in the whole model.
    own: slice  # This rank's part of the intermediate size.
    is_rounded: bool  # Quantized experts are stored plain, and are quantized as they are read.

    def place(self, leaf: str) -> tuple[slice, slice]:
        """Returns the place of this rank's part in an expert's matrix [out, in]."""
        inputs, outputs = self.shapes[leaf]
        return (slice(0, outputs), self.own) if leaf == "down_proj" else (self.own, slice(0, inputs))

    def matrix(self, leaf: str) -> ExpertMatrix:
        """Returns the weights [E, rows, columns] that hold this projection."""
        return self.held.down_EDI if leaf == "down_proj" else self.held.gate_up_EUD

    def rows(self, leaf: str) -> slice:
        """Returns the projection's rows in each expert's part of matrix(leaf)."""
        rows, _ = self.place(leaf)
        size = rows.stop - rows.start
        index = 0 if leaf == "down_proj" else self.experts.first_leaves.index(leaf)
        return slice(index * size, (index + 1) * size)

    def parts(self, leaf: str) -> Iterator[PlainPart | QuantizedPart]:
        """Yields this rank's part of the projection for each expert."""
        inputs, outputs = self.shapes[leaf]
        held, place, shape = self.matrix(leaf), self.place(leaf), [outputs, inputs]
        rows = self.rows(leaf)
        for expert in range(self.experts.count):
            if isinstance(held, ExpertCodes):
                first, count = expert * held.shape[1] + rows.start, rows.stop - rows.start
                yield QuantizedPart(
                    held.weight, held.scheme, self.is_rounded, held.device, first, count, [place], shape
                )
            else:
                yield PlainPart(held.data[expert, rows], [place], shape)

    def biases(self) -> dict[str, Tensor]:
        """Returns this rank's part of each projection's bias, [E, out], or nothing if there are none."""
        if self.held.gate_up_bias_EU is None or self.held.down_bias_ED is None:
            return {}
        first = self.held.gate_up_bias_EU.data.chunk(len(self.experts.first_leaves), dim=1)
        return dict(zip(self.shapes, (*first, self.held.down_bias_ED.data), strict=True))

    def vectors(self) -> dict[str, Tensor]:
        """Returns the vectors [E] beside the router, by their names below the MLP."""
        named = {
            self.experts.correction_name: self.held.correction_E,
            self.experts.expert_scale_name: self.held.scale_E,
        }
        return {name: vector.data for name, vector in named.items() if name is not None and vector is not None}


def expert_parts(model: CheckpointModel) -> dict[str, ModelPart]:
    """Returns the parts of every expert's own tensors, and of the vectors beside the routers."""
    parts: dict[str, ModelPart] = {}
    for mixture in _mixtures(model):
        for leaf in mixture.shapes:
            for expert, part in enumerate(mixture.parts(leaf)):
                parts[f"{mixture.mlp}.experts.{expert}.{leaf}.weight"] = part
        for leaf, held in mixture.biases().items():
            for expert, bias in enumerate(held):
                name = f"{mixture.mlp}.experts.{expert}.{leaf}.bias"
                parts[name] = PlainPart(bias, [mixture.place(leaf)[:1]], [mixture.shapes[leaf][1]])
        for name, vector in mixture.vectors().items():
            own, ones = (slice(0, len(vector)),), (slice(0, 1),) if _OF_ERNIE in name else ()
            shape = [1] * len(ones) + [len(vector)]
            parts[f"{mixture.mlp}.{name}"] = PlainPart(vector.view(shape), [ones + own], shape)
    return parts


def stacked_sources(model: CheckpointModel) -> dict[str, TensorSource]:
    """Returns the sources that hold all experts of a layer in one tensor."""
    sources: dict[str, TensorSource] = {}
    for mixture in _mixtures(model):
        for leaves in (list(mixture.experts.first_leaves), ["down_proj"]):
            name = "gate_up_proj" if len(leaves) == 2 else leaves[0]
            sources[f"{mixture.mlp}.experts.{name}"] = _weight_source(mixture, leaves)
            if mixture.biases():
                sources[f"{mixture.mlp}.experts.{name}_bias"] = _bias_source(mixture, leaves)
    return sources


def _mixtures(model: CheckpointModel) -> Iterator[_Mixture]:
    experts = model.config.experts
    if experts is None:
        return
    quantization = model.config.quantization
    is_rounded = quantization is not None and quantization.stored is None
    for name, held in model.mixtures():
        mlp = f"model.{name.removesuffix('.experts')}"
        yield _Mixture(mlp, held, experts, model.config.expert_shapes(), model.shard.of_expert, is_rounded)


def _weight_source(mixture: _Mixture, leaves: list[str]) -> TensorSource:
    inputs, outputs = mixture.shapes[leaves[0]]
    matrix = [outputs * len(leaves), inputs]
    whole_shape = [mixture.experts.count, *(reversed(matrix) if mixture.experts.transposed else matrix)]
    parts: list[StackedPart | StackedRounding] = []
    for index, leaf in enumerate(leaves):
        held, (rows, columns) = mixture.matrix(leaf), mixture.place(leaf)
        if isinstance(held, ExpertCodes):  # a whole projection is quantized, whatever part of it this rank holds
            rows, columns = slice(0, outputs), slice(0, inputs)
        read = _matrix_reader(_Rows.of(mixture, leaves, index, rows), columns, mixture.experts.transposed)
        if isinstance(held, ExpertCodes):
            own = tuple(part for part in mixture.parts(leaf) if isinstance(part, QuantizedPart))
            parts.append(StackedRounding(own, whole_shape, read))
        else:
            parts.append(StackedPart(held.data[:, mixture.rows(leaf)], whole_shape, read))
    return TensorSource(tuple(parts), _filled(mixture, leaves, "weight"))


def _bias_source(mixture: _Mixture, leaves: list[str]) -> TensorSource:
    whole_shape = [mixture.experts.count, mixture.shapes[leaves[0]][1] * len(leaves)]
    parts, held = [], mixture.biases()
    for index, leaf in enumerate(leaves):
        read = _vector_reader(_Rows.of(mixture, leaves, index, mixture.place(leaf)[0]))
        parts.append(StackedPart(held[leaf], whole_shape, read))
    return TensorSource(tuple(parts), _filled(mixture, leaves, "bias"))


def _filled(mixture: _Mixture, leaves: list[str], kind: str) -> tuple[str, ...]:
    return tuple(
        f"{mixture.mlp}.experts.{expert}.{leaf}.{kind}" for expert in range(mixture.experts.count) for leaf in leaves
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one projection among those of all projections in one matrix."""

    read: slice  # Rows that are read from the file.
    kept: slice  # Those of them that belong to the projection.

    @classmethod
    def of(cls, mixture: _Mixture, leaves: list[str], index: int, rows: slice) -> _Rows:
        """Returns the rows of leaves[index]. `rows` are those of this rank in the projection alone."""
        if mixture.experts.interleaved and len(leaves) > 1:
            step = len(leaves)
            return cls(slice(step * rows.start, step * rows.stop), slice(index, None, step))
        first = index * mixture.shapes[leaves[index]][1]
        return cls(slice(first + rows.start, first + rows.stop), slice(None))


def _matrix_reader(rows: _Rows, columns: slice, transposed: bool) -> Callable[[Stored, int], Tensor]:
    def read(stored: Stored, expert: int) -> Tensor:
        own = slice(expert, expert + 1)
        if transposed:
            return stored[own, columns, rows.read][0].T[rows.kept]
        return stored[own, rows.read, columns][0][rows.kept]

    return read


def _vector_reader(rows: _Rows) -> Callable[[Stored, int], Tensor]:
    return lambda stored, expert: stored[slice(expert, expert + 1), rows.read][0][rows.kept]
