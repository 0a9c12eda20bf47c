"""Makes adapters with classification heads by PEFT itself, and computes what transformers + PEFT make of tokens."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

AUTO = {"SEQ_CLS": AutoModelForSequenceClassification, "TOKEN_CLS": AutoModelForTokenClassification}


def make_classifier(
    folder: Path, base: Path, task_type: str, num_labels: int, seed: int, lorafleet: dict[str, Any] | None = None
) -> Path:
    """Saves a random adapter with its head. `lorafleet` is the content of lorafleet.json."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(
            _model(base, task_type, num_labels), peft.LoraConfig(task_type=task_type, **settings)
        )
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    if lorafleet is not None:
        (folder / "lorafleet.json").write_text(json.dumps(lorafleet))
    return folder


def expected_logits(base: Path, adapter: Path, task_type: str, num_labels: int, prompts: list[list[int]]) -> list[Any]:
    """Returns the head's outputs in float32, [labels] or [tokens, labels] for each prompt."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(_model(base, task_type, num_labels), adapter).eval()
        return [model(input_ids=torch.tensor([ids])).logits[0] for ids in prompts]


def _model(base: Path, task_type: str, num_labels: int) -> Any:
    model = AUTO[task_type].from_pretrained(base, num_labels=num_labels, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    return model
