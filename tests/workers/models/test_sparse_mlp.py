"""A mixture of experts from checkpoints of both layouts. test_matches_transformers.py compares what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model, stack_experts

WEIGHTS = "model.safetensors"


def parameters(folder: Path, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    model = DecoderModel(read_model_config(folder), TPGroup(rank, size), torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_in_one_tensor_load_as_experts_one_by_one_do(tmp_path: Path, family: str, ranks: int) -> None:
    single = make_model(tmp_path / "single", family)
    stacked = stack_experts(make_model(tmp_path / "stacked", family))
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(stacked / WEIGHTS))
    for rank in range(ranks):
        expected, found = parameters(single, rank, ranks), parameters(stacked, rank, ranks)
        assert any("experts" in name or "gate_up_EUD" in name for name in expected)
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("layout", ["single", "stacked"])
def test_a_checkpoint_without_one_experts_weights_is_refused(tmp_path: Path, layout: str) -> None:
    folder = make_model(tmp_path / "model", "mixtral")
    if layout == "stacked":
        stack_experts(folder)
    tensors = load_file(folder / WEIGHTS)
    name = next(
        name
        for name in tensors
        if name.endswith(("layers.1.mlp.experts.down_proj", "1.block_sparse_moe.experts.2.w2.weight"))
    )
    del tensors[name]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"the first is 'model\.layers\.1\.mlp\.experts\.\d\.down_proj\.weight'"):
        parameters(folder)


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = stack_experts(make_model(tmp_path / "model", "mixtral"))
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous()}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"gate_up_proj has shape \[4, 64, 96\]; config.json requires \[4, 96, 64\]"):
        parameters(folder)


def test_more_experts_a_token_than_experts_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3_moe")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_experts_per_tok": 3', '"num_experts_per_tok": 7'))
    with pytest.raises(ConfigError, match="num_experts_per_tok=7, more than its 6 experts"):
        read_model_config(folder)
