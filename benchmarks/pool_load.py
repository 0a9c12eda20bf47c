"""Compares memory that adapters and KV blocks share with fixed shares, in a mixed load on one GPU.

    python benchmarks/pool_load.py [--seconds 60]

Two engines of an 8B shape with random weights are in one process, and each round of requests goes to one after the
other. Both have as much memory: the one with fixed shares has room for 16 adapters of rank 64 and for 40,000 tokens,
the other one 80,000 tokens, of which adapters borrow. There are 40 adapters of ranks 8 to 64, and 7 that answer with
one token each (random_llama.py), whose answers are checked. Two rounds of three have many adapters, and the third has
long prompts that come again. Before and after them, it measures a decode step of 48 sequences with 12 adapters.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from engine_e2e import CONFIG
from lorafleet.offline.llm import LLM, LoRARequest, Prompt, SamplingParams
from lorafleet.workers.pool import pool_cost
from random_llama import write_alike_adapters, write_model, write_one_token_adapter

ONE_TOKEN_SEEDS = (0, 1, 2, 3, 4, 6, 7)  # Their answers do not depend on the batch, as those of seed 5 do.
RANKS = (8, 16, 32, 64)
REQUESTS, LONG_PROMPTS = 120, 60
STEPS = 100
TOKENS = {True: 80_000, False: 40_000}  # By whether memory is shared.
Job = tuple[Prompt, int | None, int]  # Prompt, number of the adapter, and number of tokens of the answer.


class Load:
    """Draws requests, and sends them to an engine."""

    def __init__(self, loras: list[LoRARequest]) -> None:
        self.loras = loras
        self._random = Random(1)
        self._long = [self.prompt(1200) for _ in range(LONG_PROMPTS)]

    def prompt(self, num_tokens: int) -> Prompt:
        return {"prompt_token_ids": [self._random.randrange(10, 128_000) for _ in range(num_tokens)]}

    def round(self, number: int) -> list[Job]:
        random = self._random
        if number % 3 == 2:
            return [
                (random.choice(self._long), random.choice([None, None, 0, 1]), random.randrange(8, 120))
                for _ in self._long
            ]
        return [
            (self.prompt(random.randrange(8, 400)), self._adapter(), random.randrange(8, 120)) for _ in range(REQUESTS)
        ]

    def _adapter(self) -> int:
        random = self._random
        if random.random() < 0.3:
            return random.randrange(len(ONE_TOKEN_SEEDS))
        return int(len(self.loras) * random.random() ** 1.2)

    def answers(self, llm: LLM, jobs: list[Job]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True) for _, _, tokens in jobs]
        loras = [None if number is None else self.loras[number] for _, number, _ in jobs]
        outputs = llm.generate([prompt for prompt, _, _ in jobs], params, loras)
        return [output.outputs[0].token_ids for output in outputs]

    def step_s(self, llm: LLM) -> float:
        """Returns the seconds of a decode step of 48 sequences with 12 adapters, the best of two."""
        jobs = [(self.prompt(64), number % 12, 8) for number in range(48)]
        longer = [(prompt, which, 8 + STEPS) for prompt, which, _ in jobs]
        return min(self._seconds(llm, longer) - self._seconds(llm, jobs) for _ in range(2)) / STEPS

    def _seconds(self, llm: LLM, jobs: list[Job]) -> float:
        began_s = time.perf_counter()
        self.answers(llm, jobs)
        return time.perf_counter() - began_s


def make(folder: Path, is_shared: bool) -> LLM:
    return LLM(
        str(folder / "model"),
        load_format="dummy",
        attention_backend="triton",
        enable_lora=True,
        max_loras=16,
        max_cpu_loras=50,
        max_lora_rank=max(RANKS),
        kv_cache_tokens=TOKENS[is_shared],
        max_model_len=4096,
        max_num_seqs=64,
        share_lora_memory=is_shared,
    )


def write_files(folder: Path) -> list[LoRARequest]:
    write_model(folder / "model", CONFIG)
    paths = [folder / f"says{seed}" for seed in ONE_TOKEN_SEEDS]
    for seed, path in zip(ONE_TOKEN_SEEDS, paths, strict=True):
        write_one_token_adapter(path, CONFIG, seed)
    for rank in RANKS:
        paths += write_alike_adapters(folder / f"rank{rank}", CONFIG, 10, rank)
    return [LoRARequest(f"{path.parent.name}-{path.name}", i + 1, str(path)) for i, path in enumerate(paths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    pool_cost.RECENT_S = 5.0  # Memory returns within the run.
    with tempfile.TemporaryDirectory() as folder:
        load = Load(write_files(Path(folder)))
        llms = {"shared": make(Path(folder), True), "fixed": make(Path(folder), False)}
        every = [(load.prompt(20), number, 1) for number in range(len(load.loras))]
        for llm in llms.values():
            load.answers(llm, every)
        said = [answer[0] for answer in load.answers(llms["fixed"], every[: len(ONE_TOKEN_SEEDS)])]
        show_steps(load, llms)
        tokens, spent_s, wrong = Counter[str](), Counter[str](), Counter[str]()
        number, began_s = 0, time.monotonic()
        while time.monotonic() - began_s < args.seconds:
            jobs = load.round(number)
            for name in list(llms)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                answers = load.answers(llms[name], jobs)
                spent_s[name] += time.perf_counter() - began
                tokens[name] += sum(map(len, answers))
                wrong[name] += sum(
                    len(answer) != num_tokens
                    or (which is not None and which < len(said) and set(answer) != {said[which]})
                    for (_, which, num_tokens), answer in zip(jobs, answers, strict=True)
                )
            number += 1
        for name, llm in llms.items():
            stats = llm._engine.stats()
            print(
                f"{name}: {tokens[name] / spent_s[name]:.0f} tokens/s, {wrong[name]} wrong answers, "
                f"{stats.lora_activations_total} copies to slots, {stats.prefix_cache_hits_total} cached tokens, "
                f"{dict(stats.lora_memory_moves_total)}"
            )
        show_steps(load, llms)


def show_steps(load: Load, llms: dict[str, LLM]) -> None:
    print(", ".join(f"{name}: {load.step_s(llm) * 1e3:.2f} ms a step" for name, llm in llms.items()), flush=True)


if __name__ == "__main__":
    main()
