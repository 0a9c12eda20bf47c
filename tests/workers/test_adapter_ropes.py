"""Adapters with a rope scaling of their own against transformers with that scaling in the base's config.json + PEFT.

They share steps with the base and with ordinary adapters, and their prompts are longer than the base's context.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from family_cases import CASES, make_case
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import AdapterUnsupported, ConfigError, ContextOverflow
from lorafleet.workers.bases.checkpoint import read_model_config
from tiny_models import Reference, make_adapter, make_model

POSITIONS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": POSITIONS}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
# Scaling does not reach layers with a window, even if their rope is the same.
OLMO3 = replace(
    CASES["olmo3"],
    options=CASES["olmo3"].options
    | {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}, "max_position_embeddings": POSITIONS},
)
# Each adapter's scaling, the file that states it, and what it states.
ADAPTERS: dict[str, tuple[dict[str, Any] | None, str, dict[str, Any]]] = {
    "ordinary": (None, "", {}),
    "linear": (LINEAR, "adapter_config.json", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "yarn": (YARN, "lorafleet.json", {"rope_parameters": YARN}),
    "llama3": (LLAMA3, "adapter_config.json", {"rope_parameters": LLAMA3, "context_length": 200}),
    "plain": ({"rope_type": "default"}, "lorafleet.json", {"rope_scaling": {"rope_type": "default"}}),
}
CONTEXTS = {"ordinary": POSITIONS, "linear": 4 * POSITIONS, "yarn": 3 * POSITIONS, "llama3": 200, "plain": POSITIONS}


def edited(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    return folder


def with_scaling(base: Path, folder: Path, scaling: dict[str, Any]) -> Path:
    """The base with another scaling in its config.json. Gemma 3 scales the layers that see all tokens."""
    shutil.copytree(base, folder)
    own = json.loads((folder / "config.json").read_text())["rope_parameters"]
    if "full_attention" in own:
        full = {"rope_theta": own["full_attention"]["rope_theta"]} | scaling
        return edited(folder, "config.json", {"rope_parameters": own | {"full_attention": full}})
    return edited(folder, "config.json", {"rope_parameters": {"rope_theta": own["rope_theta"]} | scaling})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "base"
    return make_model(folder, "llama2", num_hidden_layers=2, max_position_embeddings=POSITIONS)


@pytest.mark.parametrize(("family", "tp"), [("llama2", 1), ("llama2", 2), ("llama3", 1), ("gemma3", 1), ("olmo3", 1)])
def test_adapters_are_rotated_by_their_own_scaling_beside_others(tmp_path, prompt, family, tp):
    # Gemma 3's max_position_embeddings includes its scaling by 8.
    positions = 8 * POSITIONS if family == "gemma3" else POSITIONS
    if family == "olmo3":
        base = make_case(tmp_path / "base", OLMO3)
    else:
        base = make_model(tmp_path / "base", family, num_hidden_layers=2, max_position_embeddings=positions)
    references, loras = {None: (Reference(base), None)}, {None: None}
    for i, (name, (scaling, file, stated)) in enumerate(ADAPTERS.items()):
        own = make_adapter(tmp_path / name, base, seed=i, r=4)
        model = base if scaling is None else with_scaling(base, tmp_path / f"base-{name}", scaling)
        references[name] = Reference(model), own
        served = shutil.copytree(own, tmp_path / f"served-{name}")
        loras[name] = LoRARequest(name, i + 1, str(edited(served, file, stated) if file else served))
    # Fewer slots than adapters, so that ordinary ones come into slots that had a rope, and prompts in chunks.
    llm = LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_num_batched_tokens=48,
        max_num_seqs=6,
        kv_cache_tokens=4096,
        tensor_parallel_size=tp,
    )
    jobs = [(prompt(n), name) for n in (9, 30) for name in loras]
    jobs += [(prompt(n), name) for n in (100, 150) for name in ("linear", "yarn", "llama3")]
    random.Random(0).shuffle(jobs)
    outputs = llm.generate([{"prompt_token_ids": p} for p, _ in jobs], GREEDY, [loras[name] for _, name in jobs])
    llm.close()
    for (p, name), output in zip(jobs, outputs, strict=True):
        reference, adapter = references[name]
        [completion] = output.outputs
        expected = reference.greedy(p, 6, adapter, likely=completion.token_ids)
        assert completion.token_ids == expected.tokens, name
        assert [entry.logprob for entry in completion.logprobs] == pytest.approx(expected.logprobs, abs=1e-3), name


def test_an_adapters_context_is_its_own_limit(tmp_path, prompt, llama):
    own = make_adapter(tmp_path / "own", llama, r=2)
    llm = LLM(str(llama), enable_lora=True, max_loras=2, kv_cache_tokens=512)
    one_token = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    for i, (name, (_, file, stated)) in enumerate(ADAPTERS.items()):
        served = shutil.copytree(own, tmp_path / name)
        lora = LoRARequest(name, i + 1, str(edited(served, file, stated) if file else served))
        limit = CONTEXTS[name]
        [output] = llm.generate({"prompt_token_ids": prompt(limit - 3)}, one_token, lora)
        assert len(output.outputs[0].token_ids) == 3
        with pytest.raises(ContextOverflow, match=rf"the limit of adapter '{name}'.* is {limit}\."):
            llm.generate({"prompt_token_ids": prompt(limit)}, one_token, lora)
    with pytest.raises(ContextOverflow, match=rf"the limit of this server .* is {POSITIONS}\."):
        llm.generate({"prompt_token_ids": prompt(POSITIONS)}, one_token)
    llm.close()


def test_a_context_length_alone_is_linear_scaling_by_a_whole_factor(tmp_path, prompt, llama):
    own = make_adapter(tmp_path / "own", llama, r=4)
    served = edited(shutil.copytree(own, tmp_path / "served"), "adapter_config.json", {"context_length": 150})
    scaled = with_scaling(llama, tmp_path / "scaled", {"rope_type": "linear", "factor": 3.0})
    # max_model_len bounds what the adapter states, and may exceed the base's context by what is declared.
    llm = LLM(
        str(llama), enable_lora=True, kv_cache_tokens=256, max_model_len=140, long_lora_scaling_factors=(2.0, 3.0)
    )
    lora, ids = LoRARequest("long", 1, str(served)), prompt(130)
    [output] = llm.generate({"prompt_token_ids": ids}, GREEDY, lora)
    assert output.outputs[0].token_ids == Reference(scaled).greedy(ids, 6, own).tokens
    with pytest.raises(ContextOverflow, match=r"is 140\."):
        llm.generate({"prompt_token_ids": prompt(140)}, GREEDY, lora)
    with pytest.raises(ContextOverflow, match=rf"is {POSITIONS}\."):
        llm.generate({"prompt_token_ids": prompt(POSITIONS)}, GREEDY)
    llm.close()


def test_a_scaling_that_is_not_declared_is_refused_by_the_options_name(tmp_path, prompt, llama):
    own = make_adapter(tmp_path / "own", llama, r=2)
    llm = LLM(str(llama), enable_lora=True, kv_cache_tokens=256, long_lora_scaling_factors=(2.0, 8.0))
    for i, name in enumerate(("linear", "yarn")):
        _, file, stated = ADAPTERS[name]
        served = edited(shutil.copytree(own, tmp_path / name), file, stated)
        with pytest.raises(AdapterUnsupported, match=rf"'{name}'.*lora\.long_lora_scaling_factors=\(2\.0, 8\.0\)"):
            llm.generate({"prompt_token_ids": prompt(5)}, GREEDY, LoRARequest(name, i + 1, str(served)))
    llm.close()
    with pytest.raises(ConfigError, match=r"max_model_len=200 is over the model's own limit of 128 tokens"):
        LLM(str(llama), enable_lora=True, max_model_len=200, long_lora_scaling_factors=(2.0,))


@pytest.mark.parametrize(
    ("family", "stated", "cause"),
    [
        ("llama_dynamic", {"context_length": 128}, "its own rope is dynamic, longrope, proportional"),
        ("llama3", {"context_length": 1024}, r"whose rope is scaled already \(llama3\)"),
        ("llama2", {"context_length": 1024, "alora_invocation_tokens": [5]}, "activated LoRA"),
    ],
)
def test_a_rope_that_the_base_cannot_have_is_refused(tmp_path, prompt, family, stated, cause):
    base = make_model(tmp_path / "base", family, num_hidden_layers=1)
    served = edited(make_adapter(tmp_path / "served", base, r=2), "adapter_config.json", stated)
    llm = LLM(str(base), enable_lora=True, kv_cache_tokens=256)
    with pytest.raises(AdapterUnsupported, match=cause):
        llm.generate({"prompt_token_ids": prompt(5)}, GREEDY, LoRARequest("long", 1, str(served)))
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("declared", [None, (4.0,)])
def test_graphs_rotate_as_steps_without_graphs_do(tmp_path, prompt, declared):
    """The decodes pass the base's context, where the graphs end unless longer contexts are declared."""
    pytest.importorskip("flashinfer")
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 2}
    base = make_model(tmp_path / "base", "llama2", dtype="bfloat16", max_position_embeddings=POSITIONS, **shape)
    own = make_adapter(tmp_path / "ordinary", base, r=8, std=0.02)
    served = edited(shutil.copytree(own, tmp_path / "linear"), "lorafleet.json", {"rope_scaling": LINEAR})
    loras = [None, LoRARequest("ordinary", 1, str(own)), LoRARequest("linear", 2, str(served))]
    jobs = [(prompt(n), lora) for n in (20, 30) for lora in loras] + [(prompt(55), loras[2]), (prompt(100), loras[2])]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    found = []
    for eager in (True, False):
        options = {} if declared is None else {"long_lora_scaling_factors": declared}
        llm = LLM(str(base), enable_lora=True, kv_cache_tokens=8192, enforce_eager=eager, **options)
        assert (llm._engine.runner.steps.decode_graphs is None) == eager
        outputs = llm.generate([{"prompt_token_ids": p} for p, _ in jobs], params, [lora for _, lora in jobs])
        found.append([output.outputs[0] for output in outputs])
        llm.close()
    for eager_one, captured in zip(*found, strict=True):
        logprobs = zip(eager_one.logprobs, captured.logprobs, strict=True)
        for token, other, (one, two) in zip(eager_one.token_ids, captured.token_ids, logprobs, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=0.15)  # bf16 rounds otherwise in steps of other sizes
            if token != other:
                break


@pytest.mark.parametrize("case", ["hunyuan", "deepseek_v3", "gemma4_dense"])
def test_other_ropes_cannot_be_replaced(tmp_path, case):
    """An alpha is part of theta, and the scale of latent attention depends on the scaling."""
    assert read_model_config(make_case(tmp_path, CASES[case])).adapters_rope is None
