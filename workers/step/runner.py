"""Turns the scheduler's chunks into tokens: plans a step, runs it on the device and samples. It decides nothing.

launch() queues a step, and LaunchedStep.collect() waits for its tokens. In between, the host may prepare the next
step.
"""

# B rows that sample · V vocabulary

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of one chunk."""

    token: int | None  # the sequence's next token; None if the chunk ends before its last token
    logprobs: TokenLogprobs | None
    prompt: list[TokenLogprobs]  # of the prompt tokens that the chunk's tokens predict, if requested
    embedding: bytes = b""  # float32, at the end of a prompt that is pooled


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A step's tokens on their way to the host."""

    sampled: Tensor
    asked: list[int]  # rows with logprobs
    logprobs: PendingLogprobs | None


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device. collect() waits for it, and is the only place where the engine waits for the device."""

    chunks: list[Chunk]
    shape: StepShape
    sampling: list[Sequence]  # One sequence for each row of StepInputs.sampled_B.
    rows: list[SamplingRow]  # One Row for each of these sequences.
    edited: list[EditedRow]  # Rows whose logits are changed.
    faults: list[tuple[Sequence, Exception]]  # Sequences that cannot go on after the step, and why.
    row_of: dict[str, int]  # Row by request id.
    scored: list[tuple[int, PendingLogprobs]]  # Logprobs of prompt tokens: each span with its chunk's index.
    logits: StepLogits
    pooled: dict[int, Tensor]  # By chunk, for prompts that end in the step.
    download: Download
    choice: StepChoice | None = None  # None until ModelRunner.choose(), which must come before the next launch.
    late: list[Sequence] = field(default_factory=list)  # Sequences of the step that get no token from it.

    def collect(self) -> list[Sampled]:
        """Returns one Sampled for each chunk, in order."""
        choice = self.choice
        assert choice is not None
        self.download.wait()
        tokens = choice.sampled.tolist()
        found = dict(zip(choice.asked, choice.logprobs.read(), strict=True)) if choice.logprobs is not None else {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for i, span in self.scored:
            prompts.setdefault(i, []).extend(span.read())
        results: list[Sampled] = []
        for i, chunk in enumerate(self.chunks):
            row = self.row_of.get(chunk.sequence.request_id)
            prompt = prompts.get(i, [])
            if row is None:
                results.append(Sampled(None, None, prompt))
            else:
                embedding = self.pooled[i].numpy().tobytes() if i in self.pooled else b""
                results.append(Sampled(tokens[row], found.get(row), prompt, embedding))
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
            row_of={} if last is None else last.row_of,
            first_known=self._inputs.first_known,
            block_size=self._block_size,
            slot_ranks=[] if self.loras is None else self.loras.slots.ranks,
        )

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], plan: StepPlan) -> LaunchedStep:
        """Queues a step on the device, and the choice of its tokens unless that waits for masks."""
        if self._others is not None:
            self._others.check()
            self._others.send(RunStep.of(plan, self._block_size, self._generations(plan.slots)))
        shape = plan.shape
        is_timed = self._clock is not None and self._clock.begin()
        # If a peer is gone, the device waits for it in a collective forever.
        download = Download(self._device, None if self._others is None else self._others.check)
        scored: list[tuple[int, PendingLogprobs]] = []
        logits = self._run(chunks, plan, download, scored)
        if is_timed and self._clock is not None:
            self._clock.end(shape)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        row_of = {sequence.request_id: i for i, sequence in enumerate(sampling)}
        pooled = _pool(chunks, logits.hidden_TD, download)
        rows = [SamplingRow(one.params, len(one.tokens), one.seed, one.vocab_size) for one in sampling]
        edited, faults = self._prepare_edits(sampling)
        step = LaunchedStep(chunks, shape, sampling, rows, edited, faults, row_of, scored, logits, pooled, download)
        if all(sequence.grammar is None for sequence in sampling):
            self.choose(step, None)
        return step

    def _run(
        self, chunks: list[Chunk], plan: StepPlan, download: Download, scored: list[tuple[int, PendingLogprobs]]
    ) -> StepLogits:
        """Runs the step, and appends the logprobs of prompt tokens to `scored`."""
        spans = scored_spans(chunks)

        def score(i: int, logits_TV: Tensor) -> None:
            span = spans[i]
            chosen_T = to_device(span.tokens, torch.int64, self._device)
            num_top = [chunks[span.chunk].sequence.params.prompt_logprobs or 0] * len(span.tokens)
            scored.append((span.chunk, PendingLogprobs(logits_TV, chosen_T, num_top, download)))

        return self.steps.run(plan, score)

    @torch.inference_mode()
    def choose(self, step: LaunchedStep, masks: TokenMasks | None, late: Many[Sequence] = ()) -> None:
        """Queues the choice of a launched step's tokens. Tokens that masks forbid have no chance.

        `late` are sequences that get no token. The tokens chosen in their rows are dropped and not counted.
        """
        num_rows = len(step.rows)
        asked, found = [], None
        step.late = list(late)
        late_rows = {step.row_of.pop(sequence.request_id) for sequence in late}
        step.edited = [row for row in step.edited if row.index not in late_rows]
        if step.logits.sampled_BV is not None:
            asked = [i for i, row in enumerate(step.rows) if row.params.logprobs is not None and i not in late_rows]
            found = self._sample(step.logits.sampled_BV, step, asked, masks)
            self.steps.share(num_rows)
        sampled = step.download.add(self._inputs.sampled_B[:num_rows])
        step.download.close()
        step.choice = StepChoice(sampled, asked, found)

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
        return self._editor.num_bytes

    def steps_on_gpu(self) -> list[GPUSteps]:
        """Returns the steps that were timed. There are none on a CPU."""
        return [] if self._clock is None else self._clock.told()

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
        asked: list[int],
        masks: TokenMasks | None,
    ) -> PendingLogprobs | None:
        """Samples a step's tokens into sampled_B. `asked` are the rows whose logprobs are requested."""
        rows = step.rows
        where = to_device(asked, torch.int64, self._device) if asked else None
        raw_BV = None if where is None else logits_BV[where]  # a copy: masks and edits are written in place
        sampled_B = self._inputs.sampled_B[: len(rows)]
        logits_BV = logits_BV.float()
        if masks is not None:
            row_N = to_device(masks.rows, torch.int64, self._device)
            mask_tokens(logits_BV, row_N, self._upload_masks(masks.bits_NW))
        self._editor.apply(logits_BV, step.edited)
        sampled_B.copy_(sample(logits_BV, rows))
        self._editor.count(sampled_B, step.edited)
        if where is None or raw_BV is None:
            return None
        num_top = [rows[i].params.logprobs or 0 for i in asked]
        return PendingLogprobs(raw_BV, sampled_B[where], num_top, step.download)


def _pool(chunks: Many[Chunk], hidden_TD: Tensor, download: Download) -> dict[int, Tensor]:
    """Returns the pooled vectors [D] of the prompts that end in the step, by chunk. For a mean, partial sums stay with
    their sequences."""
    found: dict[int, Tensor] = {}
    start = 0
    for i, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, start + chunk.num_tokens
        if sequence.pooling == "mean":
            sum_D = hidden_TD[start:end].float().sum(dim=0)
            if sequence.num_computed > 0 and sequence.pooled_D is not None:  # otherwise it begins, or begins again
                sum_D += sequence.pooled_D
            sequence.pooled_D = sum_D
            if chunk.samples:
                found[i] = download.add(sequence.pooled_D / sequence.num_prompt)
        elif sequence.pooling == "last" and chunk.samples:
            found[i] = download.add(hidden_TD[end - 1].float())
        start = end
    return found
