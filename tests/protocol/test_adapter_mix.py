from __future__ import annotations

import pytest
import torch

from lorafleet.protocol.adapter_mix import mixed
from lorafleet.protocol.errors import AdapterUnsupported, InvalidRequest, RankTooLarge
from lorafleet.protocol.limits import MAX_MIXED
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.adapters.forms import AdapterForms, LinearForm, LowRank, OwnRope
from lorafleet.workers.adapters.mixed_forms import mix

Q, V = "layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"


def adapter(name: str) -> LoRARequest:
    return LoRARequest(name, 1, f"/adapters/{name}", digest=f"digest of {name}")


def forms(**ranks: int) -> AdapterForms:
    modules = {"q": Q, "v": V}
    return AdapterForms(
        {modules[key]: LinearForm(LowRank(torch.randn(r, 6), torch.randn(5, r), 0.5 * r)) for key, r in ranks.items()}
    )


def delta(some: AdapterForms, module: str) -> torch.Tensor:
    low_rank = some.linears[module].low_rank
    return low_rank.scaling * low_rank.b_OR @ low_rank.a_RD


def test_a_mix_adds_the_weighted_sum_of_what_its_parts_add():
    one, two, three = forms(q=2, v=3), forms(q=4), forms(v=1)
    mixture = mixed([adapter("one"), adapter("two"), adapter("three")], [0.7, -2, 1.5])
    by_name = {"one": one, "two": two, "three": three}
    result = mix([(part, by_name[part.lora.lora_name]) for part in mixture.parts], max_rank=6)
    torch.testing.assert_close(delta(result, Q), 0.7 * delta(one, Q) - 2 * delta(two, Q))
    torch.testing.assert_close(delta(result, V), 0.7 * delta(one, V) + 1.5 * delta(three, V))
    assert result.linears[Q].low_rank.rank == 6


def test_a_mix_is_the_same_in_any_order_and_another_with_other_weights():
    ab = mixed([adapter("a"), adapter("b")], [0.5, 2])
    ba = mixed([adapter("b"), adapter("a")], [2.0, 0.5])
    assert ab.digest == ba.digest and ab.parts == ba.parts
    assert (ab.lora_name, ba.lora_name) == ("a+b", "b+a")
    others = [mixed([adapter("a"), adapter("b")], weights) for weights in ([2, 0.5], [0.5, 2.0001], None)]
    assert len({ab.digest, *(other.digest for other in others)}) == 4


def test_without_weights_each_part_counts_once():
    assert [part.weight for part in mixed([adapter("a"), adapter("b")], None).parts] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["a", "b"], [1.0], "has 1 numbers for 2 adapters"),
        (["a", "b"], [1.0, float("nan")], "nan is out of range"),
        (["a", "b"], [1.0, 1e30], "lora_weights=1e.30 is out of range; it must be in"),
        (["a", "a"], None, "same adapter"),
        ([f"a{i}" for i in range(MAX_MIXED + 1)], None, f"at most {MAX_MIXED}"),
    ],
)
def test_what_cannot_be_mixed_is_said(names, weights, message):
    with pytest.raises(InvalidRequest, match=message):
        mixed([adapter(name) for name in names], weights)


def test_ranks_that_do_not_fit_together_are_named():
    mixture = mixed([adapter("a"), adapter("b")], None)
    with pytest.raises(RankTooLarge, match=r"4 \(a\) \+ 5 \(b\) = 9 .*max_lora_rank=8"):
        mix(list(zip(mixture.parts, [forms(q=4), forms(q=5)], strict=True)), max_rank=8)


@pytest.mark.parametrize(
    "other",
    [
        AdapterForms({Q: LinearForm(LowRank(torch.ones(1, 6), torch.ones(5, 1)), out_scale_O=torch.ones(5))}),
        AdapterForms({Q: LinearForm(bias_O=torch.ones(5))}),
        AdapterForms(norms={"norm": torch.ones(6)}),
        AdapterForms({Q: LinearForm(LowRank(torch.ones(1, 6), torch.ones(5, 1)))}, invocation_tokens=(1,)),
        AdapterForms({Q: LinearForm(LowRank(torch.ones(1, 6), torch.ones(5, 1)))}, own_rope=OwnRope(None, 4096)),
    ],
)
def test_only_plain_lora_is_mixed(other):
    mixture = mixed([adapter("plain"), adapter("special")], None)
    by_name = {"plain": forms(q=1), "special": other}
    with pytest.raises(AdapterUnsupported, match=r"'special'.*only plain LoRA"):
        mix([(part, by_name[part.lora.lora_name]) for part in mixture.parts], max_rank=8)
