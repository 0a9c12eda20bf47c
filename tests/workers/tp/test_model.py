"""The model on several ranks says what it says on one: logits of every family, from the weights to the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention.attention_backend import AttentionBatch, KVCache
from lorafleet.workers.attention.torch_backend import TorchAttention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.device.sampler import greedy, greedy_of_ranks
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from ranks import on_ranks
from tiny_models import COMMON, FAMILIES, make_model

CPU = torch.device("cpu")
PROMPTS = 19, 11  # tokens; longer than the windows of 8
DECODES = 4
BLOCK, BLOCKS_A_SEQUENCE = 4, 6
# A vocabulary that no number of ranks divides, and one that leaves the last of four ranks nothing.
ODD = {
    "odd tied": ("llama3", 321),
    "odd gemma2": ("gemma2", 321),
    "odd": ("qwen3", 323),
    "tiny": ("qwen2_window", 5),
    "tiny tied": ("qwen2", 5),
}
NAMES = [*FAMILIES, *ODD]


def build(folder: Path, group: TPGroup) -> DecoderModel:
    model = DecoderModel(read_model_config(folder), group, torch.float32, CPU)
    load_weights(model, folder)
    return model


@torch.inference_mode()
def run(model: DecoderModel) -> tuple[list[Tensor], list[list[int]]]:
    """Two prompts in one step, then decodes of both, all with random tokens: every step's logits [T, V], and the
    tokens that would be chosen."""
    config, local = model.config, model.shard.local
    spec = attention_spec(local, BLOCK, torch.float32, torch.float32, CPU, {})
    shape = (2 * BLOCKS_A_SEQUENCE, BLOCK, local.attentions[0].num_kv_heads, local.attentions[0].head_dim)
    caches = [KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
    attention = TorchAttention(spec, caches)
    tables = [list(range(b * BLOCKS_A_SEQUENCE, (b + 1) * BLOCKS_A_SEQUENCE)) for b in range(2)]
    random = torch.Generator().manual_seed(3)
    logits: list[Tensor] = []
    chosen: list[list[int]] = []
    starts = [0, 0]
    for step in range(1 + DECODES):
        counts = list(PROMPTS) if step == 0 else [1, 1]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        attention.plan(AttentionBatch(counts, ends, tables))
        position_T = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        sequence_T = torch.tensor([0, 1]).repeat_interleave(torch.tensor(counts))
        lengths_T = torch.maximum(torch.tensor(PROMPTS)[sequence_T], position_T + 1)
        slots_T = sequence_T * BLOCKS_A_SEQUENCE * BLOCK + position_T
        tokens_T = torch.randint(config.vocab_size, (sum(counts),), generator=random)
        hidden_TD = model(tokens_T, position_T, lengths_T, slots_T, caches, attention, None)
        own_TW = model.logits(hidden_TD)
        logits.append(model.gather_logits(own_TW))
        chosen.append(greedy_of_ranks(own_TW, model.group).tolist())
        starts = ends
    return logits, chosen


def run_all(group: TPGroup, folders: dict[str, Path]) -> dict[str, Any]:
    return {name: run(build(folder, group)) for name, folder in folders.items()}


def choose(group: TPGroup, logits_BV: Tensor) -> list[int]:
    """From this rank's columns, padded, as the head gives them."""
    width = -(-logits_BV.shape[1] // group.size)
    own_BW = torch.full((logits_BV.shape[0], width), float("-inf"))
    mine_BW = logits_BV[:, group.rank * width :][:, :width]
    own_BW[:, : mine_BW.shape[1]] = mine_BW
    return greedy_of_ranks(own_BW, group).tolist()


def coarse(vocab: int) -> Tensor:
    """With many ties."""
    return torch.randn(60, vocab, generator=torch.Generator().manual_seed(vocab)).mul(2).round()


def on_a_rank(group: TPGroup, folders: dict[str, Path]) -> tuple[dict[str, Any], dict[int, list[int]]]:
    return run_all(group, folders), {vocab: choose(group, coarse(vocab)) for vocab in (3, 61, 128)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: make_model(root / name, name) for name in FAMILIES}
    return made | {name: make_model(root / name, family, vocab_size=vocab) for name, (family, vocab) in ODD.items()}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, Any]:
    return run_all(TPGroup(), folders)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest, folders: dict[str, Path]) -> list[Any]:
    return on_ranks(request.param, on_a_rank, folders)


@pytest.mark.parametrize("name", NAMES)
def test_every_ranks_logits_are_those_of_one(ranks: list[Any], alone: dict[str, Any], name: str) -> None:
    for logits, _ in (results[name] for results, _ in ranks):
        for of_ranks, of_one in zip(logits, alone[name][0], strict=True):
            torch.testing.assert_close(of_ranks, of_one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_choose_the_largest_of_the_whole_vocabulary(ranks: list[Any], name: str) -> None:
    for logits, chosen in (results[name] for results, _ in ranks):
        assert chosen == [greedy(step).tolist() for step in logits]


def test_of_equal_logits_the_ranks_choose_the_first(ranks: list[Any]) -> None:
    for _, choices in ranks:
        for vocab, chosen in choices.items():
            assert chosen == [row.index(max(row)) for row in coarse(vocab).tolist()]


class Counted(TPGroup):
    """Of two ranks, where the other's part is always zero."""

    sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        Counted.sums += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack((x, torch.zeros_like(x)))


def test_a_forward_pass_sums_over_the_ranks_twice_a_layer_and_once_for_the_embedding(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(folders["llama_bias"], Counted(0, 2))
    monkeypatch.setattr(Counted, "sums", 0)
    run(model)
    assert Counted.sums == (1 + 2 * COMMON["num_hidden_layers"]) * (1 + DECODES)


@pytest.mark.parametrize(("size", "named"), [(3, "num_attention_heads=4"), (8, "num_attention_heads=4")])
def test_a_model_that_does_not_divide_is_refused(folders: dict[str, Path], size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(folders["llama3"], TPGroup(0, size))
