"""Measures how decode steps should split this machine's GPU between the base GEMMs and the LoRA kernels beside them.

    python -m lorafleet.kernels.lora.tune_sm_split [--cases 64x8 64x64 ... | all] [--base plain|nf4|fp8] [--layers 32]
        [--seconds 90] [--data FILE] [--json FILE]

Each class of steps (kernels/lora/sm_split.py) is measured by one case: a step of a number of tokens of a number of
adapters, with rank 16 or with mixed ranks. Every split takes turns with the unsplit step and with the base alone in
CUDA graphs of all layers, whose weights are not in the cache. --base selects the base's weights; nf4 stands for all
weights of four bits. The fastest is written where the engine reads it, or to
--data, if it is faster than the unsplit step by more than the noise. --json gets every time measured. Both files are
written after each case. A case that fails is reported and skipped; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.decoder.decoder_stack import MAX_SLOTS, Stack, captured, medians, run_beside, smallest_batch
from lorafleet.kernels.lora.gemm_sms import gemms_limited_to
from lorafleet.kernels.lora.sm_split import (
    MIN_GEMM_SMS,
    UNSPLIT,
    GEMMs,
    SMSplit,
    StepClass,
    read_splits,
    split_path,
    write_splits,
)
from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.scaled_weight import ScaledScheme

# Numbers of SMs that the GEMMs leave to the LoRA kernels. For cuBLAS they are 16 to 40 % of an H200's.
SMS_LEFT: dict[GEMMs, tuple[int, ...]] = {
    "plain": (16, 24, 32, 36, 44, 52),
    "four bits": (4, 8, 12, 16, 20, 24, 28, 32),
    "e4m3": (),
}
SCHEMES: dict[str, Scheme | None] = {"plain": None, "nf4": NF4Scheme(), "fp8": ScaledScheme()}
MIXED_RANKS = (8, 16, 32, 64)
MIXED = "-mixed"
NOISE = 0.005  # as a fraction of a step's time
REPEATS = 9
# Mixed ranks come last, since other adapters are loaded for them.
CASES = ("64x8", "64x64", "128x32", "256x64", "64x32-mixed")
ALL_CASES = (
    *("64x8", "64x64", "128x32", "256x64", "64x32", "128x8", "128x64", "256x8", "256x32", "8x8", "1x1", "512x64"),
    *("64x32-mixed", "128x32-mixed", "256x64-mixed"),
)


@dataclass(frozen=True, slots=True)
class SplitCase:
    """A step of decodes. Its tokens use the adapters in turn."""

    name: str
    num_tokens: int
    num_adapters: int
    ranks: tuple[int, ...]  # adapter i has rank ranks[i % len(ranks)]

    @classmethod
    def parse(cls, name: str) -> SplitCase:
        """Reads "64x8" (tokens x adapters of rank 16) or "64x8-mixed". Raises ValueError for anything else."""
        tokens, adapters = (int(number) for number in name.removesuffix(MIXED).split("x"))
        if tokens < 1 or not 1 <= adapters <= MAX_SLOTS:
            raise ValueError(f"{name} needs at least one token, and 1 to {MAX_SLOTS} adapters")
        return cls(name, tokens, adapters, MIXED_RANKS if name.endswith(MIXED) else (16,))

    @property
    def rank_of_slot(self) -> list[int]:
        return [self.ranks[slot % len(self.ranks)] for slot in range(MAX_SLOTS)]


@dataclass(frozen=True, slots=True)
class Measured:
    step: StepClass
    base_ms: float
    limited_base_ms: dict[int, float]  # of the base alone, by the number of SMs for which cuBLAS plans
    lora_ms: dict[SMSplit, float]  # of a step with adapters

    @property
    def best(self) -> SMSplit:
        """The fastest split, or UNSPLIT if none is faster by more than the noise."""
        best = min(self.lora_ms, key=self.lora_ms.__getitem__)
        return best if self.lora_ms[best] < self.lora_ms[UNSPLIT] * (1 - NOISE) else UNSPLIT


def candidates(num_sms: int, gemms: GEMMs = "plain") -> list[SMSplit]:
    """Returns the splits to try on a GPU of that many SMs, the unsplit step first."""
    sizes = [None, *(num_sms - left for left in SMS_LEFT[gemms] if num_sms - left >= MIN_GEMM_SMS)]
    return [UNSPLIT, *(SMSplit(size, first) for size in sizes for first in ("gemm", "lora"))]


def require_gemms(gemms: GEMMs | None, base: str) -> GEMMs:
    """Returns the GEMMs to measure. Raises ValueError if this GPU has no kernels for a base of that kind to split."""
    if gemms is None:
        raise ValueError(
            f"--base {base}: this GPU multiplies such weights by kernels whose steps are never split, so there is "
            "nothing to measure. fp8 needs compute capability 9.0, and nf4 the CUDA kernels of "
            "kernels/quant/four_bit_cuda.py. Use --base plain."
        )
    return gemms


def measure(stack: Stack, gemms: GEMMs, case: SplitCase) -> Measured:
    stack.load(case.rank_of_slot)
    x_of_size = stack.inputs(case.num_tokens)
    slots = [t % case.num_adapters for t in range(case.num_tokens)]
    batch = smallest_batch(slots, case.rank_of_slot, stack.tables)
    step = StepClass.of(case.num_tokens, batch.num_tiles, max(case.ranks), gemms)
    if step is None:
        raise ValueError(f"{case.name} has more tokens than a step that may be split")
    splits = candidates(torch.cuda.get_device_properties().multi_processor_count, gemms)
    limits = dict.fromkeys(split.gemm_sms for split in splits if split.gemm_sms is not None)
    graphs = {"base": _captured_base(stack, x_of_size, None)}
    for gemm_sms in limits:
        graphs[f"base on {gemm_sms}"] = _captured_base(stack, x_of_size, gemm_sms)
    for split in splits:
        run_beside(batch, split)
        graphs[str(split)] = captured(lambda: stack.with_lora(x_of_size, batch), split.gemm_priority)
    ms = medians(graphs, REPEATS)
    limited = {gemm_sms: ms[f"base on {gemm_sms}"] for gemm_sms in limits}
    return Measured(step, ms["base"], limited, {split: ms[str(split)] for split in splits})


def _captured_base(stack: Stack, x_of_size: dict[int, Tensor], gemm_sms: int | None) -> torch.cuda.CUDAGraph:
    def base() -> None:
        with gemms_limited_to(gemm_sms):
            stack.base(x_of_size)

    return captured(base)


def report(case: SplitCase, measured: Measured, seconds: float) -> None:
    """Prints the excess of each split over the base, in milliseconds."""
    print(f"{case.name} ({measured.step.name}): base {measured.base_ms:.3f} ms, {seconds:.0f} s since the start")
    for sms, ms in measured.limited_base_ms.items():
        print(f"  base alone on {sms} SMs: {ms - measured.base_ms:+.3f}")
    for split, ms in measured.lora_ms.items():
        chosen = "  <- chosen" if split == measured.best else ""
        print(f"  gemm_sms {split.gemm_sms}, first {split.first}: {ms - measured.base_ms:+.3f}{chosen}")
    sys.stdout.flush()


def as_row(case: SplitCase, measured: Measured) -> dict[str, object]:
    """Returns a case's times in the form of the JSON file."""
    return {
        "case": case.name,
        "class": measured.step.name,
        "base_ms": measured.base_ms,
        "limited_base_ms": measured.limited_base_ms,
        "excess_ms": [
            {"gemm_sms": split.gemm_sms, "first": split.first, "ms": ms - measured.base_ms}
            for split, ms in measured.lora_ms.items()
        ],
        "gemm_sms": measured.best.gemm_sms,
        "first": measured.best.first,
    }


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES, help="tokens x adapters, as 64x8 or 64x8-mixed, or all")
    parser.add_argument("--base", choices=list(SCHEMES), default="plain")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this many seconds")
    parser.add_argument("--data", type=Path, help="the file of splits to write; the default is the engine's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [SplitCase.parse(name) for name in (ALL_CASES if "all" in args.cases else args.cases)]
    gpu = torch.cuda.get_device_name()
    data: Path = args.data or split_path(gpu)
    splits = read_splits(split_path(gpu)) | read_splits(data)
    stack = Stack(args.layers, scheme=SCHEMES[args.base])
    try:
        gemms = require_gemms(stack.gemms, args.base)
    except ValueError as error:
        parser.error(str(error))
    print(f"{gpu}, {args.layers} layers, {time.monotonic() - started:.0f} s to start", flush=True)
    rows, failed = [], False
    for case in cases:
        if time.monotonic() - started > args.seconds:
            print(f"{case.name}: not started after {args.seconds:.0f} s", flush=True)
            continue
        try:
            measured = measure(stack, gemms, case)
        except Exception:  # whatever fails is one case's failure: the others may still be measured
            traceback.print_exc()
            print(f"{case.name}: failed", flush=True)
            failed = True
            continue
        report(case, measured, time.monotonic() - started)
        rows.append(as_row(case, measured))
        splits[measured.step.name] = measured.best
        write_splits(data, splits)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"gpu": gpu, "rows": rows}, indent=1))
        torch.cuda.empty_cache()
    print(f"splits are in {data}; {time.monotonic() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
