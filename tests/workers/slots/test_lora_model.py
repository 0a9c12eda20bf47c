"""LoRAModel computes what PEFT computes, for every kind of plain LoRA that PEFT saves."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.forms import AdapterForms, VocabForm
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.spellings import Spelled
from lorafleet.workers.slots import lora_model
from lorafleet.workers.slots.lora_model import LoRAModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KINDS: dict[str, dict[str, Any]] = {
    "one target": {"target_modules": ["down_proj"]},
    "every linear": {"target_modules": ALL, "r": 3},
    "rank 1": {"r": 1},
    "rank 64": {"r": 64},
    "rsLoRA": {"use_rslora": True, "r": 16, "lora_alpha": 3},
    "rsLoRA with patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"v_proj": 7}},
    "rank pattern, general first": {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.q_proj": 6}},
    "rank pattern, special first": {"rank_pattern": {"layers.1.self_attn.q_proj": 6, "q_proj": 2}},
    "rank pattern, regular expressions": {"rank_pattern": {r".*\.[01]\..*q_proj": 6, r"(q|v)_proj": 2}},
    "rank pattern, anchored": {"rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 5}},
    "rank pattern, a dot is any character": {"rank_pattern": {"q.proj": 5}},
    "alpha pattern, order": {"alpha_pattern": {"self_attn.v_proj": 3, "layers.0.self_attn.v_proj": 40}},
    "float alpha": {"lora_alpha": 0.75},
    "negative alpha": {"lora_alpha": -2},
    "layers_to_transform": {"layers_to_transform": [0, 2]},
    "one layer to transform": {"layers_to_transform": 1},
    "layers_pattern": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "regular expression of targets": {"target_modules": r".*\.(0|2)\..*(gate|up)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "all-linear but": {"target_modules": "all-linear", "exclude_modules": ["k_proj", "layers.1.mlp.up_proj"]},
    "excluded by regular expression": {"target_modules": ALL, "exclude_modules": r".*layers\.0\..*"},
    "full names": {"target_modules": ["model.layers.0.self_attn.q_proj", "1.mlp.up_proj"]},
    "full name beside layers_to_transform": {
        "target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"],
        "layers_to_transform": [2],
    },
    "names of other families too": {"target_modules": ["q_proj", "c_attn"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_equal_peft(make_adapter: Any, kind: str, family: str) -> None:
    adapter = make_adapter(family, **KINDS[kind])
    check_equal(adapter)


def check_equal(adapter: Any, expected: dict[str, torch.Tensor] | None = None) -> None:
    expected = adapter.peft_deltas() if expected is None else expected
    model = adapter.load()
    assert model.modules.keys() == expected.keys()
    for name, layer in model.modules.items():
        torch.testing.assert_close(layer.scaling * layer.b_OR @ layer.a_RD, expected[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("file_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_files_of_any_float_type_equal_peft(make_adapter: Any, file_dtype: torch.dtype) -> None:
    check_equal(make_adapter(dtype=file_dtype))


@pytest.mark.parametrize("serving", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_cast_to_the_serving_dtype(adapter: Any, serving: torch.dtype) -> None:
    model = adapter.load(dtype=serving)
    layer = model.modules["layers.0.self_attn.v_proj"]
    stored = adapter.tensors["base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"]
    assert layer.a_RD.dtype == layer.b_OR.dtype == serving
    assert torch.equal(layer.a_RD, stored.to(serving))
    assert layer.a_RD.is_contiguous()
    assert layer.b_OR.is_contiguous()
    assert (layer.rank, layer.in_features, layer.out_features) == (4, 32, 16)


def test_legacy_bin_equals_safetensors(adapter: Any) -> None:
    expected = adapter.peft_deltas()
    safe = adapter.load()
    torch.save(adapter.tensors, adapter.path / "adapter_model.bin")
    (adapter.path / "adapter_model.safetensors").unlink()
    check_equal(adapter, expected)
    assert adapter.load().digest != safe.digest


def test_safetensors_wins_over_bin(adapter: Any) -> None:
    (adapter.path / "adapter_model.bin").write_bytes(b"never opened")
    check_equal(adapter)


def test_config_of_2023(adapter: Any) -> None:
    expected = adapter.peft_deltas()
    old = {
        "base_model_name_or_path": "decapoda-research/llama-7b-hf",
        "bias": "none",
        "enable_lora": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "merge_weights": False,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    (adapter.path / "adapter_config.json").write_text(json.dumps(old))
    check_equal(adapter, expected)


def test_null_targets_are_peft_s_default(adapter: Any) -> None:
    expected = adapter.peft_deltas()
    check_equal(adapter.set(target_modules=None), expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", ""),
        ("base_model.model.", "base_model.model.base_model.model."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        (".weight", ".default.weight"),
    ],
)
def test_prefix_variants_are_understood(adapter: Any, old: str, new: str) -> None:
    expected = adapter.peft_deltas()
    check_equal(adapter.map(lambda k, v: (k.replace(old, new), v)), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "ALL-LINEAR", "exclude_modules": r".*\.mlp\..*"},
        {"target_modules": ALL, "layers_to_transform": [0, 1], "layers_pattern": ["h", "layer.?"]},
    ],
)
def test_targets_left_as_they_were_written(make_adapter: Any, fields: dict[str, Any]) -> None:
    adapter = make_adapter(**fields).set(**fields)
    check_equal(adapter)


def test_config_can_be_read_alone(make_adapter: Any) -> None:
    adapter = make_adapter(use_rslora=True, rank_pattern={"v_proj": 16}, lora_alpha=8)
    helper = PEFTHelper.from_bytes((adapter.path / "adapter_config.json").read_bytes())
    module = "model.layers.0.self_attn.v_proj"
    ranks = helper.ranks().of({"v": Spelled((module,))}, lambda: [], [])
    assert (ranks["v"], helper.scaling(helper.alpha, 16)) == (16, 2.0)
    assert helper.targets(module)
    assert not helper.targets("lm_head", is_linear=False)


@pytest.mark.parametrize("key", ["eva_config", "corda_config", "loftq_config", "auto_mapping", "lora_ga_config"])
def test_keys_without_part_in_the_result_are_ignored(adapter: Any, key: str) -> None:
    check_equal(adapter.set(**{key: {"anything": 1}}), adapter.peft_deltas())


def test_parts_that_are_left_out_are_facts_of_an_adapter(adapter: Any) -> None:
    names = ("visual.merger.mlp.0.lora_A.weight", "model.audio_tower.norm.weight")
    adapter.write(adapter.tensors | {f"base_model.model.{name}": torch.ones(4) for name in names})
    assert adapter.load().left_out == ("audio_tower", "visual")


def test_facts_of_an_adapter(make_adapter: Any) -> None:
    model = make_adapter(target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 6}).load()
    assert model.rank == 6
    assert model.target_modules == ["down_proj", "q_proj"]
    assert model.num_bytes == 3 * 4 * (4 * (32 + 32) + 6 * (48 + 32))
    assert model.name == "sql"


def test_digest_is_of_config_and_weights(adapter: Any) -> None:
    first = adapter.load().digest
    assert adapter.load(expected_digest=first).digest == first
    alpha = adapter.set(lora_alpha=9).load().digest
    weights = adapter.map(lambda k, v: (k, v * 2)).load().digest
    assert len({first, alpha, weights}) == 3


def test_a_cached_hub_snapshot_is_followed_into_its_blobs(adapter: Any, tmp_path: Any) -> None:
    expected = adapter.peft_deltas()
    entry = tmp_path / "models--org--sql"
    snapshot = entry / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir()
    for i, name in enumerate(["adapter_config.json", "adapter_model.safetensors"]):
        (adapter.path / name).rename(entry / "blobs" / str(i))
        (snapshot / name).symlink_to(f"../../blobs/{i}")
    check_equal(type(adapter)(snapshot), expected)


def test_the_time_of_checking_includes_the_casts_of_norms_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=10.0)
    monkeypatch.setattr(lora_model, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def taking_a_second(name: str) -> None:
        real = getattr(lora_model, name)

        def slow(*arguments: Any) -> Any:
            clock.now_s += 1
            return real(*arguments)

        monkeypatch.setattr(lora_model, name, slow)

    taking_a_second("cast")  # of the norm
    taking_a_second("embedding_part")
    taking_a_second("head_part")
    table = VocabForm(table_VD=torch.ones(8, 4))
    forms = AdapterForms(norms={"norm": torch.ones(4)}, embedding=table, head=table)
    assert LoRAModel.of(forms, ContentDigest.known("digest"), torch.float32, "sql", read_s=0.5).check_s == 2.5
