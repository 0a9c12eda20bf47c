"""A checkpoint's own layer for several tokens (MTP) in an engine: its drafts are those of a plain implementation, and
answers never depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from family_cases import CASES, make_case, make_case_adapter
from float_checkpoints import BLOCK, DEEPSEEK, FP8, scaled
from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.errors import AdapterError, ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from quantized_models import written
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import Drafted, record, speculate
from tests.workers.speculation.mtp_reference import FAMILIES, MTPReference, make_mtp_checkpoint

LENGTH = 20
SAMPLED = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5, "max_tokens": LENGTH}
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_checkpoint(tmp_path_factory.mktemp("mtp") / "base", "qwen3_5")


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_checkpoint(tmp_path_factory.mktemp("mtp") / "base", "glm4_moe")


def made_engine(base: Path, method: str | None = "mtp", **options: Any) -> tuple[SteppedEngine, list[Drafted]]:
    """Returns an engine that verifies each draft, and what is drafted from now on. Without a method, nothing is."""
    drafted: list[Drafted] = []
    if method is None:
        return SteppedEngine(base, **options), drafted
    stepped = SteppedEngine(base, speculative_config=SpeculativeConfig(method), **options)
    drafter = stepped.engine.scheduler.speculation.drafter
    assert isinstance(drafter, ModelDrafter)
    record(drafter, drafted)
    speculate(stepped.engine, drafter)
    return stepped, drafted


def answer(stepped: SteppedEngine, prompts: dict[str, list[int]], **fields: Any) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        stepped.add(name, ids, **({"params": {"max_tokens": LENGTH}} | fields))
    stepped.until(lambda: prompts.keys() <= stepped.ended.keys())
    return {name: stepped.tokens[name] for name in prompts}


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_a_plain_implementation_and_answers_are_unchanged(tmp_path, prompt, family) -> None:
    """Prompts of several chunks, and drafts of several tokens."""
    base = make_mtp_checkpoint(tmp_path / "base", family)
    prompts, sampled = {"a": prompt(20), "b": prompt(50), "c": prompt(2)}, {"d": prompt(9)}
    plain, _ = made_engine(base, None, **OPTIONS)
    stepped, drafted = made_engine(base, async_scheduling=True, **OPTIONS)
    assert answer(stepped, prompts) == answer(plain, prompts)
    assert answer(stepped, sampled, params=SAMPLED) == answer(plain, sampled, params=SAMPLED)
    checked = [one for one in drafted if one[2]][::3]
    assert len(checked) > 6 and {len(draft) for _, _, draft in checked} & {3, 4}
    assert any(len(set(draft)) > 1 for _, _, draft in checked)
    assert not MTPReference(base, family).wrong(AutoModelForCausalLM.from_pretrained(base), checked)


def test_drafts_of_an_adapter_follow_its_own_hidden_states(tmp_path, prompt, glm) -> None:
    path = make_case_adapter(tmp_path / "adapter", glm, CASES["glm4_moe"])
    found = []
    for method in (None, "mtp"):
        stepped, drafted = made_engine(glm, method)
        stepped.add("own", prompt(20), stepped.load("own", path), params={"max_tokens": LENGTH})
        stepped.add("base", prompt(20), params={"max_tokens": LENGTH})
        stepped.until(lambda stepped=stepped: len(stepped.ended) == 2)
        found.append(stepped.tokens)
    assert found[0] == found[1]
    assert found[0]["own"] != found[0]["base"]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(glm), path)
    of_adapter = [one for one in drafted if one[0] == "own" and one[2]]
    assert len(of_adapter) > 3
    assert not MTPReference(glm, "glm4_moe").wrong(adapted, of_adapter)


def test_a_cached_prefix_has_its_features(prompt, glm) -> None:
    stepped, drafted = made_engine(glm)
    answer(stepped, {"a": prompt(50)})
    before = len(drafted)
    answer(stepped, {"b": prompt(50)})
    assert stepped.engine.stats().prefix_cache_hits_total == 48
    assert stepped.engine.scheduler.speculation.drafter.kv.counts.hit_tokens == 48
    target, behind = AutoModelForCausalLM.from_pretrained(glm), drafted[before:][:3]
    assert all(draft for _, _, draft in behind)
    assert not MTPReference(glm, "glm4_moe").wrong(target, behind)


def test_preempted_sequences_are_drafted_for_as_before(prompt, qwen) -> None:
    options: dict[str, Any] = {"kv_cache_tokens": 96, "max_model_len": 64, "enable_prefix_caching": False}
    prompts = {"a": prompt(20), "b": prompt(21), "c": prompt(22)}
    stepped, drafted = made_engine(qwen, **options)
    plain, _ = made_engine(qwen, None, **options)
    assert answer(stepped, prompts) == answer(plain, prompts)
    assert stepped.engine.stats().preemptions_total > 0
    target = AutoModelForCausalLM.from_pretrained(qwen)
    assert not MTPReference(qwen, "qwen3_5").wrong(target, drafted[-4:])
    kv = stepped.engine.scheduler.speculation.drafter.kv
    assert kv.num_free == kv.num_blocks


def test_a_checkpoint_without_such_a_layer_is_refused_with_what_to_do(fleet, tmp_path) -> None:
    without = make_case(tmp_path / "without", CASES["qwen3_5"])
    with pytest.raises(ConfigError, match=r"has none: it has no tensor whose name begins with 'mtp\.'.*method='ngram'"):
        made_engine(without)
    with pytest.raises(ConfigError, match=r"has none: its config\.json \(LlamaForCausalLM\) describes none"):
        made_engine(fleet("llama3").base)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": LoRAConfig(share_lora_memory=True)}, "method='mtp' is not served with share_lora_memory"),
        ({"kv_host_gib": 1.0}, r"method='mtp' is not served with kv_host_gib=1\.0"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_it_are_refused(glm, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        made_engine(glm, **options)


@pytest.mark.parametrize("is_plain", [False, True], ids=["fp8", "plain"])
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_a_layer_of_a_quantized_checkpoint_drafts_with_the_values_that_are_stored(
    tmp_path, prompt, family, is_plain
) -> None:
    """Qwen and DeepSeek quantize the layer as all others, but for the linear before it. Others leave it plain."""
    base = make_mtp_checkpoint(tmp_path / "base", family)
    kept = ("mtp.", "model.layers.2.") if is_plain else ("mtp.fc", "model.layers.2.eh_proj")
    values: dict[str, Tensor] = {}

    def entries(name: str, weight: Tensor) -> dict[str, Tensor]:
        if weight.ndim != 2 or not name.endswith("_proj.weight") or name.startswith(kept):
            return {name: weight}
        stored, values[name] = scaled(weight, BLOCK, FP8, "weight_scale_inv")
        return {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in stored.items()}

    changes = {"quantization_config": DEEPSEEK | {"modules_to_not_convert": [name.strip(".") for name in kept]}}
    folder = written(base, tmp_path / "stored", entries, changes)
    plain = written(base, tmp_path / "values", lambda name, weight: {name: values.get(name, weight)}, {})
    stepped, drafted = made_engine(folder)
    head = stepped.engine.scheduler.speculation.drafter.steps.model
    forms = {type(linear.weight).__name__ for _, linear in head.packed_linears()}
    assert (forms == {"PlainWeight"}) == is_plain
    answer(stepped, {"a": prompt(20)})
    checked = [one for one in drafted if one[2]][::2]
    assert len(checked) > 3
    assert not MTPReference(plain, family).wrong(AutoModelForCausalLM.from_pretrained(plain), checked)


def test_a_plain_layer_is_quantized_with_the_rest(prompt, qwen) -> None:
    stepped, drafted = made_engine(qwen, quantization="fp8")
    head = stepped.engine.scheduler.speculation.drafter.steps.model
    assert not any(type(linear.weight).__name__ == "PlainWeight" for _, linear in head.packed_linears())
    answer(stepped, {"a": prompt(20)})
    assert any(draft for _, _, draft in drafted)


def test_a_damaged_layer_is_refused_by_the_name_of_its_tensor(tmp_path) -> None:
    folder = make_mtp_checkpoint(tmp_path / "base", "qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    for name, changed, message in (
        ("mtp.fc.weight", None, r"lacks 1 tensors; the first is 'mtp\.fc\.weight'"),
        ("mtp.layers.0.mlp.up_proj.weight", None, r"the first is 'mtp\.layers\.0\.mlp\.up_proj\.weight'"),
        ("mtp.embed_tokens.weight", tensors["mtp.norm.weight"].clone(), r"has the tensor 'mtp\.embed_tokens\.weight'"),
        ("mtp.fc.weight", tensors["mtp.fc.weight"][:, :8].clone(), r"mtp\.fc\.weight has shape \[32, 8\]"),
    ):
        damaged = {key: value for key, value in tensors.items() if key != name}
        save_file(damaged if changed is None else damaged | {name: changed}, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            made_engine(folder)


def test_random_weights_need_no_file(qwen) -> None:
    stepped, drafted = made_engine(qwen, load_format="dummy")
    answer(stepped, {"a": list(range(5, 20))})
    assert any(draft for _, _, draft in drafted)


def test_an_adapter_of_the_layer_is_refused_by_name(tmp_path, glm) -> None:
    path = make_case_adapter(tmp_path / "adapter", glm, CASES["glm4_moe"])
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1.self_attn.q_proj.lora_A" in name)
    for moved in ("layers.2.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj"):
        further = {
            key.replace("layers.1.self_attn.q_proj", moved): value.clone()
            for key, value in tensors.items()
            if name.rpartition("lora_A")[0] in key
        }
        save_file(tensors | further, file)
        stepped, _ = made_engine(glm)
        with pytest.raises(AdapterError, match=moved.replace(".", r"\.")):
            stepped.load("own", path)
