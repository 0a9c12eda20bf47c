"""The API of a running replica, through openai-python and httpx, against transformers + PEFT.

Every field is seen to do what it says on real answers; the finer points of each are in the other tests of tests/api.
tests/cluster/serve has several replicas behind their proxy.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

import real_server
from lorafleet.protocol.lora_config import LoRAConfig
from real_server import ADMIN_KEY, BASE
from tests.cluster.harness import greedy_answers
from tiny_models import ALL_TARGETS, make_adapter, tokenizer

TOLERANCE = 1e-3
KINDS = ["all", "qv", "rslora", "patterns", "layers", "regex", "linear", "large"]
TEXT = "the answer of the harbour "


@pytest.fixture(scope="module")
def made(fleet):
    return fleet("llama3")


@pytest.fixture(scope="module")
def url(made, tmp_path_factory) -> Iterator[str]:
    """Adapters outnumber the slots of the GPU and those of host memory."""
    lora = LoRAConfig(max_loras=3, max_lora_rank=64, max_cpu_loras=6)
    engine = {"kv_cache_tokens": 8192, "max_num_batched_tokens": 128, "max_num_seqs": 32, "device": "cpu"}
    config = {"allow_runtime_lora_updating": True}
    with real_server.running(tmp_path_factory.mktemp("whole"), made.base, {}, config, lora=lora, **engine) as server:
        for kind in KINDS:
            server.seed(kind, made.adapters[kind])
        yield server.url


@pytest.fixture(scope="module")
def client(url) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key=ADMIN_KEY, max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def http(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as made:
        yield made


def greedy(client: OpenAI, prompt: Any = TEXT, model: str = BASE, max_tokens: int = 8, **fields: Any) -> Any:
    extra = {"ignore_eos": True} | fields.pop("extra_body", {})
    asked = {"temperature": 0, "max_tokens": max_tokens} | fields
    return client.completions.create(model=model, prompt=prompt, extra_body=extra, **asked)


def text_of(client: OpenAI, **fields: Any) -> str:
    return greedy(client, **fields).choices[0].text


# -- correctness --------------------------------------------------------------------------------------------------


async def test_a_burst_over_all_adapters_equals_peft_token_by_token(url, made, prompt):
    jobs = [(prompt(n), kind) for n in (4, 19, 50) for kind in (None, *KINDS)]
    random.Random(1).shuffle(jobs)
    answers = await greedy_answers(url, jobs, base=BASE)
    for (ids, kind), answer in zip(jobs, answers, strict=True):
        [choice] = answer.choices
        tokens = choice.model_extra["token_ids"]
        expected = made.reference.greedy_along(ids, tokens, made.adapters.get(kind))
        assert len(tokens) == 10 and tokens == expected.tokens, kind
        assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
        assert answer.model == (kind or BASE)


def test_one_by_one_they_give_the_same(client, made, prompt):
    for kind in KINDS:
        answer = greedy(client, prompt(19), kind, 10, extra_body={"return_token_ids": True})
        expected = made.reference.greedy(prompt(19), 10, made.adapters[kind])
        assert answer.choices[0].model_extra["token_ids"] == expected.tokens, kind


def test_a_mix_is_scored_as_peft_scores_it(client, made, prompt):
    answer = greedy(client, prompt(30), "qv+all", 0, echo=True, logprobs=0, extra_body={"lora_weights": [0.6, -0.4]})
    parts = {made.adapters["qv"]: 0.6, made.adapters["all"]: -0.4}
    expected = made.reference.mixed_logprobs(prompt(30), parts)
    assert answer.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected, abs=TOLERANCE)
    assert answer.model == "qv+all"
    assert "qv+all" not in {model.id for model in client.models.list()}
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist"):
        greedy(client, model="qv+nobody")


def test_echo_scores_the_prompt_as_a_teacher_forced_run_does(client, made, prompt):
    answer = greedy(client, prompt(30), "all", 0, echo=True, logprobs=0)
    first, *rest = answer.choices[0].logprobs.token_logprobs
    assert first is None
    assert rest == pytest.approx(made.reference.logprobs(prompt(30), made.adapters["all"]), abs=TOLERANCE)


# -- models -------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_parent_and_root_and_each_is_served(client, made):
    listed = {model.id: model.model_extra for model in client.models.list()}
    assert listed.keys() >= {BASE, *KINDS}
    assert listed[BASE]["parent"] is None
    assert (listed["large"]["parent"], listed["large"]["root"]) == (BASE, str(made.adapters["large"]))
    for name in listed:
        assert greedy(client, model=name, max_tokens=1).choices[0].finish_reason == "length"
    assert client.models.retrieve("qv").id == "qv"
    with pytest.raises(openai.NotFoundError, match="The model `nobody` does not exist"):
        client.models.retrieve("nobody")


def test_the_colon_form_names_the_same_models(client):
    assert text_of(client, model=f"{BASE}:qv") == text_of(client, model="qv") != text_of(client)


def test_an_unknown_model_is_404_in_vllms_words(client):
    with pytest.raises(openai.NotFoundError) as caught:
        greedy(client, model="nobody")
    assert caught.value.body["message"] == "The model `nobody` does not exist."
    assert caught.value.body["param"] == "model"


# -- sampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"extra_body": {"top_k": 1}}, {"top_p": 1e-6}, {"extra_body": {"min_p": 1.0}}])
def test_the_narrowest_sampling_is_greedy(client, fields):
    assert text_of(client, temperature=1.5, **fields) == text_of(client)


def test_a_seed_repeats_and_another_does_not(client):
    def ask(seed: int) -> str:
        return text_of(client, temperature=1.0, seed=seed, max_tokens=24)

    assert ask(3) == ask(3)
    assert ask(3) != ask(4)


def test_n_samples_of_a_seed_differ_from_each_other_and_repeat(client):
    def ask() -> list[str]:
        choices = greedy(client, temperature=1.0, seed=9, n=3, max_tokens=16).choices
        assert [c.index for c in choices] == [0, 1, 2]
        return [c.text for c in choices]

    assert len(set(ask())) == 3
    assert ask() == ask()


def ids_of(client: OpenAI, **fields: Any) -> list[int]:
    extra = {"return_token_ids": True} | fields.pop("extra_body", {})
    return greedy(client, max_tokens=24, extra_body=extra, **fields).choices[0].model_extra["token_ids"]


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 50.0}}],
)
def test_penalties_make_answers_less_repetitive(client, fields):
    assert len(set(ids_of(client, **fields))) > len(set(ids_of(client)))


def test_logit_bias_forces_a_token(client):
    assert ids_of(client, logit_bias={"77": 100}) == [77] * 24


def test_stop_ends_the_text_before_it_and_include_keeps_it(client):
    whole = text_of(client, max_tokens=24)
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    answer = greedy(client, max_tokens=24, stop=[stop]).choices[0]
    assert (answer.text, answer.finish_reason, answer.model_extra["stop_reason"]) == (expected, "stop", stop)
    kept = greedy(client, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == expected + stop


def test_stop_token_ids_and_min_tokens(client):
    ids = ids_of(client)
    extra = {"stop_token_ids": [ids[3]], "return_token_ids": True}
    answer = greedy(client, max_tokens=24, extra_body=extra).choices[0]
    assert answer.model_extra["token_ids"] == ids[: ids.index(ids[3]) + 1]
    assert answer.model_extra["stop_reason"] == ids[3]
    later = greedy(client, max_tokens=24, extra_body=extra | {"min_tokens": 10}).choices[0]
    assert len(later.model_extra["token_ids"]) > 10 or later.finish_reason == "length"


def test_eos_ends_unless_it_is_ignored(client):
    eos = {"logit_bias": {"1": 100}, "max_tokens": 5}
    stopped = greedy(client, extra_body={"ignore_eos": False}, **eos)
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 1)
    assert greedy(client, **eos).choices[0].finish_reason == "length"
    shown = greedy(client, extra_body={"skip_special_tokens": False}, **eos).choices[0].text
    assert shown == "<|end|>" * 5
    assert greedy(client, **eos).choices[0].text == ""


def test_logprobs_have_the_k_best_and_offsets(client):
    answer = greedy(client, logprobs=3, max_tokens=6).choices[0]
    found = answer.logprobs
    assert [len(t) for t in found.top_logprobs] == [3] * 6
    assert all(
        max(top.values()) == pytest.approx(own)
        for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True)
    )
    forced = greedy(client, logprobs=0, max_tokens=4, logit_bias={"77": 100}).choices[0]  # not half a character
    assert "".join(forced.logprobs.tokens) == forced.text
    assert forced.logprobs.text_offset == [0, 1, 2, 3]
    named = greedy(client, logprobs=0, max_tokens=2, extra_body={"return_tokens_as_token_ids": True})
    assert all(token.startswith("token_id:") for token in named.choices[0].logprobs.tokens)


def test_prompt_logprobs(client, made, prompt):
    answer = greedy(client, prompt(20), max_tokens=1, extra_body={"prompt_logprobs": 1})
    first, *rest = answer.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    found = [entry[str(token)]["logprob"] for entry, token in zip(rest, prompt(20)[1:], strict=True)]
    assert found == pytest.approx(made.reference.logprobs(prompt(20)), abs=TOLERANCE)


def test_every_form_of_prompt_and_many_at_once(client):
    ids = tokenizer().encode(TEXT)
    forms = [TEXT, [TEXT, TEXT], ids, [ids, ids]]
    expected = text_of(client)
    for form, count in zip(forms, (1, 2, 1, 2), strict=True):
        assert [c.text for c in greedy(client, form).choices] == [expected] * count


def test_truncation_and_special_tokens_of_the_prompt(client):
    ids = tokenizer().encode(TEXT)
    cut = greedy(client, extra_body={"truncate_prompt_tokens": 3})
    assert cut.usage.prompt_tokens == 3
    assert cut.choices[0].text == text_of(client, prompt=ids[-3:])
    assert text_of(client, extra_body={"add_special_tokens": False}) == text_of(client)


def test_usage_counts_tokens_and_cached_ones(client):
    long_prompt = "a quite particular beginning " * 8
    first, again = (greedy(client, long_prompt, max_tokens=3).usage for _ in range(2))
    assert first.prompt_tokens == again.prompt_tokens == len(tokenizer().encode(long_prompt))
    assert first.completion_tokens == 3 and first.total_tokens == first.prompt_tokens + 3
    best = max(
        greedy(client, long_prompt, max_tokens=3).usage.prompt_tokens_details.cached_tokens or 0 for _ in range(4)
    )
    assert best >= 16


# -- streams and chat ---------------------------------------------------------------------------------------------


def test_a_stream_joins_to_the_whole_answer(client):
    whole = greedy(client, max_tokens=24, model="all")
    chunks = list(greedy(client, max_tokens=24, model="all", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert sum(bool(c.choices) for c in chunks) > 5
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert chunks[-2].choices[0].finish_reason == "length"


def test_a_stop_string_never_leaks_into_a_stream(client):
    whole = text_of(client, max_tokens=24)
    stop = whole[4:9]
    pieces = [c.choices[0].text for c in greedy(client, max_tokens=24, stop=[stop], stream=True)]
    assert "".join(pieces) == whole[: whole.index(stop)]


def test_interleaved_samples_of_a_stream(client):
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in greedy(client, [TEXT, TEXT + "!"], n=2, temperature=1.0, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    whole = greedy(client, [TEXT, TEXT + "!"], n=2, temperature=1.0, seed=1)
    assert texts == {c.index: c.text for c in whole.choices}


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "where is the harbour?"}]


def chat(client: OpenAI, **fields: Any) -> Any:
    extra = {"ignore_eos": True} | fields.pop("extra_body", {})
    asked: dict[str, Any] = {"model": BASE, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8}
    return client.chat.completions.create(**(asked | fields), extra_body=extra)


def test_chat_applies_the_template(client):
    rendered = tokenizer().apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    answer = chat(client, model="qv")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text_of(client, prompt=rendered, model="qv")
    parts = [{"role": "user", "content": [{"type": "text", "text": "where is the "}, {"type": "text", "text": "x"}]}]
    assert chat(client, messages=parts).choices[0].message.content


def test_a_chat_stream_joins_to_the_whole_answer(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    joined = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert joined == chat(client).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


def test_chat_logprobs(client):
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 8
    assert all(len(entry.top_logprobs) == 2 and entry.bytes is not None for entry in content)


def test_chat_can_continue_the_last_message(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "the harbour is"}]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    answer = chat(client, messages=messages, extra_body=extra).choices[0].message.content
    rendered = tokenizer().apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert answer == text_of(client, prompt=rendered)


# -- SGLang, tokens, service --------------------------------------------------------------------------------------


def test_generate_takes_sglangs_requests(http, client, made, prompt):
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    plain = http.post("/generate", json={"text": TEXT, "sampling_params": sampling}).json()
    assert plain["text"] == text_of(client)
    assert plain["meta_info"]["completion_tokens"] == 8
    for body in ({"lora_path": "qv"}, {"sampling_params": sampling | {"lora_path": "qv"}}):
        answer = http.post("/generate", json={"input_ids": prompt(12), "sampling_params": sampling} | body).json()
        assert answer["output_ids"] == made.reference.greedy(prompt(12), 8, made.adapters["qv"]).tokens
    both = {"text": [TEXT, TEXT], "lora_path": ["qv", None], "sampling_params": sampling}
    assert [a["text"] for a in http.post("/generate", json=both).json()] == [text_of(client, model="qv"), plain["text"]]
    with http.stream("POST", "/generate", json={"text": TEXT, "sampling_params": sampling, "stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["text"] == plain["text"]


def test_tokenize_and_detokenize_are_each_others_inverse(http):
    body = http.post("/tokenize", json={"model": BASE, "prompt": TEXT}).json()
    assert (body["tokens"], body["count"]) == (tokenizer().encode(TEXT), len(tokenizer().encode(TEXT)))
    assert http.post("/detokenize", json={"model": BASE, "tokens": body["tokens"]}).json()["prompt"] == TEXT
    chat_body = http.post("/tokenize", json={"model": BASE, "messages": MESSAGES}).json()
    assert chat_body["count"] > 5


# -- adapters at run time -----------------------------------------------------------------------------------------


def test_adapters_load_and_unload_in_vllms_words(http, client, made, tmp_path):
    path = make_adapter(tmp_path / "new", made.base, seed=5, r=2, target_modules=ALL_TARGETS[:4])
    body = {"lora_name": "new", "lora_path": str(path)}
    loaded = http.post("/v1/load_lora_adapter", json=body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    twice = http.post("/v1/load_lora_adapter", json=body)
    assert twice.status_code == 400
    assert twice.json()["error"]["message"] == (
        "The lora adapter 'new' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True."
    )
    assert http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True}).status_code == 200
    assert text_of(client, model="new")
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    again = http.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert again.status_code == 404
    assert again.json()["error"]["message"] == "The lora adapter 'new' cannot be found."
    with pytest.raises(openai.NotFoundError):
        greedy(client, model="new")


BAD_ADAPTERS = {
    "missing": (lambda p, _: p / "nowhere", "nowhere"),
    "truncated": (lambda p, made: _damage(make_adapter(p / "a", made.base), lambda b: b[:-100]), "truncated|damaged"),
    "garbage": (lambda p, made: _damage(make_adapter(p / "a", made.base), lambda _: b"\xff" * 64), "safetensors"),
    "rank": (lambda p, made: make_adapter(p / "a", made.base, r=65), "65.*max_lora_rank=64"),
    "method": (lambda p, made: _called(make_adapter(p / "a", made.base), "OFT"), "'OFT'.*not supported"),
}


def _damage(folder, change):
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(change(weights.read_bytes()))
    return folder


def _called(folder, method):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_type": method}))
    return folder


@pytest.mark.parametrize("kind", BAD_ADAPTERS)
def test_a_bad_adapter_is_refused_and_disturbs_nobody(http, client, made, tmp_path, kind):
    build, cause = BAD_ADAPTERS[kind]
    path = build(tmp_path, made)
    before = text_of(client, model="all")
    refused = http.post("/v1/load_lora_adapter", json={"lora_name": f"bad-{kind}", "lora_path": str(path)})
    assert 400 <= refused.status_code < 500, refused.text
    assert re.search(cause, refused.json()["error"]["message"]), refused.text
    assert text_of(client, model="all") == before
    with pytest.raises(openai.NotFoundError):
        greedy(client, model=f"bad-{kind}")


@pytest.mark.parametrize("name", ["../all", "a/../../b", "a\nb", "a\0b", "", "x" * 300, BASE])
def test_bad_names_are_refused(http, made, name):
    body = {"lora_name": name, "lora_path": str(made.adapters["all"])}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 400


# -- bad requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x", "temperature": -1}, "temperature", "-1"),
        ({"prompt": "x", "top_p": 0}, "top_p", "0"),
        ({"prompt": "x", "n": 0}, "n", "0"),
        ({"prompt": "x", "max_tokens": -5}, "max_tokens", "-5"),
        ({"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"prompt": [99999]}, "prompt", "99999"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": "x", "suffix": "y"}, "suffix", ""),
        ({"prompt": "x", "best_of": 5}, "best_of", ""),
        ({"prompt": "x", "tempratur": 1}, "tempratur", ""),
        ({"prompt": "x", "logprobs": 500}, "logprobs", "500"),
        ({}, "prompt", ""),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(http, body, param, words):
    response = http.post("/v1/completions", json={"model": BASE} | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert words in error["message"]


@pytest.mark.parametrize(
    ("field", "param"),
    [({"tools": [{"type": "function"}]}, "tools.0.function"), ({"modalities": ["audio"]}, "modalities")],
)
def test_what_is_not_served_is_refused_not_ignored(http, field, param):
    response = http.post("/v1/chat/completions", json={"model": BASE, "messages": MESSAGES} | field)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b'"x"', b""])
def test_bad_json_is_a_400(http, raw):
    response = http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_context_overflow_is_a_400_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        greedy(client, [7] * 500, max_tokens=100)
    message = caught.value.body["message"]
    assert "500" in message and "512" in message and "100" in message
    assert caught.value.code == "context_length_exceeded"


async def test_a_client_that_leaves_frees_its_sequence(url):
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"model": BASE, "prompt": TEXT, "max_tokens": 480, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            await anext(stream.aiter_lines())

        async def running() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running"))

        deadline = time.monotonic() + 120
        while await running() > 0:
            assert time.monotonic() < deadline
