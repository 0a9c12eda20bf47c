from __future__ import annotations

from typing import Any

import pytest
import torch

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig


def test_defaults_are_vllm_s() -> None:
    config = LoRAConfig()
    assert (config.max_loras, config.max_lora_rank, config.cpu_loras) == (8, 64, 16)
    assert LoRAConfig(max_loras=2, max_cpu_loras=5).cpu_loras == 5


def test_auto_dtype_is_the_base_s() -> None:
    assert LoRAConfig().serving_dtype(torch.float16) is torch.float16
    assert LoRAConfig(lora_dtype="float32").serving_dtype(torch.float16) is torch.float32
    assert LoRAConfig(lora_dtype="fp8").serving_dtype(torch.float16) is torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_loras", 0),
        ("max_loras", True),
        ("max_loras", 10**6),
        ("max_lora_rank", 0),
        ("max_lora_rank", 2.0),
        ("max_cpu_loras", 7),
        ("lora_dtype", "int8"),
        ("bias_enabled", True),
        ("lora_extra_vocab_size", -1),
        ("lora_memory_gib", -1),
        ("lora_memory_gib", 1048577),
        ("extra_memory_gib", 1048577),
        ("long_lora_scaling_factors", ()),
        ("long_lora_scaling_factors", (4.0, 0.5)),
    ],
)
def test_a_value_without_sense_or_effect_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"lora\.{field}\b.*{value!r}".replace("(", r"\(").replace(")", r"\)")) as e:
        LoRAConfig(**{field: value})
    assert e.value.param == field
