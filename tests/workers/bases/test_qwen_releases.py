"""Qwen3.5 with and without experts as Qwen releases it in FP8: a wrapper with a part for pictures and one that predicts
further tokens, both partly in FP8 too, scales for blocks, each expert on its own, and lists of plain modules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_cases import DELTA_NET, SHARED_EXPERT, SMALL
from float_checkpoints import BLOCK, DEEPSEEK, FP8, scaled
from lorafleet.offline.llm import LoRARequest, SamplingParams
from quantized_models import written
from ranks import start_llm
from tests.workers.conftest import peft_warnings_ignored
from tiny_models import tokenizer

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
    "deepstack_visual_indexes": [],
}  # fmt: skip
TEXTS: dict[str, dict[str, Any]] = {"Qwen3_5": SMALL | DELTA_NET, "Qwen3_5Moe": SMALL | DELTA_NET | SHARED_EXPERT}
# Modules that stay plain. Each is in the list of config.json.
PLAIN = re.compile(
    r"lm_head|.*embed_tokens|.*linear_attn\.(?:in_proj_a|in_proj_b|conv1d)|.*mlp\.(?:gate|shared_expert_gate)"
    r"|model\.visual\.(?:patch_embed|pos_embed|merger).*|mtp\.fc"
)
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def release(base: Path, folder: Path) -> Path:
    """Writes the checkpoint in FP8, and returns one of its values beside it."""
    values: dict[str, Tensor] = {}
    plain = ["mtp.fc"]

    def entries(name: str, weight: Tensor) -> dict[str, Tensor]:
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or PLAIN.fullmatch(module):
            if PLAIN.fullmatch(module):
                plain.append(module)
            return {name: weight}
        tensors, values[name] = scaled(weight, BLOCK, FP8, "weight_scale_inv")
        return {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}

    written(base, folder, entries, {})
    path = folder / "model.safetensors"
    predicting, _ = scaled(torch.randn(32, 64), BLOCK, FP8, "weight_scale_inv")
    further = {f"mtp.layers.0.self_attn.q_proj.{leaf}": tensor for leaf, tensor in predicting.items()}
    save_file(load_file(path) | further | {"mtp.fc.weight": torch.zeros(32, 64)}, path)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = DEEPSEEK | {"modules_to_not_convert": plain}
    (folder / "config.json").write_text(json.dumps(config))
    return written(base, folder.with_name("values"), lambda name, weight: {name: values.get(name, weight)}, {})


@torch.inference_mode()
def logprobs(model: Any, tokens: list[int]) -> list[float]:
    rows = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("name", TEXTS)
def test_released_checkpoints_answer_with_the_values_that_they_store(tmp_path: Path, prompt, name: str) -> None:
    import peft

    base, stored, tokens = tmp_path / "base", tmp_path / "fp8", prompt(70)
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    config = getattr(transformers, f"{name}Config")(text_config=TEXTS[name], vision_config=VISION)
    model_class(config).save_pretrained(base)
    tokenizer().save_pretrained(base)
    decoded = release(base, stored)
    names = load_file(stored / "model.safetensors").keys()
    assert any(re.search(r"^model\.language_model\..*in_proj_qkv\.weight_scale_inv", name) for name in names)
    assert any(re.search(r"^model\.visual\..*weight_scale_inv", name) for name in names)
    assert any(".experts.0.gate_proj.weight_scale_inv" in name for name in names) == (name == "Qwen3_5Moe")
    model = model_class.from_pretrained(decoded, dtype=torch.float32).eval()
    expected = [logprobs(model, tokens)]
    targets = r".*language_model.*\.(in_proj_\w+|out_proj|[qkvo]_proj)"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets))
    for parameter_name, parameter in wrapped.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    with peft_warnings_ignored():
        wrapped.save_pretrained(tmp_path / "lora")
    expected.append(logprobs(wrapped.eval(), tokens))
    for ranks in (1, 2):
        llm = start_llm(str(stored), ranks, enable_lora=True)
        loras = [None, LoRARequest("lora", 1, str(tmp_path / "lora"))]
        outputs = llm.generate([{"prompt_token_ids": tokens}] * 2, PARAMS, loras)
        llm.close()
        for output, wanted in zip(outputs, expected, strict=True):
            assert [p.logprob for p in output.prompt_logprobs[1:]] == pytest.approx(wanted, abs=1e-3)
