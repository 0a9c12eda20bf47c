"""Measures the engine without HTTP under a closed loop that keeps a number of sequences in it all the time.

    python benchmarks/saturation.py [--streams 64 256 512 1024] [--adapters 0] [--kv-cache-dtype auto|fp8]
        [--engine-option max_num_mixed_tokens=2048 ...] [--fill-seconds 30] [--seconds 15] [--requests N] [--json FILE]

The model has an 8B shape with random weights; on a CPU use --device cpu --layers 2 --hidden 256 --vocabulary 512.
Prompts have 512 random tokens and answers 128, greedy. Each sequence that ends is replaced at once; request i uses
adapter i modulo their number (rank 16 on all seven projections). The first answers have staggered lengths, so that
sequences end one by one. Measuring begins when as many sequences have ended as run at once, or after --fill-seconds.
So the prompts that arrive together in the beginning have no part in the figures. If waves is less than 1, the load was
not steady yet, and --fill-seconds should be higher. Measuring lasts for --seconds or until --requests have ended, so
the end of the load has no part in the figures either. Overlapped steps are those that were launched before the tokens
of the previous step were known.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmark_results import Case, Value, write_results
from engine_driver import MARGIN
from engine_setup import add_engine_arguments, make_engine
from latency import Percentiles
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine

NUM_PROMPTS = 256  # Distinct prompts. Without a prefix cache, repeating them makes no difference.
UNITS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "ms",
    "ttft_p99_ms": "ms",
    "gap_p50_ms": "ms",
    "gap_p99_ms": "ms",
    "step_ms": "ms, mean",
    "preemptions": "preemptions",
    "overlapped": "share of steps",
    "requests": "requests that ended",
    "waves": "ended before measuring, per sequence that runs",
    "seconds": "s",
}


class ClosedLoop:
    """Keeps a number of sequences in the engine, and records the times of their tokens."""

    def __init__(self, engine: Engine, loras: Sequence[LoRARequest], args: argparse.Namespace) -> None:
        self._engine = engine
        self._loras = loras
        self._generated: int = args.generated
        random = np.random.default_rng(args.seed)
        high = engine.hello.vocab_size - min(MARGIN, engine.hello.vocab_size // 2)
        self._prompts: list[list[int]] = random.integers(10, high, (NUM_PROMPTS, args.prompt)).tolist()
        self._num_added = 0
        self._last_s: dict[str, float] = {}  # The time of the last token of each sequence, at first of its arrival.
        self._without_token: set[str] = set()
        self.num_tokens = 0
        self.num_ended = 0
        self.num_steps = 0
        self.num_overlapped = 0
        self.first_token_s: list[float] = []
        self.gaps_s: list[float] = []

    def fill(self, streams: int, seconds: float) -> float:
        """Adds the first sequences, and runs until as many have ended or the time is over.

        Returns the number of sequences that have ended, as a share of streams.
        """
        end_s = time.perf_counter() + seconds
        for i in range(streams):
            self._add(1 + (i + 1) * (self._generated - 1) // streams)
        while self.num_ended < streams and self._step() < end_s:
            pass
        return self.num_ended / streams

    def run(self, seconds: float, requests: int | None) -> float:
        """Returns the seconds that it took. Only these are in the figures."""
        self.num_tokens = self.num_ended = self.num_steps = self.num_overlapped = 0
        self.first_token_s, self.gaps_s = [], []
        began_s = now_s = time.perf_counter()
        while now_s - began_s < seconds and (requests is None or self.num_ended < requests):
            now_s = self._step()
        return now_s - began_s

    def drain(self) -> None:
        for name in list(self._last_s):
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()

    def _add(self, generated: int) -> None:
        name, number = f"request {self._num_added}", self._num_added
        self._num_added += 1
        lora = self._loras[number % len(self._loras)] if self._loras else None
        params = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True)
        prompt = self._prompts[number % NUM_PROMPTS]
        self._last_s[name] = time.perf_counter()
        self._without_token.add(name)
        self._engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, lora=lora))

    def _step(self) -> float:
        """Returns the time at which the step's tokens were known."""
        outputs = self._engine.step()
        now_s = time.perf_counter()
        self.num_steps += 1
        self.num_overlapped += self._engine.pipeline.has_step
        for output in outputs:
            name = output.request_id
            assert output.error is None, output.error
            times = self.first_token_s if name in self._without_token else self.gaps_s
            times.append(now_s - self._last_s[name])
            self._without_token.discard(name)
            self._last_s[name] = now_s
            self.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                del self._last_s[name]
                self.num_ended += 1
                self._add(self._generated)
        return now_s


def measure(engine: Engine, streams: int, loras: Sequence[LoRARequest], args: argparse.Namespace) -> Case:
    loop = ClosedLoop(engine, loras, args)
    waves = loop.fill(streams, args.fill_seconds)
    before = engine.stats().preemptions_total
    seconds = loop.run(args.seconds, args.requests)
    preemptions = engine.stats().preemptions_total - before
    loop.drain()
    first, gaps = Percentiles.of(loop.first_token_s), Percentiles.of(loop.gaps_s)
    settings: dict[str, Value] = {"streams": streams, "adapters": len(loras), "kv_cache_dtype": args.kv_cache_dtype}
    settings |= {"prompt": args.prompt, "generated": args.generated}
    return Case(
        settings,
        {
            "tokens_per_s": loop.num_tokens / seconds,
            "ttft_p50_ms": None if first is None else first.p50 * 1e3,
            "ttft_p99_ms": None if first is None else first.p99 * 1e3,
            "gap_p50_ms": None if gaps is None else gaps.p50 * 1e3,
            "gap_p99_ms": None if gaps is None else gaps.p99 * 1e3,
            "step_ms": seconds / loop.num_steps * 1e3,
            "preemptions": preemptions,
            "overlapped": loop.num_overlapped / loop.num_steps,
            "requests": loop.num_ended,
            "waves": waves,
            "seconds": seconds,
        },
    )


def row(case: Case) -> str:
    def ms(name: str) -> str:
        value = case.figures[name]
        return f"{'-' if value is None else format(value, '.1f'):>9}"

    figures = case.figures
    return (
        f"{case.settings['streams']:7}{case.settings['adapters']:10}{figures['tokens_per_s']:9.0f}"
        f"{ms('ttft_p50_ms')}{ms('ttft_p99_ms')}{ms('gap_p50_ms')}{ms('gap_p99_ms')}{ms('step_ms')}"
        f"{figures['preemptions']:13.0f}{100 * (figures['overlapped'] or 0):10.0f} %{figures['requests']:10.0f}"
        f"{figures['waves']:7.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0], help="numbers of adapters; 0: the base")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--generated", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--fill-seconds", type=float, default=30.0, help="most seconds until the load is steady")
    parser.add_argument("--seconds", type=float, default=15.0, help="most seconds of measuring")
    parser.add_argument("--requests", type=int, help="most requests of a case that end while it is measured")
    parser.add_argument("--seed", type=int, default=0)
    add_engine_arguments(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        max_length = args.prompt + args.generated + 1
        engine, loras = make_engine(Path(folder), args, max(args.streams), max_length, max(args.adapters))
        print(f"KV cache of {engine.hello.kv_cache_tokens} tokens; times in ms")
        print(
            "streams  adapters    tok/s TTFT p50      p99  gap p50      p99     step  preemptions  overlapped  requests"
            "  waves"
        )
        for adapters in args.adapters:
            for streams in args.streams:
                cases.append(measure(engine, streams, loras[:adapters], args))
                print(row(cases[-1]), flush=True)
        engine.close()
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
