"""Turns the scheduler's chunks into tokens: plans a step, runs it on the device and samples. It decides nothing.

launch() queues a step, choose() the choice of its tokens, and ChosenStep.collect() waits for them. In between, the host
may prepare the next step; step_pipeline.py knows in which order.
"""

# B rows that sample · N rows with a mask · P rows with logprobs · V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.decoder.token_mask import mask_tokens
from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.kernels.sampling.draw_tokens import DrawTable, draw_tokens
from lorafleet.kernels.sampling.row_log_softmax import row_log_softmax
from lorafleet.protocol.limits import LogprobsMode
from lorafleet.protocol.messages import GPUSteps, TokenLogprobs
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.device.draw_table import DrawRows
from lorafleet.workers.device.host_copy import Download, Upload, array_to_device, to_device
from lorafleet.workers.device.logit_edits import EditedRow, EditedStep, LogitEditor
from lorafleet.workers.device.sampler import PendingLogprobs
from lorafleet.workers.device.step_plan import POSITION, StepPlan
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.schedule.routed_rows import Rows
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.sleep.replica_memory import ReplicaMemory
from lorafleet.workers.slots.classifier_extras import SlotClassifier, slot_classifier
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.speculation.awaited_drafts import MadeDrafts
from lorafleet.workers.step.decode_columns import DecodeColumns, TokensBefore
from lorafleet.workers.step.gpu_step_clock import GPUStepClock
from lorafleet.workers.step.planner import plan_step, scored_spans
from lorafleet.workers.step.prompt_pooling import Pooled, pool_prompts
from lorafleet.workers.step.step_runner import StepLogits, StepRunner
from lorafleet.workers.structured.decoding import TokenMasks
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import RunStep, SentPlan, ShareTokens
from lorafleet.workers.tp.shared_unread import SentUnread, share_unread

NONE_ACCEPTED = torch.zeros(0, dtype=torch.int64)
PromptLogprobs = list[tuple[int, PendingLogprobs]]  # logprobs of spans of prompts, each with its chunk's index


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """The result of one chunk. A Struct is made fastest."""

    tokens: list[int]  # the sequence's next tokens; none if the chunk ends before its last token
    logprobs: list[TokenLogprobs] = []  # one for each of these tokens, if requested
    prompt: list[TokenLogprobs] = []  # of the prompt tokens that the chunk's tokens predict, if requested
    embedding: bytes = b""  # float32, at the end of a prompt that is pooled, see TokenOutput.embedding
    routed_TLK: Rows | None = None  # the experts of the chunk's tokens, if requested


class FirstRows(Mapping[str, int]):
    """The first row of each sequence that samples, by request ID. Rows are looked for when they are wanted, from the
    last one on: a step of decodes wants those of new decodes only, whose prompts were the last in the step before."""

    def __init__(self, sampling: Many[Chunk], *, has_drafts: bool) -> None:
        counts = (1 + len(chunk.drafts) for chunk in sampling)
        self.rows: Many[int] = list(accumulate(counts, initial=0)) if has_drafts else range(len(sampling))
        self._sampling = sampling
        self._num_left = len(sampling)  # Sequences at the front that have not been looked at.
        self._row_by_request: dict[str, int] = {}

    def __getitem__(self, request_id: str) -> int:
        while self._num_left and request_id not in self._row_by_request:
            self._num_left -= 1
            sequence = self._sampling[self._num_left].sequence
            self._row_by_request[sequence.request_id] = self.rows[self._num_left]
        return self._row_by_request[request_id]

    def __iter__(self) -> Iterator[str]:
        return (chunk.sequence.request_id for chunk in self._sampling)

    def __len__(self) -> int:
        return len(self._sampling)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device. Its tokens must be chosen before the next launch, which overwrites its logits."""

    chunks: list[Chunk]
    shape: StepShape
    num_plain: int  # Decodes at the front of the chunks, up to the first whose sequence is not plain.
    sampling: list[Chunk]  # The chunks that sample.
    shares_tokens: bool  # As in RunStep. A sequence whose grammar waited for masks may have ended since.
    num_rows: int  # Rows of StepInputs.sampled_B: Chunk.num_sampled of each of these chunks.
    # One for each of these rows; empty if the step is greedy, or all of its sequences are plain.
    params: list[SamplingParams]
    draws: DrawTable | None  # The draws of these rows; None if the step is greedy.
    draw_B: Tensor | None  # As draw_tokens takes it.
    token_B: Tensor  # The token that each of these rows computes, on the device.
    edited: EditedStep  # Rows whose logits are changed.
    faults: list[tuple[Sequence, Exception]]  # Sequences that cannot go on after the step, and why.
    row_by_request: FirstRows
    prompt_logprobs: PromptLogprobs
    logits: StepLogits
    routed_TLK: Tensor | None  # RoutedExperts.of_step on its way to the host; None if no sequence wants it.
    pooled: dict[int, list[Tensor]]  # Pooled values by chunk's index, for prompts that end in the step.
    download: Download
    made: MadeDrafts | None  # Drafts that were made after the step was planned.

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts."""
        return self.num_rows > len(self.sampling)

    @property
    def tokens(self) -> TokensBefore:
        """Its tokens, for the plan of the next step."""
        return TokensBefore(self.row_by_request, None if self.has_drafts else self.chunks)

    @property
    def needs_masks(self) -> bool:
        """Whether a sequence has a grammar, whose mask says which tokens may be chosen."""
        return _need_masks(self.sampling[self.num_plain :])

    def verify(self, number: int, drawn_B: Tensor, num_masked: Mapping[Sequence, int]) -> DraftVerification | None:
        """Queues the comparison of its drafts with the tokens that it has drawn, if it has drafts. The arguments are
        those of DraftVerification, and TokenMasks.num_masked."""
        if not self.has_drafts:
            return None
        most_accepted = dict(num_masked)
        if self.made is not None:
            most_accepted |= self.made.counts  # No sequence of these has a grammar.
        return DraftVerification.of(number, self.sampling, self.token_B, drawn_B, most_accepted)

    def routed_of_chunks(self) -> dict[int, Rows]:
        """Returns the experts of each chunk's tokens, by the chunk's index, for those that want them. Call it once the
        download is done."""
        if self.routed_TLK is None:
            return {}
        rows_TLK, ends = self.routed_TLK.numpy(), list(accumulate(chunk.num_tokens for chunk in self.chunks))
        return {
            i: rows_TLK[end - chunk.num_tokens : end]
            for i, (chunk, end) in enumerate(zip(self.chunks, ends, strict=True))
            if chunk.sequence.routed is not None
        }


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The requested logprobs of some rows, on their way to the host."""

    rows: list[int]
    pending: PendingLogprobs


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """A step whose tokens are on their way to the host."""

    launched: LaunchedStep
    token_B: Tensor  # On the host; valid once the download is done.
    logprobs: list[RowLogprobs]
    late: Many[Sequence]  # Sequences of the step that get no token from it.
    verification: DraftVerification | None  # None if the step has no drafts.
    accepted_S: Tensor  # DraftVerification.accepted_S on the host, as token_B is.

    def drawn(self) -> dict[Sequence, list[int]]:
        """Waits for the step, which verifies drafts. Returns the tokens with which each of its sequences goes on."""
        assert self.verification is not None
        self.launched.download.wait()
        tokens, accepted = self.token_B.tolist(), self.accepted_S.tolist()
        return {
            sequence: tokens[rows.first : rows.first + accepted[rows.index] + 1]
            for sequence, rows in self.verification.rows.items()
        }

    def collect(self) -> tuple[list[int], list[Sampled]]:
        """Waits for the step. Returns the token of each of the first num_plain chunks, and one Sampled for each of the
        others, in order. Nothing else waits for the device."""
        launched = self.launched
        launched.download.wait()
        tokens, accepted = self.token_B.tolist(), self.accepted_S.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        for part in self.logprobs:
            logprobs |= zip(part.rows, part.pending.read(), strict=True)
        prompts: dict[int, list[TokenLogprobs]] = {}
        for i, span in launched.prompt_logprobs:
            prompts.setdefault(i, []).extend(span.read())
        first, late = launched.num_plain, set(self.late)
        others = launched.chunks[first:]
        sampling = [chunk.sequence for chunk in launched.sampling[first:]]
        row_by_sequence = dict(zip(sampling, launched.row_by_request.rows[first:], strict=False))
        results: list[Sampled] = []
        routed = launched.routed_of_chunks()
        for i, chunk in enumerate(others, first):
            sequence = chunk.sequence
            row = None if sequence in late else row_by_sequence.get(sequence)
            prompt = prompts.get(i, [])
            if row is None:
                results.append(Sampled([], [], prompt, routed_TLK=routed.get(i)))
            else:
                embedding = b"".join(part.numpy().tobytes() for part in launched.pooled.get(i, ()))
                end = row + 1
                if chunk.drafts and self.verification is not None:
                    end += accepted[self.verification.rows[sequence].index]
                found = [logprobs[j] for j in range(row, end) if j in logprobs] if logprobs else []
                results.append(Sampled(tokens[row:end], found, prompt, embedding, routed.get(i)))
        return tokens[:first], results


class ModelRunner:
    """Runs steps on rank 0. `others` are the ranks that run each step beside it in a tensor-parallel replica.

    `logprobs_mode` is for requests that do not name one.
    """

    def __init__(
        self,
        steps: StepRunner,
        memory: ReplicaMemory,
        loras: WorkerLoRAManager | None,
        block_size: int,
        logprobs_mode: LogprobsMode,
        others: OtherRanks | None = None,
    ) -> None:
        self.steps = steps
        self.memory = memory
        self._others = others
        # If a peer is gone, the device waits for it in a collective forever.
        self._check = None if others is None else others.check
        self.loras = loras
        self._block_size = block_size
        self._last_decodes: DecodeColumns | None = None  # Those of the last plan; None if drafts were in flight.
        self._logprobs_mode = logprobs_mode
        self._inputs = steps.inputs
        self._device = steps.device
        self._upload_masks = Upload(steps.device)
        self._editor = LogitEditor(len(steps.inputs.sampled_B), steps.model.config.vocab_size, steps.device)
        self._draws = DrawRows()
        self._num_steps = 0
        self._clock = GPUStepClock() if steps.device.type == "cuda" else None

    def plan(self, chunks: list[Chunk], last: LaunchedStep | None) -> StepPlan:
        """Plans the next step. `last` is the step before, if the host has not read its tokens yet."""
        has_drafts = last is not None and last.has_drafts
        before = TokensBefore({}) if last is None else last.tokens
        slot_ranks = [] if self.loras is None else self.loras.slots.ranks
        decodes = None if has_drafts else self._last_decodes
        plan = plan_step(chunks, before, self._inputs.first_known, self._block_size, slot_ranks, decodes)
        self._last_decodes = None if has_drafts else DecodeColumns.of_plan(chunks, plan)
        return plan

    def prepare(self, plan: StepPlan, unread: UnreadInputs | None = None) -> None:
        """Queues what the step reads, as far as that does not depend on the tokens of the step before. `unread` is what
        the plan lacks."""
        self.steps.prepare(plan, unread)

    @torch.inference_mode()
    def launch(
        self,
        chunks: list[Chunk],
        plan: StepPlan,
        unread: UnreadInputs | None = None,
        made: MadeDrafts | None = None,
    ) -> LaunchedStep:
        """Queues a step on the device, up to its logits. `unread` is what the plan lacks, and `made` are the drafts
        that were made after it."""
        sampling = chunks[: plan.num_decodes] + [chunk for chunk in chunks[plan.num_decodes :] if chunk.samples]
        special = [chunk for chunk in chunks[plan.num_plain :] if not chunk.sequence.is_plain]
        shares_tokens = not plan.is_greedy and not _need_masks([chunk for chunk in special if chunk.samples])
        if self._others is not None:
            unread = self._order(self._others, plan, unread, shares_tokens=shares_tokens)
        is_timed = self._clock is not None and self._clock.begin()
        download = Download(self._device, self._check)
        prompt_logprobs: PromptLogprobs = []
        logits = self._run(chunks, plan, unread, download, prompt_logprobs)
        routed_TLK = None
        if self.steps.routed is not None and any(chunk.sequence.routed is not None for chunk in special):
            routed_TLK = download.add(self.steps.routed.of_step(plan.num_tokens))
        if is_timed and self._clock is not None:
            self._clock.end(plan.shape)
        row_by_request = FirstRows(sampling, has_drafts=len(plan.sampling) > len(sampling))
        pooled: Pooled = {}
        faults: list[tuple[Sequence, Exception]] = []
        edited, token_B = EditedStep(), self._computed_tokens(plan, len(sampling))
        if special:
            pooled, faults = pool_prompts(chunks, logits.hidden_TD, self._classifier, download)
            edited = self._editor.prepare(sampling, token_B, _shorts_of(chunks, unread))
            faults += edited.faults
        params: list[SamplingParams] = []
        draws = draw_B = None
        if logits.sampled_BV is not None:
            params = _params_of(sampling) if special else []
            position_T = plan.fields_FT[POSITION]
            position_B = (position_T if plan.has_decodes_only else position_T[plan.sampling]) + 1
            draws = self._draws.of_step(sampling, position_B, edited.rows, logits.sampled_BV.shape[1])
            if unread is not None and unread.short_B is not None:
                by_length_BK = self._draws.by_length(sampling, position_B, unread.most_short)
                draw_B = _draws_of_lengths(by_length_BK, unread.short_B, chunks)
        return LaunchedStep(
            chunks=chunks,
            shape=plan.shape,
            num_plain=plan.num_plain,
            sampling=sampling,
            shares_tokens=shares_tokens,
            num_rows=len(plan.sampling),
            params=params,
            draws=draws,
            draw_B=draw_B,
            token_B=token_B,
            edited=edited,
            faults=faults,
            row_by_request=row_by_request,
            prompt_logprobs=prompt_logprobs,
            logits=logits,
            routed_TLK=routed_TLK,
            pooled=pooled,
            download=download,
            made=made,
        )

    def _order(
        self, others: OtherRanks, plan: StepPlan, unread: UnreadInputs | None, *, shares_tokens: bool
    ) -> UnreadInputs | None:
        """Orders the other ranks to run the step. Returns what the plan lacks as all ranks have it."""
        others.check()
        sent, missing = SentPlan.of(plan, self._block_size), None if unread is None else SentUnread.of(unread)
        others.send(RunStep(sent, self._generations(plan.slots), shares_tokens, missing))
        if missing is None:
            return None
        return share_unread(self.steps.model.group, missing, self._device, unread)[0]

    def _run(
        self,
        chunks: list[Chunk],
        plan: StepPlan,
        unread: UnreadInputs | None,
        download: Download,
        prompt_logprobs: PromptLogprobs,
    ) -> StepLogits:
        """Runs the step, and appends the logprobs of prompt tokens to `prompt_logprobs`."""
        spans = scored_spans(chunks) if plan.prompts else []

        def score(i: int, logits_TV: Tensor) -> None:
            span = spans[i]
            chosen_T = to_device(span.tokens, torch.int64, self._device)
            num_top = [chunks[span.chunk].sequence.params.prompt_logprobs or 0] * len(span.tokens)
            pending = PendingLogprobs(row_log_softmax(logits_TV), chosen_T, num_top, download)
            prompt_logprobs.append((span.chunk, pending))

        return self.steps.run(plan, score, unread, self._check)

    @torch.inference_mode()
    def choose(self, step: LaunchedStep, masks: TokenMasks | None = None, late: Many[Sequence] = ()) -> ChosenStep:
        """Queues the choice of a launched step's tokens, and their copy to the host. Tokens that masks forbid have no
        chance.

        `late` are sequences that get no token. The tokens chosen in their rows are dropped and not counted.
        """
        num_rows = step.num_rows
        logprobs: list[RowLogprobs] = []
        late_rows = {step.row_by_request[sequence.request_id] for sequence in late}
        if step.logits.sampled_BV is not None:
            edited = step.edited.without(late_rows)
            logprob_rows = [
                i for i, params in enumerate(step.params) if params.logprobs is not None and i not in late_rows
            ]
            logprobs = self._sample(step.logits.sampled_BV, step, edited, logprob_rows, masks)
            if self._others is not None and not step.shares_tokens:  # Other orders may stand between step and choice.
                self._others.send(ShareTokens(num_rows))
            self.steps.share(num_rows)
        drawn_B = self._inputs.sampled_B[:num_rows]
        token_B = step.download.add(drawn_B)
        self._num_steps += 1
        verification = step.verify(self._num_steps, drawn_B, {} if masks is None else masks.num_masked)
        accepted_S = None if verification is None else verification.accepted_S
        if step.edited.rows:
            self._editor.count(drawn_B, step.edited, accepted_S, late_rows)
        accepted_S = NONE_ACCEPTED if accepted_S is None else step.download.add(accepted_S)
        step.download.close()
        return ChosenStep(step, token_B, logprobs, late, verification, accepted_S)

    def _computed_tokens(self, plan: StepPlan, num_sampling: int) -> Tensor:
        """Returns the token that each row of plan.sampling computes in the step that has been queued, if these are more
        rows than sequences. Otherwise there are no drafts, and the tokens are arbitrary."""
        known_T = self._inputs.known_tokens(plan.num_tokens)
        if len(plan.sampling) in (plan.num_tokens, num_sampling):
            return known_T
        return known_T[to_device(plan.sampling, torch.int64, self._device)]

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        self._editor.release(sequence)
        self._draws.release(sequence)

    def _classifier(self, slot: int) -> SlotClassifier | None:
        return None if self.loras is None else slot_classifier(self.loras.slots.slots[slot].extra)

    @property
    def counts_bytes(self) -> int:
        """Bytes of the token counts from which penalties are computed."""
        return self._editor.counts_SV.nbytes

    def steps_on_gpu(self) -> list[GPUSteps]:
        """Returns the steps that were timed. There are none on a CPU."""
        return [] if self._clock is None else self._clock.totals()

    def close(self) -> None:
        """Ends what runs in the background. Stops the other ranks, and leaves their group."""
        self.steps.late.close()
        self.memory.close()
        if self._others is not None:
            self._others.close()
            self.memory.close_steps()
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
    ) -> list[RowLogprobs]:
        """Samples a step's tokens into sampled_B. Returns the logprobs of `logprob_rows`."""
        params = step.params
        assert step.draws is not None
        of_draw = [i for i in logprob_rows if self._is_processed(params[i])]
        of_model = [i for i in logprob_rows if not self._is_processed(params[i])]
        # A copy, since masks and edits are written in place.
        raw_PV = logits_BV[to_device(of_model, torch.int64, self._device)] if of_model else None
        sampled_B = self._inputs.sampled_B[: step.num_rows]
        if masks is not None:
            row_N = to_device(masks.rows, torch.int64, self._device)
            mask_tokens(logits_BV, row_N, self._upload_masks(masks.bits_NW))
        logits_BV = self._editor.apply(logits_BV, edited)
        drawn = draw_tokens(logits_BV, step.draws, self._editor.counts_SV, of_draw, step.draw_B)
        sampled_B.copy_(drawn.token_B)

        def pending(indices: list[int], logprobs_PV: Tensor) -> RowLogprobs:
            chosen_P = sampled_B[to_device(indices, torch.int64, self._device)]
            num_top = [params[i].logprobs or 0 for i in indices]
            return RowLogprobs(indices, PendingLogprobs(logprobs_PV, chosen_P, num_top, step.download))

        found = [] if raw_PV is None else [pending(of_model, row_log_softmax(raw_PV))]
        return found if drawn.logprobs_PV is None else [*found, pending(of_draw, drawn.logprobs_PV)]

    def _is_processed(self, params: SamplingParams) -> bool:
        return (params.logprobs_mode or self._logprobs_mode) == "processed_logprobs"


def _need_masks(sampling: Many[Chunk]) -> bool:
    """Returns whether one of these sequences has a grammar."""
    return any(chunk.sequence.grammar is not None for chunk in sampling)


def _draws_of_lengths(draw_BK: DrawTable, short_S: Tensor, chunks: Many[Chunk]) -> Tensor:
    """Returns the draw of each row, float64 [B], by the length that its sequence turns out to have. short_S is that of
    UnreadInputs, for each of the chunks."""
    sequence_B = array_to_device(np.arange(len(chunks)).repeat([chunk.num_sampled for chunk in chunks]), short_S.device)
    return array_to_device(draw_BK, short_S.device).gather(1, short_S[sequence_B][:, None]).squeeze(1)


def _shorts_of(chunks: Many[Chunk], unread: UnreadInputs | None) -> dict[Sequence, Tensor]:
    """Returns UnreadInputs.short_B of the sequences whose answers have a minimal length, [1] each."""
    if unread is None or unread.short_B is None:
        return {}
    own = zip(chunks, unread.short_B.split(1), strict=True)
    return {chunk.sequence: short_1 for chunk, short_1 in own if chunk.sequence.params.min_tokens}


def _params_of(sampling: Many[Chunk]) -> list[SamplingParams]:
    """Returns the parameters of each token that these chunks sample."""
    params = [chunk.sequence.params for chunk in sampling]
    if not any(chunk.drafts for chunk in sampling):
        return params
    return [own for own, chunk in zip(params, sampling, strict=True) for _ in range(1 + len(chunk.drafts))]
