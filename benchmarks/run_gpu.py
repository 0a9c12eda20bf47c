"""Runs the benchmarks that need GPUs one after another, each for a bounded time; `make bench-gpu` calls it.

    python benchmarks/run_gpu.py [--only engine_e2e saturation ...] [--out FOLDER] [--total-s SECONDS] [--list]

Each benchmark writes its output to FOLDER/NAME.log and, if it can, its figures to FOLDER/NAME.json. The folder is
benchmarks/results unless it is given. A benchmark that fails or takes too long does not stop the others, and makes the
exit status 1. `python benchmarks/measured_page.py --adopt FOLDER` then brings the figures into docs/measured.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
GRACE_S = 45.0  # The time that a benchmark has to end its processes after an interrupt; local_server.py takes up to 30.
TAIL_LINES = 15  # Lines of the log that are printed if a benchmark fails.


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    command: str  # The script in benchmarks/ and its options.
    limit_s: float
    writes_json: bool = True
    num_gpus: int = 1


RUNS = (
    Run("engine_e2e", "engine_e2e.py", 420),
    Run("engine_e2e_large", "engine_e2e.py --batches 512 1024 --adapters 0", 240),
    Run("engine_e2e_large_fp8", "engine_e2e.py --batches 256 512 1024 --adapters 0 --kv-cache-dtype fp8", 300),
    Run("engine_e2e_mixed", "engine_e2e.py --batches --adapters 0 8 64 --mixed-tokens 512", 240),
    Run("sampling", "sampling.py", 300),
    Run("draw_tokens", "draw_tokens.py", 120),
    Run("saturation", "saturation.py --adapters 0 64", 420),
    Run("saturation_fp8", "saturation.py --kv-cache-dtype fp8", 300),
    Run("long_context", "long_context.py", 300),
    Run("side_by_side", "side_by_side.py --serve --adapters 0 64", 540),
    Run("serving", "serving.py --rates 5 20 --duration-s 15", 540),
    Run("lora_kernels", "lora_kernels.py", 300),
    Run("adapter_kinds", "adapter_kinds.py --kinds plain dora bias ia3 norms mixed_but_lokr head", 420),
    Run("adapter_loading", "adapter_loading.py --ranks 16 64", 420),
    Run("kind_loading", "kind_loading.py", 240, writes_json=False),
    Run("attention_plan", "attention_plan.py", 120),
    Run("decode_attention", "decode_attention.py", 300),
    Run("families_decode", "families_decode.py", 420),
    Run("moe_kernels", "moe_kernels.py", 240, writes_json=False),
    Run("moe_engine", "moe_engine.py", 300),
    Run("moe_engine_kernels", "moe_engine.py --layers 48 --kernels --kinds none --batches 1 64", 300),
    Run("recurrent_decode", "recurrent_decode.py", 240),
    Run("state_turns", "state_turns.py", 150),
    Run("kv_tiers", "kv_tiers.py", 300),
    Run("pool_load", "pool_load.py", 240, writes_json=False),
    Run("speculative", "speculative.py --batches 1 8 16 32 64 --adapters 8", 300),
    Run("speculative_load", "speculative_load.py --right 0.1 0.3 0.7", 300),
    Run("quantized_linears", "quantized_linears.py --layers 4", 240, writes_json=False),
    Run("four_bit_linears", "four_bit_linears.py", 240, writes_json=False),
    Run("quantized_engine", "engine_e2e.py --batches 1 64 256 --adapters 0 8 --quantization none nf4 fp8", 600),
    Run("delta_rule", "delta_rule.py", 120),
    Run("structured_decode", "structured_decode.py --layers 32 --hidden 4096 --steps 200", 420, writes_json=False),
    Run("start_times", "start_times.py --fresh --switch-s 150", 360, writes_json=False),
    Run("first_minute", "first_minute.py", 420, writes_json=False),
    Run("step_watching", "step_watching.py --batches 1 64 --generated 256", 420),
    Run("rank_sum", "rank_sum.py", 240, num_gpus=2),
    Run("tensor_parallel_2", "tensor_parallel.py --sizes 1 2", 600, num_gpus=2),
    Run(
        "fleet",
        "fleet.py --device cuda --replicas 4 --max-loras 64 --load 0.7 --duration-s 60 --workloads saturation "
        "'S-LoRA, alpha .3' 'Dynamo, flash' 'Dynamo, diurnal' conversations "
        "'saturation, one replica:1'",
        2400,
        num_gpus=4,
    ),
    Run("tensor_parallel", "tensor_parallel.py", 900, num_gpus=4),
)


def run_all(runs: Sequence[Run], out: Path, num_gpus: int, total_s: float, scripts: Path = HERE) -> list[str]:
    """Returns the names of the benchmarks that failed. None is started once total_s seconds have passed."""
    out.mkdir(parents=True, exist_ok=True)
    began_s, failed = time.monotonic(), []
    for run in runs:
        left_s = total_s - (time.monotonic() - began_s)
        if run.num_gpus > num_gpus:
            print(f"{run.name}: left out, it needs {run.num_gpus} GPUs and there are {num_gpus}", flush=True)
        elif left_s <= 0:
            print(f"{run.name}: left out, {total_s:.0f} s are over", flush=True)
        elif not _run(run, out, min(run.limit_s, left_s), scripts):
            failed.append(run.name)
    return failed


def _run(run: Run, out: Path, limit_s: float, scripts: Path) -> bool:
    """Returns whether the benchmark ended well within its limit."""
    script, *options = shlex.split(run.command)
    json_file, log_file = out / f"{run.name}.json", out / f"{run.name}.log"
    json_file.unlink(missing_ok=True)  # It would be taken for a result of this run.
    json = ["--json", str(json_file)] if run.writes_json else []
    print(f"{run.name}: python benchmarks/{run.command}, at most {limit_s:.0f} s", flush=True)
    began_s = time.monotonic()
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(scripts / script), *options, *json], stdout=log, stderr=log, process_group=0
        )
        try:
            status = process.wait(limit_s)
            reason = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            reason = f"not complete after {limit_s:.0f} s"
        finally:
            _end(process)
    lines = log_file.read_text(errors="replace").splitlines()
    print("\n".join(f"  {line}" for line in (lines[-TAIL_LINES:] if reason else lines)))
    print(f"{run.name}: {'FAILED: ' + reason if reason else 'done'}, {time.monotonic() - began_s:.0f} s", flush=True)
    return not reason


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the benchmark and the processes that it started, such as a server."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--total-s", type=float, default=4 * 3600.0, help="the time for all of them together")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    args = parser.parse_args()
    chosen = [run for run in RUNS if args.only is None or run.name in args.only]
    if args.list:
        print("\n".join(f"{run.name:22}python benchmarks/{run.command}" for run in chosen))
        return
    import torch  # Imported here, so that --list needs nothing.

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        sys.exit("There is no GPU here: these benchmarks need one. `make bench` runs those that need none.")
    failed = run_all(chosen, args.out.resolve(), num_gpus, args.total_s)
    if failed:
        sys.exit(f"{len(failed)} of {len(chosen)} failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
