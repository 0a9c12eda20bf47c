"""Answers of a real engine with random weights: without their grammars they would be noise."""

from __future__ import annotations

import copy
import json
import re

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol import structured_spec
from tiny_models import VOCAB, make_model, tokenizer
from vocab_adapters import NUM_ADDED, make_vocab_adapter

PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "grün"]}, "minItems": 1, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"},
        "child": {"anyOf": [{"$ref": "#/$defs/child"}, {"type": "null"}]},
    },
    "required": ["age", "colours", "code", "child"],
    "additionalProperties": False,
    "$defs": {
        "child": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
PATTERN = r"[a-f]{3,5}-[0-9]{2}"
CHOICES = ["yes", "no", 'per"haps', "vielleicht ähnlich"]
LARK = 'start: WORD ("+" WORD)*\nWORD: /[x-z]{1,3}/'
GBNF = 'root ::= ("left" | "right") " turn"'


def is_person(text: str) -> bool:
    return jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))


KINDS = {
    "schema": (structured_spec.json_schema(PERSON, "x", any_whitespace=False), is_person),
    "regex": (structured_spec.regex(PATTERN, "x"), lambda text: re.fullmatch(PATTERN, text) is not None),
    "choice": (structured_spec.choice(CHOICES, "x"), lambda text: text in CHOICES),
    "lark": (
        structured_spec.grammar(LARK, "x"),
        lambda text: re.fullmatch(r"[x-z]{1,3}(\+[x-z]{1,3})*", text) is not None,
    ),
    "gbnf": (structured_spec.grammar(GBNF, "x"), lambda text: text in ("left turn", "right turn")),
}


@pytest.fixture(scope="module")
def made(fleet):
    return fleet("llama3")


def make_llm(made, **options: object) -> LLM:
    options = {"kv_cache_tokens": 4096, "max_num_seqs": 16} | options
    return LLM(str(made.base), enable_lora=True, max_loras=2, **options)


@pytest.fixture(scope="module", params=[True, False], ids=["overlapping", "one-by-one"])
def llm(made, request):
    llm = make_llm(made, async_scheduling=request.param)
    yield llm
    llm.close()


@pytest.fixture
def adapter(made) -> LoRARequest:
    return LoRARequest("all", 1, str(made.adapters["all"]))


def params(kind: str | None, **more: object) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 120, "seed": 1} | more
    return SamplingParams(structured_outputs=KINDS[kind][0] if kind else None, **given)


def test_every_answer_matches_whatever_else_is_in_the_batch(llm, adapter, prompt):
    jobs = [(kind, lora) for kind in (*KINDS, None) for lora in (None, adapter)]
    results = llm.generate(
        [{"prompt_token_ids": prompt(5 + i)} for i in range(len(jobs))],
        [params(kind, n=3) for kind, _ in jobs],
        [lora for _, lora in jobs],
    )
    num_ended = 0
    for (kind, _), result in zip(jobs, results, strict=True):
        for answer in result.outputs:
            if kind is not None and answer.finish_reason == "stop":
                num_ended += 1
                assert KINDS[kind][1](answer.text), (kind, answer.text)
                assert answer.token_ids[-1] == llm.tokenizer.eos_token_id
    assert num_ended >= 20


def test_answers_without_a_grammar_are_the_same_beside_those_with_one(llm, adapter, prompt):
    free = [
        params(None, temperature=0, max_tokens=12, ignore_eos=True, logprobs=3),
        params(None, max_tokens=12, ignore_eos=True),
        params(None, temperature=0.7, max_tokens=12, ignore_eos=True, top_k=30, frequency_penalty=0.5),
    ]
    bound = [params("schema"), params("regex"), params("choice", temperature=0)]

    def answers(others: list[SamplingParams]) -> list[object]:
        prompts = [{"prompt_token_ids": prompt(9 + i)} for i in range(len(free) + len(others))]
        loras = [None, adapter, None, *([adapter] * len(others))]
        results = llm.generate(prompts, [*free, *others], loras)[: len(free)]
        return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results]

    # The same rows in a step, so that base GEMMs of other shapes are no part of the question.
    unbound = [params(None, max_tokens=120, ignore_eos=True)] * len(bound)
    (tokens, logprobs), *rest = answers(bound)
    (expected, expected_logprobs), *expected_rest = answers(unbound)
    assert (tokens, [t for t, _ in rest]) == (expected, [t for t, _ in expected_rest])
    for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@torch.inference_mode()
def test_a_greedy_answer_is_the_likeliest_of_what_is_allowed_token_by_token(llm, made, prompt):
    import llguidance

    model = AutoModelForCausalLM.from_pretrained(made.base, dtype=torch.float32).eval()
    tokenizer = llguidance.LLTokenizer(llm.tokenizer.to_json(), eos_token=llm.tokenizer.eos_token_id)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(PATTERN))
    ids, end = prompt(7), llm.tokenizer.eos_token_id
    while ids[-1] != end or len(ids) == 7:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(np.flatnonzero(bits))
        logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(allowed[logits[allowed].argmax()]))
        assert matcher.consume_token(ids[-1])
    [result] = llm.generate({"prompt_token_ids": prompt(7)}, params("regex", temperature=0))
    assert result.outputs[0].token_ids == ids[7:]


def test_an_answer_that_reaches_its_limit_is_the_beginning_of_one_that_matches(llm, prompt):
    [result] = llm.generate({"prompt_token_ids": prompt(4)}, params("regex", max_tokens=3))
    assert result.outputs[0].finish_reason == "length"
    assert re.fullmatch(r"[a-f]{0,5}(-[0-9]{0,2})?", result.outputs[0].text)


def test_logprobs_are_those_of_the_model_before_the_mask(llm, made, prompt):
    [result] = llm.generate({"prompt_token_ids": prompt(6)}, params("gbnf", temperature=0, logprobs=2))
    [answer] = result.outputs
    expected = made.reference.logprobs(prompt(6) + answer.token_ids)[5:]
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(expected, abs=1e-3)
    assert any(entry.rank > 1 for entry in answer.logprobs)


def test_where_the_end_is_ignored_nothing_else_follows_the_grammars_end(llm, prompt):
    [result] = llm.generate({"prompt_token_ids": prompt(6)}, params("gbnf", ignore_eos=True, max_tokens=30))
    [answer] = result.outputs
    assert len(answer.token_ids) == 30 and answer.finish_reason == "length"
    assert answer.text in ("left turn", "right turn")
    assert set(answer.token_ids[-5:]) == {llm.tokenizer.eos_token_id}


def test_a_preempted_answer_goes_on_where_its_grammar_was(made, prompt):
    jobs = [(["schema", "regex", None][i % 3], prompt(8 + i)) for i in range(9)]

    def answers(kv_cache_tokens: int) -> tuple[list[list[int]], int]:
        llm = make_llm(made, kv_cache_tokens=kv_cache_tokens, max_model_len=128, async_scheduling=True)
        given = [params(kind, max_tokens=90, ignore_eos=kind is None) for kind, _ in jobs]
        results = llm.generate([{"prompt_token_ids": ids} for _, ids in jobs], given)
        preemptions = llm._engine.stats().preemptions_total
        llm.close()
        return [r.outputs[0].token_ids for r in results], preemptions

    crowded, preemptions = answers(256)
    roomy, none = answers(4096)
    assert preemptions > 0 == none
    assert crowded == roomy


def test_an_adapter_with_a_vocabulary_of_its_own_spells_with_it(tmp_path):
    folder = make_model(tmp_path / "base", "qwen2", num_hidden_layers=1)
    own = copy.deepcopy(tokenizer())
    own.add_tokens([f"<act {i}>" for i in range(VOCAB + NUM_ADDED - len(own))])
    lora = LoRARequest("resized", 1, str(make_vocab_adapter(tmp_path / "resized", folder, "resized", own)))
    last = VOCAB + NUM_ADDED - 1
    name = own.convert_ids_to_tokens(last)
    llm = LLM(str(folder), enable_lora=True, kv_cache_tokens=1024)
    given = SamplingParams(temperature=0, max_tokens=40, structured_outputs=structured_spec.choice([name], "x"))
    base, adapted = (result.outputs[0] for result in llm.generate(["the", "the"], given, [None, lora]))
    llm.close()
    assert adapted.token_ids[0] == last
    assert len(base.token_ids) > 2
    assert (base.text, adapted.text) == (name, name)
