from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.tp.shard import Shard
from tiny_models import make_model

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(make_model(Path(tmp_path_factory.mktemp("model")), "llama3"))


def covered(config: ModelConfig, size: int, projection: str, by_output: bool) -> list[int]:
    shards = [Shard.of(config, rank, size) for rank in range(size)]
    parts = [s.outputs(projection) if by_output else (s.input(projection),) for s in shards]
    return [i for rank_parts in parts for part in rank_parts for i in range(part.start, part.stop)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_all_ranks_are_the_whole(config: ModelConfig, size: int) -> None:
    shapes = {path: projection.shape for path, projection in config.projections().items()}
    for name in (*COLUMN_PARALLEL, *ROW_PARALLEL):
        path = next(path for path in shapes if path.endswith(name))
        inputs, outputs = shapes[path]
        whole = inputs if name in ROW_PARALLEL else outputs
        if name in ("k_proj", "v_proj") and size > config.layers[0].attention.num_kv_heads:
            continue
        assert covered(config, size, path, by_output=name in COLUMN_PARALLEL) == list(range(whole))


def test_kv_heads_are_shared_where_there_are_fewer_than_ranks(config: ModelConfig) -> None:
    assert config.layers[0].attention.num_kv_heads == 2
    dim = config.layers[0].attention.head_dim
    starts = [Shard.of(config, rank, 4).outputs("layers.0.self_attn.k_proj")[0].start for rank in range(4)]
    assert starts == [0, 0, dim, dim]
    assert Shard.of(config, 3, 4).local.layers[0].attention.num_kv_heads == 1


def test_vocabulary_need_not_divide(config: ModelConfig) -> None:
    odd = replace(config, vocab_size=10)
    parts = [Shard.of(odd, rank, 4).vocabulary for rank in range(4)]
    assert [(p.start, p.stop) for p in parts] == [(0, 3), (3, 6), (6, 9), (9, 10)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, "num_attention_heads=6"),
        ({"intermediate_size": 98}, "intermediate_size=98"),
        ({"num_heads": 12, "num_kv_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(config: ModelConfig, change: dict[str, int], named: str) -> None:
    first = config.layers[0]
    attention = replace(first.attention, **{name: n for name, n in change.items() if "heads" in name})
    mlp = replace(first.mlp, **{name: n for name, n in change.items() if "heads" not in name})
    odd = replace(config, layers=(replace(first, mixer=attention, mlp=mlp), *config.layers[1:]))
    with pytest.raises(ConfigError, match=named):
        Shard.of(odd, 0, 4)
