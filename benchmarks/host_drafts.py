"""Measures for how long a GPU would wait for the host between two steps with drafts, without a GPU.

    python benchmarks/host_drafts.py [--batches 1 8 64] [--drafts 4] [--ngrams] [--json FILE]

As in host_step.py, an engine on a CPU does what it does beside a GPU, and nothing computes the model. A drafter on the
host has draft tokens for each sequence in each step, and all of them are right. It takes no time, or, with --ngrams, is
the one of the method `ngram`. There are two ways:

- waits: the host schedules and plans a step when it has read the tokens of the step before,
- before: it does so while that step runs, and only drafts and launches afterwards.

"between" is the thread's CPU time from the moment at which the tokens are there to that at which the graph is
launched, and "step" is that of all that the host does for a step. Both are without what CUDA's calls cost. The figures
are medians of the steps, and the two ways run in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from benchmark_results import Case, write_results
from engine_driver import FreePace, abort, make_speculation
from host_step import TOKEN, build
from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.ahead_drafts import AheadDrafts
from lorafleet.workers.speculation.ahead_pace import AheadPace
from lorafleet.workers.speculation.awaited_drafts import AwaitingDrafter
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.ngram_drafter import NgramDrafter
from lorafleet.workers.step.runner import ChosenStep

PROMPT, ANSWER = 64, 900
UNITS = {"between_ms": "ms, median", "step_ms": "ms, median"}


class AllRight:
    """Drafts the token that every step draws."""

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        return [[TOKEN] * entry.most for entry in wanted]

    def read(self, sequences: Iterable[Sequence]) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass


class AlwaysAhead(AheadPace):
    """Takes steps that are planned before for faster than others."""

    def is_ahead(self, *_args: object, **_kwargs: object) -> bool:
        return True


class Stopwatch:
    """Takes the time between the tokens of a step and the launch of the next one."""

    def __init__(self, engine: Engine) -> None:
        self.between_s: list[float] = []
        self._known_s = 0.0
        ChosenStep.drawn = self._begins(ChosenStep.drawn)  # type: ignore[method-assign]  # a stopwatch around each
        ChosenStep.collect = self._begins(ChosenStep.collect)  # type: ignore[method-assign]
        launch = engine.runner.launch

        def launched(*args: Any) -> Any:
            step = launch(*args)
            self.between_s.append(time.thread_time() - self._known_s)
            return step

        engine.runner.launch = launched  # type: ignore[method-assign]

    def _begins(self, read: Callable[[ChosenStep], Any]) -> Callable[[ChosenStep], Any]:
        def reads(step: ChosenStep) -> Any:
            self._known_s = time.thread_time()
            return read(step)

        return reads


def measure(engine: Engine, watch: Stopwatch, batch: int, args: argparse.Namespace, way: str) -> dict[str, float]:
    """Returns the figures of one way."""
    drafter = AwaitingDrafter(NgramDrafter(SpeculativeConfig("ngram")) if args.ngrams else AllRight())
    ahead = AheadDrafts(drafter, AlwaysAhead()) if way == "before" else None
    engine.scheduler.speculation = make_speculation(
        engine, drafter, args.drafts, FreePace(), is_certain=False, ahead=ahead
    )
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    for i in range(batch):
        prompt = [10 + (i + place) % 200 for place in range(PROMPT)]
        engine.add(EngineRequest(request_id=f"r {i}", prompt_token_ids=prompt, params=params))
    between_s: list[float] = []
    step_s: list[float] = []
    while len(step_s) < args.steps:
        watch.between_s.clear()
        before = engine.pipeline.chunks
        began_s = time.thread_time()
        engine.step()
        seconds = time.thread_time() - began_s
        after = engine.pipeline.chunks
        have_drafts = bool(before and after) and all(chunk.drafts for chunk in (*before, *after))
        is_planned_before = any(UNKNOWN in chunk.drafts for chunk in after)
        if have_drafts and is_planned_before == (ahead is not None):
            between_s += watch.between_s
            step_s.append(seconds)
    abort(engine, "r", batch)
    while engine.has_work:
        engine.step()
    return {"between_ms": statistics.median(between_s) * 1e3, "step_ms": statistics.median(step_s) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--ngrams", action="store_true")
    parser.add_argument("--steps", type=int, default=60, help="steps of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = build(Path(folder), max(args.batches), args.drafts)
        watch = Stopwatch(engine)
        print("batch  way     ms between  ms a step")
        for batch in args.batches:
            ways = "waits", "before"
            found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(args.turns):
                for way in ways:
                    found[way].append(measure(engine, watch, batch, args, way))
            for way, turns in found.items():
                figures = {name: statistics.median(turn[name] for turn in turns) for name in UNITS}
                print(f"{batch:5}  {way:6}  {figures['between_ms']:10.2f}  {figures['step_ms']:9.2f}", flush=True)
                cases.append(Case({"batch": batch, "way": way}, figures))
        engine.close()
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
