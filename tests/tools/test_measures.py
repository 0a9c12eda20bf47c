"""The numbers of a comparison against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.measures import Score, compare_places, equal_share, perplexity, pooled_kl, score


def place(logits: torch.Tensor, token: int, k: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(k)
    rank = int((logprobs > logprobs[token]).sum()) + 1
    return TokenLogprobs(token, logprobs[token].item(), rank, best.indices.tolist(), best.values.tolist())


def test_answers_agree_up_to_their_first_difference():
    assert equal_share([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert equal_share([1, 2], [1, 2, 3, 4]) == 0.5
    assert equal_share([1, 2], [1, 2]) == equal_share([], []) == 1
    assert equal_share([], [1]) == 0


def test_kl_over_all_tokens_is_the_kl():
    p, q = torch.randn(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="sum").item()
    assert pooled_kl(place(p, 3, 12), place(q, 3, 12)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_kl_over_the_best_tokens_never_says_more(k):
    generator = torch.Generator().manual_seed(k)
    for _ in range(20):
        p, q = 3 * torch.randn(2, 12, generator=generator, dtype=torch.float64)
        exact = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="sum")
        assert 0 <= pooled_kl(place(p, 3, k), place(q, 3, k)) <= exact.item() + 1e-9


def test_places_tell_choice_and_logprob_of_the_same_token():
    p, q = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([1.0, 3.0, 0.0])
    [same, other] = compare_places([place(p, 0, 2)] * 2, [place(p, 0, 2), place(q, 0, 2)])
    assert (same.same_choice, same.kl, same.logprob_change) == (True, 0, 0)
    assert not other.same_choice
    assert other.logprob_change == pytest.approx(-2)


def test_perplexity_counts_tokens_not_texts():
    scores = [Score(-3 * math.log(2), 3), Score(-math.log(16), 1)]
    assert perplexity(scores) == pytest.approx(2 ** (7 / 4))
    assert perplexity([]) is None
    assert score([None, TokenLogprobs(1, -0.5, 1, [], [])]) == Score(-0.5, 1)
