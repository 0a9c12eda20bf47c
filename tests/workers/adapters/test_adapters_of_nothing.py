"""An adapter that would leave the base as it is is refused with the cause, over a plain model and over a wrapper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import PeftType
from safetensors.torch import save_file
from torch import Tensor

from lorafleet.protocol.errors import AdapterError
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.bases.text_part import PREFIXES
from tests.workers.conftest import base_of, make_base

Q = "layers.0.self_attn.q_proj"


def pair(module: str, rank: int = 4, hidden: int = 32) -> dict[str, Tensor]:
    prefix = f"base_model.model.{module}"
    return {f"{prefix}.lora_A.weight": torch.ones(rank, hidden), f"{prefix}.lora_B.weight": torch.ones(hidden, rank)}


def pruned() -> dict[str, Tensor]:
    """AdaLoRA after every rank of the module was pruned."""
    prefix = f"base_model.model.model.{Q}"
    return {
        f"{prefix}.lora_A": torch.ones(0, 32),
        f"{prefix}.lora_B": torch.ones(32, 0),
        f"{prefix}.lora_E": torch.ones(0, 1),
    }


@pytest.fixture(params=["plain", "wrapper"])
def base(request: pytest.FixtureRequest) -> Base:
    made = base_of(make_base("llama"))
    is_wrapper, absent = request.param == "wrapper", frozenset(["layers.1.self_attn.k_proj"])
    layout = replace(made.layout, is_text_part=is_wrapper, absent=absent)
    return replace(made, layout=layout)


@pytest.mark.parametrize(
    ("config", "tensors", "cause"),
    [
        ({"target_modules": ["q_proj"]}, {}, "no tensors, so the adapter would do nothing"),
        ({"target_modules": ["no_such_proj"]}, {}, "no tensors, so the adapter would do nothing"),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [99]},
            {},
            "no tensors, so the adapter would do nothing",
        ),
        ({"target_modules": ["k_proj"]}, pair("model.layers.1.self_attn.k_proj"), "no tensors but those of.*k_proj"),
        ({"target_modules": ["q_proj"]}, pair(f"other_tower.{Q}"), f"module 'other_tower.{Q}', which .* does not have"),
        ({"target_modules": ["q_proj"]}, pair("model.h.0.attn.q_proj"), "module 'h.0.attn.q_proj', which"),
        (
            {"peft_type": "ADALORA", "target_modules": ["q_proj"], "layers_to_transform": [0], "init_r": 4}
            | {"rank_pattern": {f"{prefix}{Q}.lora_E": [False] * 4 for prefix in ("model.", *PREFIXES)}},
            pruned(),
            "change nothing: ranks are all pruned to 0",
        ),
    ],
)
def test_it_is_refused_with_its_cause(tmp_path: Path, base: Base, config: Any, tensors: Any, cause: str) -> None:
    method = {"peft_type": str(PeftType.LORA.value), "r": 4, "lora_alpha": 8} | config
    (tmp_path / "adapter_config.json").write_text(json.dumps(method))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=cause):
        read_adapter(tmp_path, base=base, max_rank=8, dtype=torch.float32, name="nothing")
