"""Every form of linears and norms through the engine, against transformers with the adapter in its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapter_forms import applied, make_forms, served_from
from engine_steps import step_until_done
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.workers.adapters.forms import AdapterForms
from tiny_models import make_model

TOLERANCE = 1e-3
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
# Biases on every linear; no bias, and norms of q and k; norms that add one, of branches too; fused linears.
FAMILIES = ["llama_bias", "qwen3", "gemma3", "phi3"]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory) -> tuple[Path, dict[str, AdapterForms]]:
    folder = make_model(tmp_path_factory.mktemp("forms") / request.param, request.param, num_hidden_layers=2)
    return folder, make_forms(folder)


def logprobs(model, tokens: list[int]) -> list[float]:
    """Of each token but the first."""
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(tokens[1:])]


def check_all_forms_in_one_batch(made, prompt, tmp_path, monkeypatch, **options) -> None:
    folder, forms = made
    paths = served_from(tmp_path, forms, monkeypatch)
    llm = LLM(str(folder), enable_lora=True, max_num_batched_tokens=48, max_num_seqs=16, **options)
    loras = [None, *(LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items()))] * 2
    prompts = [prompt(3 + 7 * i % 40) for i in range(len(loras))]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, loras)
    models = {None: applied(folder, AdapterForms())} | {kind: applied(folder, form) for kind, form in forms.items()}
    base_answers = 0
    for tokens, lora, output in zip(prompts, loras, outputs, strict=True):
        [completion] = output.outputs
        whole = tokens + completion.token_ids
        found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
        want = logprobs(models[None if lora is None else lora.lora_name], whole)
        assert found == pytest.approx(want, abs=TOLERANCE)
        if lora is not None:
            base_answers += found == pytest.approx(logprobs(models[None], whole), abs=TOLERANCE)
    assert base_answers == 0, "an adapter makes no difference"
    llm.close()


@pytest.mark.parametrize("max_loras", [8, 3])
def test_all_forms_in_one_batch_answer_as_the_changed_model_does(made, prompt, tmp_path, monkeypatch, max_loras):
    """Also where they come and go, a slot's next adapter being of another kind."""
    check_all_forms_in_one_batch(made, prompt, tmp_path, monkeypatch, max_loras=max_loras)


@pytest.mark.parametrize("lora_dtype", ["fp8", "bfloat16"])
def test_vectors_stay_float32_whatever_a_and_b_are(made, prompt, tmp_path, monkeypatch, lora_dtype):
    folder, forms = made
    exact = {kind: forms[kind] for kind in ("ia3", "norms")}
    check_all_forms_in_one_batch((folder, exact), prompt, tmp_path, monkeypatch, max_loras=2, lora_dtype=lora_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("max_loras", [8, 3])
@pytest.mark.parametrize("eager", [False, True])
def test_all_forms_in_one_batch_on_a_gpu(made, prompt, tmp_path, monkeypatch, max_loras, eager):
    """In float32. Its decode steps have no graphs, as their attention has none; those with prompts have."""
    options = {"max_loras": max_loras, "enforce_eager": eager, "attention_backend": "triton", "kv_cache_tokens": 4096}
    check_all_forms_in_one_batch(made, prompt, tmp_path, monkeypatch, **options)


HEADS_OF_128 = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.04,
    "num_hidden_layers": 2,
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
def test_captured_decode_steps_of_any_mix_agree_with_the_changed_model(tmp_path, monkeypatch, prompt, family):
    pytest.importorskip("flashinfer")
    folder = make_model(tmp_path / "base", family, **HEADS_OF_128)
    forms = make_forms(folder, std=0.03)
    paths = served_from(tmp_path, forms, monkeypatch)
    options = {"max_loras": 5, "kv_cache_tokens": 8192, "max_num_batched_tokens": 256, "max_num_seqs": 16}
    llm = LLM(str(folder), enable_lora=True, dtype="bfloat16", **options)
    assert llm._engine.runner.steps.decode_graphs is not None
    loras = [None, *(LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items()))] * 2
    prompts = [prompt(3 + 7 * i % 40) for i in range(len(loras))]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, loras)
    models = {kind: applied(folder, form) for kind, form in ({None: AdapterForms()} | forms).items()}
    errors = {}
    for tokens, lora, output in zip(prompts, loras, outputs, strict=True):
        [completion] = output.outputs
        name, whole = None if lora is None else lora.lora_name, tokens + completion.token_ids
        found, exact = torch.tensor([p.logprob for p in completion.logprobs]), logprobs(models[name], whole)
        off = (found - torch.tensor(exact[len(tokens) - 1 :])).abs().mean().item()
        changed = torch.tensor(logprobs(models[None], whole)) - torch.tensor(exact)
        print(f"{family} {name}: {off:.4f} off; the base alone is {changed.abs().mean():.4f} off")
        errors.setdefault(name, []).append(off)
    assert all(sum(of_kind) / len(of_kind) < 0.05 for of_kind in errors.values()), errors
    llm.close()


def test_an_adapter_without_low_rank_has_rank_zero_and_names_its_targets(made, tmp_path, monkeypatch):
    folder, forms = made
    paths = served_from(tmp_path, forms, monkeypatch)
    llm = LLM(str(folder), enable_lora=True, max_loras=2)
    infos = {}
    for i, kind in enumerate(("ia3", "norms")):
        loaded = llm._engine.load_adapter(LoRARequest(kind, i + 1, str(paths[kind])))
        step_until_done(llm._engine, loaded)
        infos[kind] = loaded.result()
    assert [info.rank for info in infos.values()] == [0, 0]
    assert infos["ia3"].target_modules == sorted({module.rpartition(".")[2] for module in forms["ia3"].linears})
    assert "input_layernorm" in infos["norms"].target_modules
    sizes = [v for form in forms["ia3"].linears.values() for v in (form.out_scale_O, form.bias_O) if v is not None]
    assert infos["ia3"].num_bytes == 4 * sum(v.numel() for v in sizes)
    llm.close()
