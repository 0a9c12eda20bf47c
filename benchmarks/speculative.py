"""Measures decoding with drafts against decoding without, as ratios of tokens per second.

    python benchmarks/speculative.py [--batches 1 8 64] [--adapters 0] [--right 1 0.7 0.3] [--device cpu]
    python benchmarks/speculative.py --model demo/model --device cpu

The first form has random weights in the shape of an 8B Llama. Its last norm is zeroed, so that every answer is token 0
again and again at the full cost of a step. `ngram` drafts from the repeated text, and all of its drafts are right. An
arm of --right has drafts of which each token is right with this probability, as a drafter of that quality would make.
With --waits, each has a second arm in which no step is planned before the tokens of the step before are known.

With --draft-layers, a draft model of that many layers drafts in the arms of --right, so that they have its full cost.
Its drafts would all be right. The arms replace some of their tokens by wrong ones. N-grams are left out, and --waits
holds. --draft-head has an EAGLE-3 head instead, with random weights in the shape of the target's layers and 32,000
tokens that it drafts. With --mtp, the model has the shape of a family of families_decode.py, with as many layers as are
measured there, and its own layer for several tokens (MTP) drafts in the same way.

The second form drafts by n-grams from the answers of a real model to a repetitive prompt.

Speculation decides by itself where it pays, so no ratio should be below 1. The arms run in turns, and their medians
are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmark_results import Case, write_results
from engine_driver import abort, good_outputs, make_speculation, settle
from engine_setup import add_engine_arguments, llama_config, make_engine
from families_decode import COMMON, FAMILIES
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.engine import Engine
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.speculation.ahead_drafts import AheadDrafter, AheadDrafts
from lorafleet.workers.speculation.awaited_drafts import AwaitingDrafter
from lorafleet.workers.speculation.drafter import DeviceDrafts, Wanted
from lorafleet.workers.speculation.eagle_head import EagleHead
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.speculation.mtp_head import MTPHead
from lorafleet.workers.speculation.ngram_drafter import NgramDrafter
from lorafleet.workers.speculation.speculation import Speculation
from lorafleet.workers.startup import build_engine
from random_llama import write_head

UNITS = {"plain_tokens_per_s": "tokens/s", "tokens_per_s": "tokens/s", "ratio": "", "accepted": "", "drafted": ""}
PHRASE = "Paris is the capital of France. Rome is the capital of Italy. "
MTP_FAMILIES = "glm-4.5-air", "qwen3.5-9b", "qwen3.5-35b-a3b"
WRONG = 3  # A token that no answer has.


class KnownDrafter:
    """Drafts for answers that are token 0 again and again. Each draft token is right with a given probability.

    Args:
        model: Drafts first, so that its cost is in the step. None if nothing does.
    """

    def __init__(self, right: float, model: ModelDrafter | None = None) -> None:
        self._right = right
        self._model = model
        self._rng = random.Random(0)

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        lengths = [entry.most for entry in wanted]
        if self._model is not None:
            lengths = [len(draft) for draft in self._model.propose(wanted)]
        return [[0 if self._rng.random() < self._right else WRONG for _ in range(length)] for length in lengths]

    def is_current(self, entry: Wanted, step: DraftVerification) -> bool:
        return self._model is not None and self._model.is_current(entry, step)

    def may_catch_up(self, sequence: Sequence) -> bool:
        return self._model is not None and self._model.may_catch_up(sequence)

    def propose_behind(self, wanted: Many[Wanted], step: DraftVerification) -> DeviceDrafts:
        assert self._model is not None
        made = self._model.propose_behind(wanted, step)
        is_right_WK = torch.rand(made.token_WK.shape, device=made.token_WK.device) < self._right
        return replace(made, token_WK=torch.where(is_right_WK, 0, WRONG))

    def read(self, sequences: Iterable[Sequence]) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        if self._model is not None:
            self._model.release(sequence)


def arm(engine: Engine, name: str, most_drafts: int, model: ModelDrafter | None) -> Speculation | None:
    """Returns the speculation of one arm: "off", "ngram" or the quality of its drafts, with "waits" if these wait for
    the tokens of each step."""
    if name == "off":
        return None
    if name == "ngram":
        ngrams = AwaitingDrafter(NgramDrafter(SpeculativeConfig("ngram")))
        return make_speculation(engine, ngrams, most_drafts, is_certain=False, ahead=AheadDrafts(ngrams))
    right, *waits = name.split()
    known = KnownDrafter(float(right), model)
    drafter: AheadDrafter = AwaitingDrafter(known) if model is None else known
    ahead = None if waits else AheadDrafts(drafter)
    return make_speculation(engine, drafter, most_drafts, is_certain=model is not None, ahead=ahead)


@dataclass(frozen=True, slots=True)
class Decoded:
    tokens_per_s: float
    accepted: float  # Share of the draft tokens.
    drafted: float  # Draft tokens for each generated token: small where speculation finds that drafts do not pay.


def decode(engine: Engine, prompts: list[list[int]], num_tokens: int, loras: list[LoRARequest]) -> Decoded:
    """Answers all prompts at once. What it returns is from the step on in which all have begun."""
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
            if output.drafts is not None and started_s:
                drafted += output.drafts.num_tokens
                accepted += output.drafts.num_accepted
        if not started_s and len(begun) == len(prompts):
            started_s = time.perf_counter()
    speed = count / (time.perf_counter() - started_s)
    abort(engine, "r", len(prompts))
    return Decoded(speed, accepted / max(1, drafted), drafted / count)


def compare(
    engine: Engine,
    model: ModelDrafter | None,
    arms: list[str],
    prompts: list[list[int]],
    args: argparse.Namespace,
    loras: list[LoRARequest],
) -> list[Case]:
    """Runs the arms in turns. Returns a case for each arm with drafts."""
    speculations = {name: arm(engine, name, args.drafts, model) for name in ("off", *arms)}
    found: dict[str, list[Decoded]] = {name: [] for name in speculations}
    for turn in range(1 + args.repeats):
        for name, speculation in speculations.items():
            engine.scheduler.speculation = speculation
            result = decode(engine, prompts, args.tokens, loras)
            if turn > 0:  # The first turn compiles kernels, and learns how long steps take.
                found[name].append(result)
    speeds = {name: statistics.median(result.tokens_per_s for result in results) for name, results in found.items()}
    cases: list[Case] = []
    for name in arms:
        ratio = speeds[name] / speeds["off"]
        accepted = statistics.mean(result.accepted for result in found[name])
        drafted = statistics.mean(result.drafted for result in found[name])
        print(
            f"batch {len(prompts):3}  adapters {len(loras):2}  {name:9} {speeds['off']:9.0f} -> {speeds[name]:9.0f} "
            f"tokens/s  x {ratio:.2f}  accepted {accepted:.2f}  drafted {drafted:.2f} a token",
            flush=True,
        )
        figures = {"plain_tokens_per_s": speeds["off"], "tokens_per_s": speeds[name]}
        settings = {"batch": len(prompts), "adapters": len(loras), "drafts": name}
        cases.append(Case(settings, figures | {"ratio": ratio, "accepted": accepted, "drafted": drafted}))
    return cases


def let_answers_be_token_0(engine: Engine) -> ModelDrafter | None:
    """Zeroes the last norm of the target, and of the draft model if there is one. Returns the draft model."""
    assert engine.scheduler.speculation is not None
    drafter = engine.scheduler.speculation.drafter
    draft_model = drafter if isinstance(drafter, ModelDrafter) else None
    for steps in (engine.runner.steps, *(() if draft_model is None else (draft_model.steps,))):
        assert isinstance(steps.model, DecoderModel | EagleHead | MTPHead)
        norm = steps.model.last.norm if isinstance(steps.model, EagleHead) else steps.model.norm
        assert norm is not None
        with torch.inference_mode():
            norm.weight.zero_()
    return draft_model


def draft_options(folder: Path, args: argparse.Namespace, max_length: int) -> SpeculativeConfig:
    """Writes the configuration of a draft model with random weights, or a head, and returns what drafts by it. Returns
    the options of n-grams if there is neither."""
    if args.draft_head:
        write_head(folder, llama_config(args, max_length))
        return SpeculativeConfig("eagle3", num_speculative_tokens=args.drafts, model=str(folder))
    if not args.draft_layers:
        return SpeculativeConfig("ngram", num_speculative_tokens=args.drafts)
    folder.mkdir()
    shape = argparse.Namespace(**(vars(args) | {"layers": args.draft_layers, "hidden": args.draft_hidden}))
    (folder / "config.json").write_text(json.dumps(llama_config(shape, max_length)))
    return SpeculativeConfig("draft_model", num_speculative_tokens=args.drafts, model=str(folder))


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of what drafts beside known drafts."""
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--draft-layers", type=int, default=0, help="layers of a draft model; 0: there is none")
    parser.add_argument("--draft-hidden", type=int, default=2048)
    parser.add_argument("--draft-head", action="store_true", help="an EAGLE-3 head drafts")


def family_config(family: str) -> dict[str, Any]:
    """Returns the config.json of a family's shape."""
    _, num_layers, config = FAMILIES[family]
    return COMMON | config | {"num_hidden_layers": num_layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--right", type=float, nargs="*", default=[0.7])
    parser.add_argument("--waits", action="store_true", help="also measure drafts that are awaited before any planning")
    add_draft_arguments(parser)
    parser.add_argument("--mtp", choices=MTP_FAMILIES, help="family whose own layer for several tokens drafts")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="folder of a real model, for the second form")
    parser.add_argument("--json", type=Path)
    add_engine_arguments(parser)
    args = parser.parse_args()
    if args.mtp and (args.adapters or args.draft_layers or args.model):
        parser.error("--mtp goes with none of --adapters, --draft-layers and --model")
    has_model = bool(args.draft_layers or args.draft_head or args.mtp)
    ways = ("", " waits") if args.waits or has_model else ("",)
    arms = [f"{right}{waits}" for right in args.right for waits in ways]
    if args.model:
        arms = ["ngram"]
    elif not has_model:
        arms.insert(0, "ngram")
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            options = SpeculativeConfig("ngram", num_speculative_tokens=args.drafts)
            config = EngineConfig(args.model, device=args.device, speculative_config=options)
            engine, loras = build_engine(config), []
            settle(engine)
            text = Tokenizer.from_folder(Path(args.model)).encode(8 * PHRASE)
        else:
            length = args.prompt + args.tokens + 1
            options = draft_options(Path(folder) / "draft", args, length)
            model = None
            if args.mtp:
                options = SpeculativeConfig("mtp", num_speculative_tokens=args.drafts)
                model = family_config(args.mtp)
            engine, loras = make_engine(Path(folder), args, max(args.batches), length, args.adapters, options, model)
            text = torch.randint(10, engine.runner.steps.model.config.vocab_size - 256, (args.prompt,)).tolist()
        draft_model = None if args.model else let_answers_be_token_0(engine)
        for batch in args.batches:
            cases += compare(engine, draft_model, arms, [text[i % 8 :] for i in range(batch)], args, loras)
        engine.close()
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
