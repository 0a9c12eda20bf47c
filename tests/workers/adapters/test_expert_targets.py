"""Adapters on experts: forms of both layouts, and what is refused. test_matches_transformers.py compares answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorafleet.protocol.errors import AdapterError, AdapterMalformed, AdapterMismatch, AdapterUnsupported, RankTooLarge
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.forms import AdapterForms, StackedLowRank
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.bases.checkpoint import read_model_config
from tiny_models import make_adapter, make_layered_adapter, make_model

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PARAMETERS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "mixtral", "mixtral")


@pytest.fixture
def stacked(model: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "stacked", model, **PARAMETERS)


@pytest.fixture
def layered(model: Path, tmp_path: Path) -> Path:
    return make_layered_adapter(tmp_path / "layered", model)


def read(adapter: Path, model: Path, max_rank: int = 64) -> AdapterForms:
    base = Base(BaseLayout.of(read_model_config(model)), None, "tiny")
    return read_adapter(adapter, base=base, max_rank=max_rank, dtype=torch.float32, name="a").forms


def configured(adapter: Path, **changes: Any) -> Path:
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return adapter


def with_tensors(adapter: Path, change: Callable[[str, Tensor], tuple[str, Tensor] | None]) -> Path:
    path = adapter / WEIGHTS
    changed = (change(name, tensor) for name, tensor in load_file(path).items())
    save_file({name: tensor.contiguous() for name, tensor in filter(None, changed)}, path)
    return adapter


def delta(stack: StackedLowRank | None, expert: int) -> Tensor:
    assert stack is not None
    a_GRD = stack.a_EGRD.of_expert(expert)
    b_GOR = stack.b_EPOR.of_expert(expert).flatten(0, 1).chunk(len(a_GRD))
    parts = zip(b_GOR, a_GRD, stack.scaling_EG[expert], strict=True)
    return torch.cat([scaling * b_OR @ a_RD for b_OR, a_RD, scaling in parts])


def test_each_expert_may_have_a_rank_and_alpha_of_its_own(model: Path, tmp_path: Path) -> None:
    ranks, alphas = {"experts.2.w1": 2, "w2": 7, "0.block_sparse_moe.experts.1.w3": 5}, {"experts.3.w3": 40, "w2": 1}
    adapter = make_layered_adapter(tmp_path / "a", model, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=True)
    forms, tensors = read(adapter, model), load_file(adapter / WEIGHTS)

    def expected(layer: int, expert: int, leaf: str) -> Tensor:
        module = f"{layer}.block_sparse_moe.experts.{expert}.{leaf}"
        name = f"base_model.model.model.layers.{module}"
        rank = next((rank for ending, rank in ranks.items() if module.endswith(ending)), 4)
        alpha = next((alpha for ending, alpha in alphas.items() if module.endswith(ending)), 8)
        return alpha / rank**0.5 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]

    for layer in range(3):
        experts = forms.experts[f"layers.{layer}.mlp.experts"]
        for expert in range(4):
            gate_up = torch.cat([expected(layer, expert, leaf) for leaf in ("w1", "w3")])
            torch.testing.assert_close(delta(experts.gate_up, expert), gate_up)
            torch.testing.assert_close(delta(experts.down, expert), expected(layer, expert, "w2"))


def test_a_parameter_targeted_alone_has_the_outer_tensors(model: Path, tmp_path: Path) -> None:
    options = PARAMETERS | {"target_parameters": ["experts.gate_up_proj"]}
    forms = read(make_adapter(tmp_path / "a", model, **options), model)
    assert all(form.down is None and form.gate_up is not None for form in forms.experts.values())


def test_forms_hold_the_values_that_were_read_and_no_copy_of_them(stacked: Path, layered: Path, model: Path) -> None:
    """The values of a push are in memory that all replicas share, and are copied once, to where they are served."""
    for adapter in (stacked, layered):
        stacks = [stack for form in read(adapter, model).experts.values() for stack in form.stacks]
        pieces = [piece for stack in stacks for piece in (*stack.a_EGRD.pieces, *stack.b_EPOR.pieces)]
        assert len({piece.values_EGXY.untyped_storage().data_ptr() for piece in pieces}) == 1


def test_all_linear_need_not_mean_experts_and_routers(model: Path, layered: Path) -> None:
    with_tensors(layered, lambda name, tensor: (name, tensor) if "q_proj" in name else None)
    forms = read(
        configured(layered, target_modules="all-linear", exclude_modules=["k_proj", "v_proj", "o_proj"]), model
    )
    assert not forms.experts
    assert sorted(forms.linears) == [f"layers.{layer}.self_attn.q_proj" for layer in range(3)]


Break = Callable[[Path], Path]
Case = tuple[Break, type[AdapterError], str]


def config(**changes: Any) -> Break:
    return lambda adapter: configured(adapter, **changes)


def tensors(change: Callable[[str, Tensor], tuple[str, Tensor] | None]) -> Break:
    return lambda adapter: with_tensors(adapter, change)


def without(part: str) -> Break:
    return tensors(lambda name, tensor: None if part in name else (name, tensor))


def cut(part: str, change: Callable[[Tensor], Tensor]) -> Break:
    return tensors(lambda name, tensor: (name, change(tensor) if part in name else tensor))


def renamed(old: str, new: str) -> Break:
    return tensors(lambda name, tensor: (name.replace(old, new), tensor))


LAYERED: dict[str, Case] = {
    "DoRA": (config(use_dora=True), AdapterUnsupported, "DoRA on experts"),
    "a bias": (config(lora_bias=True), AdapterUnsupported, "a bias on lora_B on experts"),
    "PiSSA": (config(init_lora_weights="pissa"), AdapterUnsupported, "'pissa' on experts"),
    "an expert missing": (without("1.block_sparse_moe.experts.2.w1"), AdapterMalformed, "2.gate_proj"),
    "B missing": (without("0.block_sparse_moe.experts.2.w1.lora_B"), AdapterMalformed, "lora_B"),
    "up untargeted": (config(target_modules=["q_proj", "gate", "w1", "w2"]), AdapterMalformed, "up_proj"),
    "a router untargeted": (config(target_modules=["q_proj", "w1", "w2", "w3"]), AdapterMalformed, "mlp.gate"),
    "a router missing": (without("1.block_sparse_moe.gate"), AdapterMalformed, "layers.1.mlp.gate"),
    "too many experts": (renamed("experts.3", "experts.4"), AdapterMismatch, "experts.4.gate_proj"),
    "another size": (cut("w2.lora_A", lambda a: a[:, :40]), AdapterMismatch, "another model"),
    "another rank": (config(r=5), AdapterMalformed, "rank 4 in the weights, but 5"),
    "both layouts": (config(target_parameters=["experts.down_proj"]), AdapterMalformed, "mlp.experts"),
    "experts saved whole": (config(modules_to_save=["experts"]), AdapterUnsupported, "replaces .*mlp.experts, which"),
}
STACKED: dict[str, Case] = {
    "DoRA": (config(use_dora=True), AdapterUnsupported, "DoRA on experts or parameters"),
    "a layer missing": (without("layers.1."), AdapterMalformed, "layers.1.mlp.experts"),
    "down untargeted": (config(target_parameters=["gate_up_proj"]), AdapterMalformed, "experts.base_layer"),
    "unknown parameter": (config(target_parameters=["w1", "gate_up_proj"]), AdapterUnsupported, "'w1'"),
    "every weight": (config(target_parameters=["weight"]), AdapterUnsupported, "or other parameters too"),
    "another rank": (config(r=4), AdapterMismatch, r"\[12, 64\].* require \[16, 64\]"),
    "fewer experts": (cut("lora_A", lambda a: a[:9]), AdapterMismatch, "lora_A"),
}


@pytest.mark.parametrize("case", LAYERED)
def test_of_experts_one_by_one_is_refused(model: Path, layered: Path, case: str) -> None:
    break_it, error, named = LAYERED[case]
    with pytest.raises(error, match=named):
        read(break_it(layered), model)


@pytest.mark.parametrize("case", STACKED)
def test_of_experts_in_one_parameter_is_refused(model: Path, stacked: Path, case: str) -> None:
    break_it, error, named = STACKED[case]
    with pytest.raises(error, match=named):
        read(break_it(stacked), model)


def test_an_experts_rank_counts(model: Path, stacked: Path) -> None:
    with pytest.raises(RankTooLarge, match="rank 3"):
        read(stacked, model, max_rank=2)


@pytest.mark.parametrize(
    ("names", "targets"),
    [
        (("w1", "w3", "w2"), ["w1", "w2", "w3"]),
        (("w1", "w3", "w2"), ["gate_proj", "up_proj", "down_proj"]),
        (("gate_proj", "up_proj", "down_proj"), r".*\.experts\.(gate|up|down)_proj"),
    ],
)
@pytest.mark.parametrize("shares", [True, False])
def test_matrices_of_all_experts_may_be_shared(
    model: Path, tmp_path: Path, names: tuple[str, ...], targets: Any, shares: bool
) -> None:
    """A of gate and up, and B of down, have a first dimension of 1, as SGLang's shared outer LoRA."""
    count, rank, hidden, inner = 4, 3, 64, 48
    tensors: dict[str, Tensor] = {}
    for layer in range(3):
        for name in names:
            is_down = name == names[2]
            a_ERD = torch.randn(1 if shares and not is_down else count, rank, inner if is_down else hidden)
            b_EOR = torch.randn(1 if shares and is_down else count, hidden if is_down else inner, rank)
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts.{name}"
            tensors |= {f"{prefix}.lora_A.weight": a_ERD, f"{prefix}.lora_B.weight": b_EOR}
    save_file(tensors, tmp_path / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": targets}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    experts = read(tmp_path, model).experts
    for layer in range(3):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        products = [2 * tensors[f"{prefix}.{n}.lora_B.weight"] @ tensors[f"{prefix}.{n}.lora_A.weight"] for n in names]
        form = experts[f"layers.{layer}.mlp.experts"]
        for expert in range(count):
            gate_up = torch.cat([product[expert] for product in products[:2]])
            torch.testing.assert_close(delta(form.gate_up, expert), gate_up)
            torch.testing.assert_close(delta(form.down, expert), products[2][expert])
    for name, wrong in ((f"{prefix}.{names[0]}.lora_A.weight", 2), (f"{prefix}.{names[2]}.lora_B.weight", 5)):
        damaged = tensors | {name: tensors[name][:1].repeat(wrong, 1, 1)}
        save_file(damaged, tmp_path / WEIGHTS)
        with pytest.raises(AdapterMismatch, match=r"require \[4, "):
            read(tmp_path, model)
