"""LLM: offline use with vLLM's names."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lorafleet.api.text.bad_words import token_sequences
from lorafleet.offline.llm import LLM, STALLED_WAIT_S, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineOptions
from lorafleet.protocol.errors import AdapterMissing, ConfigError, InvalidRequest
from lorafleet.protocol.lora_config import LoRAConfig, LoRAOptions
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.step import planner
from lorafleet.workers.step.step_runner import StepLogits

TEXT = "the answer of the harbour"


@pytest.fixture(scope="module")
def llm(fleet):
    made = LLM(str(fleet("llama3").base), enable_lora=True, max_loras=2, kv_cache_tokens=4096)
    yield made
    made.close()


@pytest.fixture
def qv(fleet) -> LoRARequest:
    return LoRARequest("qv", 1, str(fleet("llama3").adapters["qv"]))


def test_the_parameters_are_the_options_of_an_engine_and_of_adapters():
    parameters = inspect.signature(LLM).parameters
    for kind in (EngineOptions, LoRAOptions):
        for option in dataclasses.fields(kind):
            default = inspect.Parameter.empty if option.default is dataclasses.MISSING else option.default
            assert parameters[option.name].default == default
    assert [name for name, one in parameters.items() if one.kind is not inspect.Parameter.KEYWORD_ONLY] == ["model"]


def test_one_text_or_many_with_one_result_each(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [one] = llm.generate(TEXT, params)
    many = llm.generate([TEXT, TEXT + "!", TEXT], params)
    assert one.prompt == TEXT and one.finished
    assert one.prompt_token_ids == llm.tokenizer.encode(TEXT)
    [completion] = one.outputs
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 6)
    assert [r.outputs[0].text for r in many][::2] == [completion.text] * 2


def test_a_bad_word_does_not_come_at_the_beginning_or_behind_a_space(llm):
    spelled = [llm.tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the")]
    bare, spaced = spelled
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    params["logit_bias"] = dict.fromkeys((*bare, *spaced), 50.0)
    [free] = llm.generate(TEXT, SamplingParams(**params))
    assert set(free.outputs[0].token_ids) <= {*bare, *spaced}
    [kept] = llm.generate(TEXT, SamplingParams(**params, bad_words=["the"]))
    tokens = kept.outputs[0].token_ids
    for banned in token_sequences(spelled):
        assert not any(tokens[i : i + len(banned)] == banned for i in range(len(tokens)))


def test_each_prompt_may_have_its_own_parameters_and_adapter(llm, qv, fleet, prompt):
    reference = fleet("llama3").reference
    short, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5))
    ids = {"prompt_token_ids": prompt(9)}
    base, adapted = llm.generate([ids, ids], [short, long], [None, qv])
    assert base.outputs[0].token_ids == reference.greedy(prompt(9), 2).tokens
    assert adapted.outputs[0].token_ids == reference.greedy(prompt(9), 5, fleet("llama3").adapters["qv"]).tokens
    with pytest.raises(InvalidRequest, match="2 entries for 3 prompts"):
        llm.generate([ids] * 3, [short, long])


def test_samples_stop_strings_and_logprobs(llm):
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=12, logprobs=2, ignore_eos=True)
    [result] = llm.generate(TEXT, params)
    assert [c.index for c in result.outputs] == [0, 1, 2]
    assert len({c.text for c in result.outputs}) == 3
    first = result.outputs[0]
    assert first.cumulative_logprob == pytest.approx(sum(p.logprob for p in first.logprobs))
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    whole = llm.generate(TEXT, greedy)[0].outputs[0].text
    stopped = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=whole[4:7]))
    assert stopped[0].outputs[0].text == whole[: whole.index(whole[4:7])]
    assert stopped[0].outputs[0].stop_reason == whole[4:7]


def test_logprobs_of_a_long_prompt_are_computed_in_spans_of_bounded_size(llm, prompt, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    ids = {"prompt_token_ids": prompt(300)}
    rows: list[int] = []
    run = llm._engine.runner.steps.run

    def watched(plan: StepPlan, score: Callable[[int, torch.Tensor], None], *others: Any) -> StepLogits:
        return run(plan, lambda span, logits_TV: (rows.append(len(logits_TV)), score(span, logits_TV))[1], *others)

    monkeypatch.setattr(llm._engine.runner.steps, "run", watched)
    [in_spans] = llm.generate(ids, params)
    assert rows == [128, 128, 43]  # of 299: the first token has none
    monkeypatch.setattr(planner, "SCORED_ROWS", 1000)
    [at_once] = llm.generate(ids, params)
    assert rows[3:] == [299]
    for one, other in zip(in_spans.prompt_logprobs[1:], at_once.prompt_logprobs[1:], strict=True):
        assert (one.token_id, one.top_ids) == (other.token_id, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_samples_of_one_prompt_compute_it_once_and_answer_as_each_would_alone(llm, qv, fleet, prompt):
    before = llm._engine.stats().prefix_cache_hits_total
    params = SamplingParams(temperature=0, n=4, max_tokens=5, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": prompt(75)}] * 2, params, [None, qv])
    for result, adapter in zip(results, (None, fleet("llama3").adapters["qv"]), strict=True):
        expected = fleet("llama3").reference.greedy(prompt(75), 5, adapter).tokens
        assert [completion.token_ids for completion in result.outputs] == [expected] * 4
    assert llm._engine.stats().prefix_cache_hits_total - before == 2 * 3 * 64  # whole blocks of 16


def test_an_adapter_keeps_its_weights_until_it_is_removed(llm, qv):
    llm.add_lora(qv)
    llm.add_lora(qv)
    assert [lora.lora_name for lora in llm.list_loras()] == ["qv"]
    llm.generate(TEXT, SamplingParams(max_tokens=1), qv)
    llm.pin_lora(1)
    llm.remove_lora(1)
    assert llm.list_loras() == []


def test_threads_that_read_an_adapter_have_the_processor_meanwhile(llm, fleet, monkeypatch):
    """A step that can do nothing is followed by a wait."""
    stepped_s: list[float] = []
    enough, step, read = threading.Event(), llm._engine.step, LoRAModel.from_local_checkpoint

    def count() -> Any:
        stepped_s.append(time.monotonic())
        if len(stepped_s) == 20:
            enough.set()
        return step()

    def read_late(*arguments: Any, **options: Any) -> LoRAModel:
        assert enough.wait(60)
        return read(*arguments, **options)

    monkeypatch.setattr(llm._engine, "step", count)
    monkeypatch.setattr(LoRAModel, "from_local_checkpoint", read_late)
    llm.add_lora(LoRARequest("rslora", 9, str(fleet("llama3").adapters["rslora"])))
    assert stepped_s[19] - stepped_s[0] >= 19 * STALLED_WAIT_S
    llm.remove_lora(9)


@pytest.mark.parametrize("options", [{}, {"enable_lora": True}, {"kv_host_gib": 0.01}], ids=str)
def test_an_engine_that_is_closed_and_dropped_gives_its_memory_back_without_a_collection(fleet, options):
    base, adapters = fleet("llama3").base, fleet("llama3").adapters
    llm = LLM(str(base), kv_cache_tokens=256, **options)
    lora = LoRARequest("qv", 1, str(adapters["qv"])) if "enable_lora" in options else None
    llm.generate([TEXT] * 2, SamplingParams(max_tokens=3), lora)
    gc.collect()
    gc.disable()
    try:
        steps = llm._engine.runner.steps
        parts = [weakref.ref(part) for part in (llm._engine, steps.model, steps.caches[0].k_NPGD)]
        llm.close()
        del llm, steps
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()


def test_an_engine_that_was_closed_has_given_its_memory_back_when_the_next_one_starts(fleet, monkeypatch):
    first = LLM(str(fleet("llama3").base), kv_cache_tokens=256)
    cache = weakref.ref(first._engine.runner.steps.caches[0].k_NPGD)
    first.close()
    gc.disable()
    try:
        del first
        in_memory: list[bool] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # Without a GPU there is nothing to collect.
        monkeypatch.setattr("lorafleet.offline.llm.build_engine", lambda _: in_memory.append(cache() is not None))
        LLM(str(fleet("llama3").base))
        assert in_memory == [False]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "beside_adapter", [(), ("tokenizer.json", "tokenizer_config.json"), ("tokenizer_config.json",)]
)
@pytest.mark.parametrize("configured", [{}, {"eos_token_id": 5}, {"eos_token_id": [5, 6]}], ids=str)
def test_answers_end_at_the_tokenizers_eos_as_well_for_the_base_and_adapters_alike(
    fleet, tmp_path, beside_adapter, configured
):
    made, end = fleet("llama3"), 1
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(made.base, base)
    shutil.copytree(made.adapters["qv"], adapter)
    for name in beside_adapter:
        shutil.copy(made.base / name, adapter)
    (base / "generation_config.json").write_text(json.dumps(configured))
    config = json.loads((base / "config.json").read_text()) | {"eos_token_id": 5}
    (base / "config.json").write_text(json.dumps(config))
    llm = LLM(str(base), enable_lora=True, kv_cache_tokens=512)
    asked = {"temperature": 0, "max_tokens": 6}
    always = [
        SamplingParams(logit_bias={end: 100}, **asked),
        SamplingParams(logit_bias={5: 100}, **asked),
        SamplingParams(logit_bias={end: 100}, min_tokens=3, **asked),
        SamplingParams(logit_bias={end: 100}, ignore_eos=True, **asked),
        SamplingParams(logit_bias={7: 100}, stop_token_ids=[7], **asked),
    ]
    for lora in (None, LoRARequest("qv", 1, str(adapter))):
        answers = [output.outputs[0] for output in llm.generate([TEXT] * len(always), always, lora)]
        ends = [(answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) for answer in answers]
        assert ends == [("stop", None, end), ("stop", None, 5), ends[2], ("length", None, end), ("stop", 7, 7)]
        assert [len(answer.token_ids) for answer in answers] == [1, 1, len(answers[2].token_ids), 6, 1]
        assert len(answers[2].token_ids) > 3 and answers[0].text == ""
    llm.close()


def test_mistakes_are_named_before_anything_runs(llm, fleet):
    with pytest.raises(AdapterMissing, match="nowhere"):
        llm.generate(TEXT, SamplingParams(), LoRARequest("x", 9, "/nowhere"))
    with pytest.raises(InvalidRequest, match="temperature=-1"):
        SamplingParams(temperature=-1)
    with pytest.raises(TypeError, match="tempratur"):
        SamplingParams(tempratur=1)
    with pytest.raises(ConfigError, match="max_loras has no effect without enable_lora"):
        LLM(str(fleet("llama3").base), max_loras=2)
    with pytest.raises(ConfigError, match="max_lora_rank cannot be given together with lora_config"):
        LLM(str(fleet("llama3").base), enable_lora=True, lora_config=LoRAConfig(), max_lora_rank=8)
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM(str(fleet("llama3").base), max_num_seq=2)
    without = LLM(str(fleet("llama3").base), kv_cache_tokens=512)
    with pytest.raises(InvalidRequest, match="without LoRA"):
        without.generate(TEXT, SamplingParams(), LoRARequest("x", 1, "/nowhere"))
