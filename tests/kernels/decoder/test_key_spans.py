from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("triton")

from lorafleet.kernels.decoder.key_spans import LEAST_KEYS, SpanRule

LENS = {
    "one token": [1],
    "short": [5, 100, 17],
    "no tokens": [0, 3, 0],
    "one long": [100_000],
    "long among short": [200, 131_072, 1, 77, 1000],
    "alike": [576] * 64,
    "many": [random.Random(0).randrange(1, 9000) for _ in range(256)],
}
RULES = {
    "all keys": SpanRule.of(None, None, 512, 8),
    "window": SpanRule.of(1000, None, 512, 8),
    "chunk": SpanRule.of(None, 8192, 512, 2),
    "window and chunk": SpanRule.of(300, 512, 264, 1),
    "many tiles": SpanRule.of(None, None, 512, 1000),
    "short window": SpanRule.of(128, None, 512, 8),
}


def first_seen(rule: SpanRule, length: int) -> int:
    position = max(length - 1, 0)
    low = 0 if rule.window is None else max(0, position + 1 - rule.window)
    return low if rule.chunk is None else max(low, position // rule.chunk * rule.chunk)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_spans_cover_what_each_sequence_sees_once_and_in_order(lens: list[int], rule: SpanRule) -> None:
    first_block = [1000 * b for b in range(len(lens))]
    spans, merges = rule.divide(np.array(lens, dtype=np.int32), np.array(first_block, dtype=np.int32))
    assert (spans.shape, merges.shape) == rule.shapes(len(lens))
    assert spans.dtype == merges.dtype == np.int32
    used = [row for row in spans.tolist() if row[0] >= 0]
    assert [row[0] for row in used] == sorted(row[0] for row in used)
    assert all(row == [-1] * 5 for row in spans[len(used) :].tolist())
    expected_merges, num_partial = [], 0
    for b, length in enumerate(lens):
        own = [row for row in used if row[0] == b]
        assert own[0][1] == first_seen(rule, length)
        assert own[-1][2] == length
        assert all(row[2] == after[1] for row, after in pairwise(own))
        assert all(row[1] < row[2] for row in own) or length == 0
        assert {row[4] for row in own} == {first_block[b]}
        if len(own) == 1:
            assert own[0][3] == -1
        else:
            assert [row[3] for row in own] == list(range(num_partial, num_partial + len(own)))
            expected_merges.append([b, num_partial, len(own)])
            num_partial += len(own)
    assert num_partial <= rule.num_partial
    assert [row for row in merges.tolist() if row[0] >= 0] == expected_merges
    sizes = [row[2] - row[1] for row in used]
    assert max(sizes) <= LEAST_KEYS + sum(sizes) / (rule.num_extra or len(lens) * 1e9)


def test_a_long_sequence_fills_the_gpu_and_many_short_ones_are_not_divided() -> None:
    rule = RULES["all keys"]
    spans, _ = rule.divide(np.array([131_072], dtype=np.int32), np.array([0], dtype=np.int32))
    assert (spans[:, 0] == 0).sum() == rule.num_extra == 64
    spans, merges = rule.divide(np.full(256, 300, dtype=np.int32), np.zeros(256, dtype=np.int32))
    assert (spans[:, 0] >= 0).sum() == 256
    assert (merges == -1).all()


def test_layers_with_a_short_window_have_nothing_to_merge() -> None:
    assert RULES["short window"].shapes(8) == ((8, 5), (0, 3))
    assert RULES["short window"].num_partial == 0
