"""An adapter's own tokenizer, vocabulary and chat template, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.errors import AdapterMissing
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import Vocabulary

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi <plan>"}]


@pytest.fixture
def own(byte_tokenizer_folder: Path, tmp_path: Path, catalog: Any) -> Tokenizer:
    """Of the adapter "planner": two tokens more than the base, and a template that uses them."""
    folder = tmp_path / "planner"
    saved = PreTrainedTokenizerFast.from_pretrained(byte_tokenizer_folder)
    saved.add_tokens(["<plan>", "<act>"])
    saved.chat_template = "{% for m in messages %}<act>{{ m.content }}{{ mood }}{% endfor %}"
    saved.save_pretrained(folder)
    (folder / "adapter_config.json").write_text("{}")
    tables = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), torch.zeros(len(saved), 2))
    save_file(
        {f"base_model.model.{name}": table.clone() for name, table in tables.items()},
        folder / "adapter_model.safetensors",
    )
    catalog.loras["planner"] = LoRARequest("planner", 5, str(folder), "digest of planner")
    return Tokenizer.from_folder(folder)


@pytest.fixture
def refusing(own: Tokenizer, catalog: Any) -> None:  # noqa: ARG001  made by it
    path = Path(catalog.loras["planner"].lora_path, "chat_template.jinja")
    path.write_text("{{ raise_exception('not so') }}")


@pytest.fixture
def context(own: Tokenizer, catalog: Any, request: pytest.FixtureRequest) -> int:  # noqa: ARG001  makes the adapter
    path = Path(catalog.loras["planner"].lora_path, "lorafleet.json")
    path.write_text(json.dumps({"context_length": request.param}))
    return int(request.param)


async def test_chat_is_rendered_tokenized_and_answered_in_the_adapters_language(
    http: httpx.AsyncClient, engine: Any, own: Tokenizer
) -> None:
    engine.tokenizer, engine.answer = own, lambda _: "so <act> é"
    body = {"model": "planner", "messages": HI, "logprobs": True, "chat_template_kwargs": {"mood": "!"}}
    answer = (await http.post(CHAT, json=body)).json()
    [request] = engine.requests
    assert request.prompt_token_ids == own.encode("<act>hi <plan>!")
    assert request.vocabulary == Vocabulary(own.vocab_size, engine.hello.eos_token_ids)
    assert answer["choices"][0]["message"]["content"] == "so <act> é"
    assert "<act>" in [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    streamed = (await http.post(CHAT, json=body | {"stream": True})).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "so <act> é"


async def test_completions_and_token_ids_are_checked_against_the_adapters_vocabulary(
    http: httpx.AsyncClient, engine: Any, own: Tokenizer, tokenizer: Tokenizer
) -> None:
    engine.tokenizer = own
    last = own.vocab_size - 1
    for model, token, status in (("planner", last, 200), ("planner", last + 1, 400), ("sql", last, 400)):
        answer = await http.post("/v1/completions", json={"model": model, "prompt": [token], "echo": True})
        assert answer.status_code == status
        biased = {"model": model, "prompt": "a", "logit_bias": {str(token): 1}}
        assert (await http.post("/v1/completions", json=biased)).status_code == status
    assert f"ids 0 to {tokenizer.vocab_size - 1}" in answer.text
    body = {"text": ["<act>"] * 2, "lora_path": ["planner", None]}
    assert (await http.post("/generate", json=body)).status_code == 200
    assert [request.prompt_token_ids for request in engine.requests[-2:]] == [[last], tokenizer.encode("<act>")]


async def test_tokenize_and_detokenize_speak_the_adapters_language(http: httpx.AsyncClient, own: Tokenizer) -> None:
    found = (
        await http.post("/tokenize", json={"model": "planner", "prompt": "a<act>", "return_token_strs": True})
    ).json()
    assert found["tokens"] == own.encode("a<act>") and found["token_strs"][-1] == "<act>"
    assert (await http.post("/detokenize", json={"model": "planner", "tokens": found["tokens"]})).json() == {
        "prompt": "a<act>"
    }
    chat = (await http.post("/tokenize", json={"model": "planner", "messages": HI})).json()
    assert chat["tokens"] == own.encode("<act>hi <plan>")


async def test_a_template_that_raises_is_the_clients_error(http: httpx.AsyncClient, refusing: None) -> None:  # noqa: ARG001
    answer = await http.post(CHAT, json={"model": "planner", "messages": HI})
    assert answer.status_code == 400 and "not so" in answer.text


@pytest.mark.parametrize(("context", "limit"), [(280, 280), (400, 300), (100, 100)], indirect=["context"])
async def test_an_adapters_context_bounds_its_requests(
    http: httpx.AsyncClient,
    engine: Any,
    context: int,
    limit: int,
) -> None:
    """The base's context is 256 tokens, and the longest sequence of an adapter 300."""
    engine.hello = msgspec.structs.replace(engine.hello, max_adapter_len=300)
    body = {"model": "planner", "prompt": [5] * (limit - 1)}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    request = engine.requests[-1]
    assert (request.context_length, request.params.max_tokens) == (context, 1)
    refused = await http.post("/v1/completions", json=body | {"prompt": [5] * limit})
    assert refused.status_code == 400 and f"maximum context length is {limit} tokens" in refused.text
    assert (await http.post("/v1/completions", json=body | {"model": "sql", "prompt": [5] * 256})).status_code == 400
    [listed] = [card for card in (await http.get("/v1/models")).json()["data"] if card["id"] == "planner"]
    shown = (await http.get("/v1/models/planner")).json()
    assert listed["max_model_len"] == shown["max_model_len"] == limit
    assert (await http.get("/v1/models/sql")).json()["max_model_len"] == 256


async def test_an_adapter_in_memory_whose_files_are_gone_is_served_where_it_had_no_language_of_its_own(
    http: httpx.AsyncClient, engine: Any, catalog: Any
) -> None:
    body = {"model": "planner", "prompt": "a"}
    catalog.loras["planner"] = LoRARequest("planner", 5, "/nowhere", "digest")
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    for own in ({"language": "l"}, {"vocab_size": 7}, {"context_length": 7}):
        info = AdapterInfo("d", 8, 1, [], **own)
        catalog.loras["planner"] = LoRARequest("planner", 5, "/nowhere", f"digest {info}")

        async def load(_: LoRARequest, info: AdapterInfo = info) -> AdapterInfo:
            return info

        engine.load_adapter = load
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 404 and "/nowhere" in answer.text


async def test_an_adapter_that_cannot_be_read_is_answered_by_the_base_where_that_was_asked_for(
    http: httpx.AsyncClient, engine: Any
) -> None:
    async def load(_: LoRARequest) -> AdapterInfo:
        raise AdapterMissing("no such folder")

    engine.load_adapter = load
    body = {"model": "sql", "prompt": "a"}
    assert (await http.post("/v1/completions", json=body)).status_code == 404
    engine.hello = msgspec.structs.replace(engine.hello, falls_back_to_base=True)
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and engine.requests[-1].lora is None
    assert answer.json()["model"] == "llama" and "no such folder" in str(answer.json()["lora_fallback"])
