"""Measures the CPU time that the host needs for a step of a batch of sequences, without a GPU.

    python benchmarks/host_step.py [--batches 64 256 1024] [--temperatures 0 0.8] [--answers 0 128] [--profile]
        [--json FILE]

An engine on a CPU schedules, plans, fills the inputs of a captured graph, and turns tokens into outputs, as it does
beside a GPU. Nothing computes the model: stand-ins for the graph, the layers, the head and the choice return one token
for all sequences. So the time is that of the host alone, without what CUDA's calls cost.

The thread's CPU time is measured, since that depends less on what else the machine does. The figure is the median of
the steps. Prompts have 512 tokens.

--answers: lengths of the answers. Each sequence that ends is replaced, so a step of 1024 sequences with answers of 128
tokens has 8 prompts as well. With 0 no answer ends, so all steps are of decodes alone.

--profile: prints where the time of the last case goes, by cProfile, which makes calls look more expensive.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmark_results import Case, write_results
from lorafleet.kernels.sampling.draw_tokens import Drawn, DrawTable
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.attention.attention_backend import DraftRows
from lorafleet.workers.attention.triton_decodes import CapturedDecodes, DecodeLayers
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from lorafleet.workers.step import runner, step_runner
from lorafleet.workers.step.decode_capture import DecodeCapture, DecodeGraph, DecodeKey
from lorafleet.workers.step.decode_graphs import DecodeGraphs, graph_sizes
from lorafleet.workers.step.drafted_sizes import DraftedSizes
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.tp.group import TPGroup
from tiny_llama import HIDDEN, write_tiny_llama

PROMPT, TOKEN, LONGEST = 512, 7, 1024
STEP_TOKENS = 8192
FULL = 0.98  # The part of the sequences that must run before steps are measured.
UNITS = {"step_ms": "ms, median", "sequence_us": "us, median"}


class NoCapture(DecodeCapture):
    """Fills the inputs of graphs as on a GPU, and computes nothing. Its constructor needs no GPU."""

    def __init__(self, steps: StepRunner, block_size: int, most: int) -> None:
        self._inputs, self._states, self._trash_table = steps.inputs, None, array("i", [0])
        self._caches, self._device = steps.caches, steps.device
        config, dtype = steps.model.shard.local, steps.model.embed_tokens.weight.dtype
        spec = attention_spec(config, block_size, dtype, dtype, steps.device, {})
        self._decodes = CapturedDecodes(DecodeLayers.of(spec, steps.caches))
        self._hidden_BD, self._logits_BW = torch.zeros(most, HIDDEN), torch.zeros(most, steps.model.config.vocab_size)

    def capture(self, key: DecodeKey) -> DecodeGraph | None:
        drafts = () if key.drafts is None else (DraftRows(key.drafts.most_rows, key.num_rows),)
        attention = self._decodes.for_graph(key.num_seqs, LONGEST, *drafts)
        hidden_BD, logits_BW = self._hidden_BD[: key.num_rows], self._logits_BW[: key.num_rows]
        return DecodeGraph(key, None, attention, None, None, hidden_BD, logits_BW)  # type: ignore[arg-type]  # no graph

    def replay(self, decode: DecodeGraph, num_rows: int) -> tuple[Tensor, Tensor]:
        self._inputs.sampled_B[:num_rows] = TOKEN
        return decode.hidden_BD[:num_rows], decode.logits_BW[:num_rows]


def build(folder: Path, most: int, most_drafts: int = 0) -> Engine:
    """Returns an engine that computes nothing for `most` sequences, each with up to most_drafts draft tokens."""
    write_tiny_llama(folder)
    config = EngineConfig(
        str(folder),
        device="cpu",
        cpu_threads=1,
        max_num_seqs=most,
        kv_cache_tokens=most * LONGEST,
        max_model_len=LONGEST,
        max_num_batched_tokens=STEP_TOKENS,
        async_scheduling=True,
        enable_prefix_caching=True,
        speculative_config=SpeculativeConfig("ngram", num_speculative_tokens=most_drafts) if most_drafts else None,
    )
    engine = build_engine(config)
    steps = engine.runner.steps
    most_sampled = len(steps.inputs.sampled_B)
    drafted = DraftedSizes.of(1 + most_drafts, most, most_sampled, None) if most_drafts else None
    hidden_TD = torch.zeros(STEP_TOKENS, HIDDEN)
    logits_TW = torch.zeros(most_sampled, steps.model.config.vocab_size)

    def forward(plan: StepPlan) -> Tensor:
        return hidden_TD[: plan.num_tokens]

    def draw(
        _logits_BV: Tensor,
        table_BF: DrawTable,
        _counts_SV: Tensor,
        _wanted: Sequence[int] = (),
        _draw_B: Tensor | None = None,
    ) -> Drawn:
        return Drawn(torch.full((len(table_BF),), TOKEN), None)

    def logits(hidden_BD: Tensor) -> Tensor:
        return logits_TW[: len(hidden_BD)]

    def greedy(logits_BW: Tensor, _group: TPGroup) -> Tensor:
        return torch.full((len(logits_BW),), TOKEN)

    steps._forward, steps._logits = forward, logits  # type: ignore[method-assign]  # stand-ins
    step_runner.greedy_of_ranks = greedy
    runner.draw_tokens = draw
    capture = NoCapture(steps, config.block_size, most_sampled)
    sizes = graph_sizes(most)
    steps.decode_graphs = DecodeGraphs(capture, sizes, sizes, None, LONGEST, drafted=drafted)
    gc.collect()
    gc.freeze()  # as in a server
    return engine


def measure(engine: Engine, batch: int, temperature: float, answer: int, count: int, profile: cProfile.Profile) -> Case:
    rng, names = random.Random(0), iter(range(10**9))

    def add(num_tokens: int) -> None:
        name = f"request {batch} {temperature} {next(names)}"
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=num_tokens, ignore_eos=True)
        prompt = [rng.randrange(10, 250) for _ in range(PROMPT)]
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params))

    for _ in range(batch):
        add(rng.randrange(1, answer + 1) if answer else LONGEST - PROMPT)
    seconds: list[float] = []
    all_run = False
    while len(seconds) < count:
        # From then on, every step counts. Where answers end, some sequence is always about to be replaced.
        all_run = all_run or len(engine.scheduler.running) >= FULL * batch
        if all_run:
            profile.enable()
        began_s = time.thread_time()
        outputs = engine.step()
        step_s = time.thread_time() - began_s
        profile.disable()
        if all_run:
            seconds.append(step_s)
        for output in outputs.others:
            assert output.error is None
            if output.finish_reason is not None:
                add(answer or LONGEST - PROMPT)
    for name in list(engine._sequences):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    step_s = statistics.median(seconds[count // 5 :])
    figures = {"step_ms": step_s * 1e3, "sequence_us": step_s * 1e6 / batch}
    return Case({"batch": batch, "temperature": temperature, "answer": answer}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--answers", type=int, nargs="+", default=[0, 128])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases: list[Case] = []
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        engine = build(Path(folder), max(args.batches))
        print("temperature  answer  batch  ms a step  us a sequence")
        for temperature in args.temperatures:
            for answer in args.answers:
                for batch in args.batches:
                    profile = cProfile.Profile()
                    used = profile if args.profile else _NoProfile()
                    case = measure(engine, batch, temperature, answer, args.steps, used)
                    cases.append(case)
                    step_ms, sequence_us = case.figures["step_ms"], case.figures["sequence_us"]
                    print(f"{temperature:11}  {answer:6}  {batch:5}  {step_ms:9.2f}  {sequence_us:13.2f}", flush=True)
        engine.close()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    write_results(args.json, UNITS, cases)


class _NoProfile(cProfile.Profile):
    """Stands in for a profile that nobody wants to see."""

    def enable(self, *_args: object, **_kwargs: object) -> None:
        pass


if __name__ == "__main__":
    main()
