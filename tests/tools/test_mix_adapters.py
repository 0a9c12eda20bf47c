"""Mixtures are those of PEFT's add_weighted_adapter."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft.utils import merge_utils

from lorafleet.protocol.errors import AdapterUnsupported, ConfigError, InvalidRequest
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.convert import convert_several
from lorafleet.tools.mix_adapters import Mixing, mix, seed_of
from lorafleet.tools.plain_lora import PlainLoRA
from lorafleet.workers.adapters.forms import LowRank
from tests.tools.conftest import assert_same_deltas, deltas, load_peft

METHODS = {
    "linear": {},
    "cat": {},
    "svd": {},
    "ties": {"density": 0.6},
    "ties_svd": {"density": 0.6},
    "magnitude_prune": {"density": 0.3},
    "magnitude_prune_svd": {"density": 0.3},
}


def mixed_by_peft(base, folders, weights, method, **options):
    model = load_peft(base, folders[0])
    names = ["default", *(f"a{i}" for i in range(1, len(folders)))]
    for name, folder in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(str(folder), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_weighted_adapter(names, weights, "mixed", combination_type=method, **options)
    layers = {n: m for n, m in model.base_model.model.named_modules() if hasattr(m, "lora_A")}
    return {n: m.get_delta_weight("mixed").detach() for n, m in layers.items() if "mixed" in m.lora_A}


WITH_SIGNS = [*((method, None) for method in METHODS), ("ties", "frequency"), ("ties_svd", "frequency")]


@pytest.mark.parametrize(("method", "majority"), WITH_SIGNS)
def test_mixtures_equal_pefts(base, make_adapter, tmp_path, method, majority):
    sources = [make_adapter(f"s{i}", seed=i, lora_alpha=4 * i) for i in (1, 2, 3)]
    weights, options = [0.7, -0.4, 0.5], METHODS[method]
    how = Mixing(method, majority_sign=majority, **options)
    convert_several(sources, weights, tmp_path / "out", None, how)
    signs = {"majority_sign_method": majority} if majority else {}
    assert_same_deltas(
        mixed_by_peft(base, sources, weights, method, **options, **signs), deltas(base, tmp_path / "out")
    )


@pytest.mark.parametrize("method", ["cat", "svd", "ties_svd"])
def test_adapters_of_other_ranks_and_targets_mix(base, make_adapter, tmp_path, method):
    sources = [make_adapter("q", target_modules=["q_proj", "v_proj"], r=2), make_adapter("v", r=5, seed=2)]
    options = {"density": 0.5} if "ties" in method else {}
    convert_several(sources, [1.0, 0.5], tmp_path / "out", None, Mixing(method, **options))
    assert_same_deltas(mixed_by_peft(base, sources, [1.0, 0.5], method, **options), deltas(base, tmp_path / "out"))


@pytest.mark.parametrize("place", [0, 1])
def test_adapters_with_a_rope_scaling_in_lorafleet_json_do_not_mix(base, make_adapter, tmp_path, place):
    sources = [make_adapter("first"), make_adapter("second", seed=2)]
    (sources[place] / "lorafleet.json").write_text('{"rope_scaling": {"type": "linear", "factor": 2.0}}')
    with pytest.raises(ConfigError, match="rope scaling"):
        convert_several(sources, [0.5, 0.5], tmp_path / "out", None, Mixing("cat"))
    with BaseModel.opened(base) as opened, pytest.raises(AdapterUnsupported, match="rope scaling"):
        convert_several(sources, [0.5, 0.5], tmp_path / "out", opened, Mixing("cat"))
    assert not (tmp_path / "out").exists()


def test_a_first_adapter_of_rslora_does_not_scale_the_mixture(base, make_adapter, tmp_path):
    sources = [make_adapter("a", use_rslora=True), make_adapter("b", seed=2)]
    convert_several(sources, [1.0, 1.0], tmp_path / "out", None, Mixing("cat"))
    one, two = (deltas(base, source) for source in sources)
    assert_same_deltas({name: one[name] + two[name] for name in one}, deltas(base, tmp_path / "out"))


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_draws_as_peft_does_from_the_seed_given(method):
    generator = torch.Generator().manual_seed(5)
    pairs = [LowRank(torch.randn(3, 8, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(2)]
    adapters = [PlainLoRA({"layers.0.mlp.up_proj": pair}) for pair in pairs]
    mixed, _ = mix(adapters, [0.5, 2.0], Mixing(method, density=0.5, seed=7))
    [found] = mixed.modules.values()
    torch.manual_seed(seed_of(7, "layers.0.mlp.up_proj"))
    combine, roots = getattr(merge_utils, method), torch.tensor([0.5, 2.0]).sqrt()
    torch.testing.assert_close(found.a_RD, combine([pair.a_RD for pair in pairs], roots, 0.5))
    torch.testing.assert_close(found.b_OR, combine([pair.b_OR for pair in pairs], roots, 0.5))


def test_dare_of_deltas_is_repeatable_and_keeps_the_expectation(make_adapter, tmp_path, base):
    sources = [make_adapter("a"), make_adapter("b", seed=2)]
    for name, seed in (("x", 3), ("y", 3), ("z", 4)):
        how = Mixing("dare_linear_svd", density=0.5, seed=seed, rank=32)
        convert_several(sources, [1.0, 1.0], tmp_path / name, None, how)
    x, y, z = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "xyz")
    assert x == y != z
    exact = sum(d.sum().item() for source in sources for d in deltas(base, source).values())
    drawn = sum(d.sum().item() for d in deltas(base, tmp_path / "x").values())
    spread = sum((d**2).sum().item() for source in sources for d in deltas(base, source).values()) ** 0.5
    assert abs(drawn - exact) < 5 * spread


def test_what_a_method_cannot_do_is_refused(make_adapter, tmp_path):
    sources = [make_adapter("a"), make_adapter("b", r=2)]
    with pytest.raises(InvalidRequest, match=r"ranks \[4, 2\].*Use cat or svd"):
        convert_several(sources, [1.0, 1.0], tmp_path / "out", None, Mixing("linear"))
    with pytest.raises(InvalidRequest, match="density is None"):
        Mixing("ties")
    with pytest.raises(InvalidRequest, match="density has no effect on cat"):
        Mixing("cat", density=0.5)
    with pytest.raises(InvalidRequest, match="rank has no effect on cat"):
        Mixing("cat", rank=3)
    with pytest.raises(InvalidRequest, match="seed has no effect on ties"):
        Mixing("ties", density=0.5, seed=1)
    with pytest.raises(InvalidRequest, match="majority_sign has no effect on linear"):
        Mixing("linear", majority_sign="total")
    with pytest.raises(InvalidRequest, match="1 weights"):
        convert_several(sources, [1.0], tmp_path / "out", None, Mixing("cat"))
