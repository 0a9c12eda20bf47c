from __future__ import annotations

import numpy as np
import pytest
import torch

from lorafleet.kernels.sampling.draw_tokens import draw_tokens
from lorafleet.kernels.sampling.row_log_softmax import row_log_softmax
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.draw_table import DrawRows
from lorafleet.workers.device.host_copy import Download
from lorafleet.workers.device.sampler import PendingLogprobs, greedy
from lorafleet.workers.schedule.sequence import Chunk, Sequence

VOCAB = 50


def row(num_tokens=3, seed=0, vocab_size=VOCAB, **params) -> Chunk:
    tokens = [1] * num_tokens
    sequence = Sequence("", tokens, num_tokens, SamplingParams(**params), seed, max_tokens=9, vocab_size=vocab_size)
    return Chunk(sequence, num_tokens)


def sample(logits_BV: torch.Tensor, rows: list[Chunk]) -> list[int]:
    draws = DrawRows().of_step(rows, np.array([len(row.sequence.tokens) for row in rows]), [], logits_BV.shape[1])
    return draw_tokens(logits_BV, draws, torch.zeros((0, VOCAB), dtype=torch.int32)).token_B.tolist()


def logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))


def draws(count: int, **params) -> torch.Tensor:
    rows = [row(seed=i, **params) for i in range(count)]
    return torch.tensor(sample(logits().repeat(count, 1), rows))


def test_greedy_takes_the_most_likely_token():
    assert sample(logits(), [row(temperature=0)]) == [int(logits().argmax())]


@pytest.mark.parametrize("vocab", [1, 61, 128, 32000])
def test_of_equal_logits_the_greedy_choice_is_the_first(vocab):
    coarse = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)).mul(2).round()
    assert greedy(coarse).tolist() == [row.index(max(row)) for row in coarse.tolist()]


def test_draws_follow_the_distribution():
    found = torch.bincount(draws(20000, temperature=0.8), minlength=VOCAB) / 20000
    assert (found - (logits()[0] / 0.8).softmax(-1)).abs().max() < 0.012


def test_top_k_keeps_the_k_best():
    best = set(logits()[0].topk(5).indices.tolist())
    assert set(draws(2000, temperature=2.0, top_k=5).tolist()) == best


def test_top_p_keeps_the_fewest_that_reach_p():
    probability, order = logits()[0].softmax(-1).sort(descending=True)
    wanted = int((probability.cumsum(0) < 0.6).sum()) + 1
    assert set(draws(4000, top_p=0.6).tolist()) == set(order[:wanted].tolist())


def test_min_p_drops_what_is_unlikely_beside_the_best():
    probability = logits()[0].softmax(-1)
    allowed = set(torch.nonzero(probability >= 0.3 * probability.max()).flatten().tolist())
    assert set(draws(4000, min_p=0.3).tolist()) == allowed


def test_tiny_top_p_is_greedy():
    assert set(draws(50, top_p=1e-6).tolist()) == {int(logits().argmax())}


def test_rows_of_a_batch_do_not_touch_each_other():
    rows = [
        row(temperature=0),
        row(temperature=1.0, seed=5, top_k=3),
        row(temperature=0.7, seed=6),
        row(temperature=0.7, seed=6, num_tokens=9),
    ]
    together = sample(logits(4), rows)
    alone = [sample(logits(4)[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    assert together == alone


def test_logprobs_are_of_the_raw_distribution_with_ranks():
    raw = logits()[0].log_softmax(-1)
    order = raw.argsort(descending=True).tolist()
    download = Download(torch.device("cpu"))
    [found] = PendingLogprobs(row_log_softmax(logits()), torch.tensor([order[3]]), [2], download).read()
    assert found.logprob == pytest.approx(float(raw[order[3]]))
    assert found.rank == 4
    assert found.top_ids == order[:2]
    assert found.top_logprobs == pytest.approx(raw[order[:2]].tolist())


def test_a_row_of_nan_gives_a_token_of_the_vocabulary_and_leaves_the_others_alone():
    params = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.5, "top_k": 4}, {"min_p": 0.1}, {"temperature": 0}]
    for fields in params:
        both = torch.cat((torch.full((1, VOCAB), torch.nan), logits()))
        token, neighbors = sample(both, [row(**fields), row(seed=5, temperature=0.9)])
        assert 0 <= token < VOCAB
        assert [neighbors] == sample(logits(), [row(seed=5, temperature=0.9)])


def test_a_row_of_nan_beside_a_wider_vocabulary_gives_a_token_of_its_own():
    both = torch.cat((torch.full((1, VOCAB), torch.nan), logits()))
    for fields in ({"temperature": 1.0}, {"temperature": 0}):
        assert sample(both.clone(), [row(vocab_size=20, **fields), row()])[0] < 20
