"""Gemma 2 to 4 and Phi-3 on a GPU in bf16: teacher-forced logprobs of base and adapters in one batch against
transformers, which gets an adapter as a change of its weights. Prompts are longer than windows and trained lengths."""

# R rank · D in features · O out features

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from family_cases import FamilyCase, make_case
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tiny_models import Reference, make_model

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 4096,
    "initializer_range": 0.04,
}
GEMMA = SHAPE | {"head_dim": 256, "query_pre_attn_scalar": 200, "sliding_window": 64}
FACTORS = {"short_factor": [1.0 + i / 40 for i in range(48)], "long_factor": [1.0 + i / 8 for i in range(48)]}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75} | FACTORS
FAMILIES = {
    "gemma2": GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3": GEMMA,
    "phi3": SHAPE | {"rope_parameters": LONG, "original_max_position_embeddings": 256, "sliding_window": None},
}
RANK, ALPHA = 16, 32

LAYERS = SHAPE | {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "head_dim": 256,
    "final_logit_softcapping": 10.0,
}
PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 4096, "num_kv_shared_layers": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 512}
CASES = {
    "gemma4 dense": FamilyCase(
        "Gemma4",
        LAYERS
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 512}
        | {"hidden_size_per_layer_input": 0},
    ),
    "gemma4 small": FamilyCase("Gemma4", LAYERS | PER_LAYER | {"use_double_wide_mlp": True}),
    "gemma4 experts": FamilyCase("Gemma4", LAYERS | EXPERTS | {"hidden_size_per_layer_input": 0}),
    "gemma3n": FamilyCase("Gemma3n", LAYERS | PER_LAYER | {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}),
}


class Changed(Reference):
    """Whose adapters are added to the base's weights. It has eager attention, whose products are the plainest."""

    def model(self, adapter: Path | None) -> nn.Module:
        if adapter not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype, attn_implementation="eager")
            if adapter is not None:
                for name, (a_RD, b_OR) in matrices(model, adapter.name).items():
                    weight_OD = model.get_submodule(name).weight.data
                    weight_OD.copy_(weight_OD.float() + ALPHA / RANK * (b_OR @ a_RD))
            self._models[adapter] = model.eval().to(self._device)
        return self._models[adapter]


def matrices(model: nn.Module, name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every linear but the head."""
    random = torch.Generator().manual_seed(len(name))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    return {
        n: tuple(
            0.02 * torch.randn(*shape, generator=random) for shape in ((RANK, m.in_features), (m.out_features, RANK))
        )
        for n, m in linears.items()
    }


def save_adapter(folder: Path, base: Path) -> Path:
    folder.mkdir()
    found = matrices(AutoModelForCausalLM.from_pretrained(base), folder.name)
    tensors = {
        f"base_model.model.{n}.lora_{side}.weight": m
        for n, pair in found.items()
        for side, m in zip("AB", pair, strict=True)
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_base_and_adapters_agree_with_transformers_in_bf16(tmp_path, prompt, family, backend):
    pytest.importorskip(backend)
    check(make_model(tmp_path / "base", family, dtype="bfloat16", **FAMILIES[family]), backend, tmp_path, prompt)


@pytest.mark.parametrize("name", CASES)
def test_layers_of_several_kinds_agree_with_transformers_in_bf16(tmp_path, prompt, name):
    check(make_case(tmp_path / "base", CASES[name]), "auto", tmp_path, prompt)


def check(base: Path, backend: str, tmp_path: Path, prompt: Callable[[int], list[int]]) -> None:
    paths = {name: save_adapter(tmp_path / name, base) for name in ("one", "other")}
    llm = LLM(
        str(base),
        dtype="bfloat16",
        enable_lora=True,
        attention_backend=backend,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        kv_cache_tokens=16384,
    )
    jobs = [(prompt(n), name) for n in (5, 100, 250, 400) for name in (None, *paths)]
    requests = {name: LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(paths.items())}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p, _ in jobs], params, [requests.get(name) for _, name in jobs])
    exact, half = Changed(base, device="cuda"), Changed(base, dtype=torch.bfloat16, device="cuda")
    ours, theirs = [], []
    for (p, name), output in zip(jobs, outputs, strict=True):
        [completion] = output.outputs
        found = torch.tensor([entry.logprob for entry in completion.logprobs])
        # Token by token, since a sequence that passes the trained length is turned anew, not at its end alone.
        truth, bf16 = (of_next(r, p, completion.token_ids, paths.get(name)) for r in (exact, half))
        ours.append((found - truth).abs().mean().item())
        theirs.append((bf16 - truth).abs().mean().item())
    print(f"{backend}: error {mean(ours):.4f}, of transformers in bf16 {mean(theirs):.4f}")
    assert mean(ours) < 1.5 * mean(theirs) + 0.002


def test_graphs_turn_by_each_sequences_length(tmp_path, prompt):
    """Dynamic NTK, whose angles change with every token past the trained length."""
    pytest.importorskip("flashinfer")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    shape = SHAPE | {"rope_parameters": rope, "max_position_embeddings": 128}
    base = make_model(tmp_path / "base", "llama_dynamic", dtype="bfloat16", **shape)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    answers = []
    for eager in (True, False):
        llm = LLM(str(base), enforce_eager=eager, max_num_batched_tokens=256, max_num_seqs=16, kv_cache_tokens=8192)
        assert (llm._engine.runner.steps.decode_graphs is None) == eager
        prompts = [{"prompt_token_ids": prompt(n)} for n in (5, 120, 200, 300)]
        answers.append([output.outputs[0] for output in llm.generate(prompts, params)])
        llm.close()
    for one, other in zip(*answers, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(one.token_ids))
        differences = [abs(a.logprob - b.logprob) for a, b in zip(one.logprobs[:same], other.logprobs, strict=False)]
        print(f"{same} of 24 tokens alike, logprobs differ by {max(differences, default=0):.4f}")
        assert same >= 6 and mean(differences) < 0.05


@torch.inference_mode()
def of_next(reference: Changed, prompt: list[int], tokens: list[int], adapter: Path | None) -> Tensor:
    """Each token's logprob after those before it."""
    found = []
    for i, token in enumerate(tokens):
        ids = torch.tensor([prompt + tokens[:i]], device="cuda")
        logits = reference.model(adapter)(input_ids=ids, use_cache=False).logits[0, -1]
        found.append(logits.float().log_softmax(-1)[token].item())
    return torch.tensor(found)
