"""Converted adapters have in PEFT the deltas that the source had."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoKrConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported, ConfigError
from lorafleet.tools.convert import convert, convert_several
from lorafleet.tools.mix_adapters import Mixing
from tests.tools.conftest import assert_same_deltas, deltas, logits, rewrite, set_config
from tiny_models import load_base, make_model

LAYOUTS = {
    "with the adapter's name": lambda name: name.replace(".weight", ".default.weight"),
    "with another adapter's name": lambda name: name.replace(".weight", ".my-sql.weight"),
    "without a prefix": lambda name: name.removeprefix("base_model.model.model."),
    "without base_model": lambda name: name.removeprefix("base_model.model."),
    "doubled prefix": lambda name: f"base_model.model.{name}",
    "of a multimodal model": lambda name: name.replace("model.layers", "model.language_model.layers"),
    "language_model outside": lambda name: name.replace("model.model.", "model.language_model.model."),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_key_layouts_become_pefts_own(base, make_adapter, tmp_path, layout):
    source = make_adapter(rank_pattern={"q_proj": 2}, use_rslora=True)
    wanted, names = deltas(base, source), load_file(source / "adapter_model.safetensors").keys()
    done = convert(rewrite(source, lambda n, t: (LAYOUTS[layout](n), t)), tmp_path / "out", None)
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == names
    assert_same_deltas(wanted, deltas(base, tmp_path / "out"), atol=0)
    assert "renamed" in done.changes[0]


def test_a_multimodal_models_adapter_targets_the_decoders_modules(base, make_adapter, tmp_path):
    alphas = {r"model\.layers\.0\..*": 64}
    source = make_adapter(target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 2}, alpha_pattern=alphas)
    wanted = deltas(base, source)
    rewrite(source, lambda n, t: (n.replace("model.layers", "model.language_model.layers"), t))
    of_all = {
        "rank_pattern": {"model.language_model.layers.0.mlp.up_proj": 2, "language_model.layers.1.mlp.up_proj": 2},
        "alpha_pattern": {r"^model\.language_model\.layers\.0\..*": 64},
    }
    for i, targets in enumerate(
        (r".*language.*\.(q_proj|up_proj)", ["language_model.layers.0.self_attn.q_proj", "q_proj", "up_proj"])
    ):
        convert(set_config(source, target_modules=targets, **of_all), tmp_path / f"out{i}", None)
        assert_same_deltas(wanted, deltas(base, tmp_path / f"out{i}"), atol=0)


def test_tensors_of_two_adapters_are_not_mixed_up(make_adapter, tmp_path):
    source = make_adapter()
    rewrite(source, lambda n, t: (n.replace(".weight", ".a.weight" if "lora_A" in n else ".b.weight"), t))
    with pytest.raises(AdapterMalformed, match="several adapters: a, b"):
        convert(source, tmp_path / "out", None)


def test_legacy_bin_with_a_config_of_2023_becomes_safetensors(base, make_adapter, tmp_path):
    source = make_adapter()
    wanted = deltas(base, source)
    tensors = load_file(source / "adapter_model.safetensors")
    (source / "adapter_model.safetensors").unlink()
    torch.save(tensors, source / "adapter_model.bin")
    old = {
        "base_model_name_or_path": "huggyllama/llama-7b", "bias": "none", "enable_lora": None, "fan_in_fan_out": False,
        "inference_mode": True, "lora_alpha": 8, "lora_dropout": 0.05, "merge_weights": False, "modules_to_save": None,
        "peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
        "down_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (source / "adapter_config.json").write_text(json.dumps(old))
    done = convert(source, tmp_path / "out", None)
    assert not (tmp_path / "out" / "adapter_model.bin").exists()
    assert_same_deltas(wanted, deltas(base, tmp_path / "out"), atol=0)
    assert (
        not {"enable_lora", "merge_weights"} & json.loads((tmp_path / "out" / "adapter_config.json").read_text()).keys()
    )
    assert any("adapter_model.bin" in change for change in done.changes)


def test_a_pickle_that_holds_more_than_tensors_is_refused(make_adapter, tmp_path):
    source = make_adapter()
    (source / "adapter_model.safetensors").unlink()
    torch.save({"x": Path("/tmp")}, source / "adapter_model.bin")
    with pytest.raises(AdapterUnsupported, match="could run code"):
        convert(source, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def as_mlx(folder: Path, source: Path, **parameters: object) -> Path:
    """The adapter as mlx-lm writes it: transposed, with a scale."""
    folder.mkdir()
    leaves = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b", ".lora_magnitude_vector": ".m"}
    tensors = {}
    for name, tensor in load_file(source / "adapter_model.safetensors").items():
        name = name.removeprefix("base_model.model.")
        for ours, theirs in leaves.items():
            name = name.replace(ours, theirs)
        tensors[name] = (tensor.T if tensor.dim() == 2 else tensor).contiguous()
    save_file(tensors, folder / "adapters.safetensors")
    config = {
        "fine_tune_type": "lora",
        "num_layers": 16,
        "model": "mlx-community/tiny",
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, **parameters},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_mlx_adapters_keep_their_scale(base, make_adapter, tmp_path):
    source = make_adapter()  # alpha / r is 2
    convert(as_mlx(tmp_path / "mlx", source), tmp_path / "out", None)
    assert_same_deltas(deltas(base, source), deltas(base, tmp_path / "out"))


def test_the_first_mlx_adapters_scale_by_alpha_over_rank_too(base, make_adapter, tmp_path):
    source = make_adapter()
    convert(as_mlx(tmp_path / "mlx", source, scale=0.5, alpha=16), tmp_path / "out", None)
    assert_same_deltas(deltas(base, source), deltas(base, tmp_path / "out"))


def test_mlx_dora_stays_dora(base, make_adapter, tmp_path):
    source = make_adapter(use_dora=True)
    done = convert(set_config(as_mlx(tmp_path / "mlx", source), fine_tune_type="dora"), tmp_path / "out", None)
    model = PeftModel.from_pretrained(load_base(base), str(source)).eval()
    converted = PeftModel.from_pretrained(load_base(base), str(tmp_path / "out")).eval()
    torch.testing.assert_close(logits(converted), logits(model))
    assert done.kind == "DoRA"


def test_whole_weights_of_mlx_are_refused(make_adapter, tmp_path):
    folder = set_config(as_mlx(tmp_path / "mlx", make_adapter()), fine_tune_type="full")
    with pytest.raises(AdapterUnsupported, match="'full'"):
        convert(folder, tmp_path / "out", None)


def test_rank_reduction_is_the_best_of_its_rank_and_says_what_it_lost(base, make_adapter, tmp_path):
    source = make_adapter(r=8, rank_pattern={"o_proj": 2})
    done = convert(source, tmp_path / "out", None, rank=3)
    wanted, found = deltas(base, source), deltas(base, tmp_path / "out")
    for name, delta in wanted.items():
        tail = torch.linalg.svdvals(delta.double())[3:].norm() / delta.double().norm()
        error = (found[name] - delta).norm() / delta.norm()
        assert done.reduced[name.removeprefix("model.")].relative_error == pytest.approx(tail.item(), abs=1e-6)
        assert error.item() == pytest.approx(tail.item(), abs=1e-5)
    assert done.reduced["layers.0.self_attn.o_proj"].relative_error == 0
    assert done.max_rank == 3


def test_a_kronecker_product_of_high_rank_is_as_exact_and_can_be_reduced(tmp_path):
    base = make_model(tmp_path / "base", "llama2", hidden_size=128, intermediate_size=96, num_hidden_layers=1)
    config = LoKrConfig(r=50, target_modules=["q_proj", "down_proj"], decompose_factor=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(base), config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(tmp_path / "lokr"))
    wanted = deltas(base, tmp_path / "lokr")
    assert convert(tmp_path / "lokr", tmp_path / "whole", None).max_rank == 128
    assert_same_deltas(wanted, deltas(base, tmp_path / "whole"))
    done = convert(tmp_path / "lokr", tmp_path / "reduced", None, rank=8)
    for name, delta in deltas(base, tmp_path / "reduced").items():
        error = ((wanted[name] - delta).norm() / wanted[name].norm()).item()
        assert done.reduced[name.removeprefix("model.")].relative_error == pytest.approx(error, rel=1e-4)


def test_floats_are_cast_and_what_does_not_fit_is_refused(make_adapter, tmp_path):
    source = make_adapter()
    convert(source, tmp_path / "out", None, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    large = rewrite(source, lambda n, t: (n, t * 1e6))
    with pytest.raises(AdapterMalformed, match="float16 cannot hold"):
        convert(large, tmp_path / "half", None, dtype=torch.float16)


def test_a_damaged_adapter_is_not_written_anew(make_adapter, tmp_path):
    source = make_adapter()
    rewrite(source, lambda n, t: (n, t * float("nan")))
    with pytest.raises(AdapterMalformed, match="NaN"):
        convert(source, tmp_path / "out", None)


def test_nothing_is_overwritten(make_adapter):
    source = make_adapter()
    before = (source / "adapter_config.json").read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        convert(source, source, None)
    assert (source / "adapter_config.json").read_bytes() == before


def test_the_adapters_tokenizer_comes_along_but_no_code(make_adapter, tmp_path):
    source = make_adapter()
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling.py").write_text("raise SystemExit")
    convert(source, tmp_path / "out", None)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_what_a_server_reads_beside_the_weights_comes_along(make_adapter, tmp_path):
    source = make_adapter()
    (source / "lorafleet.json").write_text("{}")
    (source / "draft").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / "draft" / name).write_bytes((source / name).read_bytes())
    convert(source, tmp_path / "one", None)
    convert_several([source, source], [0.5, 0.5], tmp_path / "mixed", None, Mixing("cat"))
    copied = sorted(str(p.relative_to(tmp_path / "one")) for p in (tmp_path / "one").rglob("*.*"))
    assert copied == [
        "adapter_config.json", "adapter_model.safetensors", "draft/adapter_config.json",
        "draft/adapter_model.safetensors", "lorafleet.json",
    ]  # fmt: skip
    assert (tmp_path / "mixed" / "lorafleet.json").is_file()
    assert not (tmp_path / "mixed" / "draft").exists()  # it was trained for one of them
