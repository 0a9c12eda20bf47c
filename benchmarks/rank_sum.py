"""Measures the sum over the ranks after a row-parallel linear, with the residual's add and the norm: microseconds per
call.

    python benchmarks/rank_sum.py [--size 4096] [--rows 1 8 32 64 256 512 1024 8192] [--json FILE]

It uses all GPUs of the machine, in bf16, with 64 calls in one CUDA graph. It compares NCCL's all-reduce followed by the
norm's kernel with the one kernel that writes to the other GPUs (kernels/ranks/rank_sum.py). The floor is the bytes that
a GPU must receive from the others, divided by 450 GB/s (NVLink 4, one direction).
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
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.row_parallel_sum import RankSum

CALLS, REPEATS = 64, 20
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
    norm = NormWeight(torch.ones(args.size, dtype=torch.bfloat16, device=device))
    rows = []
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {size}, rows of {args.size} in bf16")
        print("rows   floor us   NCCL + norm   one kernel")
    for count in args.rows:
        x = torch.zeros(count, args.size, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)
        floor = (size - 1) * x.numel() * 2 / LINK_BYTES_PER_S * 1e6
        nccl = in_graph_us(lambda x=x, r=residual: add_rms_norm(LinearOutput(group.all_reduce(x)), r, norm, 1e-5))
        ours = in_graph_us(lambda x=x, r=residual: ranks.add_rms_norm(LinearOutput(x), r, norm, 1e-5))
        rows.append({"ranks": size, "rows": count, "floor_us": floor, "nccl_us": nccl, "one_kernel_us": ours})
        if rank == 0:
            print(f"{count:4} {floor:10.1f} {nccl:13.1f} {ours:12.1f}", flush=True)
    if rank == 0 and args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    group.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256, 512, 1024, 8192])
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
