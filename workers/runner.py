"""Turns a step's chunks into tensors, runs the model on them, samples. One GPU's arithmetic, no decisions.

launch() queues a step, LaunchedStep.collect() waits for its tokens; between the two the host may prepare the next one.
"""

# T tokens of the step · B rows that sample · D hidden size · V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lorafleet.kernels.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.workers.attention.base import AttentionBackend, AttentionBatch, KVCache
from lorafleet.workers.decode_graphs import DecodeGraphs
from lorafleet.workers.host_copy import Download, to_device
from lorafleet.workers.lora.worker_manager import WorkerLoRAManager
from lorafleet.workers.messages import TokenLogprobs
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.prefill_graphs import PrefillGraphs
from lorafleet.workers.sampler import PendingLogprobs, Row, sample
from lorafleet.workers.scheduler import Chunk
from lorafleet.workers.sequence import Sequence
from lorafleet.workers.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Sampled:
    """token: of the chunk's sequence, None where the chunk ends before its last token. prompt: logprobs of the
    prompt tokens that the chunk's tokens predict, where asked for."""

    token: int | None
    logprobs: TokenLogprobs | None
    prompt: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device. collect() waits for it, and is the only place where the engine waits for the device.

    row_of: request id -> row of `sampled` and of StepInputs.sampled_B. asked: the rows with logprobs. prompt: those of
    prompt tokens, by chunk.
    """

    chunks: list[Chunk]
    row_of: dict[str, int]
    sampled: Tensor
    asked: list[int]
    logprobs: PendingLogprobs | None
    prompt: dict[int, PendingLogprobs]
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
            results.append(Sampled(None, None, prompt) if row is None else Sampled(tokens[row], found.get(row), prompt))
        return results


class ModelRunner:
    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        caches: list[KVCache],
        inputs: StepInputs,
        device: torch.device,
        loras: WorkerLoRAManager | None,
        decode_graphs: DecodeGraphs | None,
        prefill_graphs: PrefillGraphs | None,
    ) -> None:
        self.loras = loras
        self.decode_graphs = decode_graphs
        self.prefill_graphs = prefill_graphs
        self.model = model
        self.caches = caches
        self.attention = attention
        self.inputs = inputs
        self.device = device

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], last: LaunchedStep | None) -> LaunchedStep:
        """Queues a step on the device. last: the step before, where the host has not read its tokens yet."""
        row_of_last = {} if last is None else last.row_of
        sampling = [chunk for chunk in chunks if chunk.samples]
        row_of = {chunk.sequence.request_id: i for i, chunk in enumerate(sampling)}
        rows = [_row(chunk.sequence) for chunk in sampling]
        sampled_B = self.inputs.sampled_B[: len(rows)]
        download = Download(self.device)
        prompt: dict[int, PendingLogprobs] = {}
        logits_BV = self._decode(chunks, row_of_last)
        is_chosen = logits_BV is not None and all(row.is_plain_greedy for row in rows)  # by the graph
        if logits_BV is None:
            hidden_TD = self._forward(chunks, row_of_last)
            prompt = self._prompt_logprobs(chunks, hidden_TD, download)
            logits_BV = self._logits(hidden_TD, chunks) if rows else None
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        found = None
        if logits_BV is not None:
            where = to_device(asked, torch.int64, self.device) if asked else None
            raw_BV = None if where is None else logits_BV[where]  # a copy: sample() edits in place
            if not is_chosen:
                sampled_B.copy_(sample(logits_BV.float(), rows))
            if where is not None and raw_BV is not None:
                num_top = [rows[i].params.logprobs or 0 for i in asked]
                found = PendingLogprobs(raw_BV, sampled_B[where], num_top, download)
        sampled = download.add(sampled_B)
        download.close()
        return LaunchedStep(chunks, row_of, sampled, asked, found, prompt, download)

    def _decode(self, chunks: list[Chunk], row_of_last: Mapping[str, int]) -> Tensor | None:
        """Logits of a step of decodes alone, by a captured graph; None where none serves it."""
        if self.decode_graphs is None or not all(c.num_tokens == 1 and c.samples for c in chunks):
            return None
        if any(chunk.sequence.wants_prompt_logprobs for chunk in chunks):
            return None
        lora_slots = _lora_slots(chunks)
        graph = self.decode_graphs.find(lora_slots)
        if graph is None:
            return None
        self.inputs.upload(chunks, row_of_last, graph.num_rows)
        return self.decode_graphs.run(graph, _attention_batch(chunks), lora_slots, self._slot_ranks())

    def _forward(self, chunks: list[Chunk], row_of_last: Mapping[str, int]) -> Tensor:
        batch, lora_slots = _attention_batch(chunks), _lora_slots(chunks)
        if self.prefill_graphs is not None:
            graph = self.prefill_graphs.find(len(lora_slots), _uses_lora(lora_slots))
            if graph is not None:
                self.inputs.upload(chunks, row_of_last, graph.num_tokens)
                return self.prefill_graphs.run(graph, batch, lora_slots, self._slot_ranks())
        return self._forward_eagerly(chunks, row_of_last, batch, lora_slots)

    def _forward_eagerly(
        self, chunks: list[Chunk], row_of_last: Mapping[str, int], batch: AttentionBatch, lora_slots: list[int]
    ) -> Tensor:
        self.inputs.upload(chunks, row_of_last, len(lora_slots))
        self.attention.plan(batch)
        self.inputs.mark_copied()
        inputs = self.inputs.tensors(len(lora_slots))
        lengths_T = None
        if self.model.config.rope.depends_on_length:
            lengths_T = to_device(_rope_lengths(chunks), torch.int64, self.device)
        lora = None if self.loras is None else LoRABatch.build(lora_slots, self.loras.slots.tables)
        hidden_TD: Tensor = self.model(
            inputs.tokens(), inputs.position_T, lengths_T, inputs.kv_slot_T, self.caches, self.attention, lora
        )
        return hidden_TD

    def _slot_ranks(self) -> list[int]:
        return [] if self.loras is None else self.loras.slots.ranks

    def _logits(self, hidden_TD: Tensor, chunks: list[Chunk]) -> Tensor:
        """Of the last token of each chunk that samples."""
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        return self.model.logits(hidden_TD[to_device(last, torch.int64, self.device)])

    def _prompt_logprobs(
        self, chunks: list[Chunk], hidden_TD: Tensor, download: Download
    ) -> dict[int, PendingLogprobs]:
        found: dict[int, PendingLogprobs] = {}
        start = 0
        for i, chunk in enumerate(chunks):
            seq, rows = chunk.sequence, hidden_TD[start : start + chunk.num_tokens]
            start += chunk.num_tokens
            # The token at position p predicts the one at p + 1; the last one predicts the answer.
            predicted = seq.tokens[seq.num_computed + 1 : seq.num_computed + chunk.num_tokens + 1]
            predicted = predicted[: seq.num_prompt - seq.num_computed - 1]
            if seq.wants_prompt_logprobs and predicted:
                chosen_T = to_device(predicted, torch.int64, self.device)
                num_top = [seq.params.prompt_logprobs or 0] * len(predicted)
                logits_TV = self.model.logits(rows[: len(predicted)])
                found[i] = PendingLogprobs(logits_TV, chosen_T, num_top, download)
        return found


def _lora_slots(chunks: list[Chunk]) -> list[int]:
    """Of each token, or BASE_SLOT."""
    slots: list[int] = []
    for chunk in chunks:
        slot = chunk.sequence.slot
        slots += [BASE_SLOT if slot is None else slot] * chunk.num_tokens
    return slots


def _uses_lora(lora_slots: list[int]) -> bool:
    return any(slot != BASE_SLOT for slot in lora_slots)


def _attention_batch(chunks: list[Chunk]) -> AttentionBatch:
    return AttentionBatch(
        query_lens=[chunk.num_tokens for chunk in chunks],
        context_lens=[chunk.sequence.num_computed + chunk.num_tokens for chunk in chunks],
        block_tables=[chunk.sequence.blocks.table for chunk in chunks if chunk.sequence.blocks is not None],
    )


def _rope_lengths(chunks: list[Chunk]) -> list[int]:
    """Of each token, see RotaryEmbedding.cos_sin."""
    starts = [(chunk.sequence, chunk.sequence.num_computed, chunk.num_tokens) for chunk in chunks]
    return [max(seq.num_prompt, at + 1) for seq, start, count in starts for at in range(start, start + count)]


def _row(sequence: Sequence) -> Row:
    return Row(sequence.params, sequence.tokens, sequence.num_prompt, sequence.seed, sequence.stop_ids)
