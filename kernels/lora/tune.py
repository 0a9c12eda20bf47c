"""Measures the LoRA kernels' launch shapes on this machine's GPU and writes them where the engine reads them.

    python -m lorafleet.kernels.lora.tune [--layers 8] [--classes few some many prefill]

Each class of launches (kernels/lora/lora_tuning.py) is measured by one representative step with rank 16. One field is
changed at a time, and the change is adopted if the whole step, base GEMMs included, gets faster by more than the
noise. This takes some minutes.
"""

# T tokens · D in · O out

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from lorafleet.kernels.decoder.decoder_stack import MAX_SLOTS, Stack, captured, medians, smallest_batch
from lorafleet.kernels.lora.lora_batch import PREFILL_TILE_TOKENS, TILE_TOKENS
from lorafleet.kernels.lora.lora_tuning import CLASSES, Tuning, class_of, save, tuning_for

STEPS = {"few": (8, 8), "some": (24, 24), "many": (64, 64), "prefill": (4096, 8)}  # (tokens, adapters)
RANK = 16
NOISE = 0.002  # as a fraction of a step's time
SHRINK = {
    "narrow_d": (64, 128),
    "narrow_stages": (2, 3, 4),
    "wide_d": (64, 128),
    "wide_stages": (2, 3, 4),
    "warps": (2, 4, 8),
}
EXPAND: dict[str, tuple[Any, ...]] = {
    "elements": (1024, 2048, 4096),
    "programs": (256, 512, 1024, 2048),
    "warps": (2, 4, 8),
}


def candidates(tuning: Tuning) -> list[Tuning]:
    """Returns every tuning that differs from the given one in one field."""
    early = (False, True) if torch.cuda.get_device_capability()[0] >= 9 else (False,)
    shrinks = [replace(tuning.shrink, **{field: value}) for field, values in SHRINK.items() for value in values]
    expands = [
        replace(tuning.expand, **{field: value})
        for field, values in {**EXPAND, "early": early}.items()
        for value in values
    ]
    return [replace(tuning, shrink=shrink) for shrink in shrinks] + [replace(tuning, expand=e) for e in expands]


def tune(stack: Stack, name: str) -> Tuning:
    num_tokens, num_adapters = STEPS[name]
    prefill = name == "prefill"
    x_of_size = stack.inputs(num_tokens)
    batch = smallest_batch(
        [t * num_adapters // num_tokens for t in range(num_tokens)],
        [RANK] * MAX_SLOTS,
        stack.tables,
        PREFILL_TILE_TOKENS if prefill else TILE_TOKENS,
    )
    assert class_of(batch.num_tiles, prefill) == name
    # The best tuning so far alternates with each candidate, so that a slower clock slows both.
    best = tuning_for(x_of_size[4096].device, batch.num_tiles, prefill)
    tried = {best}
    improved = True
    while improved:
        improved = False
        for i in range(len(candidates(best))):
            candidate = candidates(best)[i]  # derived from the best so far, which changes
            if candidate in tried:
                continue
            tried.add(candidate)
            graphs = {}
            for key, tuning in (("best", best), ("candidate", candidate)):
                batch.tuning = tuning
                graphs[key] = captured(lambda: stack.with_lora(x_of_size, batch), batch.split.gemm_priority)
            ms = medians(graphs, 9)
            if ms["candidate"] < ms["best"] * (1 - NOISE):
                print(f"{name}: {ms['best']:.3f} -> {ms['candidate']:.3f} ms  {candidate}", flush=True)
                best, improved = candidate, True
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=CLASSES)
    args = parser.parse_args()
    stack = Stack(args.layers)
    stack.load([RANK] * MAX_SLOTS)
    gpu = torch.cuda.get_device_name()
    sizes = {"few": 1, "some": 17, "many": 33, "prefill": 1}  # for each class, a number of tiles that belongs to it
    found = {name: tuning_for(torch.device("cuda"), sizes[name], name == "prefill") for name in CLASSES}
    for name in args.classes:
        found[name] = tune(stack, name)
        print(name, found[name], "->", save(gpu, found), flush=True)


if __name__ == "__main__":
    main()
