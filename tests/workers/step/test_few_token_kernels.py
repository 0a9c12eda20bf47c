"""The kernels for few tokens that captured decode steps choose: which layers have them, and that a model's answers
stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from family_cases import CASES, SMALL
from lorafleet.kernels.moe.few_tokens import MOST_TOKENS
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.attention.attention_backend import AttentionBatch, KVCache
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.weights import fill_randomly
from lorafleet.workers.device.state_cache import StateCache
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.delta_net import DeltaNet
from lorafleet.workers.step.few_token_kernels import few_token_kernels
from lorafleet.workers.tp.group import TPGroup

CPU = torch.device("cpu")
BLOCK, CONTEXT = 16, 10


def make(folder: Path, family: str, quantization: Method | None = None, tp_size: int = 1) -> DecoderModel:
    import transformers

    case = CASES[family]
    transformers_config = getattr(transformers, f"{case.name}{case.suffix}").config_class(**(SMALL | case.options))
    transformers_config.architectures = [case.name + case.suffix]
    transformers_config.save_pretrained(folder)
    config = read_model_config(folder)
    config = replace(config, quantization=resolved(config.quantization, quantization))
    torch.manual_seed(0)
    model = DecoderModel(config, TPGroup(0, tp_size), torch.float32, CPU)
    if quantization is None:
        fill_randomly(model)
    return model


def decoded(model: DecoderModel, tokens: int, uses_kernels: bool) -> Tensor:
    """Returns the model's output for a token of each sequence, after states and caches that a seed decides."""
    spec = attention_spec(model.config, BLOCK, torch.float32, torch.float32, CPU, {})
    random = torch.Generator().manual_seed(1)
    caches = [KVCache(*torch.randn(2, tokens, BLOCK, *layer.kv_shape[:2], generator=random)) for layer in spec.layers]
    attention = make_attention(spec, caches, "torch")
    attention.plan(AttentionBatch([1] * tokens, [CONTEXT] * tokens, [[i] for i in range(tokens)]))
    shapes = [layer.mixer.config.state for layer in model.decoder_layers() if isinstance(layer.mixer, DeltaNet)]
    step = StateCache(shapes, tokens, torch.float32, CPU).of_padding([1] * tokens)
    rows = torch.arange(tokens)
    last = torch.full_like(rows, CONTEXT - 1)
    for _ in range(2):
        if uses_kernels:
            with few_token_kernels(model, tokens):
                out = model(rows % 7, last, last + 1, rows * BLOCK + CONTEXT - 1, caches, attention, None, step)
        else:
            out = model(rows % 7, last, last + 1, rows * BLOCK + CONTEXT - 1, caches, attention, None, step)
    return out


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "llama4"])
def test_a_models_answers_stay(tmp_path: Path, family: str) -> None:
    model = make(tmp_path, family)
    torch.testing.assert_close(decoded(model, 3, True), decoded(model, 3, False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "rows", "quantization", "tp_size", "count"),
    [
        ("qwen3_5_moe", 1, None, 1, 5),
        ("qwen3_5_moe", MOST_TOKENS, None, 1, 5),
        ("qwen3_5_moe", MOST_TOKENS + 1, None, 1, 0),
        ("qwen3_5_moe", 1, None, 2, 0),
        ("qwen3_5", 1, None, 1, 2),
        ("qwen2_moe", 1, "fp8", 1, 1),
        ("gpt_oss", 1, None, 1, 0),
        ("minimax_m2", 1, None, 1, 2),
    ],
)
def test_only_layers_that_the_kernels_compute_have_them(
    tmp_path: Path, family: str, rows: int, quantization: Method | None, tp_size: int, count: int
) -> None:
    model = make(tmp_path, family, quantization, tp_size)
    with few_token_kernels(model, rows) as found:
        assert found == count
    for _, mixture in model.mixtures():
        assert mixture.few_tokens is None
    for layer in model.decoder_layers():
        assert not isinstance(layer.mixer, DeltaNet) or layer.mixer.few_tokens is None
