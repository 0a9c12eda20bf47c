"""Measures long contexts in the engine without HTTP: prefill, decode steps, and a long prompt amid running streams.

    python benchmarks/long_context.py [--contexts 32768 131072] [--sequences 1 8] [--streams 32]
        [--kv-cache-dtype auto|fp8] [--engine-option max_gap_ms=40 ...] [--seconds 5] [--without-decodes] [--json FILE]

The model has an 8B shape with random weights; on a CPU use --device cpu --layers 2 --hidden 256 --vocabulary 512
--contexts 256 --streams 4. For each context there are three measurements:

- a prompt of that length alone: the time from submitting it to its first token, repeated for --seconds;
- decode steps of --sequences with that context, as far as --most-tokens and the KV cache allow: the median on the host;
- the prompt amid streams with prompts of 512 tokens: the gaps of each stream until the prompt's first token, and the
  prompt's speed relative to its speed alone.

`--contexts 131072 --seconds 1 --without-decodes --engine-option max_gap_ms=40` measures what the goals name, in about
40 s on an H100.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmark_results import Case, Value, write_results
from engine_driver import abort, submit, until_all_answer
from engine_setup import add_engine_arguments, make_engine
from latency import Percentiles
from lorafleet.workers.engine import Engine

STREAM_PROMPT = 512
ANSWER_ROOM = 4096  # Tokens beyond the longest prompt, so that no answer ends while it is measured.
SETTLE_STEPS = 16
UNITS = {
    "prefill_s": "s",
    "prefill_tokens_per_s": "tokens/s",
    "step_ms": "ms, median",
    "first_token_s": "s",
    "relative_speed": "share of the speed alone",
    "gap_p50_ms": "ms",
    "gap_p99_ms": "ms",
    "gap_max_ms": "ms",
    "gap_before_p50_ms": "ms",
}


def prefill_s(engine: Engine, context: int, seconds: float) -> float:
    """Returns the median time to the first token of a prompt alone."""
    times: list[float] = []
    while sum(times) < seconds:
        name = f"alone {context} {len(times)}"
        submit(engine, name, 1, context, 2, [])
        times.append(until_all_answer(engine, name, 1))
        abort(engine, name, 1)
    return statistics.median(times)


def decode_steps_ms(engine: Engine, context: int, counts: list[int], steps: int) -> dict[int, float]:
    """Returns the median time of a decode step for each number of sequences, all of them with this context."""
    name, most = f"decode {context}", max(counts)
    submit(engine, name, most, context, ANSWER_ROOM, [])
    until_all_answer(engine, name, most)
    step_ms = {}
    for count in sorted(counts, reverse=True):
        for i in range(count, most):
            engine.abort(f"{name} {i}")
        times: list[float] = []
        while len(times) < steps + SETTLE_STEPS:
            began_s = time.perf_counter()
            outputs = engine.step()
            assert all(output.finish_reason is None for output in outputs), "an answer ended, or failed"
            if len(outputs) == count:
                times.append(time.perf_counter() - began_s)
        step_ms[count] = statistics.median(times[SETTLE_STEPS:]) * 1e3
    abort(engine, name, most)
    return step_ms


class Streams:
    """Runs streams, and records the gaps of each."""

    def __init__(self, engine: Engine, name: str, count: int) -> None:
        self._engine = engine
        self._prefix = f"{name} "
        submit(engine, name, count, STREAM_PROMPT, ANSWER_ROOM, [])
        until_all_answer(engine, name, count)
        self._last_s: dict[str, float] = {}
        self.gaps_s: list[float] = []

    def step(self) -> set[str]:
        """Returns the names of the other requests that have a token."""
        others = set()
        outputs = self._engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            name = output.request_id
            assert output.error is None, output.error
            if not name.startswith(self._prefix):
                others.add(name)
                continue
            assert output.finish_reason is None, "a stream ended before the prompt was processed"
            if name in self._last_s:
                self.gaps_s.append(now_s - self._last_s[name])
            self._last_s[name] = now_s
        return others


def amid_streams(engine: Engine, context: int, count: int, alone_s: float) -> dict[str, float | None]:
    name, prompt = f"stream {context}", f"amid {context}"
    streams = Streams(engine, name, count)
    for _ in range(SETTLE_STEPS):
        streams.step()
    before = statistics.median(streams.gaps_s)
    streams.gaps_s.clear()
    submit(engine, prompt, 1, context, 2, [])
    began_s = time.perf_counter()
    while f"{prompt} 0" not in streams.step():
        pass
    first_token_s = time.perf_counter() - began_s
    engine.abort(f"{prompt} 0")
    abort(engine, name, count)
    gaps = Percentiles.of(streams.gaps_s)
    return {
        "first_token_s": first_token_s,
        "relative_speed": alone_s / first_token_s,
        "gap_p50_ms": None if gaps is None else gaps.p50 * 1e3,
        "gap_p99_ms": None if gaps is None else gaps.p99 * 1e3,
        "gap_max_ms": max(streams.gaps_s, default=0.0) * 1e3,
        "gap_before_p50_ms": before * 1e3,
    }


def measure(engine: Engine, context: int, args: argparse.Namespace) -> list[Case]:
    shared: dict[str, Value] = {"context": context, "kv_cache_dtype": args.kv_cache_dtype}
    room = engine.hello.kv_cache_tokens
    if context + ANSWER_ROOM > room:
        print(f"{context:7}  the KV cache has {room} tokens: not measured", flush=True)
        return []
    alone_s = prefill_s(engine, context, args.seconds)
    cases = [Case(shared | {"kind": "prefill"}, {"prefill_s": alone_s, "prefill_tokens_per_s": context / alone_s})]
    print(f"{context:7}  alone: {alone_s:.2f} s, {context / alone_s:.0f} tokens/s", flush=True)
    most = max(1, min(args.most_tokens // context, room // (context + ANSWER_ROOM)))
    counts = [] if args.without_decodes else sorted({min(count, most) for count in args.sequences})
    for count, step_ms in sorted(decode_steps_ms(engine, context, counts, args.steps).items()) if counts else ():
        cases.append(Case(shared | {"kind": "decode", "sequences": count}, {"step_ms": step_ms}))
        print(f"{context:7}  decode step of {count}: {step_ms:.2f} ms", flush=True)
    figures = amid_streams(engine, context, args.streams, alone_s)
    cases.append(Case(shared | {"kind": "amid streams", "streams": args.streams}, figures))
    print(
        f"{context:7}  amid {args.streams} streams: {figures['first_token_s']:.2f} s, {figures['relative_speed']:.2f} "
        f"of its speed alone; gaps ms p50 {figures['gap_p50_ms']:.1f}, p99 {figures['gap_p99_ms']:.1f}, longest "
        f"{figures['gap_max_ms']:.1f}; before {figures['gap_before_p50_ms']:.1f}",
        flush=True,
    )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="of decode steps")
    parser.add_argument("--most-tokens", type=int, default=262144, help="of all contexts of a decode step together")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of which the median is taken")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0, help="a prefill is repeated until so many have passed")
    parser.add_argument("--without-decodes", action="store_true", help="do not measure decode steps")
    add_engine_arguments(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = []
    longest = max(*args.contexts, STREAM_PROMPT) + ANSWER_ROOM
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = make_engine(Path(folder), args, max(args.streams + 1, *args.sequences), longest)
        print(f"KV cache of {engine.hello.kv_cache_tokens} tokens")
        warm_up = min(*args.contexts, 8192)
        prefill_s(engine, warm_up, 1e-9)
        decode_steps_ms(engine, warm_up, [1, 2], 2)
        amid_streams(engine, warm_up, args.streams, 1.0)
        for context in args.contexts:
            cases += measure(engine, context, args)
        engine.close()
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
