"""Measures drafts under a load that moves from one stream to many and back, against the same load without drafts.

    python benchmarks/speculative_load.py [--streams 1 4 16 64 256 64 16 4 1] [--adapters 0] [--right 0.3 0.7]
        [--draft-layers 16] [--device cpu]

The model and the arms of --right are those of speculative.py. Each request that ends is replaced at once, so that the
number of streams stays until twice as many requests, and at least 12, have ended. Then the next number of --streams
holds. No arm begins anew between them, so speculation has to learn what a larger or smaller batch costs while it
serves.

No ratio should be below 0.98. Arms run in turns, and their medians are compared. The arm without drafts runs first and
last in each turn, and the second one's ratio shows what differs by chance. The last line of an arm is the whole load,
with the time in which more streams have ended than are replaced.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmark_results import Case, write_results
from engine_driver import abort, good_outputs
from engine_setup import add_engine_arguments, make_engine
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from speculative import add_draft_arguments, arm, draft_options, let_answers_be_token_0

UNITS = {"plain_tokens_per_s": "tokens/s", "tokens_per_s": "tokens/s", "ratio": "", "accepted": ""}
REQUESTS_PER_STREAM = 2  # A stage lasts until so many requests for each stream have ended,
LEAST_REQUESTS = 12  # but not until fewer than these have.
AGAIN = "none"  # The arm without drafts that runs last.
WHOLE = "all"


@dataclass(slots=True)
class Speeds:
    """The figures of one pass over the load."""

    of_stages: list[float] = field(default_factory=list)  # Tokens per second.
    whole: float = 0.0  # Tokens per second of the pass.
    num_drafted: int = 0
    num_accepted: int = 0


class MovingLoad:
    """Requests to one engine, whose number moves."""

    def __init__(self, engine: Engine, text: list[int], loras: list[LoRARequest], args: argparse.Namespace) -> None:
        self._engine = engine
        self._text = text
        self._loras = loras
        self._args = args
        self._num_added = 0
        self._num_running = 0

    def run(self) -> Speeds:
        """Runs the whole load once."""
        speeds, began_s, num_tokens = Speeds(), time.perf_counter(), 0
        for streams in self._args.streams:
            while self._num_running > streams:
                num_tokens += self._step(speeds)[0]
            num_ended, stage_tokens, stage_s = 0, 0, time.perf_counter()
            while num_ended < max(REQUESTS_PER_STREAM * streams, LEAST_REQUESTS):
                while self._num_running < streams:
                    self._add()
                count, ended = self._step(speeds)
                stage_tokens += count
                num_ended += ended
            num_tokens += stage_tokens
            speeds.of_stages.append(stage_tokens / (time.perf_counter() - stage_s))
        speeds.whole = num_tokens / (time.perf_counter() - began_s)
        abort(self._engine, "r", self._num_added)
        self._num_added = self._num_running = 0
        return speeds

    def _step(self, speeds: Speeds) -> tuple[int, int]:
        """Runs one step of the engine. Returns the number of tokens that it gave, and of requests that ended."""
        num_tokens = num_ended = 0
        for output in good_outputs(self._engine):
            num_tokens += len(output.token_ids)
            num_ended += output.finish_reason is not None
            if output.drafts is not None:
                speeds.num_drafted += output.drafts.num_tokens
                speeds.num_accepted += output.drafts.num_accepted
        self._num_running -= num_ended
        return num_tokens, num_ended

    def _add(self) -> None:
        """Adds a request to the engine. Lengths of answers differ, so that streams do not end together."""
        number, tokens = self._num_added, self._args.tokens
        max_tokens = tokens // 2 + (number * 37) % (tokens + 1)
        params = SamplingParams(temperature=0, max_tokens=max(2, max_tokens), ignore_eos=True)
        lora = self._loras[number % len(self._loras)] if self._loras else None
        prompt = self._text[number % 8 :]
        self._engine.add(EngineRequest(request_id=f"r {number}", prompt_token_ids=prompt, params=params, lora=lora))
        self._num_added += 1
        self._num_running += 1


def compare(engine: Engine, load: MovingLoad, model: ModelDrafter | None, args: argparse.Namespace) -> list[Case]:
    """Runs the arms in turns. Returns a case for each arm and stage, and one for the whole load."""
    arms = [str(right) for right in args.right]
    speculations = {name: arm(engine, name, args.drafts, model) for name in ("off", *arms)} | {AGAIN: None}
    found: dict[str, list[Speeds]] = {name: [] for name in speculations}
    for turn in range(1 + args.repeats):
        for name, speculation in speculations.items():
            engine.scheduler.speculation = speculation
            speeds = load.run()
            if turn > 0:  # The first turn compiles kernels.
                found[name].append(speeds)
    cases: list[Case] = []
    for name in (*arms, AGAIN):
        drafted = sum(speeds.num_drafted for speeds in found[name])
        accepted = sum(speeds.num_accepted for speeds in found[name]) / max(1, drafted)
        for stage, streams in enumerate([*args.streams, WHOLE]):
            plain, with_drafts = (_median(found[each], stage) for each in ("off", name))
            ratio = with_drafts / plain
            print(f"drafts {name:4} streams {streams:4} {plain:9.0f} -> {with_drafts:9.0f} tokens/s  x {ratio:.3f}")
            figures = {"plain_tokens_per_s": plain, "tokens_per_s": with_drafts, "ratio": ratio, "accepted": accepted}
            settings = {"stage": stage, "streams": streams, "adapters": args.adapters, "drafts": name}
            cases.append(Case(settings, figures))
    return cases


def _median(speeds: list[Speeds], stage: int) -> float:
    """Returns the median of a stage's speed, or that of the whole load behind the last stage."""
    return statistics.median([*each.of_stages, each.whole][stage] for each in speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64, 256, 64, 16, 4, 1])
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--right", type=float, nargs="+", default=[0.3, 0.7])
    add_draft_arguments(parser)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="mean length of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    add_engine_arguments(parser)
    args = parser.parse_args()
    length = args.prompt + args.tokens * 3 // 2 + 2
    with tempfile.TemporaryDirectory() as folder:
        options = draft_options(Path(folder) / "draft", args, length)
        engine, loras = make_engine(Path(folder), args, max(args.streams), length, args.adapters, options)
        text = torch.randint(10, args.vocabulary - 256, (args.prompt,)).tolist()
        model = let_answers_be_token_0(engine)
        cases = compare(engine, MovingLoad(engine, text, loras, args), model, args)
        engine.close()
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
