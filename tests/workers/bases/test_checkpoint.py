from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorafleet.offline.llm import LLM, SamplingParams
from lorafleet.protocol.config_json import MAX_JSON_BYTES, read_config
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.models.generic.generic_loading import read_generic_config
from lorafleet.workers.startup import build_engine
from tiny_models import make_model
from wrapper_cases import WRAPPERS, make_wrapper


@pytest.fixture
def model(tmp_path) -> Path:
    return make_model(tmp_path / "model", "llama3")


def edit(model: Path, **changes: object) -> Path:
    path = model / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return model


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": [], "model_type": ...}, r"\[\] \(model_type None\)"),
        ({"architectures": ["LlamaForCausalLM", "BertModel"]}, "LlamaForCausalLM.*BertModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "mish"}, "mish"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model, changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read_model_config(edit(model, **changes))


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda m: (m / "config.json").unlink(), "config.json is missing"),
        (lambda m: (m / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda m: (m / "config.json").write_text("[]"), "holds a list"),
        (lambda m: (m / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
        (lambda m: os.truncate(m / "config.json", MAX_JSON_BYTES + 1), "has more than 134,217,728 bytes"),
        (lambda m: edit(m, hidden_size="64"), "hidden_size='64'"),
        (lambda m: (m / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\x10" * 100), "model.safetensors cannot be read"),
        (lambda m: in_shards(m, ["a.safetensors", "b.safetensors"]), "both have the tensor"),
        (lambda m: in_shards(m, [1]), "no weight_map of names of files"),
        (
            lambda m: (m / "generation_config.json").write_text('{"eos_token_id": 100000}'),
            "eos_token_id=100000 .* ids 0",
        ),
        (lambda m: (m / "generation_config.json").write_text('{"eos_token_id": [1, "2"]}'), "eos_token_id='2'"),
        (lambda m: edit(m, num_hidden_layers=4), "layers.3"),
        (lambda m: edit(m, num_hidden_layers=2), "layers.2"),
        (lambda m: edit(m, intermediate_size=128), r"has shape \[64, 96\]"),
    ],
)
def test_a_damaged_checkpoint_names_its_cause(model, break_it, named):
    break_it(model)
    with pytest.raises(ConfigError, match=named):
        build_engine(EngineConfig(model=str(model)))


def in_shards(model, files):
    """Gives the checkpoint an index of these files, each of which has all of its tensors."""
    for name in files:
        shutil.copy(model / "model.safetensors", model / str(name))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(files))}))
    (model / "model.safetensors").unlink()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_model_config(tmp_path / "nowhere")


def test_the_spelling_of_transformers_4_means_the_same(model):
    new = read_model_config(model)
    rope = json.loads((model / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    old = edit(model, rope_parameters=..., dtype=..., rope_theta=theta, rope_scaling=rope, torch_dtype="float32")
    assert read_model_config(old) == new


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("phi3", {"partial_rotary_factor": 0.7, "rope_parameters": {}}, "partial_rotary_factor=0.7"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(tmp_path, family, changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read_model_config(edit(make_model(tmp_path / "model", family), **changes))


def test_longrope_without_a_factor_for_each_frequency_is_refused(tmp_path):
    model = make_model(tmp_path / "model", "phi3_long")
    rope = json.loads((model / "config.json").read_text())["rope_parameters"]
    with pytest.raises(ConfigError, match="no long_factor with 8 numbers"):
        read_model_config(edit(model, rope_parameters=rope | {"long_factor": [1.0]}))


def test_phi_3_as_transformers_4_wrote_it_means_the_same(tmp_path):
    model = make_model(tmp_path / "model", "phi3_partial")
    new = read_model_config(model)
    rope = json.loads((model / "config.json").read_text())["rope_parameters"]
    scaling = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    old = {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "rope_scaling": scaling}
    assert read_model_config(edit(model, rope_parameters=..., **old)) == new


def test_gemma_3_as_transformers_4_wrote_it_means_the_same(tmp_path):
    model = make_model(tmp_path / "model", "gemma3")
    new = read_model_config(model)
    old = {"rope_theta": 100000.0, "rope_local_base_freq": 1000.0, "sliding_window_pattern": 2}
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert read_model_config(edit(model, rope_parameters=..., layer_types=..., rope_scaling=scaling, **old)) == new


def test_what_a_config_leaves_out_is_the_familys_default(tmp_path):
    for family in ("Gemma2", "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Phi3"):
        name = f"{family}ForCausalLM"
        default = getattr(transformers, name).config_class()
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        found = read_model_config(tmp_path)
        assert found.vocab_size == default.vocab_size
        assert found.hidden_size == default.hidden_size
        sizes = default.intermediate_size
        assert found.layers[0].mlp.intermediate_size in (sizes if isinstance(sizes, list) else [sizes])
        assert found.num_layers == default.num_hidden_layers
        attention = found.layers[0].attention
        heads = default.num_attention_heads, default.num_key_value_heads
        assert (attention.num_heads, attention.num_kv_heads) == heads
        assert found.norm.eps == default.rms_norm_eps
        assert found.max_position_embeddings == default.max_position_embeddings
        assert found.tie_word_embeddings == default.tie_word_embeddings
        assert found.final_softcap == getattr(default, "final_logit_softcapping", None)
        assert attention.softcap == getattr(default, "attn_logit_softcapping", None)
        kinds = getattr(default, "layer_types", ["sliding_attention"] * default.num_hidden_layers)
        windows = [default.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        assert [layer.attention.window for layer in found.layers] == windows
        assert found.eos_token_ids == (default.eos_token_id,)


def test_a_sharded_checkpoint_is_the_same_model(model, prompt):
    ask = {"prompt_token_ids": prompt(9)}, SamplingParams(temperature=0, max_tokens=5)
    whole = LLM(str(model), kv_cache_tokens=512).generate(*ask)[0].outputs[0].token_ids
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, model / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()
    assert LLM(str(model), kv_cache_tokens=512).generate(*ask)[0].outputs[0].token_ids == whole


def test_dtype_auto_is_the_checkpoints_own(tmp_path):
    half = make_model(tmp_path / "half", "llama3", dtype="bfloat16")
    assert read_model_config(half).dtype == torch.bfloat16
    engine = build_engine(EngineConfig(model=str(edit(half, dtype=...)), kv_cache_tokens=512))
    assert engine.runner.steps.model.embed_tokens.weight.dtype == torch.bfloat16


def test_context_over_the_models_limit_is_refused_with_both_numbers(model):
    with pytest.raises(ConfigError, match="max_model_len=4096 is over the model's own limit of 512"):
        build_engine(EngineConfig(model=str(model), max_model_len=4096))


def test_context_over_the_cache_is_refused_with_both_numbers(model):
    with pytest.raises(ConfigError, match="holds 64 tokens, less than max_model_len=128"):
        build_engine(EngineConfig(model=str(model), max_model_len=128, kv_cache_tokens=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_tokens": 1}, "kv_cache_tokens=1 is less than one KV block of block_size=16"),
        ({"block_size": 10**6}, "no memory is left for the KV cache: a block of it has block_size=1000000 tokens"),
        ({"kv_cache_tokens": 10**15}, "a KV cache of 1000000000000016 tokens needs .*GiB, more than is free"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_with_its_size_and_what_to_change(model, options, message):
    with pytest.raises(ConfigError, match=message):
        build_engine(EngineConfig(model=str(model), **options))


def test_context_shrinks_to_the_cache_where_none_is_asked_for(model):
    assert build_engine(EngineConfig(model=str(model), kv_cache_tokens=64)).hello.max_model_len == 64


def test_answers_end_at_the_generation_configs_tokens_else_at_the_configs(model: Path) -> None:
    edit(model, eos_token_id=[3, 4])
    for written, expected in (("{}", (3, 4)), ('{"eos_token_id": null}', (3, 4)), ('{"eos_token_id": [5, 6]}', (5, 6))):
        (model / "generation_config.json").write_text(written)
        assert read_model_config(model).eos_token_ids == expected
        assert read_generic_config(model).eos_token_ids == expected


def test_the_ends_of_the_whole_config_come_before_those_of_its_text_part(tmp_path: Path) -> None:
    base = make_wrapper(tmp_path / "base", WRAPPERS["gemma3"])
    (base / "generation_config.json").unlink(missing_ok=True)
    text = read_config(base / "config.json")["text_config"]
    for whole, part, expected in (([3, 4], 5, (3, 4)), ([3, 4], None, (3, 4)), (None, 5, (5,)), (None, None, ())):
        edit(base, eos_token_id=whole, text_config=text | {"eos_token_id": part})
        assert read_model_config(base).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2'"),
        ({"layer_types": 5}, "layer_types=5, which cannot be read"),
        ({"rope_parameters": 7}, "rope_parameters=7, which cannot be read"),
        ({"sliding_window": "8"}, "sliding_window='8'"),
        ({"attention_bias": "no"}, "attention_bias='no'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; it must be at most"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field(tmp_path: Path, changes, named: str) -> None:
    family = {"sliding_window": "mistral", "layer_types": "qwen2_window"}
    name = next((family[key] for key in changes if key in family), "llama2")
    with pytest.raises(ConfigError, match=named):
        read_model_config(edit(make_model(tmp_path / "model", name, num_hidden_layers=1), **changes))


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"a": {"__float__": "Infinity"}, "b": [0.5, {"__float__": "-Infinity"}], "c": {"d": {"__float__": "more"}}}'
    )
    found = {"a": float("inf"), "b": [0.5, float("-inf")], "c": {"d": {"__float__": "more"}}}
    assert read_config(tmp_path / "config.json") == found
