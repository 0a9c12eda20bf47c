"""Measures the sum over the ranks after a row-parallel linear, with the residual's add and the norm: microseconds per
call.

    python benchmarks/rank_sum.py [--size 4096] [--rows 1 8 32 64 128 256 512 1024 8192] [--json FILE]

It uses all GPUs of the machine, in bf16, with 64 calls in one CUDA graph. It compares NCCL's all-reduce followed by the
norm's kernel with the kernels that write to the other GPUs, in one step and in two (kernels/ranks/rank_sum.py). A "-"
means that the rows are too many for the kernel's memory. The last column is what replicas choose. A floor is the bytes
that a GPU must receive from the others in one step or in two, divided by 450 GB/s (NVLink 4, one direction).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.ranks.rank_sum import fits_two_steps, rank_sum_add_rms_norm, two_step_sum_add_rms_norm
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.peer_memory import open_peer_memory
from lorafleet.workers.tp.row_parallel_sum import TWO_STEP_BYTES_OF_TWO, RankSum

CALLS, REPEATS = 64, 20
EPS = 1e-5
LINK_BYTES_PER_S = 450e9


def in_graph_us(call: Callable[[], Tensor]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def measure(rank: int, size: int, meeting: str, args: argparse.Namespace) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    device = torch.device("cuda", 0)
    group = TPGroup.join(rank, size, meeting, device)
    ranks = RankSum(group, device)
    one_step, two_steps = (open_peer_memory(group, device, TWO_STEP_BYTES_OF_TWO) for _ in range(2))
    norm = NormWeight(torch.ones(args.size, dtype=torch.bfloat16, device=device))
    rows = []
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {size}, rows of {args.size} in bf16, microseconds")
        print("rows  floors of one step, two   NCCL + norm   one step   two steps   chosen")
    for count in args.rows:
        x = torch.zeros(count, args.size, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)
        linear = LinearOutput(x)
        row = {
            "ranks": size,
            "rows": count,
            "floor_us": (size - 1) * x.nbytes / LINK_BYTES_PER_S * 1e6,
            "two_step_floor_us": 2 * (size - 1) / size * x.nbytes / LINK_BYTES_PER_S * 1e6,
            "nccl_us": in_graph_us(
                lambda x=x, r=residual: add_rms_norm(LinearOutput(group.all_reduce(x)), r, norm, EPS)
            ),
            "one_step_us": None,
            "two_step_us": None,
            "chosen_us": in_graph_us(lambda x=linear, r=residual: ranks.add_rms_norm(x, r, norm, EPS)),
        }
        if one_step is not None and one_step.areas.holds(x.nbytes):
            areas = one_step.areas
            row["one_step_us"] = in_graph_us(
                lambda x=linear, r=residual, a=areas: rank_sum_add_rms_norm(x, r, norm, EPS, a)
            )
        if two_steps is not None and fits_two_steps(x, two_steps.areas):
            areas = two_steps.areas
            row["two_step_us"] = in_graph_us(
                lambda x=linear, r=residual, a=areas: two_step_sum_add_rms_norm(x, r, norm, EPS, a)
            )
        rows.append(row)
        if rank == 0:
            one, two = ("-" if us is None else f"{us:.1f}" for us in (row["one_step_us"], row["two_step_us"]))
            print(
                f"{count:4} {row['floor_us']:19.1f} {row['two_step_floor_us']:6.1f} {row['nccl_us']:13.1f} "
                f"{one:>10} {two:>11} {row['chosen_us']:8.1f}",
                flush=True,
            )
    if rank == 0 and args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    group.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 512, 1024, 8192])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = torch.cuda.device_count()
    meeting = os.path.join(tempfile.mkdtemp(prefix="lf-"), "store")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=measure, args=(rank, size, meeting, args)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
