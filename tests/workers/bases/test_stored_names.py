"""Checkpoints with other names of tensors or architectures than their class writes, which transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lorafleet.offline.llm import LLM
from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.quantized.quantized_checkpoint import quantize_checkpoint
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.stored_names import names_in_files, without_wrappers
from tests.workers.bases.test_stored_tables import answers, expected, rewrite
from tiny_models import make_model
from wrapper_cases import WRAPPERS, make_wrapper

Tensors = dict[str, Tensor]


def flat(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def same(tensors: Tensors) -> Tensors:
    return tensors


def with_value_head(tensors: Tensors) -> Tensors:
    return tensors | {"v_head.summary.weight": torch.zeros(1, 64), "v_head.summary.bias": torch.zeros(1)}


def compiled(tensors: Tensors) -> Tensors:
    def wrapped(name: str) -> str:
        return f"module._orig_mod.{name}".replace("layers.0.", "layers.0._checkpoint_wrapped_module.")

    return {wrapped(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "change", "config"),
    [
        ("llama3", flat, {}),
        ("llama2", flat, {}),
        ("llama2", with_value_head, {}),
        ("llama2", same, {"architectures": ["LlamaForCausalLM", "LlamaModel"]}),
        ("llama2", same, {"architectures": None}),
        ("mistral", flat, {"architectures": ["MistralModel"]}),
    ],
)
def test_answers_are_those_of_transformers(
    tmp_path: Path, family: str, change: Callable[[Tensors], Tensors], config: dict[str, Any]
) -> None:
    base = rewrite(make_model(tmp_path / "base", family, num_hidden_layers=1), change, **config)
    assert answers(LLM(str(base), kv_cache_tokens=1024), {}) == [pytest.approx(expected(base), abs=1e-3)]


def test_wrappers_of_training_are_left_out_of_names(tmp_path: Path) -> None:
    """transformers itself takes such tensors for unknown ones."""
    base = make_model(tmp_path / "base", "llama2", num_hidden_layers=1)
    wanted = expected(base)
    assert answers(LLM(str(rewrite(base, compiled)), kv_cache_tokens=1024), {}) == [pytest.approx(wanted, abs=1e-3)]
    rewrite(
        base,
        lambda tensors: tensors | {name.replace("_orig_mod.", ""): tensor.clone() for name, tensor in tensors.items()},
    )
    with pytest.raises(ConfigError, match=r"both have the tensor '.*' or '"):
        LLM(str(base), kv_cache_tokens=1024)


def test_a_flat_checkpoint_is_quantized_with_whole_names(tmp_path: Path) -> None:
    base = rewrite(make_model(tmp_path / "base", "llama3", num_hidden_layers=1), flat)
    quantize_checkpoint(base, "int4", tmp_path / "out")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")
    found = answers(LLM(str(tmp_path / "out"), kv_cache_tokens=1024), {})
    assert found == answers(LLM(str(base), kv_cache_tokens=1024, quantization="int4"), {})


def test_a_part_for_pictures_may_stand_beside_a_flat_decoder(tmp_path: Path) -> None:
    case = WRAPPERS["qwen3"]
    base = make_wrapper(tmp_path / "base", case)
    wanted = expected(base, None, case.model_class)
    rewrite(base, flat)
    assert read_model_config(base).stored_names.root == "model."
    assert answers(LLM(str(base), kv_cache_tokens=1024), {}) == [pytest.approx(wanted, abs=1e-3)]


def test_names_with_and_without_the_root_are_not_mixed() -> None:
    assert names_in_files(["layers.0.norm.weight", "lm_head.weight"], "model.", ()).root == "model."
    assert names_in_files(["layers.0.norm.weight", "model.norm.weight"], "model.", ()).root == ""
    assert names_in_files(["midlayer.norm.weight", "norm.weight"], "model.", ()).root == ""
    assert without_wrappers("module.module.model._orig_mod.norm.weight") == "model.norm.weight"
