"""Tensors of mixtures' checkpoints: those that are not read, and a text part beside a part for pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.protocol.errors import AdapterError, ConfigError
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.base_weights import FileWeights
from lorafleet.workers.tp.group import TPGroup

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"


def held(folder: Path) -> dict[str, Tensor]:
    model = DecoderModel(read_model_config(folder), TPGroup(0, 1), torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    return {name: value() for name, value in held_tensors(model).items()}


def with_tensors(folder: Path, **tensors: Tensor) -> None:
    save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS)


def changed(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read(adapter: Path, base: Path) -> AdapterForms:
    layout = BaseLayout.of(read_model_config(base))
    return read_adapter(adapter, base=Base(layout, None, "tiny"), max_rank=64, dtype=torch.float32, name="a").forms


@pytest.mark.parametrize(
    ("case", "options", "name"),
    [
        ("glm4_moe", {"num_nextn_predict_layers": 2}, "model.layers.3.eh_proj.weight"),
        ("ernie_moe", {}, "model.mtp_block.0.mlp.up_proj.weight"),
    ],
)
def test_what_predicts_further_tokens_is_not_read(
    tmp_path: Path, case: str, options: dict[str, int], name: str
) -> None:
    folder = make_case(tmp_path / "base", CASES[case])
    with_tensors(folder, **{name: torch.zeros(2, 2)})
    changed(folder / "config.json", **options)
    assert name not in held(folder)
    with_tensors(folder, **{"model.layers.4.eh_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ConfigError, match=r"layers\.4\.eh_proj"):
        held(folder)


def test_llama_4_is_served_without_its_part_for_pictures(tmp_path: Path) -> None:
    text, wrapper = make_case(tmp_path / "text", CASES["llama4"]), tmp_path / "wrapper"
    adapter = make_case_adapter(tmp_path / "adapter", text, CASES["llama4"])
    tensors = load_file(text / WEIGHTS)
    expected, forms = held(text), read(adapter, text)
    wrapper.mkdir()
    of_pictures = {
        "vision_model.class_embedding": torch.zeros(2),
        "multi_modal_projector.linear_1.weight": torch.ones(2),
    }
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()} | of_pictures, wrapper / WEIGHTS)
    config = {"text_config": json.loads((text / "config.json").read_text()), "model_type": "llama4"}
    (wrapper / "config.json").write_text(json.dumps(config | {"architectures": ["Llama4ForConditionalGeneration"]}))
    found = held(wrapper)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    def inserted(name: str) -> str:
        return name.replace("base_model.model.", "base_model.model.language_model.")

    own = {inserted(name): tensor for name, tensor in load_file(adapter / ADAPTER_WEIGHTS).items()}
    save_file(own, adapter / ADAPTER_WEIGHTS)
    wrapped = read(adapter, wrapper)
    assert wrapped.linears.keys() == forms.linears.keys()
    for module, experts in forms.experts.items():
        for stack, same in zip(experts.stacks, wrapped.experts[module].stacks, strict=True):
            for matrices, others in ((stack.a_EGRD, same.a_EGRD), (stack.b_EPOR, same.b_EPOR)):
                experts = range(matrices.shape[0])
                assert all(torch.equal(matrices.of_expert(e), others.of_expert(e)) for e in experts)
    picture = "base_model.model.vision_model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(own | {picture: torch.zeros(4, 4)}, adapter / ADAPTER_WEIGHTS)
    with_pictures = read(adapter, wrapper)
    assert with_pictures.left_out == ("vision_model",)
    assert with_pictures.linears.keys() == forms.linears.keys()


@pytest.mark.parametrize("name", ["llama4", "granite_moe", "minimax_m2"])
def test_the_files_weights_are_found_by_the_engines_names(tmp_path: Path, name: str) -> None:
    folder = make_case(tmp_path / "base", CASES[name])
    config, expected = read_model_config(folder), held(folder)
    files = FileWeights(folder, torch.float32, config.tie_word_embeddings, config.quantization, config.names)
    for module in config.projections():
        assert torch.equal(files.weight(module), expected[f"model.{module}.weight"])


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "granite_moe"])
def test_tensors_and_targets_that_do_not_match_are_refused(tmp_path: Path, name: str) -> None:
    base = make_case(tmp_path / "base", CASES[name])
    adapter = make_case_adapter(tmp_path / "adapter", base, CASES[name])
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    save_file({n: t for n, t in tensors.items() if ".1." not in n or ".experts." not in n}, adapter / ADAPTER_WEIGHTS)
    with pytest.raises(AdapterError, match=r"targets .*experts.* but the weights file has no tensors"):
        read(adapter, base)
    save_file(tensors, adapter / ADAPTER_WEIGHTS)
    changed(adapter / "adapter_config.json", target_parameters=["experts.gate_up_proj_bias"])
    with pytest.raises(AdapterError, match="matches none of them"):
        read(adapter, base)
    changed(adapter / "adapter_config.json", target_modules=["w1"], target_parameters=[])
    with pytest.raises(AdapterError, match="does not target"):
        read(adapter, base)
