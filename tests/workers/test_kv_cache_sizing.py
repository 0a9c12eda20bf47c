"""The size and the shapes of the KV cache, for models whose layers differ."""

from __future__ import annotations

import pytest
import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers import kv_cache_sizing
from lorafleet.workers.attention.attention_backend import AttentionSpec, LayerAttention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.kv_cache_sizing import allocate_caches, longest_captured, size_cache
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup

BLOCK = 16
CPU = torch.device("cpu")


@pytest.fixture
def model(fleet) -> DecoderModel:
    return DecoderModel(read_model_config(fleet("gemma2").base), TPGroup(), torch.float32, CPU)


def test_bytes_and_shapes_are_each_layers_own(model, monkeypatch):
    own = [
        LayerAttention(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0),  # 2 * (8 + 8) numbers a token
        LayerAttention(num_heads=4, num_kv_heads=1, head_dim=24, scale=1.0, value_dim=16),  # 1 * (24 + 16)
        LayerAttention(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, window=4, cache_layer=0),  # none
    ]
    own += [own[2]] * (model.config.num_layers - 3)
    spec = AttentionSpec(tuple(own), BLOCK, torch.float32, torch.float16, CPU)
    monkeypatch.setattr(kv_cache_sizing, "CPU_CACHE_BYTES", 5 * BLOCK * 72 * 2 + 7)
    config = EngineConfig("m", load_format="dummy", block_size=BLOCK)
    num_blocks, max_model_len = size_cache(config, model, spec)
    assert (num_blocks, max_model_len) == (5, 5 * BLOCK)
    caches = allocate_caches(config, model.config, spec, num_blocks)
    assert [tuple(c.k_NPGD.shape) for c in caches[:2]] == [(5, BLOCK, 2, 8), (5, BLOCK, 1, 24)]
    assert [tuple(c.v_NPGD.shape) for c in caches[:2]] == [(5, BLOCK, 2, 8), (5, BLOCK, 1, 16)]
    assert all(cache is caches[0] for cache in caches[2:])
    assert sum(c.k_NPGD.nbytes + c.v_NPGD.nbytes for c in set(caches)) == 5 * BLOCK * 72 * 2


def test_the_cache_leaves_what_is_allocated_after_the_start(model, monkeypatch):
    spec = attention_spec(model.config, BLOCK, torch.float32, torch.float32, CPU, {})
    block_bytes = BLOCK * kv_cache_sizing.bytes_per_token(spec)
    monkeypatch.setattr(kv_cache_sizing, "CPU_CACHE_BYTES", 10 * block_bytes)
    config = EngineConfig("m", load_format="dummy", block_size=BLOCK)
    asked: list[int] = []

    def late_bytes(most_tokens: int) -> int:
        asked.append(most_tokens)
        return 3 * block_bytes

    assert size_cache(config, model, spec, None, late_bytes) == (7, 7 * BLOCK)
    assert asked == [10 * BLOCK]


def test_a_models_spec_has_its_windows_and_cap_by_layer(model):
    config = model.config
    spec = attention_spec(config, BLOCK, torch.float32, torch.float32, CPU, {})
    assert [layer.window for layer in spec.layers] == [attention.window for attention in config.attentions]
    assert len(spec.kinds) == 2  # with a window, and without
    first = config.attentions[0]
    assert {(x.head_dim, x.scale, x.softcap) for x in spec.layers} == {(first.head_dim, first.scale, first.softcap)}


@pytest.mark.parametrize(
    ("factors", "max_model_len", "captured"),
    [(None, None, 512), ((4.0,), None, 2048), ((64.0,), None, 4096), ((4.0,), 1000, 1000)],
)
def test_graphs_have_room_for_the_contexts_that_are_declared(model, factors, max_model_len, captured):
    """The base's context is 512 tokens, and the cache has 4096."""
    lora = LoRAConfig(long_lora_scaling_factors=factors)
    config = EngineConfig("m", load_format="dummy", block_size=BLOCK, lora=lora, max_model_len=max_model_len)
    assert longest_captured(config, model.config, 512, 4096 // BLOCK) == captured
