"""Tools refuse classification heads, or keep them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from classifiers import make_classifier
from lorafleet.protocol.errors import AdapterMismatch, AdapterUnsupported
from lorafleet.protocol.lora_request import LoRAPart, LoRARequest
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.convert import convert
from lorafleet.tools.inspection import inspect_folder
from lorafleet.tools.merging import merge
from lorafleet.tools.plain_lora import PlainLoRA
from lorafleet.tools.reading import read_forms
from lorafleet.workers.adapters.mixed_forms import mix


@pytest.fixture
def classifier(base: Path, tmp_path: Path) -> Path:
    return make_classifier(tmp_path / "topic", base, "TOKEN_CLS", 3, 1)


def test_merging_and_mixing_refuse_a_head(base: Path, classifier: Path, tmp_path: Path) -> None:
    with BaseModel.opened(base) as opened:
        forms = read_forms(classifier, opened, "topic").forms
        with pytest.raises(AdapterUnsupported, match="classification head"):
            merge(opened, classifier, forms, tmp_path / "merged")
    with pytest.raises(AdapterUnsupported, match="classification head"):
        PlainLoRA.from_forms(forms)
    with pytest.raises(AdapterUnsupported, match="classification head"):
        mix([(LoRAPart(LoRARequest("topic", 1, str(classifier)), 1.0), forms)], 64)
    assert not (tmp_path / "merged").exists()


def test_an_older_layout_keeps_its_head(classifier: Path, tmp_path: Path) -> None:
    file = classifier / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}, file)
    convert(classifier, tmp_path / "today", None)
    found = load_file(tmp_path / "today" / "adapter_model.safetensors")
    assert found.keys() == tensors.keys()
    for name in ("base_model.model.score.weight", "base_model.model.score.bias"):
        torch.testing.assert_close(found[name], tensors[name])


def test_inspection_needs_no_base(classifier: Path) -> None:
    found = inspect_folder(classifier, "topic")
    assert (found.refusal, found.needs_base) == (None, None)
    assert found.targets["score"] == 1


def test_a_head_for_another_hidden_size_is_refused(base: Path, classifier: Path) -> None:
    file = classifier / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "base_model.model.score.weight": torch.zeros(3, 8)}, file)
    with BaseModel.opened(base) as opened, pytest.raises(AdapterMismatch, match="hidden size"):
        read_forms(classifier, opened, "topic")
