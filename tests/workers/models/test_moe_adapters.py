"""Adapters that PEFT makes for a layer's mixture of experts, against PEFT's own module, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.merging import merge
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.bases.checkpoint import ModelConfig
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models import sparse_mlp
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import pack
from lorafleet.workers.tp.group import TPGroup
from tests.workers.models.test_moe_families import FAMILIES, HIDDEN, checkpoint, output, reference
from tiny_models import make_model

CPU = torch.device("cpu")
NUM_TOKENS = 9
# For each family the parameters and modules that its adapter targets.
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "gpt-oss": (["experts.gate_up_proj", "experts.down_proj", "router.weight"], []),
    "llama 4": (["experts.gate_up_proj", "experts.down_proj"], ["shared_expert.up_proj", "shared_expert.down_proj"]),
    "nemotron h": (["experts.up_proj", "experts.down_proj", "gate.weight"], ["shared_experts.up_proj"]),
    "glm 4.5": (["experts.gate_up_proj", "gate.weight"], ["shared_experts.gate_proj", "shared_experts.down_proj"]),
    "qwen 2": (["experts.down_proj"], ["shared_expert.gate_proj", "shared_expert_gate"]),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe") / "dense", "qwen3", num_hidden_layers=1)


class Decoder(nn.Module):
    """The modules around the mixture, whose names are those of a checkpoint."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        layer = nn.Module()
        layer.mlp = mlp
        self.model.layers = nn.ModuleList([layer])

    def forward(self, x_TD: Tensor) -> Tensor:
        out = self.model.layers[0].mlp(x_TD.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).view_as(x_TD)


def make_adapter(folder: Path, module: nn.Module, family: str, x_TD: Tensor) -> Tensor:
    """Saves an adapter for the module, and returns the output of PEFT's."""
    import peft

    parameters, modules = TARGETS[family]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules, target_parameters=parameters)
    model = peft.get_peft_model(Decoder(module), config)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    out: Tensor = model.eval()(x_TD)
    model.save_pretrained(folder)
    return out


def loaded(
    config: ModelConfig, base: Path, adapter: Path, rank: int, ranks: int, max_loras: int = 1
) -> tuple[SparseMLP, LoRAModelManager]:
    """Returns this rank's mixture, and its slots with the adapter in slot 0."""
    layout = Base(BaseLayout.of(config), None, "tiny")
    forms = read_adapter(adapter, base=layout, max_rank=8, dtype=torch.float32, name="a").forms
    model = DecoderModel(config, TPGroup(rank, ranks), torch.float32, CPU)
    load_weights(model, base)
    manager = LoRAModelManager(model, LoRAConfig(max_loras=max_loras, max_lora_rank=8), torch.float32, CPU)
    part = LoRAModel.of(forms, ContentDigest.known("a"), torch.float32, "a", manager.sharding)
    packed = pack(part, manager.base_parts, torch.float32, lambda size: torch.empty(size, dtype=torch.uint8))
    manager.activate(packed, manager.slots[0])
    (_, mixture), *_ = model.mixtures()
    return mixture, manager


def adapted(config: ModelConfig, base: Path, adapter: Path, x_TD: Tensor, ranks: int) -> Tensor:
    """Returns the mixture's output for tokens that alternate between the base and the adapter, summed over ranks."""
    total = torch.zeros_like(x_TD)
    for rank in range(ranks):
        mixture, manager = loaded(config, base, adapter, rank, ranks)
        batch = LoRABatch.build([BASE_SLOT if t % 2 else 0 for t in range(len(x_TD))], manager.tables)
        total += mixture(x_TD, batch).y_TO
    return total


def merged(config: ModelConfig, base: Path, adapter: Path, dense: Path) -> Path:
    """Returns a checkpoint of the base with the adapter merged into it."""
    shutil.copy(dense / "config.json", base)
    with BaseModel.opened(base) as opened:
        own = replace(opened, config=config)
        forms = read_adapter(
            adapter, base=own.for_reader(torch.float32), max_rank=8, dtype=torch.float32, name="a"
        ).forms
        merge(own, adapter, forms, base.with_name("merged"))
    return base.with_name("merged")


def make_single_adapter(folder: Path, module: nn.Module) -> None:
    """Saves an adapter in the layout of transformers 4, and adds its changes to the module's weights."""
    generator, tensors = torch.Generator().manual_seed(9), {}
    weights = module.state_dict()

    def change(name: str, weight: Tensor) -> None:
        a = 0.3 * torch.randn(3, weight.shape[1], generator=generator)
        b = 0.3 * torch.randn(weight.shape[0], 3, generator=generator)
        prefix = f"base_model.model.model.layers.0.mlp.{name}"
        tensors.update({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b})
        weight += 2.0 * b @ a

    for name, tensor in weights.items():
        if name.startswith("experts."):
            leaves = ("gate_proj", "up_proj") if "gate_up" in name else (name.removeprefix("experts."),)
            for expert, matrix in enumerate(tensor):
                for leaf, rows in zip(leaves, matrix.chunk(len(leaves)), strict=True):
                    change(f"experts.{expert}.{leaf}", rows)
        elif name.endswith(".weight"):
            change(name.removesuffix(".weight"), tensor)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": r".*\.mlp\..*"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek v3", "nemotron h", "qwen 2"])
def test_adapters_on_single_experts_equal_changed_weights(name: str, dense: Path, tmp_path: Path) -> None:
    family, base, adapter = FAMILIES[name], tmp_path / "base", tmp_path / "adapter"
    module = reference(family)
    config = checkpoint(base, dense, family, module.state_dict())
    make_single_adapter(adapter, module)
    x_TD = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = output(config, base, x_TD, 1)
    expected[::2] = module(x_TD.unsqueeze(0))[0, ::2]
    for ranks in (1, 2):
        found = adapted(config, base, adapter, x_TD, ranks)
        torch.testing.assert_close(found, expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")  # PEFT does not know the model around the mixture.
def test_equals_peft(name: str, dense: Path, tmp_path: Path) -> None:
    family, base, adapter = FAMILIES[name], tmp_path / "base", tmp_path / "adapter"
    module = reference(family)
    config = checkpoint(base, dense, family, module.state_dict())
    x_TD = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = output(config, base, x_TD, 1)
    own = make_adapter(adapter, module, name, x_TD)
    close = partial(torch.testing.assert_close, atol=2e-5 * own.abs().max().item(), rtol=1e-5)
    assert (own - expected).abs().max() > 0.1 * expected.abs().max()
    close(output(config, merged(config, base, adapter, dense), x_TD, 1), own)
    expected[::2] = own[::2]
    for ranks in (1, 2):
        close(adapted(config, base, adapter, x_TD, ranks), expected)


@torch.no_grad()
def test_steps_without_adapters_on_experts_launch_nothing_for_them(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, base, adapter = FAMILIES["deepseek v3"], tmp_path / "base", tmp_path / "adapter"
    module = reference(family)
    config = checkpoint(base, dense, family, module.state_dict())
    make_single_adapter(adapter, module)
    mixture, manager = loaded(config, base, adapter, 0, 1, max_loras=2)
    launched: list[bool] = []

    def experts_mlp(x_TD: Tensor, *arguments: Any) -> Tensor:
        launched.append(arguments[2] is not None)
        return torch.zeros_like(x_TD)

    monkeypatch.setattr(sparse_mlp, "experts_mlp", experts_mlp)
    attention_only, on_experts = (manager.static_batch(4, 3, takes_experts=takes) for takes in (False, True))
    attention_only.fill([1, BASE_SLOT], [8, 8])
    on_experts.fill([1, 0], [8, 8])
    built = [LoRABatch.build(slots, manager.tables) for slots in ([1, 1], [BASE_SLOT, 1, 0])]
    for batch in (attention_only, on_experts, *built):
        assert batch is not None
        mixture(torch.ones(batch.num_tokens, HIDDEN), batch)
    assert launched == [False, True, False, True]
    with pytest.raises(AssertionError, match="nothing for experts"):
        attention_only.fill([1, 0], [8, 8])
