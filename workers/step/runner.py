"""Turns the scheduler's chunks into tokens: plans a step, runs it on the device and samples. It decides nothing.

launch() queues a step, choose() the choice of its tokens, and ChosenStep.collect() waits for them. In between, the host
may prepare the next step; step_pipeline.py knows in which order.
"""

# B rows that sample · N rows with a mask · P rows with logprobs · V vocabulary

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.decoder.token_mask import mask_tokens
from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.protocol.messages import GPUSteps, TokenLogprobs
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.device.host_copy import Download, Upload, to_device
from lorafleet.workers.device.logit_edits import EditedRow, LogitEditor
from lorafleet.workers.device.sampler import PendingLogprobs, SamplingRow, sample
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.step.gpu_step_clock import GPUStepClock
from lorafleet.workers.step.planner import plan_step, scored_spans
from lorafleet.workers.step.step_runner import StepLogits, StepRunner
from lorafleet.workers.structured.decoding import TokenMasks
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import RunStep

PromptLogprobs = list[tuple[int, PendingLogprobs]]  # logprobs of spans of prompts, each with its chunk's index


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of one chunk."""

    token: int | None  # the sequence's next token; None if the chunk ends before its last token
    logprobs: TokenLogprobs | None
    prompt: list[TokenLogprobs]  # of the prompt tokens that the chunk's tokens predict, if requested
    embedding: bytes = b""  # float32, at the end of a prompt that is pooled


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device. Its tokens must be chosen before the next launch, which overwrites its logits."""

    chunks: list[Chunk]
    shape: StepShape
    sampling: list[Sequence]  # One sequence for each row of StepInputs.sampled_B.
    rows: list[SamplingRow]  # One SamplingRow for each of these sequences.
    edited: list[EditedRow]  # Rows whose logits are changed.
    faults: list[tuple[Sequence, Exception]]  # Sequences that cannot go on after the step, and why.
    row_by_request: dict[str, int]  # Row of each of these sequences, by request id.
    prompt_logprobs: PromptLogprobs
    logits: StepLogits
    pooled: dict[int, Tensor]  # Pooled vectors by chunk's index, for prompts that end in the step.
    download: Download

    @property
    def needs_masks(self) -> bool:
        """Whether a sequence has a grammar, whose mask says which tokens may be chosen."""
        return any(sequence.grammar is not None for sequence in self.sampling)


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """A step whose tokens are on their way to the host."""

    launched: LaunchedStep
    token_B: Tensor  # On the host; valid once the download is done.
    logprob_rows: list[int]  # Rows whose logprobs are requested.
    logprobs: PendingLogprobs | None  # The logprobs of these rows; None if there are none.
    late: Many[Sequence]  # Sequences of the step that get no token from it.

    def collect(self) -> list[Sampled]:
        """Waits for the step, and returns one Sampled for each chunk, in order. Nothing else waits for the device."""
        launched = self.launched
        launched.download.wait()
        tokens = self.token_B.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            logprobs = dict(zip(self.logprob_rows, self.logprobs.read(), strict=True))
        prompts: dict[int, list[TokenLogprobs]] = {}
        for i, span in launched.prompt_logprobs:
            prompts.setdefault(i, []).extend(span.read())
        row_by_request = launched.row_by_request
        if self.late:
            late = {sequence.request_id for sequence in self.late}
            row_by_request = {name: row for name, row in row_by_request.items() if name not in late}
        results: list[Sampled] = []
        for i, chunk in enumerate(launched.chunks):
            row = row_by_request.get(chunk.sequence.request_id)
            prompt = prompts.get(i, [])
            if row is None:
                results.append(Sampled(None, None, prompt))
            else:
                embedding = launched.pooled[i].numpy().tobytes() if i in launched.pooled else b""
                results.append(Sampled(tokens[row], logprobs.get(row), prompt, embedding))
        return results


class ModelRunner:
    """Runs steps on rank 0. `others` are the ranks that run each step beside it in a tensor-parallel replica."""

    def __init__(
        self, steps: StepRunner, loras: WorkerLoRAManager | None, block_size: int, others: OtherRanks | None = None
    ) -> None:
        self.steps = steps
        self._others = others
        self.loras = loras
        self._block_size = block_size
        self._inputs = steps.inputs
        self._device = steps.device
        self._upload_masks = Upload(steps.device)
        self._editor = LogitEditor(len(steps.inputs.sampled_B), steps.model.config.vocab_size, steps.device)
        self._clock = GPUStepClock() if steps.device.type == "cuda" else None

    def plan(self, chunks: list[Chunk], last: LaunchedStep | None) -> StepPlan:
        """Plans the next step. `last` is the step before, if the host has not read its tokens yet."""
        return plan_step(
            chunks,
            row_by_request={} if last is None else last.row_by_request,
            first_known=self._inputs.first_known,
            block_size=self._block_size,
            slot_ranks=[] if self.loras is None else self.loras.slots.ranks,
        )

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], plan: StepPlan) -> LaunchedStep:
        """Queues a step on the device, up to its logits."""
        if self._others is not None:
            self._others.check()
            self._others.send(RunStep.of(plan, self._block_size, self._generations(plan.slots)))
        shape = plan.shape
        is_timed = self._clock is not None and self._clock.begin()
        # If a peer is gone, the device waits for it in a collective forever.
        download = Download(self._device, None if self._others is None else self._others.check)
        prompt_logprobs: PromptLogprobs = []
        logits = self._run(chunks, plan, download, prompt_logprobs)
        if is_timed and self._clock is not None:
            self._clock.end(shape)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        pooled = _pool(chunks, logits.hidden_TD, download)
        edited, faults = self._prepare_edits(sampling)
        return LaunchedStep(
            chunks=chunks,
            shape=shape,
            sampling=sampling,
            rows=[SamplingRow(seq.params, len(seq.tokens), seq.seed, seq.vocab_size) for seq in sampling],
            edited=edited,
            faults=faults,
            row_by_request={sequence.request_id: row for row, sequence in enumerate(sampling)},
            prompt_logprobs=prompt_logprobs,
            logits=logits,
            pooled=pooled,
            download=download,
        )

    def _run(
        self, chunks: list[Chunk], plan: StepPlan, download: Download, prompt_logprobs: PromptLogprobs
    ) -> StepLogits:
        """Runs the step, and appends the logprobs of prompt tokens to `prompt_logprobs`."""
        spans = scored_spans(chunks) if plan.prompts else []

        def score(i: int, logits_TV: Tensor) -> None:
            span = spans[i]
            chosen_T = to_device(span.tokens, torch.int64, self._device)
            num_top = [chunks[span.chunk].sequence.params.prompt_logprobs or 0] * len(span.tokens)
            prompt_logprobs.append((span.chunk, PendingLogprobs(logits_TV, chosen_T, num_top, download)))

        return self.steps.run(plan, score)

    @torch.inference_mode()
    def choose(self, step: LaunchedStep, masks: TokenMasks | None = None, late: Many[Sequence] = ()) -> ChosenStep:
        """Queues the choice of a launched step's tokens, and their copy to the host. Tokens that masks forbid have no
        chance.

        `late` are sequences that get no token. The tokens chosen in their rows are dropped and not counted.
        """
        num_rows = len(step.rows)
        logprob_rows, logprobs = [], None
        if step.logits.sampled_BV is not None:
            late_rows = {step.row_by_request[sequence.request_id] for sequence in late}
            edited = [row for row in step.edited if row.index not in late_rows]
            logprob_rows = [
                i for i, row in enumerate(step.rows) if row.params.logprobs is not None and i not in late_rows
            ]
            logprobs = self._sample(step.logits.sampled_BV, step, edited, logprob_rows, masks)
            self.steps.share(num_rows)
        token_B = step.download.add(self._inputs.sampled_B[:num_rows])
        step.download.close()
        return ChosenStep(step, token_B, logprob_rows, logprobs, late)

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        self._editor.release(sequence)

    def _prepare_edits(self, sampling: Many[Sequence]) -> tuple[list[EditedRow], list[tuple[Sequence, Exception]]]:
        """Prepares the edits of each row. A row that fails is computed without edits all the same, since others may
        share what the step computes of its prompt. Its token is dropped."""
        edited: list[EditedRow] = []
        faults: list[tuple[Sequence, Exception]] = []
        for i, sequence in enumerate(sampling):
            try:
                edits = self._editor.prepare(sequence)
            except Exception as error:
                faults.append((sequence, error))
                continue
            if edits is not None:
                edited.append(EditedRow(i, edits, sequence.num_generated))
        return edited, faults

    @property
    def counts_bytes(self) -> int:
        """Bytes of the token counts from which penalties are computed."""
        return self._editor.counts_SV.nbytes

    def steps_on_gpu(self) -> list[GPUSteps]:
        """Returns the steps that were timed. There are none on a CPU."""
        return [] if self._clock is None else self._clock.totals()

    def close(self) -> None:
        """Stops the other ranks, and leaves their group."""
        if self._others is not None:
            self._others.close()
            self.steps.close()
            self.steps.model.group.leave()

    def _generations(self, slots: Many[int]) -> list[tuple[int, int]]:
        """Returns the generation of each slot that a step uses."""
        if self.loras is None:
            return []
        return [(slot, self.loras.slots.slots[slot].generation) for slot in sorted(set(slots) - {BASE_SLOT})]

    def _sample(
        self,
        logits_BV: Tensor,
        step: LaunchedStep,
        edited: list[EditedRow],
        logprob_rows: list[int],
        masks: TokenMasks | None,
    ) -> PendingLogprobs | None:
        """Samples a step's tokens into sampled_B. Returns the logprobs of `logprob_rows`, or None without such rows."""
        rows = step.rows
        row_P = to_device(logprob_rows, torch.int64, self._device) if logprob_rows else None
        raw_PV = None if row_P is None else logits_BV[row_P]  # a copy: masks and edits are written in place
        sampled_B = self._inputs.sampled_B[: len(rows)]
        if masks is not None:
            row_N = to_device(masks.rows, torch.int64, self._device)
            mask_tokens(logits_BV, row_N, self._upload_masks(masks.bits_NW))
        logits_BV = self._editor.apply(logits_BV, edited)
        sampled_B.copy_(sample(logits_BV, rows, edited, self._editor.counts_SV))
        self._editor.count(sampled_B, edited)
        if row_P is None or raw_PV is None:
            return None
        num_top = [rows[i].params.logprobs or 0 for i in logprob_rows]
        return PendingLogprobs(raw_PV, sampled_B[row_P], num_top, step.download)


def _pool(chunks: Many[Chunk], hidden_TD: Tensor, download: Download) -> dict[int, Tensor]:
    """Returns the pooled vectors [D] of the prompts that end in the step, by chunk. For a mean, partial sums stay with
    their sequences."""
    pooled: dict[int, Tensor] = {}
    start = 0
    for i, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, start + chunk.num_tokens
        if sequence.pooling == "mean":
            sum_D = hidden_TD[start:end].float().sum(dim=0)
            if sequence.num_computed > 0 and sequence.pooled_D is not None:  # otherwise it begins, or begins again
                sum_D += sequence.pooled_D
            sequence.pooled_D = sum_D
            if chunk.samples:
                pooled[i] = download.add(sequence.pooled_D / sequence.num_prompt)
        elif sequence.pooling == "last" and chunk.samples:
            pooled[i] = download.add(hidden_TD[end - 1].float())
        start = end
    return pooled
