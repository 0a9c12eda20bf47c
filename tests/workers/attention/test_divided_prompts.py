"""Divided contexts by naive attention in place of FlashInfer's: each part is a sequence without a causal mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.merge_parts import merge_parts
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.attention.divided_prompts import Division

HEADS, SIZE, BLOCK = 2, 8, 4


def attend(batch: AttentionBatch, q_THD: Tensor, key_KHD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns attention, and the base-2 logarithms of the denominators. Keys are values too."""
    outs, logs, start = [], [], 0
    for count, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        keys = torch.cat([key_KHD[block * BLOCK : (block + 1) * BLOCK] for block in table])[:context]
        assert len(keys) == context, "the table has too few blocks"
        score = torch.einsum("qhd,khd->hqk", q_THD[start : start + count], keys)
        if causal:
            mask = torch.ones(count, context, dtype=torch.bool).triu(context - count + 1)
            score = score.masked_fill(mask, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), keys))
        logs.append((score.logsumexp(-1) / torch.tensor(2.0).log()).T)
        start += count
    return torch.cat(outs), torch.cat(logs)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize(
    "lens",
    [[(3, 40)], [(3, 43)], [(5, 5), (2, 41), (1, 7), (4, 90)], [(2, 39), (2, 43)]],
    ids=["whole_blocks", "part_of_a_block", "among_short_ones", "several"],
)
def test_parts_and_ends_are_merged_to_the_attention_of_all_keys(lens: list[tuple[int, int]], parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    counts, contexts = [count for count, _ in lens], [context for _, context in lens]
    key_KHD = torch.randn(400, HEADS, SIZE, generator=generator)
    q_THD = torch.randn(sum(counts), HEADS, SIZE, generator=generator)
    blocks = iter(torch.randperm(100, generator=generator).tolist())
    tables = [[next(blocks) for _ in range(-(-context // BLOCK) + 1)] for context in contexts]  # with a block to spare
    batch = AttentionBatch(counts, contexts, tables)
    want, _ = attend(batch, q_THD, key_KHD, causal=True)

    division = Division.of(batch, parts, BLOCK, long_context=30)
    assert division.num_parts == parts and sum(division.ends.query_lens) == len(q_THD)
    out, log = attend(division.ends, q_THD, key_KHD, causal=True)
    part, part_log = attend(division.parts, q_THD[division.rows].repeat(parts, 1, 1), key_KHD, causal=False)
    shape = parts, len(division.rows), HEADS
    row_N = torch.tensor(division.rows, dtype=torch.int32)
    merge_parts(out, log.contiguous(), part.view(*shape, SIZE), part_log.reshape(shape), row_N)
    torch.testing.assert_close(out, want)


def test_the_parts_of_a_context_are_nearly_equal_and_no_part_is_empty() -> None:
    division = Division.of(AttentionBatch([2], [2 + 17 * BLOCK], [list(range(18))]), 4, BLOCK, long_context=1)
    assert division.parts.context_lens == [4 * BLOCK, 4 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    assert Division.of(AttentionBatch([2], [2 + 3 * BLOCK], [[0, 1, 2, 3]]), 8, BLOCK, long_context=1).num_parts == 3
