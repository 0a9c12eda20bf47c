from __future__ import annotations

import itertools
from typing import Any

import httpx
import msgspec
import pytest

from lorafleet.api.text.tokenizer import Tokenizer


async def generate(http: httpx.AsyncClient, **body: Any) -> Any:
    response = await http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks_of(http: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await http.post("/generate", json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-2]]


async def test_text_is_answered_in_sglangs_shape(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = await generate(http, text="hello", rid="mine")
    ids = [*tokenizer.encode("base wörld 🎉"), tokenizer.eos_token_id]
    assert answer == {
        "text": "base wörld 🎉",
        "output_ids": ids,
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": tokenizer.eos_token_id},
            "prompt_tokens": len(tokenizer.encode("hello")),
            "completion_tokens": len(ids),
            "cached_tokens": 1,
        },
    }


@pytest.mark.parametrize(
    "where",
    [{"lora_path": "sql"}, {"sampling_params": {"lora_path": "sql"}}, {"model": "sql"}, {"model": "llama:sql"}],
)
async def test_the_adapter_is_named_at_any_place(http: httpx.AsyncClient, where: dict[str, Any]) -> None:
    assert (await generate(http, input_ids=[1, 2], **where))["text"] == "sql wörld 🎉"


async def test_a_batch_may_mix_adapters_and_the_base(http: httpx.AsyncClient) -> None:
    answers = await generate(
        http,
        text=["a", "b", "c"],
        lora_path=["sql", None, "org/json"],
        sampling_params=[{"max_new_tokens": 100}, {"max_new_tokens": 2}, {}],
        rid=["x", "y", "z"],
    )
    assert [a["text"] for a in answers][::2] == ["sql wörld 🎉", "org/json wörld 🎉"]
    assert answers[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y", "z"]


async def test_a_batch_of_one_is_a_list_and_n_makes_a_list(http: httpx.AsyncClient) -> None:
    assert isinstance(await generate(http, text=["a"]), list)
    assert isinstance(await generate(http, input_ids=[[1]]), list)
    assert len(await generate(http, text="a", sampling_params={"n": 3})) == 3


async def test_a_stream_repeats_the_text_so_far(http: httpx.AsyncClient) -> None:
    chunks = await chunks_of(http, text="a", lora_path="sql")
    texts = [c["text"] for c in chunks]
    assert texts[-1] == "sql wörld 🎉"
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [c["meta_info"]["finish_reason"] is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["meta_info"]["completion_tokens"] == len(chunks[-1]["output_ids"])
    assert "index" not in chunks[0]


async def test_a_streamed_batch_numbers_its_answers(http: httpx.AsyncClient) -> None:
    chunks = await chunks_of(http, text=["a", "b"], lora_path=["sql", None])
    last = {c["index"]: c["text"] for c in chunks}
    assert last == {0: "sql wörld 🎉", 1: "base wörld 🎉"}


async def test_sampling_params_reach_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    same = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "stop": ["x"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    renamed = {"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 5}
    await generate(http, text="a", sampling_params=same | renamed)
    params = engine.requests[0].params
    assert {name: getattr(params, name) for name in same} == same
    assert (params.max_tokens, params.min_tokens, params.seed) == (9, 2, 5)
    await generate(http, text="a")
    assert (engine.requests[1].params.max_tokens, engine.requests[1].params.temperature) == (128, 1.0)


async def test_a_matched_stop_string_is_named(http: httpx.AsyncClient) -> None:
    answer = await generate(http, text="a", sampling_params={"stop": " wö"})
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("base", {"type": "stop", "matched": " wö"})


async def test_logprobs_come_as_triples(http: httpx.AsyncClient) -> None:
    answer = await generate(
        http,
        input_ids=[5, 6, 7],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        sampling_params={"max_new_tokens": 2},
    )
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-0.5, 6, None], [-0.5, 7, None]]
    assert meta["output_token_logprobs"] == [[-0.5, i, None] for i in answer["output_ids"]]
    assert meta["input_top_logprobs"] == [None, [[-0.25, 40, None]], [[-0.25, 40, None]]]
    assert meta["output_top_logprobs"] == [[[-0.25, 40, None]]] * 2
    later = await generate(http, input_ids=[5, 6, 7], return_logprob=True, logprob_start_len=1)
    assert later["meta_info"]["input_token_logprobs"] == [[None, 6, None], [-0.5, 7, None]]
    without = await generate(http, text="a", return_logprob=True, return_text_in_logprobs=True)
    assert without["meta_info"]["input_token_logprobs"] == []
    assert without["meta_info"]["output_token_logprobs"][0][2] is not None


async def test_max_new_tokens_0_scores_the_prompt_only(http: httpx.AsyncClient) -> None:
    answer = await generate(
        http,
        input_ids=[5, 6],
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
    )
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["input_token_logprobs"] == [[None, 5, None], [-0.5, 6, None]]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_a_fallback_to_the_base_is_said(http: httpx.AsyncClient, engine: Any) -> None:
    engine.fallback_reason = "broken"
    response = await http.post("/generate", json={"text": "a", "lora_path": "sql"})
    assert response.headers["x-lorafleet-fallback"] == "base"
    assert response.json()["meta_info"]["lora_fallback"] == {"requested": "sql", "reason": "broken"}


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "text", 400),
        ({"text": "a", "input_ids": [1]}, "text", 400),
        ({"text": [1]}, "text", 400),
        ({"text": ""}, "text", 400),
        ({"input_ids": "a"}, "input_ids", 400),
        ({"input_ids": ["a"]}, "input_ids", 400),
        ({"text": "a", "lora_path": 3}, "lora_path", 400),
        ({"text": "a", "lora_path": "gpt"}, "model", 404),
        ({"text": "a", "lora_path": "sql", "sampling_params": {"lora_path": "org/json"}}, "lora_path", 400),
        ({"text": ["a", "b"], "lora_path": ["sql"]}, "lora_path", 400),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", 400),
        ({"text": "a", "sampling_params": 3}, "sampling_params", 400),
        ({"text": "a", "sampling_params": {"heat": 3}}, "sampling_params.heat", 400),
        ({"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex", 400),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature", 400),
        ({"text": "a", "sampling_params": {"max_new_tokens": 300}}, "max_new_tokens", 400),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states", 400),
        ({"text": "a", "rid": 3}, "rid", 400),
        ({"text": "a", "image_data": "x"}, "image_data", 400),
    ],
)
async def test_wrong_requests_name_the_field(
    http: httpx.AsyncClient, body: dict[str, Any], param: str, status: int
) -> None:
    response = await http.post("/generate", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_a_stream_has_the_prompts_logprobs_in_its_first_and_last_chunk_and_renders_each_once(
    http: httpx.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    real = Tokenizer.token_text
    monkeypatch.setattr(Tokenizer, "token_text", lambda self, i: rendered.append(i) or real(self, i))
    ids = tokenizer.encode("hello world " * 20)
    body = {"input_ids": ids, "stream": True, "return_logprob": True, "logprob_start_len": 0}
    response = await http.post("/generate", json=body | {"top_logprobs_num": 1, "return_text_in_logprobs": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    metas = [msgspec.json.decode(line)["meta_info"] for line in lines if line != "[DONE]"]
    assert len(metas) > 4
    for meta in (metas[0], metas[-1]):
        assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == ids
        assert len(meta["input_top_logprobs"]) == len(ids)
    assert not any("input_token_logprobs" in meta or "input_top_logprobs" in meta for meta in metas[1:-1])
    counts = [len(meta["output_token_logprobs"]) for meta in metas]
    assert counts == sorted(counts) and counts[-1] == metas[-1]["completion_tokens"]
    assert len(rendered) == 2 * (len(ids) + counts[-1]) - 1, "each token and its best, and none for the first"
