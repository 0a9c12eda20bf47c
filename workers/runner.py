"""A step from the scheduler's chunks to their tokens: plans it, has it run on the device, samples. Decides nothing.

launch() queues a step, LaunchedStep.collect() waits for its tokens; between the two the host may prepare the next one.
"""

# B rows that sample · V vocabulary

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora_batch import BASE_SLOT
from lorafleet.workers.gpu_step_clock import GPUStepClock
from lorafleet.workers.host_copy import Download, to_device
from lorafleet.workers.lora.worker_manager import WorkerLoRAManager
from lorafleet.workers.messages import GPUSteps, TokenLogprobs
from lorafleet.workers.planner import plan_step, predicted_tokens
from lorafleet.workers.sampler import PendingLogprobs, Row, sample
from lorafleet.workers.scheduler import Chunk
from lorafleet.workers.sequence import Sequence
from lorafleet.workers.step_metrics import StepShape
from lorafleet.workers.step_runner import StepRunner
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.messages import RunStep


@dataclass(frozen=True, slots=True)
class Sampled:
    """token: of the chunk's sequence, None where the chunk ends before its last token. prompt: logprobs of the
    prompt tokens that the chunk's tokens predict, where asked for. embedding: float32, at the end of a prompt that is
    pooled."""

    token: int | None
    logprobs: TokenLogprobs | None
    prompt: list[TokenLogprobs]
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device. collect() waits for it, and is the only place where the engine waits for the device.

    row_of: request id -> row of `sampled` and of StepInputs.sampled_B. asked: the rows with logprobs. pooled: of
    prompts that end in the step, by chunk. prompt: logprobs of prompt tokens, by chunk.
    """

    chunks: list[Chunk]
    shape: StepShape
    row_of: dict[str, int]
    sampled: Tensor
    asked: list[int]
    logprobs: PendingLogprobs | None
    prompt: dict[int, PendingLogprobs]
    pooled: dict[int, Tensor]
    download: Download

    def collect(self) -> list[Sampled]:
        """One Sampled a chunk, in order."""
        self.download.wait()
        tokens = self.sampled.tolist()
        found = dict(zip(self.asked, self.logprobs.read(), strict=True)) if self.logprobs is not None else {}
        results: list[Sampled] = []
        for i, chunk in enumerate(self.chunks):
            row = self.row_of.get(chunk.sequence.request_id)
            prompt = self.prompt[i].read() if i in self.prompt else []
            if row is None:
                results.append(Sampled(None, None, prompt))
            else:
                embedding = self.pooled[i].numpy().tobytes() if i in self.pooled else b""
                results.append(Sampled(tokens[row], found.get(row), prompt, embedding))
        return results


class ModelRunner:
    """others: the ranks that run each step beside this one, in a tensor-parallel replica."""

    def __init__(
        self, steps: StepRunner, loras: WorkerLoRAManager | None, block_size: int, others: OtherRanks | None = None
    ) -> None:
        self.steps = steps
        self._others = others
        self.loras = loras
        self._block_size = block_size
        self._inputs = steps.inputs
        self._device = steps.device
        self._clock = GPUStepClock() if steps.device.type == "cuda" else None

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], last: LaunchedStep | None) -> LaunchedStep:
        """Queues a step on the device. last: the step before, where the host has not read its tokens yet."""
        plan = plan_step(
            chunks,
            row_of={} if last is None else last.row_of,
            first_known=self._inputs.first_known,
            block_size=self._block_size,
            slot_ranks=[] if self.loras is None else self.loras.slots.ranks,
        )
        if self._others is not None:
            self._others.check()
            self._others.send(RunStep.of(plan, self._block_size, self._generations(plan.slots)))
        shape = plan.shape
        is_timed = self._clock is not None and self._clock.begin()
        logits = self.steps.run(plan)
        if is_timed and self._clock is not None:
            self._clock.end(shape)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled_B = self._inputs.sampled_B[: len(sampling)]
        # A peer that is gone leaves the device waiting for it in a collective for ever.
        download = Download(self._device, None if self._others is None else self._others.check)
        asked, found = [], None
        if logits.sampled_BV is not None:
            asked = [i for i, seq in enumerate(sampling) if seq.params.logprobs is not None]
            found = self._sample(logits.sampled_BV, sampling, asked, download)
            self.steps.share(len(sampling))
        prompt = self._prompt_logprobs(chunks, logits.prompts, download)
        pooled = _pool(chunks, logits.hidden_TD, download)
        row_of = {sequence.request_id: i for i, sequence in enumerate(sampling)}
        sampled = download.add(sampled_B)
        download.close()
        return LaunchedStep(chunks, shape, row_of, sampled, asked, found, prompt, pooled, download)

    def steps_on_gpu(self) -> list[GPUSteps]:
        """Those that were timed; none on a CPU."""
        return [] if self._clock is None else self._clock.told()

    def close(self) -> None:
        """Ends the other ranks."""
        if self._others is not None:
            self._others.close()
            self.steps.close()
            self.steps.model.group.leave()

    def _generations(self, slots: Many[int]) -> list[tuple[int, int]]:
        """Of the slots that a step uses."""
        if self.loras is None:
            return []
        return [(slot, self.loras.slots.slots[slot].generation) for slot in sorted(set(slots) - {BASE_SLOT})]

    def _sample(
        self, logits_BV: Tensor, sampling: Many[Sequence], asked: list[int], download: Download
    ) -> PendingLogprobs | None:
        """Into sampled_B. asked: the rows whose logprobs somebody wants."""
        where = to_device(asked, torch.int64, self._device) if asked else None
        raw_BV = None if where is None else logits_BV[where]  # a copy: sample() edits in place
        sampled_B = self._inputs.sampled_B[: len(sampling)]
        sampled_B.copy_(sample(logits_BV.float(), [_row(sequence) for sequence in sampling]))
        if where is None or raw_BV is None:
            return None
        num_top = [sampling[i].params.logprobs or 0 for i in asked]
        return PendingLogprobs(raw_BV, sampled_B[where], num_top, download)

    def _prompt_logprobs(
        self, chunks: list[Chunk], logits: list[Tensor], download: Download
    ) -> dict[int, PendingLogprobs]:
        """By chunk. logits: of each chunk that predicts prompt tokens."""
        wanting = [(i, predicted) for i, chunk in enumerate(chunks) if (predicted := predicted_tokens(chunk))]
        found: dict[int, PendingLogprobs] = {}
        for (i, predicted), logits_TV in zip(wanting, logits, strict=True):
            chosen_T = to_device(predicted, torch.int64, self._device)
            num_top = [chunks[i].sequence.params.prompt_logprobs or 0] * len(predicted)
            found[i] = PendingLogprobs(logits_TV, chosen_T, num_top, download)
        return found


def _pool(chunks: Many[Chunk], hidden_TD: Tensor, download: Download) -> dict[int, Tensor]:
    """By chunk, [D], of the prompts that end in the step. Of a mean the sums so far stay with their sequences."""
    found: dict[int, Tensor] = {}
    start = 0
    for i, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, start + chunk.num_tokens
        if sequence.pooling == "mean":
            sum_D = hidden_TD[start:end].float().sum(dim=0)
            if sequence.num_computed > 0 and sequence.pooled_D is not None:  # else it begins, or begins anew
                sum_D += sequence.pooled_D
            sequence.pooled_D = sum_D
            if chunk.samples:
                found[i] = download.add(sequence.pooled_D / sequence.num_prompt)
        elif sequence.pooling == "last" and chunk.samples:
            found[i] = download.add(hidden_TD[end - 1].float())
        start = end
    return found


def _row(sequence: Sequence) -> Row:
    return Row(sequence.params, sequence.tokens, sequence.num_prompt, sequence.seed, sequence.stop_ids)
