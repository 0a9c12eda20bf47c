from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import families_decode
from benchmark_results import read_results
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup

# Layers, and GB that a step of one token reads: the active parameters in bfloat16 and the keys of its context.
ACTIVE = {
    "gpt-oss-20b": (24, 7.3),
    "gemma-4-12b": (48, 23.4),
    "mistral-small-24b": (40, 45.8),
    "deepseek-v3": (4, 6.5),
    "glm-4.7-flash": (24, 4.2),
}


def meta_model(folder: Path, family: str) -> DecoderModel:
    _, layers, config = families_decode.FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(families_decode.COMMON | config | {"num_hidden_layers": layers}))
    return DecoderModel(read_model_config(folder), TPGroup(), torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("family", families_decode.FAMILIES)
def test_families_have_shapes_that_the_decoder_serves(tmp_path: Path, family: str) -> None:
    model = meta_model(tmp_path, family)
    adapted = [name for names, _ in model.packed_linears() for name in names if families_decode.ADAPTED.search(name)]
    assert len(adapted) >= 3 * sum(hasattr(layer.mixer, "o_proj") for layer in model.decoder_layers())
    one, eight, many = (families_decode.floor_bytes(model, batch, 512.0) for batch in (1, 8, 64))
    assert 0 < one < eight < many
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert one < weights * 1.01 and weights < 132e9
    if family in ACTIVE:
        layers, gigabytes = ACTIVE[family]
        assert len(model.layers) == layers
        assert one / 1e9 == pytest.approx(gigabytes, rel=0.05)


def test_all_figures_of_a_family_are_measured_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, _, config = families_decode.FAMILIES["deepseek-v3"]
    sizes = {name: 16 for name, value in config.items() if isinstance(value, int) and value >= 64}
    small = config | sizes | {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    monkeypatch.setattr(families_decode, "FAMILIES", {"deepseek-v3": (61, 2, small)})
    for name, value in {"DEVICE": "cpu", "PROMPT": 12, "GENERATED": 4, "ROUNDS": 1, "ADAPTERS": 2}.items():
        monkeypatch.setattr(families_decode, name, value)
    file = tmp_path / "results.json"
    words = ["--only", "deepseek-v3", "--batches", "1", "3", "--bandwidth", "4.2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["families_decode.py", *words])
    families_decode.main()
    one, three = read_results(file).cases
    assert one.settings == {"family": "deepseek-v3", "layers": 2, "batch": 1}
    assert three.settings["batch"] == 3
    for case in (one, three):
        assert case.figures.keys() == families_decode.UNITS.keys()
        assert all(value is None or value > 0 for value in case.figures.values())
    assert (one.figures["adapted_ms"], three.figures["adapted_ms"] is None) == (None, False)
