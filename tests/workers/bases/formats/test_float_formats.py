"""Checkpoints of 8-bit codes and 4-bit floats as they are released, against the plain checkpoint with their values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from float_checkpoints import DEEPSEEK, FORMS, MODELOPT, NVFP4_SETTINGS, compressed, float_checkpoint, group
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.formats.float_codes import Codes
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.base_weights import FileWeights
from lorafleet.workers.tp.group import TPGroup
from quantized_answers import assert_answers_as, served
from quantized_models import with_config
from ranks import start_llm
from tiny_models import make_model

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_model(folder, "qwen3", num_hidden_layers=2, intermediate_size=160)


def loaded(folder: Path, rank: int, size: int) -> DecoderModel:
    model = DecoderModel(read_model_config(folder), TPGroup(rank, size), torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("form", list(FORMS))
def test_ranks_and_adapters_that_need_the_bases_weights_get_the_files_values(tmp_path, model, form) -> None:
    folder, values = float_checkpoint(model, tmp_path / "quantized", form)
    files = FileWeights(folder, torch.float32, False, read_model_config(folder).quantization)
    for name, want in load_file(values / "model.safetensors").items():
        assert torch.equal(files.weight(name.removesuffix(".weight").removeprefix("model.")), want)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        quantized, plain = loaded(folder, rank, size), loaded(values, rank, size)
        kinds = {type(linear.weight).__name__ for _, linear in quantized.packed_linears()}
        assert kinds - {"PlainWeight"} != set()
        held, wanted = held_tensors(quantized), held_tensors(plain)
        assert all(torch.equal(held[name](), wanted[name]()) for name in wanted)


@pytest.mark.parametrize("form", ["fp8, blocks", "compressed-tensors, W8A8"])
def test_parts_of_fused_linears_have_the_files_values(tmp_path, form) -> None:
    """Blocks of scales do not end where q, k and v do, nor where ranks do."""
    plain = make_model(tmp_path / "model", "phi3", num_hidden_layers=2)
    folder, values = float_checkpoint(plain, tmp_path / "quantized", form)
    for rank in range(2):
        held, wanted = held_tensors(loaded(folder, rank, 2)), held_tensors(loaded(values, rank, 2))
        assert all(torch.equal(held[name](), wanted[name]()) for name in wanted)


def test_kinds_of_scales_that_one_weight_can_hold_share_it(tmp_path, model) -> None:
    """Rows, blocks and tensors of e4m3 in q, k and v need no plain weight."""
    quantized = loaded(float_checkpoint(model, tmp_path / "quantized", "compressed-tensors, mixed")[0], 0, 1)
    kinds = {names[0]: type(linear.weight).__name__ for names, linear in quantized.packed_linears()}
    assert kinds["layers.1.self_attn.q_proj"] == "ScaledWeight"
    assert kinds["layers.1.mlp.gate_proj"] == "NF4Weight"
    assert kinds["layers.0.self_attn.o_proj"] == "PlainWeight"


def test_a_rank_reads_only_its_part_of_the_codes(tmp_path, model, monkeypatch) -> None:
    read: list[int] = []
    part_of = Codes.__getitem__

    def counted(self: Codes, place: tuple[slice, ...]) -> torch.Tensor:
        part = part_of(self, place)
        read.append(part.numel())
        return part

    monkeypatch.setattr(Codes, "__getitem__", counted)
    sizes = {}
    for form in ("fp8, blocks", "modelopt, NVFP4"):
        folder, _ = float_checkpoint(model, tmp_path / form, form)
        for size in (1, 2):
            read.clear()
            loaded(folder, 0, size)
            sizes[form, size] = sum(read)
        assert sizes[form, 2] < 0.6 * sizes[form, 1]


@pytest.mark.parametrize("form", ["compressed-tensors, mixed", "fp8, blocks"])
def test_two_ranks_answer_as_transformers_does_over_the_values(tmp_path, model, prompt, form) -> None:
    folder, values = float_checkpoint(model, tmp_path / "quantized", form)
    llm = start_llm(str(folder), 2, enable_lora=True)
    try:
        assert_answers_as(llm, values, prompt)
    finally:
        llm.close()


@pytest.mark.parametrize("form", ["compressed-tensors, W8A8", "compressed-tensors, MXFP4", "modelopt, FP8"])
def test_one_rank_answers_as_transformers_does_over_the_values(tmp_path, model, prompt, form) -> None:
    folder, values = float_checkpoint(model, tmp_path / "quantized", form)
    assert_answers_as(served(folder), values, prompt)


def test_modelopt_may_quantize_the_kv_cache_alone(tmp_path, model) -> None:
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert read_model_config(with_config(model, tmp_path / "fp8", quantization_config=config)).quantization is None
    folder = with_config(model, tmp_path / "fp4", quantization_config=config | {"kv_cache_scheme": "NVFP4"})
    with pytest.raises(UnsupportedModel, match="KV cache of NVFP4"):
        read_model_config(folder)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "named"),
        [
            (DEEPSEEK | {"fmt": "e5m2"}, "fmt='e5m2'"),
            (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
            (DEEPSEEK | {"activation_scheme": "other"}, "activation_scheme"),
            (NVFP4_SETTINGS | {"quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
            (NVFP4_SETTINGS | {"group_size": 32}, "group_size=32"),
            (NVFP4_SETTINGS | {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "KV cache"),
            (NVFP4_SETTINGS | {"kv_cache_scheme": "NVFP4"}, "KV cache of NVFP4"),
            (compressed({"a": group(8, "float", "channel", symmetric=False)}, []), "symmetric"),
            (compressed({"a": group(8, "int", "channel", dynamic=True)}, []), "dynamic"),
            (compressed({"a": group(6, "float", "group", group_size=32)}, []), "'num_bits': 6"),
            (compressed({"a": group(4, "float", "group", group_size=64)}, []), "'group_size': 64"),
        ],
    )
    def test_other_numbers_are_refused_by_name(self, tmp_path, model, config, named) -> None:
        folder = with_config(model, tmp_path / "model", quantization_config=config)
        with pytest.raises(UnsupportedModel, match=named) as refusal:
            read_model_config(folder)
        assert "quantization=nf4" in str(refusal.value)

    def test_a_plain_weight_beside_its_codes_is_refused(self, tmp_path, model) -> None:
        folder, values = float_checkpoint(model, tmp_path / "quantized", "compressed-tensors, MXFP4")
        tensors, plain = load_file(folder / "model.safetensors"), load_file(values / "model.safetensors")
        save_file(tensors | {f"{UP}.weight": plain[f"{UP}.weight"]}, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=f"{UP}.weight is beside"):
            loaded(folder, 0, 1)

    def test_a_linear_that_mixed_settings_do_not_name_or_cannot_have_is_refused(self, tmp_path, model) -> None:
        folder, _ = float_checkpoint(model, tmp_path / "quantized", "modelopt, mixed")
        config = json.loads((folder / "config.json").read_text())
        layers = config["quantization_config"]["quantized_layers"]
        own = layers.pop("model.layers.1.mlp")
        for changed, named in (
            ({}, r"up_proj is stored quantized, but quantization_config's quantized_layers does not name it"),
            (
                {"model.layers.1.mlp.up_proj": {"quant_algo": "W4A16_AWQ"}},
                r"'W4A16_AWQ' for model.layers.1.mlp.up_proj",
            ),
            ({"model.layers.1.mlp.up_proj": own | {"group_size": 32}}, r"group_size=32 for model.layers.1.mlp.up_proj"),
        ):
            others = {f"model.layers.1.mlp.{name}_proj": own for name in ("gate", "down")}
            config["quantization_config"]["quantized_layers"] = layers | others | changed
            (folder / "config.json").write_text(json.dumps(config))
            with pytest.raises(ConfigError, match=named):
                read_model_config(folder)

    def test_an_fp4_kv_cache_of_hf_quant_config_is_refused(self, tmp_path, model) -> None:
        folder, _ = float_checkpoint(model, tmp_path / "quantized", "modelopt, FP8")
        settings = MODELOPT["quantization"] | {"kv_cache_quant_algo": "NVFP4"}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
        with pytest.raises(UnsupportedModel, match="KV cache of NVFP4"):
            read_model_config(folder)

    @pytest.mark.parametrize(
        ("form", "leaf", "damage", "named"),
        [
            ("fp8, blocks", "weight_scale_inv", lambda t: t[:-1], "one scale for each 24 x 48"),
            ("fp8, blocks", "weight_scale_inv", lambda t: t * torch.nan, "NaN"),
            ("fp8, static", "weight", lambda t: t.float().bfloat16(), "stored as torch.bfloat16"),
            ("fp8, blocks", "weight", lambda t: t.view(torch.uint8).bitwise_or(127).view(t.dtype), "contains NaN"),
            ("fp8, blocks", "weight_scale_inv", None, "stored as F8_E4M3 without a scale"),
            ("compressed-tensors, FP8 static", "weight_scale", lambda t: -t, "negative"),
            ("compressed-tensors, W8A8", "weight", lambda t: t[:, :-1], "requires"),
            ("compressed-tensors, MXFP4", "weight_scale", lambda t: t | 255, "NaN"),
            ("compressed-tensors, MXFP4", "weight_scale", lambda t: t.float(), "exponents of 8 bits"),
            ("compressed-tensors, MXFP4", "weight_scale", lambda t: t.flatten(), "instead of two dimensions"),
            ("compressed-tensors, MXFP4", "weight_packed", lambda t: t[:, :-1], "one scale for each 32"),
            ("compressed-tensors, mixed", "weight_global_scale", lambda t: t * 0, "one positive number"),
            ("compressed-tensors, mixed", "weight_global_scale", lambda t: t * 0 + 1e-44, "infinite"),
            ("compressed-tensors, mixed", "weight_global_scale", lambda t: t.repeat(2), "at most 1 numbers"),
            ("fp8, blocks", "weight", lambda t: t[:0], "at least one"),
            ("fp8, blocks", "weight_scale_inv", lambda t: t.to(torch.complex64), "stored as torch.complex64"),
            ("compressed-tensors, mixed", "weight_packed", None, "is missing"),
            ("modelopt, NVFP4", "weight_scale", lambda t: t.float(), "stored as torch.float32"),
            ("modelopt, NVFP4", "weight_scale_2", None, "is missing"),
            ("bitsandbytes, 8 bits", "weight_format", lambda t: t + 1, "order"),
        ],
    )
    def test_damaged_checkpoints_are_refused_by_the_tensors_name(
        self, tmp_path, model, form, leaf, damage, named
    ) -> None:
        folder, _ = float_checkpoint(model, tmp_path / "quantized", form)
        tensors, name = load_file(folder / "model.safetensors"), f"{UP}.{leaf}"
        if damage is None:
            del tensors[name]
        else:
            tensors[name] = damage(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=named) as refusal:
            loaded(folder, 0, 1)
        assert UP in str(refusal.value)

    @pytest.mark.parametrize(
        ("form", "key", "pattern"),
        [
            ("fp8, blocks", "modules_to_not_convert", "model.layers.1"),
            ("compressed-tensors, mixed", "ignore", "re:.*up_proj"),
            ("modelopt, NVFP4", "ignore", "model.layers.1.mlp*"),
        ],
    )
    def test_a_linear_that_config_json_calls_plain_must_be_plain(self, tmp_path, model, form, key, pattern) -> None:
        folder, _ = float_checkpoint(model, tmp_path / "quantized", form)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"][key] = [pattern]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="stored quantized"):
            read_model_config(folder)
