"""Turns a step's chunks into tensors, runs the model on them, samples. One GPU's arithmetic, no decisions.

launch() queues a step, LaunchedStep.collect() waits for its tokens; between the two the host may prepare the next one.
"""

# T tokens of the step · B rows that sample · D hidden size · V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lorafleet.kernels.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.workers.attention.base import AttentionBackend, AttentionBatch, KVCache
from lorafleet.workers.decode_graphs import DecodeGraphs, DecodeStep
from lorafleet.workers.feedback import Feedback
from lorafleet.workers.lora.worker_manager import WorkerLoRAManager
from lorafleet.workers.messages import TokenLogprobs
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.sampler import Row, logprobs, sample
from lorafleet.workers.scheduler import Chunk
from lorafleet.workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Sampled:
    """token: of the chunk's sequence, None where the chunk ends before its last token. prompt: logprobs of the
    prompt tokens that the chunk's tokens predict, where asked for."""

    token: int | None
    logprobs: TokenLogprobs | None
    prompt: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class _Download:
    """Tokens on their way to the host."""

    host_B: Tensor
    done: torch.cuda.Event | None

    @classmethod
    def start(cls, sampled_B: Tensor) -> _Download:
        if not sampled_B.is_cuda:
            return cls(sampled_B, None)
        host_B = torch.empty(sampled_B.shape, dtype=sampled_B.dtype, pin_memory=True)
        host_B.copy_(sampled_B, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(host_B, done)

    def wait(self) -> list[int]:
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.host_B.tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device. collect() waits for it, and is the only place where the engine waits for the device."""

    chunks: list[Chunk]
    sampled_B: Tensor | None
    row_of: dict[str, int]  # request id -> row of sampled_B
    top: list[TokenLogprobs | None]
    prompt: list[list[TokenLogprobs]]
    download: _Download | None

    def collect(self) -> list[Sampled]:
        """One Sampled a chunk, in order."""
        tokens = self.download.wait() if self.download is not None else []
        results: list[Sampled] = []
        for chunk, prompt in zip(self.chunks, self.prompt, strict=True):
            row = self.row_of.get(chunk.sequence.request_id)
            token, found = (None, None) if row is None else (tokens[row], self.top[row])
            results.append(Sampled(token, found, prompt))
        return results

    def feedback(self, tokens: list[int], chunks: list[Chunk]) -> Feedback | None:
        """For the step after this one, of these tokens and chunks."""
        if self.sampled_B is None:
            return None
        owners = [chunk.sequence.request_id for chunk in chunks for _ in range(chunk.num_tokens)]
        return Feedback.of(tokens, owners, self.sampled_B, self.row_of)


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """One entry a token of the step. kv_slots: block * block size + offset, where its key and value go."""

    tokens: list[int]
    positions: list[int]
    kv_slots: list[int]
    lora_slots: list[int]

    @classmethod
    def of(cls, chunks: list[Chunk], size: int) -> _StepInputs:
        inputs = cls([], [], [], [])
        for chunk in chunks:
            seq = chunk.sequence
            assert seq.blocks is not None
            start, end, table = seq.num_computed, seq.num_computed + chunk.num_tokens, seq.blocks.table
            if chunk.num_tokens == 1:  # nearly all chunks: the general way takes three times as long
                inputs.tokens.append(seq.tokens[start])
                inputs.positions.append(start)
                inputs.kv_slots.append(table[start // size] * size + start % size)
                inputs.lora_slots.append(BASE_SLOT if seq.slot is None else seq.slot)
                continue
            inputs.tokens.extend(seq.tokens[start:end])
            inputs.positions.extend(range(start, end))
            inputs.kv_slots.extend(table[at // size] * size + at % size for at in range(start, end))
            inputs.lora_slots.extend([BASE_SLOT if seq.slot is None else seq.slot] * chunk.num_tokens)
        return inputs


class ModelRunner:
    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        caches: list[KVCache],
        block_size: int,
        device: torch.device,
        loras: WorkerLoRAManager | None,
        graphs: DecodeGraphs | None,
    ) -> None:
        self.loras = loras
        self.graphs = graphs
        self.model = model
        self.caches = caches
        self.attention = attention
        self.block_size = block_size
        self.device = device
        self._planned = torch.cuda.Event() if device.type == "cuda" else None

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], last: LaunchedStep | None) -> LaunchedStep:
        """Queues a step on the device. last: the step before, where the host has not read its tokens yet."""
        inputs = _StepInputs.of(chunks, self.block_size)
        feedback = None if last is None else last.feedback(inputs.tokens, chunks)
        rows = [_row(chunk.sequence) for chunk in chunks if chunk.samples]
        row_of = {chunk.sequence.request_id: i for i, chunk in enumerate(c for c in chunks if c.samples)}
        logits_BV = self._replay(chunks, inputs, feedback)
        prompt: list[list[TokenLogprobs]] = [[] for _ in chunks]
        if logits_BV is None:
            hidden_TD = self._forward(chunks, inputs, feedback)
            prompt = self._prompt_logprobs(chunks, hidden_TD)
            logits_BV = self._logits(hidden_TD, chunks) if rows else None
        if logits_BV is None:
            return LaunchedStep(chunks, None, row_of, [], prompt, None)
        # sample() edits in place, the logprobs are of the raw distribution.
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits_BV[asked] if asked else None
        sampled_B = sample(logits_BV, rows)
        top: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            self._add_logprobs(top, raw, asked, sampled_B, rows)
        return LaunchedStep(chunks, sampled_B, row_of, top, prompt, _Download.start(sampled_B))

    def _replay(self, chunks: list[Chunk], inputs: _StepInputs, feedback: Feedback | None) -> Tensor | None:
        """Logits of a step of decodes alone, by a captured graph; None where none serves it."""
        if self.graphs is None or len(inputs.tokens) > len(chunks) or not all(chunk.samples for chunk in chunks):
            return None
        if any(chunk.sequence.wants_prompt_logprobs for chunk in chunks):
            return None
        step = DecodeStep(
            inputs.tokens, inputs.positions, inputs.kv_slots, inputs.lora_slots, _tables(chunks), self._slot_ranks()
        )
        return self.graphs.run(step, feedback)

    def _forward(self, chunks: list[Chunk], inputs: _StepInputs, feedback: Feedback | None) -> Tensor:
        if self._planned is not None:
            self._planned.synchronize()  # a plan is copied out of pinned memory that the next one overwrites
        self.attention.plan(
            AttentionBatch(
                query_lens=[chunk.num_tokens for chunk in chunks],
                context_lens=[chunk.sequence.num_computed + chunk.num_tokens for chunk in chunks],
                block_tables=_tables(chunks),
            )
        )
        if self._planned is not None:
            self._planned.record()
        token_T = self._integers(inputs.tokens)
        if feedback is not None:
            feedback.fill(token_T)
        lengths_T = self._integers(_rope_lengths(chunks)) if self.model.config.rope.depends_on_length else None
        hidden_TD: Tensor = self.model(
            token_T,
            self._integers(inputs.positions),
            lengths_T,
            self._integers(inputs.kv_slots),
            self.caches,
            self.attention,
            LoRABatch.build(inputs.lora_slots, self.device),
        )
        return hidden_TD

    def _slot_ranks(self) -> list[int]:
        return [] if self.loras is None else self.loras.slots.ranks

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def _logits(self, hidden_TD: Tensor, chunks: list[Chunk]) -> Tensor:
        """Of the last token of each chunk that samples."""
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        return self.model.logits(hidden_TD if len(last) == hidden_TD.shape[0] else hidden_TD[self._integers(last)])

    def _add_logprobs(
        self, top: list[TokenLogprobs | None], raw_BV: Tensor, asked: list[int], sampled_B: Tensor, rows: list[Row]
    ) -> None:
        tokens: list[int] = sampled_B.tolist()
        most = max(rows[i].params.logprobs or 0 for i in asked)
        for i, found in zip(asked, logprobs(raw_BV, [tokens[i] for i in asked], most), strict=True):
            top[i] = _cut(found, rows[i].params.logprobs or 0)

    def _prompt_logprobs(self, chunks: list[Chunk], hidden_TD: Tensor) -> list[list[TokenLogprobs]]:
        found: list[list[TokenLogprobs]] = []
        start = 0
        for chunk in chunks:
            seq, rows = chunk.sequence, hidden_TD[start : start + chunk.num_tokens]
            start += chunk.num_tokens
            # The token at position p predicts the one at p + 1; the last one predicts the answer.
            predicted = seq.tokens[seq.num_computed + 1 : seq.num_computed + chunk.num_tokens + 1]
            predicted = predicted[: seq.num_prompt - seq.num_computed - 1]
            if not seq.wants_prompt_logprobs or not predicted:
                found.append([])
                continue
            logits_TV = self.model.logits(rows[: len(predicted)])
            found.append(logprobs(logits_TV, predicted, seq.params.prompt_logprobs or 0))
        return found


def _rope_lengths(chunks: list[Chunk]) -> list[int]:
    """Of each token, see RotaryEmbedding.cos_sin."""
    starts = [(chunk.sequence, chunk.sequence.num_computed, chunk.num_tokens) for chunk in chunks]
    return [max(seq.num_prompt, at + 1) for seq, start, count in starts for at in range(start, start + count)]


def _tables(chunks: list[Chunk]) -> list[list[int]]:
    return [chunk.sequence.blocks.table for chunk in chunks if chunk.sequence.blocks is not None]


def _row(sequence: Sequence) -> Row:
    return Row(sequence.params, sequence.tokens, sequence.num_prompt, sequence.seed, sequence.stop_ids)


def _cut(found: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        found.token_id, found.logprob, found.rank, found.top_ids[:num_top], found.top_logprobs[:num_top]
    )
