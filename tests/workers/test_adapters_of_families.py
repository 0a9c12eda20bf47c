"""Adapters on what only some families have: a head with a bias as Phi-2's, MLPs without a gate, norms elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_cases import CASES, make_case
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import AdapterError
from lorafleet.workers.bases.weights import held_tensors
from lorafleet.workers.slots.base_weights import FileWeights
from tests.workers.conftest import peft_warnings_ignored

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
SAVED = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
ADAPTERS: dict[str, peft.PeftConfig] = {
    "saved": SAVED,
    "lora": peft.LoraConfig(r=4, target_modules=["lm_head", "fc1"]),
    "dora": peft.LoraConfig(r=4, target_modules=["lm_head"], use_dora=True),
    "biases of targets": peft.LoraConfig(r=4, target_modules=["v_proj", "lm_head"], bias="lora_only"),
    "ia3": peft.IA3Config(target_modules=["lm_head", "fc2"], feedforward_modules=[]),
    "resized": peft.LoraConfig(r=4, target_modules=["k_proj"]),
}


def make_adapter(folder: Path, base: Path, config: peft.PeftConfig, num_tokens: int | None = None) -> Any:
    """Saves an adapter with random numbers, and returns PEFT's model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    if num_tokens is not None:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
        torch.nn.init.normal_(model.lm_head.bias)
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    with peft_warnings_ignored():
        wrapped.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return wrapped.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("phi"), CASES["phi"])


@torch.inference_mode()
def test_adapters_of_a_head_with_a_bias_answer_as_peft_does(base: Path, prompt: Any, tmp_path: Path) -> None:
    models = {
        name: make_adapter(tmp_path / name, base, config, 336 if name == "resized" else None)
        for name, config in ADAPTERS.items()
    }
    assert "base_model.model.lm_head.bias" in load_file(tmp_path / "resized" / "adapter_model.safetensors")
    llm = LLM(str(base), enable_lora=True, max_loras=8, max_num_seqs=8, kv_cache_tokens=2048)
    requests: list[LoRARequest | None] = [
        LoRARequest(name, i + 1, str(tmp_path / name)) for i, name in enumerate(models)
    ]
    ids = prompt(20)
    outputs = llm.generate([{"prompt_token_ids": ids}] * len(requests), PARAMS, lora_request=requests)
    llm.close()
    for (name, model), output in zip(models.items(), outputs, strict=True):
        [completion] = output.outputs
        tokens = ids + completion.token_ids
        rows = model(input_ids=torch.tensor([tokens])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        assert completion.token_ids == rows.argmax(-1).tolist(), name
        expected = [row[token].item() for row, token in zip(rows, completion.token_ids, strict=True)]
        assert [p.logprob for p in completion.logprobs] == pytest.approx(expected, abs=1e-3), name


@pytest.mark.parametrize(("shape", "named"), [(None, "0 biases of lm_head"), ((7,), r"shape \[7\]")])
def test_a_saved_head_has_a_bias_of_its_size(
    base: Path, tmp_path: Path, shape: tuple[int, ...] | None, named: str
) -> None:
    make_adapter(tmp_path / "a", base, SAVED)
    path, name = tmp_path / "a" / "adapter_model.safetensors", "base_model.model.lm_head.bias"
    tensors = load_file(path)
    tensors.pop(name)
    save_file(tensors | ({} if shape is None else {name: torch.zeros(shape)}), path)
    refused(base, tmp_path / "a", named)


def test_biases_of_norms_are_refused(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", base, peft.LoraConfig(r=4, target_modules=["dense"], bias="all"))
    refused(base, tmp_path / "a", "bias of the norm final_layernorm")


def test_trained_tokens_of_a_head_with_a_bias_are_refused(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trainable_token_indices": {"lm_head": [3]}}))
    weights = tmp_path / "a" / "adapter_model.safetensors"
    rows = {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.zeros(1, 32)}
    save_file(load_file(weights) | rows, weights)
    refused(base, tmp_path / "a", "trained tokens of lm_head")


@pytest.mark.parametrize(
    ("case", "module", "named"),
    [("arcee", "down_proj", "without a gate"), ("olmo2", "gate_proj", "norms of"), ("phi", "lm_head", "norms of")],
)
def test_ia3_on_inputs_that_no_norm_or_linear_can_scale_is_refused(
    tmp_path: Path, case: str, module: str, named: str
) -> None:
    model = make_case(tmp_path / "base", CASES[case])
    make_adapter(tmp_path / "a", model, peft.IA3Config(target_modules=[module], feedforward_modules=[module]))
    refused(model, tmp_path / "a", named)


def test_weights_for_adapters_are_the_quantized_ones_whatever_linears_are_called(base: Path) -> None:
    llm = LLM(str(base), quantization="nf4", kv_cache_tokens=512)
    model = llm._engine.runner.steps.model
    llm.close()
    held, files = held_tensors(model), FileWeights(base, torch.float32, False, model.config.quantization)
    plain = FileWeights(base, torch.float32, False)
    for module in model.config.projections():  # q_proj, dense, fc1, ...
        assert torch.equal(files.weight(module), held[f"model.{module}.weight"]()), module
        assert not torch.equal(files.weight(module), plain.weight(module)), module


def refused(base: Path, adapter: Path, named: str) -> None:
    llm = LLM(str(base), enable_lora=True, kv_cache_tokens=512)
    with pytest.raises(AdapterError, match=named):
        llm.generate({"prompt_token_ids": [5, 6]}, PARAMS, LoRARequest("a", 1, str(adapter)))
    llm.close()
