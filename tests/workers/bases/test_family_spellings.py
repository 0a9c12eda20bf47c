"""The families of family_cases.py in a config.json as hubs have it from transformers 4, and what is refused of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from family_cases import CASES, SMALL
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.layer_config import QueryTemperature

# By case, what transformers 4 writes differently; ... stands for a key that it leaves out.
YARN_THETA = 10000.0
SPELLINGS: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": ..., "layer_types": ...},
    "olmo3": {"rope_parameters": ..., "rope_theta": YARN_THETA, "rope_scaling": "full_attention"},
    "exaone4": {"layer_types": ..., "sliding_window_pattern": "LG"},
    "exaone4_full": {"layer_types": ..., "sliding_window_pattern": None},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    "arcee": {},
    "apertus": {},
    "phi": {"num_key_value_heads": 2},
    "granite4": {"layer_types": ["attention"] * 2},
    "granite4_nope": {"layer_types": ..., "layers_block_type": ["attention"] * 2, "position_embedding_type": "nope"},
    "ministral": {},
    "ministral3": {},
    "helium": {},
    "stablelm": {},
    "nemotron": {},
    "olmo": {"clip_qkv": None},
    "cohere": {"use_qk_norm": False},
    "phimoe": {"num_experts_per_tok": 2},
    "gemma": {"hidden_act": "gelu", "hidden_activation": None},
}
PHIMOE_ROPE = CASES["phimoe"].options["rope_parameters"]


def config_of(case: str) -> dict[str, Any]:
    config_class = getattr(transformers, CASES[case].name + "Config")
    config = config_class(**(SMALL | CASES[case].options), architectures=[CASES[case].name + "ForCausalLM"])
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def read(folder: Path, config: dict[str, Any]) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return read_model_config(folder)


@pytest.mark.parametrize("case", SPELLINGS)
def test_the_spelling_of_transformers_4_means_the_same(tmp_path: Path, case: str) -> None:
    config = config_of(case)
    if case == "olmo3":
        config["rope_parameters"]["sliding_attention"]["rope_theta"] = YARN_THETA
    expected = read(tmp_path, config)
    rope = config.pop("rope_parameters") or {}
    old = config | SPELLINGS[case]
    old |= {"torch_dtype": old.pop("dtype", None)}
    rope = rope.get(SPELLINGS[case].get("rope_scaling"), rope)
    old["rope_theta"] = rope.pop("rope_theta", ...)
    old["partial_rotary_factor"] = rope.pop("partial_rotary_factor", ...)
    old["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    assert read(tmp_path, old) == expected


def test_what_a_config_leaves_out_is_the_familys_default(tmp_path: Path) -> None:
    for case in SPELLINGS:
        if case.startswith("granite4"):  # without layer_types, all layers of Granite 4 are recurrent
            continue
        name = CASES[case].name
        whole = json.loads(getattr(transformers, f"{name}Config")().to_json_string())
        bare = {"architectures": [f"{name}ForCausalLM"], "vocab_size": 300_000}  # Arcee's own lacks its end token
        assert read(tmp_path, bare) == read(tmp_path, whole | bare), name


def test_ministral_3_scales_queries_by_default(tmp_path: Path) -> None:
    model = read(tmp_path, {"architectures": ["Ministral3ForCausalLM"]})
    assert model.attentions[0].temperature == QueryTemperature(0.1, 16384)


def test_internlm_3_is_llama_with_other_names(tmp_path: Path) -> None:
    config = config_of("arcee") | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True}
    llama = read(tmp_path, config | {"hidden_act": "silu"})
    named = {"architectures": ["InternLM3ForCausalLM"], "hidden_act": "silu", "qkv_bias": True, "bias": True}
    own = read(tmp_path, config | {"attention_bias": ..., "mlp_bias": ...} | named)
    assert own == replace(llama, architecture="InternLM3ForCausalLM")


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("granite4", {"layer_types": ["conv", "attention"]}, "conv.*over 2 layers"),
        ("granite4", {"layer_types": None, "layers_block_type": ["mamba"] * 2}, "at least one layer must have it"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3"),
        ("phimoe", {"rope_parameters": PHIMOE_ROPE | {"long_mscale": 1.3}}, "short_mscale and long_mscale"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types.*over 1 layers"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, case: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, config_of(case) | changes)
