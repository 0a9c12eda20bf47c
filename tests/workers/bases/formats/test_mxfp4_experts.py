"""gpt-oss with experts in MXFP4, as it is published, against transformers, which decodes them on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from tiny_models import Reference

SIZES = {"hidden_size": 64, "intermediate_size": 32}
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES["gpt_oss"]
    return make_case(tmp_path_factory.mktemp("mxfp4") / "plain", type(case)(case.name, case.options | SIZES))


def in_mxfp4(folder: Path, plain: Path) -> Path:
    """Saves the model with random experts in MXFP4."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = tensor.shape
            shape = count, outputs, inputs // 32
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator).to(torch.uint8)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((plain / name).read_bytes())
    return folder


def held(folder: Path, rank: int, size: int) -> dict[str, Tensor]:
    model = DecoderModel(read_model_config(folder), TPGroup(rank, size), torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    return {name: value() for name, value in held_tensors(model).items()}


@pytest.mark.filterwarnings("ignore")  # transformers says that it decodes.
def test_answers_are_those_of_transformers(plain: Path, tmp_path: Path, prompt) -> None:
    folder = in_mxfp4(tmp_path / "mxfp4", plain)
    adapter = make_case_adapter(tmp_path / "adapter", plain, CASES["gpt_oss"])
    llm = LLM(str(folder), dtype="float32", enable_lora=True, kv_cache_tokens=256)
    reference, ids = Reference(folder), prompt(30)
    for own in (None, adapter):
        lora = None if own is None else LoRARequest("a", 1, str(own))
        [output] = llm.generate({"prompt_token_ids": ids}, PARAMS, lora_request=lora)
        expected = reference.greedy(ids, 5, own)
        assert output.outputs[0].token_ids == expected.tokens
        assert [p.logprob for p in output.outputs[0].logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


def test_ranks_have_their_parts_of_the_values(plain: Path, tmp_path: Path) -> None:
    folder = in_mxfp4(tmp_path / "mxfp4", plain)
    whole, parts = held(folder, 0, 1), [held(folder, rank, 2) for rank in range(2)]
    for leaf, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        name = f"model.layers.1.mlp.experts.3.{leaf}.weight"
        assert torch.equal(torch.cat([part[name] for part in parts], dim=dim), whole[name])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda name, tensor: None if "down_proj_scales" in name else tensor, "down_proj_scales is missing"),
        (lambda name, tensor: None if "down_proj_blocks" in name else tensor, "lacks .* tensors"),
        (lambda name, tensor: tensor | 255 if "down_proj_scales" in name else tensor, "NaN"),
        (
            lambda name, tensor: (
                torch.zeros(1 << 40, 2, 0, 16, dtype=torch.uint8) if "down_proj_bl" in name else tensor
            ),
            "at most 16,384",
        ),
        (lambda name, tensor: tensor[..., :8].clone() if "down_proj_blocks" in name else tensor, "groups, 16"),
        (
            lambda name, tensor: tensor[:, :8].clone() if "down_proj" in name and "bias" not in name else tensor,
            "has shape",
        ),
    ],
)
def test_damaged_experts_are_refused(plain: Path, tmp_path: Path, damage, message: str) -> None:
    folder = in_mxfp4(tmp_path / "mxfp4", plain)
    tensors = {name: damage(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        held(folder, 0, 1)


def test_experts_are_not_stored_twice(plain: Path, tmp_path: Path) -> None:
    folder = in_mxfp4(tmp_path / "mxfp4", plain)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: load_file(plain / "model.safetensors")[name]}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="beside its quantized form"):
        held(folder, 0, 1)
