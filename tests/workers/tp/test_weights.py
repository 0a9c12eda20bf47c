"""What each rank holds of a checkpoint. No process group is needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.stored_tensors import StoredTensors
from lorafleet.workers.bases.weights import fill_randomly, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model

CPU = torch.device("cpu")
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(Path(tmp_path_factory.mktemp("model")), "llama_bias", vocab_size=321)


def empty(folder: Path, rank: int, size: int) -> DecoderModel:
    return DecoderModel(read_model_config(folder), TPGroup(rank, size), torch.float32, CPU)


def loaded(folder: Path, rank: int, size: int) -> DecoderModel:
    model = empty(folder, rank, size)
    load_weights(model, folder)
    return model


def filled(folder: Path, rank: int, size: int) -> DecoderModel:
    model = empty(folder, rank, size)
    fill_randomly(model)
    return model


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_holds_its_rows_and_columns(folder: Path, rank: int) -> None:
    whole = load_file(folder / "model.safetensors")
    model = loaded(folder, rank, 4)
    layer = list(model.decoder_layers())[1]
    heads = slice(rank * 24, (rank + 1) * 24)  # head_dim 24, 4 heads
    kv = slice(rank // 2 * 24, (rank // 2 + 1) * 24)  # 2 KV heads: two ranks have each
    inner = slice(rank * 24, (rank + 1) * 24)  # intermediate size 96

    def rows(suffix: str) -> tuple[Tensor, Tensor]:
        qkv = zip("qkv", (heads, kv, kv), strict=True)
        return (
            torch.cat([whole[f"{ATTENTION}.{p}_proj.{suffix}"][place] for p, place in qkv]),
            torch.cat([whole[f"{MLP}.{p}_proj.{suffix}"][inner] for p in ("gate", "up")]),
        )

    qkv_weight, gate_up_weight = rows("weight")
    qkv_bias, gate_up_bias = rows("bias")
    assert torch.equal(layer.mixer.qkv_proj.weight.weight, qkv_weight)
    assert torch.equal(layer.mixer.qkv_proj.bias, qkv_bias)
    assert torch.equal(layer.mlp.up_proj.weight.weight, gate_up_weight)
    assert torch.equal(layer.mlp.up_proj.bias, gate_up_bias)
    assert torch.equal(layer.mixer.o_proj.weight.weight, whole[f"{ATTENTION}.o_proj.weight"][:, heads])
    assert torch.equal(layer.mlp.down_proj.weight.weight, whole[f"{MLP}.down_proj.weight"][:, inner])
    assert torch.equal(layer.attention_in.norm.weight, whole["model.layers.1.input_layernorm.weight"])


@pytest.mark.parametrize("table", ["model.embed_tokens", "lm_head"])
def test_the_ranks_tables_are_the_vocabulary_then_zeros(folder: Path, table: str) -> None:
    models = [loaded(folder, rank, 4) for rank in range(4)]
    parts = [(m.lm_head if table == "lm_head" else m.embed_tokens).weight for m in models]
    assert [len(part) for part in parts] == [81] * 4
    together = torch.cat(parts)
    assert torch.equal(together[:321], load_file(folder / "model.safetensors")[f"{table}.weight"])
    assert together[321:].count_nonzero() == 0


def test_only_the_ranks_part_of_a_tensor_is_taken_from_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, int] = {}

    class Counting:
        def __init__(self, name, stored) -> None:
            self.name, self.stored = name, stored

        def get_shape(self) -> list[int]:
            return self.stored.get_shape()

        def __getitem__(self, place) -> Tensor:
            part = self.stored[place]
            taken[self.name] = part.numel()
            return part

    read = StoredTensors.stored
    monkeypatch.setattr(StoredTensors, "stored", lambda tensors, name: Counting(name, read(tensors, name)))
    model = loaded(folder, 3, 4)
    whole = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    assert taken.keys() == whole.keys()
    assert taken[f"{MLP}.down_proj.weight"] * 4 == whole[f"{MLP}.down_proj.weight"]
    assert taken["lm_head.weight"] == 78 * model.config.hidden_size
    assert sum(taken.values()) == sum(p.numel() for p in model.parameters()) - 2 * 3 * model.config.hidden_size


def test_shapes_are_checked_against_the_whole_models(folder: Path, tmp_path: Path) -> None:
    narrow = make_model(tmp_path / "narrow", "llama_bias", vocab_size=321, intermediate_size=48)
    model = empty(folder, 1, 2)
    with pytest.raises(ConfigError, match=r"has shape \[64, 48\]; config.json requires \[64, 96\]"):
        load_weights(model, narrow)


def test_progress_counts_every_tensor_on_every_rank(folder: Path) -> None:
    for rank in range(2):
        seen: list[tuple[int, int]] = []
        load_weights(empty(folder, rank, 2), folder, lambda done, total, seen=seen: seen.append((done, total)))
        total = len(load_file(folder / "model.safetensors"))
        assert seen == [(i + 1, total) for i in range(total)]


def test_random_weights_are_the_same_where_ranks_hold_the_same(folder: Path) -> None:
    models = [filled(folder, rank, 4) for rank in range(4)]
    q, k, v = zip(*(m.packed_linears()[0][1].weight.weight.split(24) for m in models), strict=True)
    for heads in (k, v):
        assert torch.equal(heads[0], heads[1]) and torch.equal(heads[2], heads[3])
        assert not torch.equal(heads[0], heads[2])
    assert not torch.equal(q[0], q[1])
    assert not torch.equal(k[0], v[0])
    assert all(m.norm.weight.eq(1).all() for m in models)
    assert all(m.embed_tokens.weight[:78].std() > 0.01 for m in models)
    again = filled(folder, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), models[2].parameters(), strict=True))
