"""Measures decoding with drafts against decoding without, as ratios of tokens per second.

    python benchmarks/speculative.py [--batches 1 8 64] [--adapters 0] [--right 1 0.7 0.3] [--device cpu]
    python benchmarks/speculative.py --model demo/model --device cpu

The first form has random weights in the shape of an 8B Llama. Its last norm is zeroed, so that every answer is token 0
again and again at the full cost of a step. `ngram` drafts from the repeated text, and all of its drafts are right. An
arm of --right has drafts of which each token is right with this probability, as a drafter of that quality would make.

The second form drafts by n-grams from the answers of a real model to a repetitive prompt.

Speculation decides by itself where it pays, so no ratio should be below 1. The arms run in turns, and their medians
are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from benchmark_results import Case, write_results
from engine_driver import abort, good_outputs, settle
from engine_setup import add_engine_arguments, make_engine
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.speculation.drafter import Drafter, Wanted
from lorafleet.workers.speculation.ngram_drafter import NgramDrafter
from lorafleet.workers.speculation.speculation import Speculation
from lorafleet.workers.startup import build_engine

UNITS = {"plain_tokens_per_s": "tokens/s", "tokens_per_s": "tokens/s", "ratio": "", "accepted": ""}
PHRASE = "Paris is the capital of France. Rome is the capital of Italy. "
WRONG = 3  # A token that no answer has.


class KnownDrafter:
    """Drafts for answers that are token 0 again and again. Each draft token is right with a given probability."""

    def __init__(self, right: float) -> None:
        self._right = right
        self._rng = random.Random(0)

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        return [[0 if self._rng.random() < self._right else WRONG for _ in range(entry.most)] for entry in wanted]

    def release(self, sequence: Sequence) -> None:
        """Does nothing, since nothing is remembered."""


def arm(engine: Engine, name: str, config: SpeculativeConfig, most_sampled: int) -> Speculation | None:
    """Returns the speculation of one arm: "off", "ngram" or the quality of its drafts."""
    if name == "off":
        return None
    drafter: Drafter = NgramDrafter(config) if name == "ngram" else KnownDrafter(float(name))
    return Speculation(drafter, engine.scheduler.budget, config.num_speculative_tokens, most_sampled)


def decode(engine: Engine, prompts: list[list[int]], num_tokens: int, loras: list[LoRARequest]) -> tuple[float, float]:
    """Answers all prompts at once. Returns the tokens per second from the step in which all have begun, and the
    accepted share of the draft tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        lora = loras[i % len(loras)] if loras else None
        engine.add(EngineRequest(request_id=f"r {i}", prompt_token_ids=prompt, params=params, lora=lora))
    begun, ended, count, drafted, accepted, started_s = set(), 0, 0, 0, 0, 0.0
    while not ended:  # The first one that ends leaves a smaller batch.
        for output in good_outputs(engine):
            count += len(output.token_ids) if started_s else 0
            begun.add(output.request_id)
            ended += output.finish_reason is not None
            if output.drafts is not None:
                drafted += output.drafts.num_tokens
                accepted += output.drafts.num_accepted
        if not started_s and len(begun) == len(prompts):
            started_s = time.perf_counter()
    speed = count / (time.perf_counter() - started_s)
    abort(engine, "r", len(prompts))
    return speed, accepted / max(1, drafted)


def compare(
    engine: Engine,
    config: SpeculativeConfig,
    arms: list[str],
    prompts: list[list[int]],
    args: argparse.Namespace,
    loras: list[LoRARequest],
) -> list[Case]:
    """Runs the arms in turns. Returns a case for each arm with drafts."""
    most_sampled = len(engine.runner.steps.inputs.sampled_B)
    speculations = {name: arm(engine, name, config, most_sampled) for name in ("off", *arms)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in speculations}
    for turn in range(1 + args.repeats):
        for name, speculation in speculations.items():
            engine.scheduler.speculation = speculation
            result = decode(engine, prompts, args.tokens, loras)
            if turn > 0:  # The first turn compiles kernels, and learns how long steps take.
                found[name].append(result)
    speeds = {name: statistics.median(speed for speed, _ in results) for name, results in found.items()}
    cases: list[Case] = []
    for name in arms:
        ratio, accepted = speeds[name] / speeds["off"], statistics.mean(share for _, share in found[name])
        print(
            f"batch {len(prompts):3}  adapters {len(loras):2}  {name:6} {speeds['off']:9.0f} -> {speeds[name]:9.0f} "
            f"tokens/s  x {ratio:.2f}  accepted {accepted:.2f}",
            flush=True,
        )
        figures = {"plain_tokens_per_s": speeds["off"], "tokens_per_s": speeds[name]}
        settings = {"batch": len(prompts), "adapters": len(loras), "drafts": name}
        cases.append(Case(settings, figures | {"ratio": ratio, "accepted": accepted}))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--right", type=float, nargs="*", default=[0.7])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="folder of a real model, for the second form")
    parser.add_argument("--json", type=Path)
    add_engine_arguments(parser)
    args = parser.parse_args()
    arms = ["ngram"] if args.model else ["ngram", *map(str, args.right)]
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        options = SpeculativeConfig("ngram", num_speculative_tokens=args.drafts)
        if args.model:
            config = EngineConfig(args.model, device=args.device, speculative_config=options)
            engine, loras = build_engine(config), []
            settle(engine)
            text = Tokenizer.from_folder(Path(args.model)).encode(8 * PHRASE)
        else:
            length = args.prompt + args.tokens + 1
            engine, loras = make_engine(Path(folder), args, max(args.batches), length, args.adapters, options)
            text = torch.randint(10, args.vocabulary - 256, (args.prompt,)).tolist()
            model = engine.runner.steps.model
            assert isinstance(model, DecoderModel)
            with torch.inference_mode():
                model.norm.weight.zero_()
        for batch in args.batches:
            cases += compare(engine, options, arms, [text[i % 8 :] for i in range(batch)], args, loras)
        engine.close()
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
