"""Turns a step's chunks into tensors, runs the model on them, samples. One GPU's arithmetic, no decisions.

ModelRunner.step is the only place where the engine waits for the device.
"""

# T tokens of the step · B rows that sample · D hidden size · V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.workers.attention.base import AttentionBackend, AttentionBatch, KVCache
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


class ModelRunner:
    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        caches: list[KVCache],
        block_size: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.caches = caches
        self.attention = attention
        self.block_size = block_size
        self.device = device

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> list[Sampled]:
        """One Sampled a chunk, in order."""
        hidden_TD = self._forward(chunks)
        prompt = self._prompt_logprobs(chunks, hidden_TD)
        ends: list[int] = []
        end = 0
        for chunk in chunks:
            end += chunk.num_tokens
            if chunk.samples:
                ends.append(end - 1)
        rows = [_row(chunk.sequence) for chunk in chunks if chunk.samples]
        tokens, top = self._sample(hidden_TD, ends, rows) if rows else ([], [])
        results: list[Sampled] = []
        sampled = iter(zip(tokens, top, strict=True))
        for chunk, prompt_part in zip(chunks, prompt, strict=True):
            token, token_logprobs = next(sampled) if chunk.samples else (None, None)
            results.append(Sampled(token, token_logprobs, prompt_part))
        return results

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        slot_of_token: list[int] = []
        rope_lengths: list[int] = []
        size = self.block_size
        for chunk in chunks:
            seq = chunk.sequence
            assert seq.blocks is not None
            start, end, table = seq.num_computed, seq.num_computed + chunk.num_tokens, seq.blocks.table
            tokens += seq.tokens[start:end]
            positions += range(start, end)
            slot_mapping += [table[at // size] * size + at % size for at in range(start, end)]
            slot_of_token += [BASE_SLOT if seq.slot is None else seq.slot] * chunk.num_tokens
            rope_lengths += [max(seq.num_prompt, at + 1) for at in range(start, end)]
        self.attention.plan(
            AttentionBatch(
                query_lens=[chunk.num_tokens for chunk in chunks],
                context_lens=[chunk.sequence.num_computed + chunk.num_tokens for chunk in chunks],
                block_tables=[chunk.sequence.blocks.table for chunk in chunks if chunk.sequence.blocks is not None],
            )
        )
        lora = LoRABatch.build(slot_of_token, self.device)
        lengths_T = self._integers(rope_lengths) if self.model.config.rope.depends_on_length else None
        hidden_TD: Tensor = self.model(
            self._integers(tokens),
            self._integers(positions),
            lengths_T,
            self._integers(slot_mapping),
            self.caches,
            self.attention,
            lora,
        )
        return hidden_TD

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def _sample(
        self, hidden_TD: Tensor, ends: list[int], rows: list[Row]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        hidden_BD = hidden_TD if len(ends) == hidden_TD.shape[0] else hidden_TD[self._integers(ends)]
        logits_BV = self.model.logits(hidden_BD)
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        # sample() edits in place, the logprobs are of the raw distribution.
        raw = logits_BV[asked] if asked else None
        tokens = sample(logits_BV, rows)
        top: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            most = max(rows[i].params.logprobs or 0 for i in asked)
            for i, found in zip(asked, logprobs(raw, [tokens[i] for i in asked], most), strict=True):
                top[i] = _cut(found, rows[i].params.logprobs or 0)
        return tokens, top

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


def _row(sequence: Sequence) -> Row:
    return Row(sequence.params, sequence.tokens, sequence.num_prompt, sequence.seed, sequence.stop_ids)


def _cut(found: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        found.token_id, found.logprob, found.rank, found.top_ids[:num_top], found.top_logprobs[:num_top]
    )
