"""Trains the LoRA of a draft that belongs to one adapter of its target, with PEFT, and writes it in PEFT's format."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, SAFETENSORS_NAME
from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.drafts.distillation import TrainingPlan, distil
from lorafleet.tools.drafts.draft_target import TargetAnswer


def check_peft() -> None:
    """Raises ConfigError if PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "drafts of adapters are trained with PEFT, which is not installed here. Run `pip install "
            "'lorafleet[train]'`, or leave --adapters out."
        )


@contextmanager
def trained_lora(
    draft: PreTrainedModel,
    answers: Sequence[TargetAnswer],
    rank: int,
    plan: TrainingPlan,
    report: Callable[[str], None],
) -> Iterator[PreTrainedModel]:
    """Yields the draft with a LoRA on all its linear layers that was trained on the answers. The draft's own weights
    stay as they are, and it has no LoRA after the block."""
    import peft

    torch.manual_seed(plan.seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    needed = [weight for weight in draft.parameters() if weight.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own.
        model = peft.get_peft_model(draft, config)
    try:
        distil(model, answers, plan, report)
        yield model
    finally:
        model.unload()
        for weight in needed:
            weight.requires_grad_(True)


def save_lora(model: PreTrainedModel, draft: Path, dtype: torch.dtype, folder: Path) -> None:
    """Writes the LoRA into an empty folder. `draft` is the folder that its config names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, save_embedding_layers=False)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / SAFETENSORS_NAME).items()}
    save_file(weights, folder / SAFETENSORS_NAME)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card, a form that nobody filled in.
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text())
    # PEFT has the targets as a set, whose order differs from run to run.
    config |= {"target_modules": sorted(config["target_modules"]), "base_model_name_or_path": str(draft)}
    path.write_text(json.dumps(config, indent=2) + "\n")
