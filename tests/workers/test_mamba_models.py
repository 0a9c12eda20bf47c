"""Models with Mamba-2 layers or short convolutions: states that follow their sequences, names in published files, and
quantized linears."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_cases import CASES, make_adapter_of_matrices, make_case, make_case_adapter
from float_checkpoints import BLOCK, DEEPSEEK, FP8, scaled
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import AdapterMismatch, ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from quantized_models import ROUNDED, with_values, written
from ranks import start_llm
from tests.workers.test_recurrent_models import check_aborts, check_answers
from tiny_models import Reference

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


def assert_equal(llm: LLM, jobs: list[tuple[list[int], Path | None]], reference: Reference) -> None:
    """Compares the answers with transformers and PEFT, all in one batch."""
    names = {path: f"a{i}" for i, (_, path) in enumerate(jobs) if path is not None}
    loras = [
        None if path is None else LoRARequest(names[path], 1 + list(names).index(path), str(path)) for _, path in jobs
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in jobs], PARAMS, loras)
    for (ids, path), output in zip(jobs, outputs, strict=True):
        [completion] = output.outputs
        expected = reference.greedy(ids, 6, path, likely=completion.token_ids)
        assert completion.token_ids == expected.tokens
        assert [p.logprob for p in completion.logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "most_tokens"), [("nemotron_h", 23), ("granite4_hybrid", 70), ("falcon_h1", 17), ("lfm2", 40)]
)
def test_states_survive_chunks_preemptions_and_aborts(tmp_path: Path, prompt, name: str, most_tokens: int) -> None:
    base = make_case(tmp_path / "base", CASES[name])
    options = {"lora": {}, "dora": {"use_dora": True, "r": 3}}
    adapters = {k: make_case_adapter(tmp_path / k, base, CASES[name], **given) for k, given in options.items()}
    reference = Reference(base)
    check_answers((base, adapters), reference, prompt, max_num_batched_tokens=most_tokens)
    check_aborts(base, reference, prompt)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["nemotron_h", "nemotron_h_latent", "granite4_hybrid", "falcon_h1", "lfm2", "olmo_hybrid"]
)
def test_a_gpu_answers_as_transformers_does(tmp_path: Path, prompt, name: str) -> None:
    base = make_case(tmp_path / "base", CASES[name])
    adapters = {k: make_case_adapter(tmp_path / k, base, CASES[name]) for k in ("lora", "dora")}
    check_answers((base, adapters), Reference(base), prompt, device="cuda", max_num_batched_tokens=90)


@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1"])
def test_adapters_on_linears_that_peft_leaves_out(tmp_path: Path, prompt, name: str) -> None:
    """Nemotron-H's have the names of its published checkpoints."""
    base, changed = make_case(tmp_path / "base", CASES[name]), tmp_path / "changed"
    adapter = make_adapter_of_matrices(tmp_path / "adapter", base, changed)
    modules = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert any(module.endswith(".out_proj") for module in modules)
    assert any(module.startswith("backbone.") for module in modules) == (name == "nemotron_h")
    ids = prompt(40)
    llm = LLM(str(base), enable_lora=True, max_num_batched_tokens=32, max_num_seqs=2, kv_cache_tokens=256)
    [output] = llm.generate({"prompt_token_ids": ids}, PARAMS, LoRARequest("a", 1, str(adapter)))
    expected = Reference(changed).greedy(ids, 6)
    assert output.outputs[0].token_ids == expected.tokens
    assert [p.logprob for p in output.outputs[0].logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


def test_nemotron_h_may_name_its_layers_in_three_ways(tmp_path: Path) -> None:
    base = make_case(tmp_path, CASES["nemotron_h"])
    given, path = read_model_config(base), base / "config.json"
    assert given.attention_layers == (3,)
    assert given.recurrent_layers == (0, 2)
    config = json.loads(path.read_text())
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        config.pop(key, None)
    older = ["mamba", "mlp", "mamba", "attention", "moe"]
    for own in ({"hybrid_override_pattern": "M-M*E"}, {"layers_block_type": older}, {"layer_types": older}):
        path.write_text(json.dumps(config | own))
        assert read_model_config(base) == given


@pytest.mark.parametrize(
    ("case", "changes", "error", "message"),
    [
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}, UnsupportedModel, "at least one layer must have it"),
        ("nemotron_h", {"n_groups": 3}, ConfigError, "4 Mamba heads, which is not a multiple of its 3 groups"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, UnsupportedModel, "mlp_hidden_act='silu'"),
        ("bamba", {"time_step_limit": [2.0, 1.0]}, ConfigError, "time_step_limit"),
        ("bamba", {"mamba_d_head": 5}, ConfigError, "mamba_n_heads=4 of 5 numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, ConfigError, "must be 5 numbers"),
        ("lfm2", {"layer_types": ["conv"] * 3}, UnsupportedModel, "layer_types without full_attention"),
    ],
)
def test_configs_that_are_not_served_are_refused(
    tmp_path: Path, case: str, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    path = make_case(tmp_path, CASES[case]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=message):
        read_model_config(tmp_path)


def test_limits_of_steps_may_be_infinite_in_either_spelling(tmp_path: Path) -> None:
    path = make_case(tmp_path, CASES["bamba"]) / "config.json"
    config, found = json.loads(path.read_text()), []
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None):
        path.write_text(json.dumps(config | {"time_step_limit": limit}))
        found.append(read_model_config(tmp_path))
    assert found[0] == found[1] == found[2]


def test_adapters_of_convolutions_are_refused_by_name(tmp_path: Path) -> None:
    case = CASES["granite4_hybrid"]
    base = make_case(tmp_path / "base", case)
    adapter = make_case_adapter(tmp_path / "conv", base, case)
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace("mamba.in_proj", "mamba.conv1d"): t for name, t in load_file(path).items()}, path)
    llm = LLM(str(base), enable_lora=True, kv_cache_tokens=1024)
    with pytest.raises(AdapterMismatch, match=r"mamba\.conv1d"):
        llm.generate({"prompt_token_ids": [5]}, PARAMS, LoRARequest("conv", 1, str(adapter)))


def test_fp8_blocks_of_a_recurrent_model(tmp_path: Path, prompt) -> None:
    """The linears whose outputs are gates stay plain, as in Qwen's releases."""
    base = make_case(tmp_path / "base", CASES["qwen3_5"])
    values: dict[str, torch.Tensor] = {}
    plain: list[str] = []

    def entries(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if weight.ndim != 2 or ".layers." not in name:
            return {name: weight}
        module = name.removesuffix(".weight")
        if module.endswith(("in_proj_a", "in_proj_b")):
            plain.append(module)
            return {name: weight}
        tensors, values[name] = scaled(weight, BLOCK, FP8, "weight_scale_inv")
        return {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}

    stored = written(base, tmp_path / "fp8", entries, {})
    config = {"quantization_config": DEEPSEEK | {"modules_to_not_convert": [*plain, "lm_head"]}}
    path = stored / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    decoded = written(base, tmp_path / "values", lambda n, w: {n: values.get(n, w)}, {})
    assert any("in_proj_qkv" in name for name in values)
    assert plain
    adapter = make_case_adapter(tmp_path / "lora", decoded, CASES["qwen3_5"])
    jobs = [(prompt(length), path) for length in (3, 40) for path in (None, adapter)]
    for ranks in (1, 2):
        llm = start_llm(str(stored), ranks, enable_lora=True)
        assert_equal(llm, jobs, Reference(decoded))
        llm.close()


@pytest.mark.parametrize(("name", "method"), [("bamba", "nf4"), ("nemotron_h_latent", "fp8")])
def test_linears_of_a_state_space_are_quantized_as_they_are_read(
    tmp_path: Path, prompt, name: str, method: str
) -> None:
    base = make_case(tmp_path / "base", CASES[name])
    rounded: Callable[[torch.Tensor], torch.Tensor] = ROUNDED[method]
    decoded = with_values(base, tmp_path / "values", rounded)
    adapter = make_case_adapter(tmp_path / "lora", decoded, CASES[name])
    jobs = [(prompt(length), path) for length in (3, 40) for path in (None, adapter)]
    for ranks in (1, 2):
        llm = start_llm(str(base), ranks, enable_lora=True, quantization=method)
        assert_equal(llm, jobs, Reference(decoded))
        llm.close()
