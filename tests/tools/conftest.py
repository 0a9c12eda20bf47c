"""Provides one tiny base, adapters that PEFT made on it, and PEFT's reading of a folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_models import ALL_TARGETS, load_base, make_model

MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    return make_model(tmp_path_factory.mktemp("tools") / "base", "llama2", **sizes)


def load_peft(base: Path, folder: Path) -> Any:
    with warnings.catch_warnings():  # These are PEFT's own warnings; ours stay errors.
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(load_base(base), str(folder)).eval()


def deltas(base: Path, folder: Path) -> dict[str, Tensor]:
    """Returns the change that PEFT makes to each weight when it loads the folder."""
    model = load_peft(base, folder).base_model.model
    layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    return {n: m.get_delta_weight("default").detach() for n, m in layers.items()}


def logits(model: Any) -> Tensor:
    ids = torch.arange(5, 29).view(1, -1)
    with torch.inference_mode():
        return model(input_ids=ids).logits[0]


def assert_same_deltas(first: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-5) -> None:
    assert first.keys() == other.keys()
    for name, delta in first.items():
        torch.testing.assert_close(other[name], delta, atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture
def make_adapter(base: Path, tmp_path: Path) -> MakeAdapter:
    def make(name: str = "source", *, config: Any = None, seed: int = 1, std: float = 0.15, **fields: Any) -> Path:
        settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS} | fields
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(load_base(base), config or peft.LoraConfig(**settings))
        torch.manual_seed(seed)
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in parameter_name:
                torch.nn.init.normal_(parameter, std=std)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(str(tmp_path / name))
        return tmp_path / name

    return make


def rewrite(folder: Path, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> Path:
    """Rewrites the names or values of the tensors."""
    path = folder / "adapter_model.safetensors"
    save_file({n: t.contiguous() for n, t in (change(*item) for item in load_file(path).items())}, path)
    return folder


def set_config(folder: Path, **changes: object) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder
