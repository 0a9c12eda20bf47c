"""Architectures without a decoder of ours, as transformers' own modules, against transformers + PEFT in float32."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from generic_cases import GENERIC_CASES, make_generic
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterUnsupported, ConfigError, UnsupportedModel
from lorafleet.workers.models.generic.architecture import find_architecture
from lorafleet.workers.models.generic.attention_probe import window_of
from lorafleet.workers.models.generic.generic_loading import read_generic_config
from lorafleet.workers.rank_startup import build_rank
from tiny_models import COMMON, Answer, Reference, make_adapter, make_model

pytestmark = pytest.mark.filterwarnings("ignore:.*(save_embedding_layers|tied):UserWarning")  # PEFT's own

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Made:
    base: Path
    adapter: Path  # LoRA on every linear
    reference: Reference


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            base = make_generic(folder / "base", name)
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if name == "olmoe" else "all-linear"  # no experts
            adapter = make_adapter(folder / "adapter", base, r=4, target_modules=targets, std=0.2)
            found[name] = Made(base, adapter, Reference(base))
        return found[name]

    return get


def prompt(length: int) -> list[int]:
    return torch.randint(5, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def llm_of(model: Made, **options: Any) -> LLM:
    return LLM(str(model.base), model_impl="transformers", enable_lora=True, **options)


def assert_same(output: Any, expected: Answer) -> None:
    [completion] = output.outputs
    assert len(completion.token_ids) == GREEDY.max_tokens
    assert completion.token_ids == expected.tokens
    assert [p.logprob for p in completion.logprobs] == pytest.approx(expected.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("name", GENERIC_CASES)
def test_a_mixed_batch_answers_as_transformers_and_peft_do(made, name):
    model = made(name)
    llm = llm_of(model, max_num_batched_tokens=24, max_num_seqs=6, kv_cache_tokens=1024)
    lora = LoRARequest("all", 1, str(model.adapter))
    jobs = [(prompt(n), lora if adapted else None) for n in (2, 19, 40) for adapted in (False, True)]
    for cached in (0, 32):  # the second time, prompts begin with cached blocks
        outputs = llm.generate([{"prompt_token_ids": p} for p, _ in jobs], GREEDY, lora_request=[r for _, r in jobs])
        for (p, request), output in zip(jobs, outputs, strict=True):
            adapter = None if request is None else model.adapter
            assert_same(output, model.reference.greedy_along(p, output.outputs[0].token_ids, adapter))
        assert outputs[-1].num_cached_tokens == cached


def test_adapters_on_head_and_embedding_follow_the_class_s_scaling_of_logits(made, tmp_path):
    model = made("granite")
    adapters = [
        make_adapter(
            tmp_path / "lora", model.base, target_modules=["q_proj", "lm_head", "embed_tokens"], use_dora=True
        ),
        make_adapter(tmp_path / "saved", model.base, r=4, target_modules=["up_proj"], modules_to_save=["lm_head"]),
    ]
    llm = llm_of(model, kv_cache_tokens=1024)
    requests = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(adapters)]
    outputs = llm.generate([{"prompt_token_ids": prompt(20)}] * 3, GREEDY, lora_request=[*requests, None])
    for output, adapter in zip(outputs, [*adapters, None], strict=True):
        assert_same(output, model.reference.greedy(prompt(20), 8, adapter))


@pytest.mark.parametrize("method", [None, "nf4", "int4", "fp8"])
def test_both_implementations_of_an_architecture_answer_alike(tmp_path, method):
    base = make_model(tmp_path / "base", "qwen3", num_hidden_layers=2)
    adapter = make_adapter(tmp_path / "adapter", base, r=4, use_dora=True)  # computed from the served weights
    answers = []
    for implementation in ("lorafleet", "transformers"):
        llm = LLM(str(base), model_impl=implementation, quantization=method, enable_lora=True, kv_cache_tokens=256)
        output = llm.generate({"prompt_token_ids": prompt(30)}, GREEDY, LoRARequest("dora", 1, str(adapter)))
        answers.append(output[0].outputs[0])
    ours, theirs = answers
    assert theirs.token_ids == ours.token_ids
    assert [p.logprob for p in theirs.logprobs] == pytest.approx([p.logprob for p in ours.logprobs], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("OwnForCausalLM", {"auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}, "never run"),
        ("OwnForCausalLM", {}, "has no class of that name"),
        ("LlavaForConditionalGeneration", {}, "LlavaForConditionalGeneration"),
        ("MambaForCausalLM", {}, "recurrent state"),
        ("BartForCausalLM", {}, "cross-attention"),
        ("BloomForCausalLM", {}, "0 modules attend"),
        ("DiffLlamaForCausalLM", {}, "attend 8 times in 4 layers"),
        ("GptOssForCausalLM", {"num_local_experts": 4}, "s_aux"),
        ("DeepseekV3ForCausalLM", {}, "heads of different sizes"),
        ("Llama4ForCausalLM", {}, "chunked_attention"),
        ("ElectraForCausalLM", {}, "mask"),
        ("Gemma3ForCausalLM", {}, "Gemma3TextScaledWordEmbedding"),
        ("GPT2LMHeadModel", {}, "no nn.Linear"),
        ("Olmo2ForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("Olmo2ForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints"),
        ("Olmo2ForCausalLM", {"hidden_size": "64"}, "cannot read"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_before_weights_are_read(tmp_path, architecture, changes, named):
    model_class = getattr(transformers, architecture, None)
    kind = {} if model_class is None else {"model_type": model_class.config_class.model_type}
    raw = COMMON | {"num_hidden_layers": 4, "architectures": [architecture]} | kind | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=named):
        read_generic_config(tmp_path)


def test_an_architecture_without_a_decoder_of_ours_runs_so_by_itself_and_the_log_says_it(made, caplog):
    with caplog.at_level(logging.INFO):
        build_rank(EngineConfig(str(made("gpt_neox").base), kv_cache_tokens=64))
    assert "GPTNeoXForCausalLM runs as transformers' own module" in caplog.text


def test_no_kernel_that_the_checkpoint_names_is_fetched(made, tmp_path):
    raw = json.loads((made("olmo2").base / "config.json").read_text())
    kernels = {"attn_implementation": "nobody/attention", "_attn_implementation": "nobody/attention"}
    (tmp_path / "config.json").write_text(json.dumps(raw | kernels | {"experts_implementation": "nobody/experts"}))
    config = find_architecture(tmp_path).config
    assert "nobody" not in f"{config._attn_implementation} {config._experts_implementation} {config.to_dict()}"


def test_a_module_that_mixes_tokens_by_itself_is_refused(made, monkeypatch):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)).cumsum(1)

    monkeypatch.setattr(transformers.models.olmo2.modeling_olmo2.Olmo2MLP, "forward", forward)
    with pytest.raises(UnsupportedModel, match="hidden states differ"):
        build_rank(EngineConfig(str(made("olmo2").base), model_impl="transformers", kv_cache_tokens=64))


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("olmo2", {"modules_to_save": ["post_attention_layernorm"]}, "transformers' own module"),
        ("gpt_neox", {"target_modules": ["dense", "embed_in"]}, "transformers' own module"),
        ("phi", {"target_modules": ["dense", "lm_head"]}, "transformers' own module"),
    ],
)
def test_adapters_on_other_modules_are_refused(made, tmp_path, name, options, named):
    model = made(name)
    adapter = make_adapter(tmp_path / "adapter", model.base, r=4, **({"target_modules": ["up_proj"]} | options))
    llm = llm_of(model, kv_cache_tokens=64)
    with pytest.raises(AdapterUnsupported, match=named):
        llm.generate({"prompt_token_ids": prompt(5)}, GREEDY, LoRARequest("x", 1, str(adapter)))


def test_ia3_on_inputs_is_refused_where_nothing_is_known_of_what_computes_them(made, tmp_path):
    import peft

    model = made("olmo2")
    base = transformers.AutoModelForCausalLM.from_pretrained(model.base)
    settings = peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"])
    peft.get_peft_model(base, settings).save_pretrained(tmp_path)
    with pytest.raises(AdapterUnsupported, match="feedforward_modules"):
        llm_of(model, kv_cache_tokens=64).generate(
            {"prompt_token_ids": prompt(5)}, GREEDY, LoRARequest("ia3", 1, str(tmp_path))
        )


ON_GPU = pytest.mark.gpu


@pytest.mark.parametrize(("device", "backend"), [("cpu", "torch"), pytest.param("cuda", "triton", marks=ON_GPU)])
def test_low_precision_stays_near_the_reference(made, device, backend):
    model = made("cohere2")
    llm = llm_of(
        model, dtype="bfloat16", device=device, attention_backend=backend, kv_cache_dtype="fp8", kv_cache_tokens=256
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate({"prompt_token_ids": prompt(40)}, params, LoRARequest("all", 1, str(model.adapter)))
    found = [p.logprob for p in output.prompt_logprobs[1:]]
    expected = model.reference.logprobs(prompt(40), model.adapter)
    assert sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(found) < 0.15


def test_windows_are_read_off_masks() -> None:
    def window(rule) -> int | None:
        return window_of(lambda _b, _h, query, key: rule(query, key), 100)

    assert window(lambda q, k: k <= q) is None
    assert window(lambda q, k: (k <= q) & (k > q - 8)) == 8
    for other in (lambda q, k: (k <= q) & (k // 8 == q // 8), lambda q, k: k <= k + q, lambda q, k: k < q):
        with pytest.raises(UnsupportedModel, match="mask"):
            window(other)
