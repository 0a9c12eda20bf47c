"""The base's weights as adapters are computed from them: the same from the model in memory as from the files, on a GPU
as on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorafleet.protocol.errors import AdapterUnsupported
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, BaseLayout, peft_name
from lorafleet.workers.adapters.base_source import BaseWeights
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.base_weights import FileWeights, ModelWeights, MovedWeights
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model

CPU = torch.device("cpu")
DENSE = ["llama3", "llama_bias", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]


def loaded(folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> DecoderModel:
    model = DecoderModel(read_model_config(folder), TPGroup(), dtype, device)
    load_weights(model, folder)
    return model


def in_memory(model: DecoderModel) -> ModelWeights:
    return ModelWeights(model, held_tensors(model))


@pytest.mark.parametrize("family", DENSE)
def test_layout_and_weights_are_the_checkpoint_s(tmp_path: Path, family: str) -> None:
    folder = make_model(tmp_path / "base", family)
    layout = BaseLayout.of(read_model_config(folder))
    stored = load_file(folder / "model.safetensors")
    tables = [EMBEDDING] if layout.tied else [EMBEDDING, HEAD]
    modules = [*layout.linears, *layout.norms, *tables]
    names = {f"{peft_name(m)}.weight" for m in modules} | {f"{peft_name(m)}.bias" for m in layout.biased}
    assert names == stored.keys()
    model = in_memory(loaded(folder, torch.float32))
    files = FileWeights(folder, torch.float32, layout.tied)
    for module in modules:
        for weights in (model, files):
            torch.testing.assert_close(weights.weight(module), stored[f"{peft_name(module)}.weight"])
    for module in layout.biased:
        for weights in (model, files):
            assert torch.equal(weights.bias(module), stored[f"{peft_name(module)}.bias"])
    assert torch.equal(model.weight(HEAD), files.weight(HEAD))


def test_files_are_cast_as_the_model_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base", "llama3")
    weights = FileWeights(folder, torch.bfloat16, tied=False)
    assert torch.equal(weights.weight("norm"), loaded(folder, torch.bfloat16).norm.weight)


def test_a_checkpoint_that_is_gone_is_the_adapter_s_error(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base", "llama3")
    weights = FileWeights(folder, torch.float32, tied=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(AdapterUnsupported, match=r"model.norm.weight cannot be read .* Put the checkpoint"):
        weights.weight("norm")


RANK = 4


def write_adapter(folder: Path, layout: BaseLayout, config: dict[str, Any]) -> Path:
    """LoRA on all linears, or HRA, with what the config asks for."""
    torch.manual_seed(5)
    tensors = {}
    for module, (inputs, outputs) in layout.linears.items():
        leaves: dict[str, tuple[int, ...]] = {"hra_u": (inputs, RANK)}
        if config["peft_type"] == "LORA":
            leaves = {"lora_A.weight": (RANK, inputs), "lora_B.weight": (outputs, RANK)}
        if config.get("use_dora"):
            leaves["lora_magnitude_vector"] = (outputs,)
        if "kasa_config" in config:
            leaves["lora_diag"] = (RANK,)
        tensors |= {f"base_model.model.model.{module}.{leaf}": torch.randn(shape) for leaf, shape in leaves.items()}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in layout.linears})
    config = {"r": RANK, "target_modules": targets} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


COMPUTED: dict[str, dict[str, Any]] = {
    "DoRA": {"peft_type": "LORA", "use_dora": True},
    "PiSSA": {"peft_type": "LORA", "init_lora_weights": "pissa"},
    "OLoRA": {"peft_type": "LORA", "init_lora_weights": "olora"},
    "KaSA": {"peft_type": "LORA", "kasa_config": {}},
    "HRA": {"peft_type": "HRA"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", COMPUTED)
def test_what_is_computed_on_the_gpu_is_what_the_cpu_gives(tmp_path: Path, kind: str) -> None:
    folder = make_model(tmp_path / "base", "llama3")
    layout = BaseLayout.of(read_model_config(folder))
    path = write_adapter(tmp_path / "a", layout, COMPUTED[kind])

    def forms(weights: BaseWeights) -> AdapterForms:
        base = Base(layout, weights)
        return read_adapter(path, base=base, max_rank=64, dtype=torch.float32, name="a").forms

    gpu = torch.device("cuda")
    on_cpu = forms(FileWeights(folder, torch.float32, layout.tied))
    for weights in (
        in_memory(loaded(folder, torch.float32, gpu)),
        MovedWeights(FileWeights(folder, torch.float32, layout.tied), gpu),
    ):
        check_same(on_cpu, forms(weights))


def check_same(on_cpu: AdapterForms, on_gpu: AdapterForms) -> None:
    for module, form in on_cpu.linears.items():
        other = on_gpu.linears[module]
        assert form.low_rank is not None
        assert other.low_rank is not None
        assert not other.low_rank.a_RD.is_cuda
        deltas = [low.scaling * low.b_OR @ low.a_RD for low in (form.low_rank, other.low_rank)]
        torch.testing.assert_close(deltas[1], deltas[0], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(other.out_scale_O, form.out_scale_O, atol=1e-4, rtol=1e-4)
