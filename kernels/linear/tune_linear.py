"""Measures in which shapes the base's linears are fastest, and writes the shapes where the engine reads them.

    python -m lorafleet.kernels.linear.tune_linear [--rows 1 8 16 ... 256] [--layers 8] [--seconds 60] [--data FILE]

The linears are those of an 8B Llama (kernels/decoder/decoder_stack.py). Each class of rows is measured by a step of its
largest number of rows, in CUDA graphs of all layers. They include the kernels that read the linears' outputs, and the
weights are not in the cache. One linear's shape is changed at a time, cuBLAS among the candidates, and the change is
adopted if the whole graph gets faster by more than the noise. Shapes are written if they are faster than cuBLAS alone.
With more than MOST_SPLIT_ROWS rows, only gate and up have other candidates than cuBLAS.
No class is begun, and no candidate tried, after --seconds. The file is written after each class.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.decoder.decoder_stack import LINEARS, Stack, captured, medians
from lorafleet.kernels.linear.linear_tuning import (
    EARLY_CAPABILITY,
    MAX_SPLITS,
    MOST_SPLIT_ROWS,
    ROW_BOUNDS,
    LinearShape,
    name_of,
    read_shapes,
    shapes_path,
    write_shapes,
)

NOISE = 0.002  # as a fraction of a graph's time
REPEATS = 9
PROGRAMS_A_SM = (1, 2, 3)  # candidates for the number of programs of a launch, for each multiprocessor
PREFETCHES = (0, 1024)
# Candidates for block_o, block_d, stages and warps, by whether more than 16 rows share a tile. The first are the start.
FEW_ROWS = ((64, 64, 8, 4), (64, 128, 5, 4))
MANY_ROWS = ((64, 64, 6, 4), (128, 64, 4, 8))
GATED_FEW_ROWS = ((64, 64, 5, 4), (64, 128, 3, 4))
GATED_MANY_ROWS = ((64, 64, 4, 4),)
# Candidates for block_o, block_d, stages, warps and block_t with more than MOST_SPLIT_ROWS rows. The first that is not
# far too large is the start.
WIDE = (
    (64, 64, 4, 8, 256),
    (64, 64, 3, 4, 128),
    (128, 64, 4, 8, 128),
    (64, 64, 6, 8, 128),
    (64, 128, 3, 8, 128),
    (64, 64, 4, 4, 64),
)

Shapes = Mapping[str, LinearShape | None]  # by the linear's name in LINEARS; None selects cuBLAS


def starting_shape(name: str, num_rows: int, num_sms: int, early: bool) -> LinearShape | None:
    """Returns a shape that serves the linear well on a GPU that nobody has measured, or None for cuBLAS."""
    if num_rows > MOST_SPLIT_ROWS:
        return next(candidates(name, num_rows, num_sms, early), None)
    if name == "gate_up":
        return LinearShape(*_tile(GATED_FEW_ROWS if num_rows <= 16 else GATED_MANY_ROWS), early=early, gated=True)
    outputs, inputs = _size(name)
    tile = (FEW_ROWS if num_rows <= 16 else MANY_ROWS)[0]
    return _shape(tile, _splits(outputs // tile[0], inputs // tile[1], 2 * num_sms), 0, early)


def candidates(name: str, num_rows: int, num_sms: int, early: bool) -> Iterator[LinearShape]:
    """Yields the shapes to try for a linear, besides cuBLAS."""
    if num_rows > MOST_SPLIT_ROWS:
        yield from _wide_candidates(name, num_rows, early)
        return
    outputs, inputs = _size(name)
    prefetches = PREFETCHES if early else (0,)
    for tile in FEW_ROWS if num_rows <= 16 else MANY_ROWS:
        programs = [num_sms * share for share in PROGRAMS_A_SM]
        for splits in dict.fromkeys(_splits(outputs // tile[0], inputs // tile[1], count) for count in programs):
            for prefetch in prefetches:
                shape = _shape(tile, splits, prefetch, early)
                if shape.fits(outputs, inputs):
                    yield shape
    if name == "gate_up":
        for block_o, block_d, stages, warps in GATED_FEW_ROWS if num_rows <= 16 else GATED_MANY_ROWS:
            for prefetch in prefetches:
                yield LinearShape(block_o, block_d, 1, stages, warps, prefetch, early, gated=True)


def _wide_candidates(name: str, num_rows: int, early: bool) -> Iterator[LinearShape]:
    """Yields none for a GPU that cannot start kernels early, since it cannot load tiles by descriptors either."""
    if name != "gate_up" or not early:
        return
    for block_o, block_d, stages, warps, block_t in WIDE:
        if block_t < 2 * num_rows:
            for starts_early in (True, False):
                yield LinearShape(block_o, block_d, 1, stages, warps, 0, starts_early, gated=True, block_t=block_t)


def _tile(tiles: tuple[tuple[int, int, int, int], ...]) -> tuple[int, int, int, int, int]:
    """Returns the first fields of a LinearShape that is not split."""
    block_o, block_d, stages, warps = tiles[0]
    return block_o, block_d, 1, stages, warps


def _shape(tile: tuple[int, int, int, int], splits: int, prefetch: int, early: bool) -> LinearShape:
    block_o, block_d, stages, warps = tile
    return LinearShape(block_o, block_d, splits, stages, warps, prefetch, early)


def _splits(tiles: int, steps: int, programs: int) -> int:
    """Returns the largest number of splits with no more programs than that, in which every split has steps."""
    most = max(1, min(MAX_SPLITS, programs // tiles))
    return next(splits for splits in range(most, 0, -1) if (splits - 1) * -(-steps // splits) < steps)


def _size(name: str) -> tuple[int, int]:
    inputs, outputs = LINEARS[name]
    return sum(outputs), inputs


def tune_rows(stack: Stack, num_rows: int, deadline: float) -> dict[str, LinearShape]:
    """Returns the shapes of the linears that are faster than cuBLAS in steps of that many rows.

    Nothing more is tried after `deadline`, a time.monotonic().
    """
    x_of_size = stack.inputs(num_rows)
    properties = torch.cuda.get_device_properties()
    early = (properties.major, properties.minor) >= EARLY_CAPABILITY
    num_sms = properties.multi_processor_count

    def graph_of(shapes: Shapes) -> torch.cuda.CUDAGraph:
        return _captured(stack, x_of_size, shapes)

    best: dict[str, LinearShape | None] = {name: starting_shape(name, num_rows, num_sms, early) for name in LINEARS}
    cublas = graph_of(dict.fromkeys(LINEARS))
    best_graph, tried = graph_of(best), 0
    for name in LINEARS:
        for shape in (None, *candidates(name, num_rows, num_sms, early)):
            if shape == best[name] or time.monotonic() > deadline:
                continue
            changed = best | {name: shape}
            graph = graph_of(changed)
            ms = medians({"best": best_graph, "changed": graph}, REPEATS)
            tried += 1
            if ms["changed"] < ms["best"] * (1 - NOISE):
                best, best_graph = changed, graph
    ms = medians({"cublas": cublas, "best": best_graph}, 3 * REPEATS)
    print(f"{num_rows} rows: cuBLAS {ms['cublas']:.3f} ms, best of {tried} {ms['best']:.3f} ms", flush=True)
    for name, shape in best.items():
        print(f"  {name}: {shape}", flush=True)
    if ms["best"] >= ms["cublas"] * (1 - NOISE):
        return {}
    return {name: shape for name, shape in best.items() if shape is not None}


def _captured(stack: Stack, x_of_size: dict[int, Tensor], shapes: Shapes) -> torch.cuda.CUDAGraph:
    return captured(lambda: stack.in_shapes(x_of_size, shapes))


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, choices=ROW_BOUNDS, default=(1, 64, 256, *ROW_BOUNDS[1:-1]))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--data", type=Path, help="the file of shapes to write; the default is the engine's")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    data: Path = args.data or shapes_path(gpu)
    shapes = read_shapes(data)
    stack = Stack(args.layers)
    deadline = started + args.seconds
    for num_rows in args.rows:
        if time.monotonic() > deadline:
            print(f"{num_rows} rows: not started after {args.seconds:.0f} s", flush=True)
            continue
        found = tune_rows(stack, num_rows, deadline)
        for name in LINEARS:
            by_rows = shapes.setdefault(name_of(*_size(name)), {})
            by_rows.pop(num_rows, None)
            if name in found:
                by_rows[num_rows] = found[name]
        write_shapes(data, {name: by_rows for name, by_rows in shapes.items() if by_rows})
    print(f"shapes are in {data}; {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
