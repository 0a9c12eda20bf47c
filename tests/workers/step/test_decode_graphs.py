from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.step.decode_graphs import may_split
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model


@pytest.mark.parametrize(
    ("family", "quantization", "tp_size", "expected"),
    [
        ("llama3", None, 1, True),
        ("qwen2", None, 1, True),
        ("llama3", None, 2, False),
        ("llama3", "fp8", 1, False),
        ("mixtral", None, 1, False),
    ],
)
def test_only_models_like_the_measured_one_split_the_gpu(
    tmp_path: Path, family: str, quantization: Method | None, tp_size: int, expected: bool
) -> None:
    config = read_model_config(make_model(tmp_path / "base", family))
    config = replace(config, quantization=resolved(config.quantization, quantization))
    model = DecoderModel(config, TPGroup(0, tp_size), torch.bfloat16, torch.device("cpu"))
    assert may_split(model) is expected
