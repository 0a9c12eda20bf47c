"""Linears as llm-compressor, GPTQModel, ModelOpt and AutoRound stored them, with the settings that they wrote.

tests/support/library_files.py made the files. Each linear stands in a model whose other linears are plain.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library_files import LINEAR, ROWS
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model

FILES = sorted((Path(__file__).parent / "library_files").glob("*.safetensors"))
MODULE = LINEAR.removeprefix("model.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_model(folder, "qwen3", num_hidden_layers=1, hidden_size=32, intermediate_size=256)


def checkpoint(model: Path, folder: Path, file: Path) -> Path:
    """Puts the file's linear into the model, with the library's own quantization_config."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{LINEAR}.weight"]
    stored = load_file(file)
    del stored["values"]
    save_file(tensors | stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads(metadata(file)["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        found: dict[str, str] = opened.metadata()
    return found


def test_there_are_files_of_each_library() -> None:
    names = {file.name.partition("-")[0] for file in FILES}
    assert names == {"llmcompressor", "gptqmodel", "modelopt", "autoround"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_linear_has_the_values_that_its_library_gives_it(tmp_path: Path, model: Path, file: Path) -> None:
    folder = checkpoint(model, tmp_path / "quantized", file)
    wanted, tolerance = load_file(file)["values"], float(metadata(file)["tolerance"])
    columns = [slice(0, 256)], [slice(0, 128), slice(128, 256)]  # down_proj is divided by its inputs
    for places in columns:
        for rank, place in enumerate(places):
            group = TPGroup(rank, len(places))
            engine = DecoderModel(read_model_config(folder), group, torch.float32, torch.device("cpu"))
            with torch.inference_mode():
                load_weights(engine, folder)
            held = held_tensors(engine)[f"{LINEAR}.weight"]()
            largest = (held[:ROWS] - wanted[:, place]).abs().max() / wanted.abs().max()
            assert held.abs().max() > 0 and largest <= tolerance
    scheme = read_model_config(folder).quantization
    assert scheme is not None and scheme.of([MODULE]) is not None, "it is held in the file's bits"
