"""What config.json says and the tensors contradict is decided by the tensors, or refused by name.

docs/models.md has the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from family_cases import CASES, make_case
from float_checkpoints import float_checkpoint
from int_checkpoints import awq, gptq, written
from lorafleet.offline.llm import LLM
from lorafleet.protocol.errors import ConfigError
from quantized_answers import GREEDY
from tests.workers.bases.test_checkpoint import edit
from tiny_models import make_model

MIXTURE: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": []}
# Family, what config.json says of its checkpoint, and what the error names.
FLAGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fewer biases of attention": ("llama_bias", {"attention_bias": False}, r"self_attn\.\w+\.bias.*does not have"),
    "more biases of attention": ("llama2", {"attention_bias": True}, r"lacks.*self_attn\.\w+\.bias"),
    "fewer biases of MLPs": ("llama_bias", {"mlp_bias": False}, r"mlp\.\w+\.bias.*does not have"),
    "more biases of MLPs": ("llama2", {"mlp_bias": True}, r"lacks.*mlp\.\w+\.bias"),
    "fewer layers": ("llama2", {"num_hidden_layers": 1}, r"layers\.1\..*does not have"),
    "more layers": ("llama2", {"num_hidden_layers": 3}, r"lacks.*layers\.2\."),
    "fewer tokens": ("llama2", {"vocab_size": 300}, r"(embed_tokens|lm_head)\.weight has shape \[320, 64\]"),
    "more tokens": ("llama3", {"vocab_size": 400}, r"embed_tokens.* has shape \[320, 64\]"),
    "another size of heads": ("llama2", {"head_dim": 32}, r"proj\.weight has shape"),
    "fewer heads": ("llama2", {"num_attention_heads": 2, "num_key_value_heads": 2}, r"proj\.weight has shape"),
    "other KV heads": ("llama3", {"num_key_value_heads": 1}, r"[kv]_proj\.weight has shape \[32, 64\]"),
    "KV heads in one linear": ("phi3", {"num_key_value_heads": 1}, r"qkv_proj\.weight has shape"),
    "another size of MLPs": ("llama2", {"intermediate_size": 64}, r"_proj\.weight has shape"),
    "another hidden size": ("llama2", {"hidden_size": 32, "head_dim": 16}, r"has shape"),
    "another class": ("qwen3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, r"[qk]_norm.*not have"),
    "norms of queries": ("llama2", {"architectures": ["Qwen3ForCausalLM"]}, r"lacks.*[qk]_norm"),
    "fewer experts": ("qwen3_moe", {"num_experts": 4}, r"has shape|does not have"),
    "more experts": ("qwen3_moe", {"num_experts": 8}, r"has shape|lacks"),
    "another size of experts": ("qwen3_moe", {"moe_intermediate_size": 24}, r"has shape"),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}, r"does not have"),
    "no dense layers": ("qwen3_moe_step", {"decoder_sparse_step": 1}, r"does not have|lacks"),
    "plain weights called quantized": (
        "llama2",
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        "stores no linear quantized",
    ),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_the_tensors_contradict_is_refused_by_name(tmp_path: Path, flag: str) -> None:
    family, changes, named = FLAGS[flag]
    options = MIXTURE if family == "qwen3_moe" else {"num_hidden_layers": 2}
    base = edit(make_model(tmp_path / "base", family, **options), **changes)
    with pytest.raises(ConfigError, match=named):
        LLM(str(base), kv_cache_tokens=512)


CASE_FLAGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no shared expert": ("deepseek_v3", {"n_shared_experts": None}, r"shared_experts.*does not have"),
    "another size of shared experts": ("deepseek_v3", {"n_shared_experts": 1}, r"shared_experts.* has shape"),
    "more dense layers": ("deepseek_v3", {"first_k_dense_replace": 2}, r"does not have"),
    "the rank of keys": ("deepseek_v2", {"kv_lora_rank": 16}, r"kv_\w+\.weight has shape"),
    "other kinds of layers": ("qwen3_next", {"layer_types": ["full_attention"] * 3}, r"not have|shape"),
    "a bias of convolutions": ("bamba", {"mamba_conv_bias": False}, r"conv1d\.bias.*does not have"),
    "heads of a state": ("bamba", {"mamba_d_state": 4}, r"has shape"),
}


@pytest.mark.parametrize("flag", CASE_FLAGS)
def test_a_flag_of_mixtures_and_recurrent_layers_is_refused_as_well(tmp_path: Path, flag: str) -> None:
    family, changes, named = CASE_FLAGS[flag]
    base = edit(make_case(tmp_path / "base", CASES[family]), **changes)
    with pytest.raises(ConfigError, match=named):
        LLM(str(base), kv_cache_tokens=512)


QUANTIZED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bits of GPTQ": ("gptq", {"bits": 8}, "bits is wrong"),
    "groups of GPTQ": ("gptq", {"group_size": 64}, "group"),
    "whole rows of GPTQ": ("gptq", {"group_size": -1}, "group"),
    "zeros of GPTQ": ("gptq", {"sym": True}, "says sym"),
    "bits of AWQ": ("awq", {"bits": 8}, "bits is wrong"),
    "groups of AWQ": ("awq", {"group_size": 16}, "group"),
    "zeros of AWQ": ("awq", {"zero_point": False}, "zero_point=false"),
    "plain linears of AWQ": (
        "awq",
        {"modules_to_not_convert": ["down_proj"]},
        "modules_to_not_convert has 'down_proj'",
    ),
    "blocks of FP8": ("fp8, blocks", {"weight_block_size": [16, 16]}, "scale"),
    "plain linears of FP8": ("fp8, blocks", {"modules_to_not_convert": ["down_proj"]}, "by 'down_proj'"),
    "nothing quantized": ("gptq", {}, "qweight|does not have"),
}


@pytest.mark.parametrize("flag", QUANTIZED)
def test_a_quantization_config_that_the_tensors_contradict_is_refused(tmp_path: Path, flag: str) -> None:
    form, changes, named = QUANTIZED[flag]
    model = make_model(tmp_path / "plain", "llama2", num_hidden_layers=1, intermediate_size=128)
    if form.startswith("fp8"):
        base, _ = float_checkpoint(model, tmp_path / "base", form)
    else:
        base, _ = written(model, tmp_path / "base", {"gptq": gptq, "awq": awq}[form](symmetric=False))
    config = json.loads((base / "config.json").read_text())["quantization_config"]
    edit(base, quantization_config=config | changes if changes else ...)
    with pytest.raises(ConfigError, match=named):
        LLM(str(base), kv_cache_tokens=512)


def test_the_order_of_groups_is_that_of_the_tensors(tmp_path: Path, prompt) -> None:
    """desc_act is written wrongly by some tools; g_idx has each input's group."""
    model = make_model(tmp_path / "plain", "llama2", num_hidden_layers=1, intermediate_size=128)
    base, _ = written(model, tmp_path / "base", gptq(symmetric=False, ordered=True))
    found = []
    for desc_act in (True, False):
        config = json.loads((base / "config.json").read_text())["quantization_config"]
        llm = LLM(str(edit(base, quantization_config=config | {"desc_act": desc_act})), kv_cache_tokens=512)
        [output] = llm.generate({"prompt_token_ids": prompt(12)}, GREEDY)
        llm.close()
        found.append([p.logprob for p in output.outputs[0].logprobs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama_bias", {"attention_bias": False}, r"self_attn\.\w+\.bias.*does not have"),
        ("llama2", {"num_hidden_layers": 1}, r"layers\.1\..*does not have"),
    ],
)
def test_modules_of_transformers_do_not_leave_tensors_out(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    base = edit(make_model(tmp_path / "base", family, num_hidden_layers=2), **changes)
    with pytest.raises(ConfigError, match=named):
        LLM(str(base), kv_cache_tokens=512, model_impl="transformers")
