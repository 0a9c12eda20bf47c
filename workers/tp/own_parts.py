"""Computes the part of a linear and of the vocabulary that one tensor-parallel rank holds."""

from __future__ import annotations

from lorafleet.workers.bases.projection import Projection, Units


def own_units(units: Units, rank: int, size: int) -> slice:
    """Returns this rank's numbers of a dimension. Several ranks have the same unit if there are more ranks."""
    first = rank * units.count // size
    return slice(first * units.size, (first + max(1, units.count // size)) * units.size)


def own_outputs(projection: Projection, rank: int, size: int) -> tuple[slice, ...]:
    """Returns this rank's rows of the projection's weight and of a LoRA B, one slice for each part that is fused in
    it."""
    found, start = [], 0
    for units in projection.outputs:
        own = own_units(units, rank, size) if projection.split == "outputs" else slice(0, units.total)
        found.append(slice(start + own.start, start + own.stop))
        start += units.total
    return tuple(found)


def own_input(projection: Projection, rank: int, size: int) -> slice:
    """Returns the columns of the projection's weight and of a LoRA A."""
    inputs = projection.inputs
    return own_units(inputs, rank, size) if projection.split == "inputs" else slice(0, inputs.total)


def vocab_per_rank(vocab_size: int, size: int) -> int:
    """Returns the number of rows of the vocabulary's tables that every rank has, padding included."""
    return -(-vocab_size // size)


def own_vocabulary(vocab_size: int, rank: int, size: int) -> slice:
    """Returns the token ids of this rank. The last ranks may have fewer than the first, or none."""
    per_rank = vocab_per_rank(vocab_size, size)
    start = min(rank * per_rank, vocab_size)
    return slice(start, min(start + per_rank, vocab_size))
