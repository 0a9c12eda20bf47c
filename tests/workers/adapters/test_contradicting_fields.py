"""A field of adapter_config.json that the tensors contradict is refused, whichever of the two says more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lorafleet.protocol.errors import AdapterError
from lorafleet.workers.adapters.peft_fields import FIELDS
from tests.workers.conftest import AdapterDir, peft_warnings_ignored

LORA_TARGETS = ["q_proj", "v_proj"]
OWN = "base_model.model.model.layers.0.self_attn.q_proj"
# Fields whose values no tensor shows.
UNSEEN = {
    *(
        "alpha_pattern",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "init_lora_weights",
        "lora_alpha",
        "peft_type",
    ),
    *("use_rslora", "alora_invocation_tokens", "rope_scaling", "rope_parameters", "context_length"),
    *("fan_in_fan_out", "original_max_position_embeddings"),
}
# By field: how the adapter is made, what the config says afterwards, and words of the refusal.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("r", {}, {"r": 8}, "rank 4 in the weights, but 8"),
    ("rank_pattern", {"rank_pattern": {"v_proj": 2}}, {"rank_pattern": {}}, "rank 2 in the weights, but 4"),
    ("rank_pattern", {}, {"rank_pattern": {"v_proj": 2}}, "rank 4 in the weights, but 2"),
    ("use_dora", {"use_dora": True}, {"use_dora": False}, "lora_magnitude_vector' does not belong"),
    ("use_dora", {}, {"use_dora": True}, "without lora_magnitude_vector"),
    ("lora_bias", {"lora_bias": True}, {"lora_bias": False}, "lora_B.bias' does not belong"),
    ("lora_bias", {}, {"lora_bias": True}, "without lora_B.bias"),
    ("bias", {"bias": "all"}, {"bias": "none"}, "bias"),
    ("bias", {"bias": "all"}, {"bias": "lora_only"}, "layers.0.self_attn.k_proj"),
    ("bias", {"bias": "lora_only"}, {"bias": "none"}, "base_layer.bias' does not belong"),
    ("bias", {"bias": "lora_only"}, {"bias": "all"}, "bias='all'"),
    ("target_modules", {}, {"target_modules": ["q_proj"]}, "does not target"),
    ("target_modules", {}, {"target_modules": [*LORA_TARGETS, "o_proj"]}, "has no tensors"),
    ("target_modules", {}, {"target_modules": r"model\.layers\.0\..*q_proj"}, "does not target"),
    ("exclude_modules", {}, {"exclude_modules": ["v_proj"]}, "does not target"),
    ("exclude_modules", {"exclude_modules": ["v_proj"]}, {"exclude_modules": None}, "has no tensors"),
    ("layers_to_transform", {}, {"layers_to_transform": [0]}, "does not target"),
    ("layers_to_transform", {"layers_to_transform": [0]}, {"layers_to_transform": None}, "has no tensors"),
    ("layers_pattern", {"layers_to_transform": [0]}, {"layers_pattern": ["blocks"]}, "does not target"),
    ("target_parameters", {}, {"target_parameters": ["o_proj.weight"]}, "has no tensors"),
    ("modules_to_save", {"modules_to_save": ["norm"]}, {"modules_to_save": None}, "does not target"),
    ("modules_to_save", {}, {"modules_to_save": ["lm_head"]}, "lacks it"),
    ("trainable_token_indices", {"trainable_token_indices": [3]}, {"trainable_token_indices": None}, "embed_tokens"),
    (
        "trainable_token_indices",
        {"trainable_token_indices": [3]},
        {"trainable_token_indices": [3, 4]},
        "require [2, 32]",
    ),
    ("trainable_token_indices", {}, {"trainable_token_indices": [3]}, "trained tokens of embed_tokens"),
    ("kasa_config", {}, {"kasa_config": {}}, "without lora_diag"),
    ("use_bdlora", {}, {"use_bdlora": {"nblocks": 2, "target_modules_bd_a": ["q_proj", "v_proj"]}}, "require [4, 16]"),
    ("velora_config", {}, {"velora_config": {}}, "without lora_velora_embed"),
    ("task_type", {}, {"task_type": "SEQ_CLS"}, "has no head"),
]


@pytest.mark.parametrize(("field", "made", "changed", "words"), CASES)
def test_it_is_refused(
    make_adapter: Callable[..., AdapterDir], field: str, made: dict[str, Any], changed: dict[str, Any], words: str
) -> None:
    with peft_warnings_ignored():
        adapter = make_adapter(family="qwen2", **made)
    adapter.load()
    with pytest.raises(AdapterError) as caught:
        adapter.set(**changed).load()
    assert words in caught.value.message, field


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [("lora_magnitude_vector", (32,)), ("lora_B.bias", (32,)), ("lora_diag", (4,)), ("lora_velora_embed", (4,))],
)
def test_a_tensor_of_a_feature_that_is_off_is_refused_in_one_module_too(adapter: Any, leaf: str, shape: Any) -> None:
    adapter.write(adapter.tensors | {f"{OWN}.{leaf}": torch.ones(shape)})
    with pytest.raises(AdapterError, match=leaf):
        adapter.load()


def test_every_field_of_lora_is_tried() -> None:
    assert FIELDS["LORA"].used == {case[0] for case in CASES} | (UNSEEN & FIELDS["LORA"].used)


@pytest.mark.parametrize("value", [True, False])
def test_a_field_that_peft_resets_does_not_matter(adapter: Any, value: bool) -> None:
    """PEFT turns fan_in_fan_out off on linears."""
    plain = adapter.load().modules
    found = adapter.set(fan_in_fan_out=value).load().modules
    assert all(torch.equal(plain[module].b_OR, found[module].b_OR) for module in plain)
