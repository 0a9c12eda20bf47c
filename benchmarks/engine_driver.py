"""Drives an engine without a server for benchmarks, and measures its times and the copy bandwidth."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch

from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import EngineRequest, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.speculation.ahead_drafts import AheadDrafts
from lorafleet.workers.speculation.drafter import Drafter
from lorafleet.workers.speculation.speculation import Speculation
from lorafleet.workers.speculation.step_pace import StepPace

MARGIN = 256  # Token ids at the end of the vocabulary that are not drawn.


def settle(engine: Engine) -> None:
    """Steps an engine until its start has left nothing for later: the attention is its last one, and all graphs are
    captured."""
    while engine.stats().attention_waits:
        engine.step()
        time.sleep(0.1)
    while engine.fills_idle_time:
        engine.step()


def load(engine: Engine, paths: Sequence[Path]) -> list[LoRARequest]:
    """Loads adapters into an engine, whose start has left nothing for later afterwards."""
    settle(engine)
    asked = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
    futures: list[Future[AdapterInfo]] = [engine.load_adapter(lora) for lora in asked]
    while not all(future.done() for future in futures):
        engine.step()
        time.sleep(0.001)
    return [msgspec.structs.replace(lora, digest=f.result().digest) for lora, f in zip(asked, futures, strict=True)]


class FreePace(StepPace):
    """Takes all drafts to be faster, since it sees no step."""

    def observe(self, num_decodes: int, num_drafts: int, seconds: float, token_s: float) -> None:
        """Takes in nothing, whatever the step."""


def make_speculation(
    engine: Engine,
    drafter: Drafter,
    most_drafts: int,
    pace: StepPace | None = None,
    *,
    is_certain: bool,
    ahead: AheadDrafts | None = None,
) -> Speculation:
    """Returns the speculation of an engine with another drafter. The arguments are Speculation's."""
    most_sampled = len(engine.runner.steps.inputs.sampled_B)
    return Speculation(
        drafter, engine.scheduler.budget, most_drafts, most_sampled, pace, is_certain=is_certain, ahead=ahead
    )


def answer_alone(
    engine: Engine, name: str, prompt: list[int], num_tokens: int, salt: str = ""
) -> tuple[float, list[TokenOutput]]:
    """Answers one greedy request. Returns the seconds to its first token, and all outputs."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started, first_s = time.perf_counter(), 0.0
    engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, cache_salt=salt))
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
        if outputs and not first_s:
            first_s = time.perf_counter() - started
    return first_s, outputs


def submit(
    engine: Engine,
    name: str,
    count: int,
    num_tokens: int,
    generated: int,
    loras: Sequence[LoRARequest],
    traced: bool = False,
) -> None:
    """Submits greedy requests with random prompts. Request i uses adapter i modulo the number of adapters."""
    params = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for i in range(count):
        prompt = torch.randint(10, engine.hello.vocab_size - MARGIN, (num_tokens,), generator=generator).tolist()
        lora = loras[i % len(loras)] if loras else None
        engine.add(
            EngineRequest(request_id=f"{name} {i}", prompt_token_ids=prompt, params=params, lora=lora, traced=traced)
        )


def abort(engine: Engine, name: str, count: int) -> None:
    for i in range(count):
        engine.abort(f"{name} {i}")
    while engine.has_work:
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def until_all_answer(engine: Engine, name: str, count: int) -> float:
    """Returns the seconds until each of the requests has its first token."""
    waiting = {f"{name} {i}" for i in range(count)}
    started = time.perf_counter()
    while waiting:
        waiting -= {output.request_id for output in good_outputs(engine)}
    return time.perf_counter() - started


def good_outputs(engine: Engine) -> list[TokenOutput]:
    """Runs a step and returns its outputs. Raises RuntimeError if a request has failed."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"{output.request_id}: {output.error}")
    return outputs


def prefill_tokens_per_s(
    engine: Engine, batch: int, num_tokens: int, generated: int, loras: Sequence[LoRARequest], repeats: int
) -> float:
    """Returns the median rate from submitting all prompts to the last first token; the first repeat is a warm-up."""
    seconds: list[float] = []
    for repeat in range(1 + repeats):
        name = f"prefill {batch} {repeat}"
        submit(engine, name, batch, num_tokens, generated, loras)
        seconds.append(until_all_answer(engine, name, batch))
        abort(engine, name, batch)
    return batch * num_tokens / statistics.median(seconds[1:])


def decode_step_ms(engine: Engine, batch: int, num_tokens: int, generated: int, loras: Sequence[LoRARequest]) -> float:
    """Returns the median host time, from scheduler to tokens, of the steps in which every sequence decodes."""
    name = f"decode {batch}"
    submit(engine, name, batch, num_tokens, generated, loras)
    until_all_answer(engine, name, batch)
    steps: list[float] = []
    while engine.has_work:
        before = time.perf_counter()
        if len(good_outputs(engine)) == batch:
            steps.append(time.perf_counter() - before)
    return statistics.median(steps) * 1e3


def copy_bandwidth() -> float:
    """Returns the bytes per second that the GPU reads and writes while it copies 4 GiB."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times) * 1e3
