"""Embeddings through the engine, against the hidden states of transformers and PEFT."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from lorafleet.api.request.pooling import read_pooling
from lorafleet.protocol.errors import ConfigError
from real_server import RealServer, running
from tiny_models import make_model

pytestmark = pytest.mark.xdist_group("real_server")

TEXTS = ["the fleet of adapters", "a", "the harbour, the answer is there and more of it, and more"]


@pytest.fixture
def api(real: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def expected(fleet: Callable[[str], Any], ids: list[int], adapter: str | None, pooling: str) -> np.ndarray[Any, Any]:
    made = fleet("llama3")
    hidden_TD = made.reference.hidden(ids, None if adapter is None else made.adapters[adapter])
    vector_D = {"last": hidden_TD[-1], "mean": hidden_TD.mean(dim=0), "cls": hidden_TD[0]}[pooling]
    return torch.nn.functional.normalize(vector_D, dim=0).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize(("model", "adapter"), [("llama", None), ("sql", "all")])
def test_embeddings_are_those_of_transformers_and_peft(
    api: openai.OpenAI, real: RealServer, fleet: Any, model: str, adapter: str | None, pooling: str
) -> None:
    for _ in range(2):  # the second time the prompts' beginnings are in the prefix cache
        answer = api.embeddings.create(model=model, input=TEXTS, extra_body={"pooling": pooling})
        assert [one.index for one in answer.data] == [0, 1, 2]
        for text, one in zip(TEXTS, answer.data, strict=True):
            assert real.front is not None
            ids = real.front.texts.tokenizer.encode(text)
            np.testing.assert_allclose(one.embedding, expected(fleet, ids, adapter, pooling), atol=1e-3)
    assert answer.model == model
    assert (
        answer.usage.total_tokens
        == answer.usage.prompt_tokens
        == sum(
            len(real.front.texts.tokenizer.encode(text))
            for text in TEXTS  # type: ignore[union-attr]  # asserted above
        )
    )


async def test_they_share_steps_with_answers_and_change_none(real: RealServer, fleet: Any, prompt: Any) -> None:
    async with httpx.AsyncClient(base_url=real.url, timeout=60) as http:
        body = {"prompt": prompt(20), "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        embed = {"model": "sql", "input": [prompt(n) for n in range(1, 40)], "pooling": "mean"}
        whole, *others = await asyncio.gather(
            http.post("/v1/completions", json=body), *(http.post("/v1/embeddings", json=embed) for _ in range(2))
        )
    tokens = fleet("llama3").reference.greedy(prompt(20), 20).tokens
    assert whole.json()["choices"][0]["token_ids"] == tokens
    for other in others:
        for n, one in enumerate(other.json()["data"], 1):
            np.testing.assert_allclose(one["embedding"], expected(fleet, prompt(n), "all", "mean"), atol=1e-3)


def test_what_a_request_may_ask_of_its_numbers(api: openai.OpenAI) -> None:
    def embedding(**options: Any) -> np.ndarray[Any, Any]:
        answer = api.embeddings.create(model="sql", input="the fleet", **options)
        return np.asarray(answer.data[0].embedding, np.float32)

    whole = embedding(encoding_format="float")
    assert len(whole) == 64
    assert np.linalg.norm(whole) == pytest.approx(1, abs=1e-5)
    np.testing.assert_array_equal(embedding(), whole)  # openai-python asks for base64 where one does not say
    short = embedding(dimensions=16)
    np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    raw = embedding(extra_body={"normalize": False})
    np.testing.assert_allclose(raw / np.linalg.norm(raw), whole, atol=1e-6)
    assert abs(float(np.linalg.norm(raw)) - 1) > 0.01


async def test_base64_is_of_little_endian_float32(real: RealServer) -> None:
    async with httpx.AsyncClient(base_url=real.url, timeout=60) as http:
        body = {"model": "sql", "input": [5, 6, 7], "encoding_format": "base64"}
        coded = (await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
        plain = (await http.post("/v1/embeddings", json=body | {"encoding_format": "float"})).json()
    decoded = np.frombuffer(base64.b64decode(coded), "<f4")
    np.testing.assert_array_equal(decoded, np.asarray(plain["data"][0]["embedding"], np.float32))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [10**6]}, "input"),
    ({"input": "x" * 200}, "input"),
    ({"dimensions": 65}, "dimensions"),
    ({"dimensions": 0}, "dimensions"),
    ({"pooling": "max"}, "pooling"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"messages": []}, "messages"),
    ({"priority": 2**40}, "priority"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
async def test_what_cannot_be_is_refused_by_name(real: RealServer, body: dict[str, Any], param: str) -> None:
    async with httpx.AsyncClient(base_url=real.url, timeout=60) as http:
        response = await http.post("/v1/embeddings", json={"model": "llama", "input": "hi"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        (None, "last"),
        ('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}', "mean"),
        ('{"pooling_mode_cls_token": true}', "cls"),
        ('{"pooling_mode_lasttoken": true, "word_embedding_dimension": 64}', "last"),
    ],
)
def test_a_models_own_pooling_is_its_default(tmp_path: Path, content: str | None, pooling: str) -> None:
    if content is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(content)
    assert read_pooling(tmp_path) == pooling


@pytest.mark.parametrize("content", ['{"pooling_mode_max_tokens": true}', "{}", "nonsense"])
def test_a_pooling_that_is_not_served_is_refused_at_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(ConfigError):
        read_pooling(tmp_path)


def test_a_checkpoint_without_a_head_embeds_and_does_not_generate(tmp_path: Path, prompt: Any) -> None:
    """As some models for embeddings are published: without the first segment of names, too."""
    base = make_model(tmp_path / "base", "qwen3", num_hidden_layers=1, tie_word_embeddings=False)
    file, ids = base / "model.safetensors", prompt(12)
    kept = {name.removeprefix("model."): t for name, t in load_file(file).items() if name != "lm_head.weight"}
    save_file(kept, file, metadata={"format": "pt"})
    with torch.inference_mode():
        hidden_TD = AutoModel.from_pretrained(base)(input_ids=torch.tensor([ids])).last_hidden_state[0]
    with running(tmp_path, base, {}, {}) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        embedded = http.post("/v1/embeddings", json={"model": "llama", "input": ids})
        chat = {"messages": [{"role": "user", "content": "a"}]}
        refused = [
            http.post(path, json={"model": "llama"} | body)
            for path, body in (
                ("/v1/completions", {"prompt": ids}),
                ("/v1/completions", {"prompt": ids, "stream": True}),
                ("/v1/completions", {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}),
                ("/v1/chat/completions", chat),
            )
        ]
    wanted = torch.nn.functional.normalize(hidden_TD[-1], dim=0).numpy()
    np.testing.assert_allclose(embedded.json()["data"][0]["embedding"], wanted, atol=1e-3)
    for answer in refused:
        assert answer.status_code == 400, answer.text
        assert "no lm_head.weight, so it cannot generate" in answer.text
