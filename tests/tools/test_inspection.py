"""What inspect says is what serving does."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorafleet.offline.llm import LLM, LoRARequest
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.errors import AdapterError, AdapterMissing
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.inspection import fit, inspect_folder
from lorafleet.tools.reading import read_forms
from tests.tools.conftest import rewrite, set_config
from tiny_models import ALL_TARGETS, make_model


def fit_on(base, folder, tp=1, *, fully_sharded=True, **config):
    return fit(folder, "sql", BaseModel.of_config(base), LoRAConfig(**config), tp, fully_sharded=fully_sharded)


def test_an_adapter_is_described(base, make_adapter):
    folder = make_adapter(rank_pattern={"q_proj": 2}, use_rslora=True)
    (folder / "tokenizer.json").write_text("{}")
    found = inspect_folder(folder, "sql")
    assert found.kind == "LoRA, rsLoRA, ranks by module"
    assert found.ranks == {2: 2, 4: 12}
    assert found.targets == dict.fromkeys(sorted(ALL_TARGETS), 2) | {"q_proj": 2}
    assert found.num_layers == 2
    assert found.shapes["down_proj"] == [(48, 32)]
    assert found.digest == folder_digest(folder)
    assert found.base_name == str(base)
    assert found.tokenizer == ["tokenizer.json"]
    assert found.refusal is None
    assert found.bytes_on_one_gpu == 2 * found.num_values
    assert found.files["adapter_config.json"] == (folder / "adapter_config.json").stat().st_size


def test_parts_that_are_left_out_are_named(base, make_adapter):
    folder = make_adapter()
    tensors = load_file(folder / "adapter_model.safetensors")
    picture = "base_model.model.model.vision_tower.encoder.layers.0.mlp.fc1.lora_A.weight"
    save_file(tensors | {picture: torch.ones(4, 3)}, folder / "adapter_model.safetensors")
    found = inspect_folder(folder, "sql")
    assert (found.left_out, found.refusal, found.needs_base) == (["vision_tower"], None, None)
    assert fit_on(base, folder).refusal is None


def test_bytes_on_each_gpu_are_those_of_its_part(base, make_adapter):
    folder = make_adapter()
    [whole] = fit_on(base, folder).bytes_per_gpu
    with BaseModel.opened(base) as opened:
        pairs = [form.low_rank for form in read_forms(folder, opened, "sql").forms.linears.values()]
    assert whole == 4 * sum(pair.a_RD.numel() + pair.b_OR.numel() for pair in pairs)
    assert fit_on(base, folder, lora_dtype="bfloat16").bytes_per_gpu == [whole // 2]
    assert fit_on(base, folder, tp=2).bytes_per_gpu == [whole // 2] * 2
    [a, b] = fit_on(base, folder, tp=2, fully_sharded=False).bytes_per_gpu
    assert whole // 2 < a == b < whole
    assert "does not divide" in (fit_on(base, folder, tp=3).refusal or "")


@pytest.mark.parametrize("damage", ["other base", "rank", "unknown", "nan", "rank limit", "truncated"])
def test_a_refusal_is_the_servers_own(base, make_adapter, tmp_path, damage):
    folder = make_adapter(r=8)
    limit = 4 if damage == "rank limit" else 64
    if damage == "other base":
        base = make_model(tmp_path / "other", "llama2", num_hidden_layers=1)
    elif damage == "rank":
        set_config(folder, r=3)
    elif damage == "unknown":
        set_config(folder, use_telepathy=True)
    elif damage == "nan":
        rewrite(folder, lambda n, t: (n, t * float("nan")))
    elif damage == "truncated":
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-9])
    found = fit_on(base, folder, max_lora_rank=limit)
    llm = LLM(str(base), enable_lora=True, max_lora_rank=limit, device="cpu", kv_cache_tokens=256)
    try:
        with pytest.raises(AdapterError) as caught:
            llm.add_lora(LoRARequest("sql", 1, str(folder)))
    finally:
        llm.close()
    assert (type(caught.value).__name__, caught.value.message) == (found.error, found.refusal)


def test_what_can_be_found_out_of_a_damaged_adapter_is(make_adapter, tmp_path):
    folder = make_adapter()
    (folder / "adapter_config.json").write_text('{"r": 4, "r": 8}')
    found = inspect_folder(folder, "sql")
    assert (found.kind, found.error) == (None, "AdapterMalformed")
    assert "twice" in (found.refusal or "")
    assert "adapter_model.safetensors" in found.files
    with pytest.raises(AdapterMissing):
        inspect_folder(tmp_path / "nowhere", "sql")


def test_what_only_a_base_could_tell_is_said_to_be_unknown(base, make_adapter):
    folder = make_adapter(init_lora_weights="pissa")
    found = inspect_folder(folder, "sql")
    assert (found.refusal, found.bytes_on_one_gpu) == (None, None)
    assert "--model" in (found.needs_base or "")
    assert found.kind == "PiSSA (unconverted)"
    assert fit_on(base, folder).refusal is None


def test_a_rope_scaling_needs_the_base(base, make_adapter):
    folder = make_adapter()
    (folder / "lorafleet.json").write_text('{"rope_scaling": {"type": "linear", "factor": 2.0}}')
    assert "--model" in (inspect_folder(folder, "sql").needs_base or "")
    assert fit_on(base, folder).refusal is None


def test_a_bases_config_is_enough_unless_the_adapter_is_computed_from_its_weights(base, make_adapter, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((base / "config.json").read_bytes())
    assert fit_on(bare, make_adapter()).refusal is None
    assert "cannot be read" in (fit_on(bare, make_adapter("dora", use_dora=True)).refusal or "")


def test_extras_count_as_bytes(base, make_adapter):
    folder = make_adapter(use_dora=True, target_modules=["q_proj"])
    [whole] = fit_on(base, folder).bytes_per_gpu
    assert whole == 2 * 4 * (4 * (32 + 32) + 32)  # layers x (A, B and a row scale) in float32


def test_a_foreign_layout_is_named_with_its_remedy(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {}}))
    torch.save({}, tmp_path / "adapters.safetensors")
    found = inspect_folder(tmp_path, "sql")
    assert found.kind == "mlx-lm's layout"
    assert "lorafleet convert" in (found.refusal or "")
