"""A checkpoint that `lorafleet quantize` writes is served with the bits that `--quantization` serves."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from family_cases import CASES, make_case
from lorafleet.offline.llm import LLM
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.protocol.quantization_methods import Method
from lorafleet.tools.quantized import quantized_checkpoint
from lorafleet.tools.quantized.quantized_checkpoint import default_folder, quantize_checkpoint
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.quantization import METHODS, resolved
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from quantized_answers import GREEDY
from tiny_models import make_model, stack_experts

MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """llama_bias has inputs of 64 and 96, and biases. Layer 1 of the mixture is dense."""
    folder = tmp_path_factory.mktemp("plain")
    mixture = make_model(folder / "mixture", "qwen3_moe", num_hidden_layers=2, **MIXTURE)
    return {
        "dense": make_model(folder / "dense", "llama_bias", num_hidden_layers=2, dtype="bfloat16"),
        "fused": make_model(folder / "fused", "phi3", num_hidden_layers=1),
        "mixture": mixture,
        "stacked": stack_experts(Path(shutil.copytree(mixture, folder / "stacked"))),
    }


def parameters(folder: Path, method: Method | None, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Returns what a rank holds, with the codes of quantized weights."""
    config = read_model_config(folder)
    config = replace(config, quantization=resolved(config.quantization, method))
    model = DecoderModel(config, TPGroup(rank, size), config.dtype or torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(model, folder)
    return dict(model.named_parameters())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", ["dense", "fused", "mixture", "stacked"])
def test_every_rank_holds_the_bits_that_are_quantized_at_a_start(tmp_path, bases, base, method) -> None:
    out = tmp_path / "out"
    done = quantize_checkpoint(bases[base], method, out)
    assert done.num_files == 1
    for rank, size in ((0, 1), (1, 2)):
        held, wanted = parameters(out, None, rank, size), parameters(bases[base], method, rank, size)
        assert held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def answers(folder: Path, prompt, **options: object) -> list[tuple[list[int], list[float]]]:
    llm = LLM(str(folder), kv_cache_tokens=2048, **options)
    outputs = llm.generate([{"prompt_token_ids": prompt(n)} for n in (3, 20)], GREEDY)
    llm.close()
    return [(out.outputs[0].token_ids, [p.logprob for p in out.outputs[0].logprobs]) for out in outputs]


@pytest.mark.parametrize(("base", "method"), [("dense", "nf4"), ("dense", "int4"), ("mixture", "fp8"), ("mixture", "nf4")])
def test_logprobs_are_those_of_quantizing_at_a_start(tmp_path, prompt, bases, base, method) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(bases[base], method, out)
    assert answers(out, prompt) == answers(bases[base], prompt, quantization=method)


@pytest.mark.parametrize("case", ["gpt_oss", "gemma3"])
def test_other_layouts_of_names_and_experts_are_quantized(tmp_path, case) -> None:
    base, out = make_case(tmp_path / "base", CASES[case]), tmp_path / "out"
    quantize_checkpoint(base, "fp8", out)
    held, wanted = parameters(out, None, 0, 1), parameters(base, "fp8", 0, 1)
    assert all(torch.equal(held[name].view(torch.uint8), t.view(torch.uint8)) for name, t in wanted.items())
