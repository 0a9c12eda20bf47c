"""Merged checkpoints are what PEFT's merge_and_unload gives, and transformers reads them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from family_cases import CASES, make_case
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported, ConfigError
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.convert import convert
from lorafleet.tools.inspection import inspect_folder
from lorafleet.tools.merging import Merged, merge
from lorafleet.tools.reading import read_forms
from lorafleet.workers.adapters.forms import (
    AdapterForms,
    Kronecker,
    LinearForm,
    LowRank,
    OwnRope,
    TokenRows,
    VocabForm,
)
from lorafleet.workers.bases.rope_config import RopeConfig
from tests.tools.conftest import load_peft, logits
from tiny_models import ALL_TARGETS, load_base, make_model


def merged(base: Path, adapter: Path, out: Path, **options: object) -> Merged:
    with BaseModel.opened(base) as opened:
        return merge(opened, adapter, read_forms(adapter, opened, "sql").forms, out, **options)


def merge_forms(base: Path, forms: AdapterForms, out: Path) -> Merged:
    with BaseModel.opened(base) as opened:
        return merge(opened, base, forms, out)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def test_merged_weights_are_pefts(base, make_adapter, tmp_path):
    adapter = make_adapter(rank_pattern={"q_proj": 2}, use_rslora=True)
    done = merged(base, adapter, tmp_path / "out")
    expected = load_peft(base, adapter).merge_and_unload().state_dict()
    found = tensors(tmp_path / "out")
    assert set(found) == set(tensors(base))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    assert len(done.changed) == 2 * len(ALL_TARGETS)


def test_the_result_is_a_checkpoint_of_its_own(base, make_adapter, tmp_path):
    adapter = make_adapter()
    merged(base, adapter, tmp_path / "out")
    torch.testing.assert_close(logits(load_base(tmp_path / "out")), logits(load_peft(base, adapter)), atol=1e-4, rtol=0)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in base.iterdir()}


def test_shards_stay_as_they_are_divided(base, make_adapter, tmp_path):
    sharded = tmp_path / "sharded"
    load_base(base).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    merged(sharded, make_adapter(), tmp_path / "out")
    index = "model.safetensors.index.json"
    assert (
        json.loads((tmp_path / "out" / index).read_text())["weight_map"]
        == (json.loads((sharded / index).read_text())["weight_map"])
    )
    merged(base, tmp_path / "source", tmp_path / "whole")
    torch.testing.assert_close(logits(load_base(tmp_path / "out")), logits(load_base(tmp_path / "whole")))


def test_arithmetic_is_in_float32_and_rounds_once(tmp_path, base, make_adapter):
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)
    adapter = make_adapter()
    merged(half, adapter, tmp_path / "out")
    merged(half, adapter, tmp_path / "float32", dtype=torch.float32)
    exact, rounded = tensors(tmp_path / "float32"), tensors(tmp_path / "out")
    for name, tensor in exact.items():
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(rounded[name], tensor.bfloat16(), atol=0, rtol=0)
    assert json.loads((tmp_path / "float32" / "config.json").read_text())["dtype"] == "float32"


def test_values_that_the_dtype_cannot_hold_are_refused(base, make_adapter, tmp_path):
    adapter = make_adapter(std=300.0)
    with pytest.raises(AdapterMalformed, match="float16 cannot hold"):
        merged(base, adapter, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def test_every_form_of_a_linear_has_its_place_in_the_weights(tmp_path):
    base = make_model(tmp_path / "base", "llama_bias", num_hidden_layers=1)
    weight, bias = (tensors(base)[f"model.layers.0.mlp.down_proj.{leaf}"] for leaf in ("weight", "bias"))
    out, into = weight.shape
    pair = LowRank(torch.randn(3, into), torch.randn(out, 3), 0.5)
    scale, new_bias = torch.rand(out), torch.randn(out)
    form = LinearForm(low_rank=pair, out_scale_O=scale, bias_O=new_bias)
    merge_forms(base, AdapterForms({"layers.0.mlp.down_proj": form}), tmp_path / "a")
    found = tensors(tmp_path / "a")
    expected = scale[:, None] * (weight + 0.5 * pair.b_OR @ pair.a_RD)
    torch.testing.assert_close(found["model.layers.0.mlp.down_proj.weight"], expected)
    torch.testing.assert_close(found["model.layers.0.mlp.down_proj.bias"], new_bias)
    kron = Kronecker(torch.randn(8, 4), torch.randn(out // 8, into // 4), 2.0)
    forms = AdapterForms({"layers.0.mlp.down_proj": LinearForm(kronecker=kron)}, norms={"norm": torch.full((64,), 3.0)})
    merge_forms(base, forms, tmp_path / "b")
    found = tensors(tmp_path / "b")
    torch.testing.assert_close(found["model.layers.0.mlp.down_proj.weight"], weight + 2 * torch.kron(kron.w1, kron.w2))
    torch.testing.assert_close(found["model.layers.0.mlp.down_proj.bias"], bias)
    assert (found["model.norm.weight"] == 3).all()


def test_a_bias_where_the_architecture_has_none_is_refused_by_name(base, tmp_path):
    forms = AdapterForms({"layers.0.mlp.up_proj": LinearForm(bias_O=torch.ones(48))})
    with pytest.raises(AdapterUnsupported, match=r"bias on layers\.0\.mlp\.up_proj, and LlamaForCausalLM has no"):
        merge_forms(base, forms, tmp_path / "out")
    with pytest.raises(AdapterUnsupported, match="aLoRA"):
        merge_forms(base, AdapterForms(invocation_tokens=(1, 2)), tmp_path / "out")
    own_rope = OwnRope(RopeConfig(16, 1e4, 512, "linear", 4.0), 2048)
    with pytest.raises(AdapterUnsupported, match="rope scaling"):
        merge_forms(base, AdapterForms(own_rope=own_rope), tmp_path / "out")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied") / "base", "llama3", num_hidden_layers=1)


def test_a_change_of_one_of_two_tied_tables_unties_them(tied, tmp_path):
    table = tensors(tied)["model.embed_tokens.weight"]
    pair = LowRank(torch.randn(2, 64), torch.randn(len(table), 2), 0.5)
    done = merge_forms(tied, AdapterForms(head=VocabForm(low_rank=pair)), tmp_path / "out")
    assert done.untied
    model = load_base(tmp_path / "out")
    torch.testing.assert_close(model.model.embed_tokens.weight.data, table)
    torch.testing.assert_close(model.lm_head.weight.data, table + 0.5 * pair.b_OR @ pair.a_RD)


def test_an_equal_change_of_both_keeps_them_tied(tied, tmp_path):
    rows = VocabForm(rows=TokenRows(torch.tensor([3, 7]), torch.randn(2, 64)))
    done = merge_forms(tied, AdapterForms(embedding=rows, head=rows), tmp_path / "out")
    assert not done.untied
    model = load_base(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model.lm_head.weight.data[[3, 7]], rows.rows.row_ND)


def test_an_embeddings_low_rank_is_added_transposed(base, tmp_path):
    table = tensors(base)["model.embed_tokens.weight"]
    pair = LowRank(torch.randn(2, len(table)), torch.randn(32, 2), 0.5)
    merge_forms(base, AdapterForms(embedding=VocabForm(low_rank=pair)), tmp_path / "out")
    found = tensors(tmp_path / "out")["model.embed_tokens.weight"]
    torch.testing.assert_close(found, table + 0.5 * (pair.b_OR @ pair.a_RD).T)


def test_a_resized_vocabulary_is_written_with_the_adapters_tokenizer(base, tmp_path):
    grown = [VocabForm(table_VD=torch.randn(330, 32)) for _ in range(2)]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "tokenizer.json").write_text('{"of": "the adapter"}')
    with BaseModel.opened(base) as opened:
        done = merge(opened, adapter, AdapterForms(embedding=grown[0], head=grown[1]), tmp_path / "out")
    assert done.vocab_size == 330
    model = load_base(tmp_path / "out")
    torch.testing.assert_close(model.lm_head.weight.data, grown[1].table_VD)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"of": "the adapter"}'
    with pytest.raises(Exception, match="one vocabulary"):
        merge_forms(base, AdapterForms(embedding=grown[0]), tmp_path / "half")


def test_no_code_of_the_base_comes_along(base, tmp_path, make_adapter):
    config = json.loads((base / "config.json").read_text())
    other = tmp_path / "base"
    other.mkdir()
    for path in base.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "modeling.py").write_text("raise SystemExit")
    (other / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Model"}}))
    merged(other, make_adapter(), tmp_path / "out")
    assert not (tmp_path / "out" / "modeling.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_quantized_base_is_refused(base, tmp_path, make_adapter):
    quantized = tmp_path / "base"
    shutil.copytree(base, quantized)
    stored = {n: t.to(torch.float8_e4m3fn) if "proj" in n else t for n, t in tensors(base).items()}
    save_file(stored, quantized / "model.safetensors")
    with pytest.raises(AdapterUnsupported, match="quantized"):
        merged(quantized, make_adapter(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_stays(base, make_adapter):
    with pytest.raises(ConfigError, match="already exists"):
        merged(base, make_adapter(), base)


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], EXPERTS[1:]])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_merged_one_by_one(tmp_path, family, targets):
    base = make_model(tmp_path / "base", family, num_hidden_layers=2)
    adapter = make_moe_adapter(tmp_path / "a", base, targets)
    done = merged(base, adapter, tmp_path / "out")
    assert any("experts.0." in name for name in done.changed)
    assert "--model" in (inspect_folder(adapter, "a").needs_base or "")
    assert convert(adapter, tmp_path / "kept", None).kind == "LoRA, parameters"
    torch.testing.assert_close(logits(load_base(tmp_path / "out")), logits(load_peft(base, adapter)), atol=1e-4, rtol=0)


def test_experts_kept_in_one_tensor_are_merged_too(tmp_path):
    base = make_model(tmp_path / "base", "qwen3_moe", num_hidden_layers=1)
    adapter = make_moe_adapter(tmp_path / "a", base, EXPERTS)
    merged(base, adapter, tmp_path / "single")
    stacked = tmp_path / "stacked"
    shutil.copytree(base, stacked)
    save_file(load_base(base).state_dict(), stacked / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors(stacked)
    merged(stacked, adapter, tmp_path / "out")
    assert len(tensors(tmp_path / "out")) < len(tensors(tmp_path / "single"))
    torch.testing.assert_close(logits(load_base(tmp_path / "out")), logits(load_base(tmp_path / "single")))


def make_moe_adapter(folder: Path, base: Path, target_parameters: list[str]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=target_parameters)
        model = get_peft_model(load_base(base), config)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(folder))
    return folder


def test_modules_that_peft_merges_by_default_names(base, make_adapter, tmp_path):
    adapter = make_adapter(config=LoraConfig(r=2, target_modules="all-linear"))
    merged(base, adapter, tmp_path / "out")
    torch.testing.assert_close(logits(load_base(tmp_path / "out")), logits(load_peft(base, adapter)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", ["two that differ", "a copy", "the head alone"])
def test_tables_that_config_json_calls_tied_are_merged_as_the_files_have_them(tied, tmp_path, stored) -> None:
    base, own = Path(shutil.copytree(tied, tmp_path / "base")), "model.embed_tokens.weight"
    found = tensors(base)
    head = found[own].flip(0) if stored == "two that differ" else found[own].clone()
    kept = {name: t for name, t in found.items() if stored != "the head alone" or name != own}
    save_file(kept | {"lm_head.weight": head}, base / "model.safetensors", metadata={"format": "pt"})
    pair = LowRank(torch.randn(2, 64), torch.randn(320, 2), 0.5)
    done = merge_forms(base, AdapterForms(head=VocabForm(low_rank=pair)), tmp_path / "out")
    written = tensors(tmp_path / "out")
    torch.testing.assert_close(written["lm_head.weight"], head + 0.5 * pair.b_OR @ pair.a_RD)
    assert torch.equal(written[own], found[own])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert done.untied == (stored != "two that differ")
    rows = VocabForm(rows=TokenRows(torch.tensor([3]), torch.ones(1, 64)))
    merge_forms(base, AdapterForms(embedding=rows, head=rows), tmp_path / "both")
    both = tensors(tmp_path / "both")
    assert torch.equal(both[own][3], torch.ones(64))
    assert (
        torch.equal(both["lm_head.weight"][3], torch.ones(64))
        if stored == "two that differ"
        else "lm_head.weight" not in both
    )


def test_an_embedding_with_a_familys_own_name_is_changed(tmp_path) -> None:
    base = make_case(tmp_path / "base", CASES["nemotron_h"])
    [own] = [name for name in tensors(base) if "embed" in name]
    rows = VocabForm(rows=TokenRows(torch.tensor([3]), torch.ones(1, tensors(base)[own].shape[1])))
    merge_forms(base, AdapterForms(embedding=rows), tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == tensors(base).keys()
    assert torch.equal(tensors(tmp_path / "out")[own][3], rows.rows.row_ND[0])
