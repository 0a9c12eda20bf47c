from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import ModelConfig, read_model_config
from lorafleet.workers.tp.shard import ROW_PARALLEL, Shard
from tiny_models import make_model

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(make_model(Path(tmp_path_factory.mktemp("model")), "llama3"))


def covered(config: ModelConfig, size: int, projection: str, by_output: bool) -> list[int]:
    shards = [Shard.of(config, rank, size) for rank in range(size)]
    parts = [s.output(projection) if by_output else s.input(projection) for s in shards]
    return [i for part in parts for i in range(part.start, part.stop)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_all_ranks_are_the_whole(config: ModelConfig, size: int) -> None:
    shapes = config.linear_shapes()
    for name in (*COLUMN_PARALLEL, *ROW_PARALLEL):
        path = next(path for path in shapes if path.endswith(name))
        inputs, outputs = shapes[path]
        whole = inputs if name in ROW_PARALLEL else outputs
        if name in ("k_proj", "v_proj") and size > config.num_kv_heads:
            continue
        assert covered(config, size, path, by_output=name in COLUMN_PARALLEL) == list(range(whole))


def test_kv_heads_are_shared_where_there_are_fewer_than_ranks(config: ModelConfig) -> None:
    assert config.num_kv_heads == 2
    dim = config.head_dim
    starts = [Shard.of(config, rank, 4).output("layers.0.self_attn.k_proj").start for rank in range(4)]
    assert starts == [0, 0, dim, dim]
    assert Shard.of(config, 3, 4).local.num_kv_heads == 1


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
    with pytest.raises(ConfigError, match=named):
        Shard.of(replace(config, **change), 0, 4)
