"""LoRA's options in random combinations: each adapter that PEFT can make gives PEFT's logits, or is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from lorafleet.protocol.errors import AdapterError
from tests.workers.adapters.kinds.harness import logits_with, make, peft_logits, read
from tests.workers.conftest import peft_warnings_ignored

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS: list[Any] = [[1, 5], {"embed_tokens": [5, 1]}, {"lm_head": [9]}, {"lm_head": [9], "embed_tokens": [5]}]
OPTIONS: dict[str, tuple[float, list[Any]]] = {  # how often it is set, and to what
    "use_dora": (0.3, [True]),
    "use_rslora": (0.3, [True]),
    "bias": (0.25, ["all", "lora_only"]),
    "lora_bias": (0.1, [True]),
    "modules_to_save": (0.3, [["embed_tokens"], ["lm_head", "norm"], ["input_layernorm", "classifier"]]),
    "trainable_token_indices": (0.3, TOKENS),
    "ensure_weight_tying": (0.3, [True]),
    "init_lora_weights": (0.25, ["pissa", "olora", "mica", False]),
    "rank_pattern": (0.2, [{"q_proj": 2}, {"lm_head": 2}]),
    "alpha_pattern": (0.2, [{"embed_tokens": 5}, {"layers.0.mlp.up_proj": 5}]),
    "exclude_modules": (0.2, [["o_proj"], "lm_head"]),
}
ROUNDS, EACH = 4, 12


def draw(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"r": rng.choice([1, 3]), "lora_alpha": rng.choice([8, 0.5]), "task_type": "CAUSAL_LM"}
    some = rng.sample([*LINEARS, "embed_tokens", "lm_head"], rng.randint(1, 5))
    fields["target_modules"] = rng.choice([some, some, "all-linear", ".*(q_proj|down_proj|lm_head)"])
    for name, (often, values) in OPTIONS.items():
        if rng.random() < often:
            fields[name] = rng.choice(values)
    return fields


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_combination_is_exact_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    served = 0
    for i in range(EACH):
        fields = draw(rng)
        family = rng.choice(["llama", "llama, tied", "qwen2", "qwen3, tied", "gemma3, tied"])
        try:
            with peft_warnings_ignored():
                adapter = make(tmp_path / str(i), family, LoraConfig(**fields))
            expected = peft_logits(adapter)
        except (ValueError, TypeError):  # PEFT does not know the combination
            continue
        try:
            forms = read(adapter)
        except AdapterError:
            continue
        scale = max(1.0, expected.abs().max().item())
        difference = (logits_with(forms, family) - expected).abs().max()
        assert difference < 2e-4 * scale, (family, fields)
        served += 1
    assert served > EACH // 3
