"""Adapters with classification heads over HTTP, against transformers + PEFT in float32."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

import real_server
from classifiers import expected_logits, make_classifier
from lorafleet.api.answer import pooling_types
from lorafleet.protocol.lora_config import LoRAConfig
from real_server import RealServer

PROMPTS = [[7, 8, 9], [11], [*range(20, 65)], [5, 6]]
TEXTS = ["the fleet", "of adapters, and more", "the harbour"]
SCORED = ("of {query} says {document}", ["of ", " says ", ""])


@dataclass(frozen=True)
class House:
    """A server with classifiers, two slots for all of its adapters, and steps of 32 tokens."""

    server: RealServer
    base: Path
    adapters: dict[str, Path]

    def expected(self, adapter: str, prompts: list[list[int]]) -> list[torch.Tensor]:
        task_type, num_labels, _ = HEADS[adapter]
        return expected_logits(self.base, self.adapters[adapter], task_type, num_labels, prompts)

    def ids(self, text: str) -> list[int]:
        assert self.server.front is not None
        return self.server.front.texts.tokenizer.encode(text)


HEADS: dict[str, tuple[str, int, dict[str, Any] | None]] = {
    "topic": ("SEQ_CLS", 3, {"id2label": {"0": "sea", "1": "land", "2": "air"}}),
    "flags": ("SEQ_CLS", 2, {"problem_type": "multi_label_classification"}),
    "level": ("SEQ_CLS", 1, {"problem_type": "regression"}),
    "match": ("SEQ_CLS", 1, None),
    "asked": ("SEQ_CLS", 1, {"score_template": SCORED[0]}),
    "tags": ("TOKEN_CLS", 4, None),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, fleet: Callable[[str], Any]) -> Iterator[House]:
    folder, made = tmp_path_factory.mktemp("classify"), fleet("llama3")
    adapters = {
        name: make_classifier(folder / name, made.base, task_type, num_labels, 30 + i, lorafleet)
        for i, (name, (task_type, num_labels, lorafleet)) in enumerate(HEADS.items())
    }
    served = {**adapters, "sql": made.adapters["all"]}
    engine: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "kv_cache_tokens": 2048}
    with real_server.running(
        folder,
        made.base,
        served,
        {},
        lora=LoRAConfig(max_loras=2, max_gpu_loras=2),
        max_model_len=80,
        device="cpu",
        **engine,
    ) as server:
        yield House(server, made.base, adapters)


@pytest.fixture
async def http(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=house.server.url, timeout=60) as client:
        yield client


async def ask(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_classes_are_those_of_transformers_and_peft(http: httpx.AsyncClient, house: House) -> None:
    activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "topic": lambda logits: logits.softmax(-1),
        "flags": torch.sigmoid,
        "level": lambda logits: logits,
        "match": torch.sigmoid,
    }
    for name, activation in activations.items():
        for use, act in ((True, activation), (None, activation), (False, lambda logits: logits)):
            answer = await ask(http, "/classify", model=name, input=PROMPTS, use_activation=use)
            TypeAdapter(pooling_types.Classes).validate_python(answer, strict=True)
            assert answer["model"] == name
            assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, PROMPTS))
            for logits, entry in zip(house.expected(name, PROMPTS), answer["data"], strict=True):
                assert entry["probs"] == pytest.approx(act(logits).tolist(), abs=1e-3)
                assert entry["num_classes"] == len(logits)
                names = ["sea", "land", "air"] if name == "topic" else ["LABEL_0", "LABEL_1"]
                assert entry["label"] == names[int(logits.argmax())]


async def test_tokens_are_classified_over_several_steps(http: httpx.AsyncClient, house: House) -> None:
    expected = [logits.softmax(-1).numpy() for logits in house.expected("tags", PROMPTS)]
    for body in ({}, {"task": "token_classify"}):
        answer = await ask(http, "/pooling", model="tags", input=PROMPTS, **body)
        TypeAdapter(pooling_types.PooledList).validate_python(answer, strict=True)
        for probs_TL, entry in zip(expected, answer["data"], strict=True):
            np.testing.assert_allclose(np.asarray(entry["data"]), probs_TL, atol=1e-3)
    coded = await ask(http, "/pooling", model="tags", input=PROMPTS, encoding_format="base64")
    for probs_TL, entry in zip(expected, coded["data"], strict=True):
        np.testing.assert_allclose(
            np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(-1, 4), probs_TL, atol=1e-3
        )


async def test_heads_share_steps_with_answers_and_change_none(
    http: httpx.AsyncClient, house: House, fleet: Any, prompt: Any
) -> None:
    """All adapters compete for two slots, prompts take several steps, and cached prefixes are reused."""
    generated = {"prompt": prompt(40), "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    prompts = [prompt(n) for n in (3, 50, 17, 33)]
    jobs = list(itertools.product(("topic", "tags", "match"), range(3)))
    first, second, *others = await asyncio.gather(
        ask(http, "/v1/completions", **generated),
        ask(http, "/v1/completions", model="sql", **generated),
        *(ask(http, "/pooling", model=name, input=prompts, use_activation=False) for name, _ in jobs),
    )
    reference, sql = fleet("llama3").reference, fleet("llama3").adapters["all"]
    assert first["choices"][0]["token_ids"] == reference.greedy(prompt(40), 20).tokens
    assert second["choices"][0]["token_ids"] == reference.greedy(prompt(40), 20, sql).tokens
    expected = {name: house.expected(name, prompts) for name, _ in jobs}
    for (name, _), answer in zip(jobs, others, strict=True):
        for logits, entry in zip(expected[name], answer["data"], strict=True):
            np.testing.assert_allclose(np.asarray(entry["data"]), logits.numpy(), atol=1e-3)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_a_head_with_one_label_scores_pairs(http: httpx.AsyncClient, house: House, path: str) -> None:
    for model, (before, between, after) in (("match", ("", "", "")), ("asked", SCORED[1])):
        pairs = [house.ids(f"{before}{TEXTS[0]}{between}{text}{after}") for text in TEXTS[1:]]
        expected = [torch.sigmoid(logits).item() for logits in house.expected(model, pairs)]
        for first in (TEXTS[0], [TEXTS[0]], [TEXTS[0]] * 2):
            answer = await ask(http, path, model=model, text_1=first, text_2=TEXTS[1:])
            TypeAdapter(pooling_types.Scores).validate_python(answer, strict=True)
            assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-3)
            assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))
    raw = await ask(http, path, model="match", text_1=TEXTS[0], text_2=TEXTS[1], use_activation=False)
    [logit] = house.expected("match", [house.ids(TEXTS[0] + TEXTS[1])])
    assert raw["data"][0]["score"] == pytest.approx(logit.item(), abs=1e-3)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls", None])
async def test_without_a_head_scores_are_cosines(
    http: httpx.AsyncClient, house: House, fleet: Any, pooling: str | None
) -> None:
    def embedded(text: str) -> torch.Tensor:
        hidden_TD = fleet("llama3").reference.hidden(house.ids(text), fleet("llama3").adapters["all"])
        return {"mean": hidden_TD.mean(0), "cls": hidden_TD[0]}.get(str(pooling), hidden_TD[-1])

    long = TEXTS[1] + " and more" * 5
    for texts in (TEXTS[1:], [long, TEXTS[0]]):
        answer = await ask(http, "/score", model="sql", text_1=TEXTS[0], text_2=texts, pooling=pooling)
        cosines = [torch.cosine_similarity(embedded(TEXTS[0]), embedded(text), dim=0).item() for text in texts]
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(cosines, abs=1e-3)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ordered_by_their_scores(http: httpx.AsyncClient, path: str) -> None:
    documents: list[Any] = [*TEXTS, {"text": "more and more"}]
    plain = [*TEXTS, "more and more"]
    for model in ("match", "sql"):
        scores = [
            entry["score"] for entry in (await ask(http, "/score", model=model, text_1="what", text_2=plain))["data"]
        ]
        best = sorted(range(4), key=lambda i: -scores[i])
        answer = await ask(http, path, model=model, query="what", documents=documents)
        TypeAdapter(pooling_types.Ranking).validate_python(answer, strict=True)
        assert [entry["index"] for entry in answer["results"]] == best
        assert [entry["document"]["text"] for entry in answer["results"]] == [plain[i] for i in best]
        assert [entry["relevance_score"] for entry in answer["results"]] == pytest.approx([scores[i] for i in best])
        some = await ask(http, path, model=model, query="what", documents=documents, top_n=2, return_documents=False)
        assert [sorted(entry) for entry in some["results"]] == [["index", "relevance_score"]] * 2
        assert [entry["index"] for entry in some["results"]] == best[:2]
        every = await ask(http, path, model=model, query="what", documents=documents, top_n=0)
        assert len(every["results"]) == 4


async def test_pooling_embeds_as_the_route_for_embeddings(http: httpx.AsyncClient) -> None:
    options = {"model": "topic", "input": PROMPTS, "pooling": "cls", "dimensions": 8, "normalize": False}
    embeddings = await ask(http, "/v1/embeddings", **options)
    pooled = await ask(http, "/pooling", task="embed", **options)
    assert [e["data"] for e in pooled["data"]] == [e["embedding"] for e in embeddings["data"]]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/classify", {"model": "sql", "input": "a"}, "model"),
    ("/classify", {"model": "llama", "input": "a"}, "model"),
    ("/classify", {"model": "tags", "input": "a"}, "model"),
    ("/classify", {"model": "topic", "input": []}, "input"),
    ("/classify", {"model": "topic", "input": "a" * 200}, "input"),
    ("/classify", {"model": "topic", "input": "a", "softmax": True}, "softmax"),
    ("/classify", {"model": "topic", "input": "a", "messages": []}, "messages"),
    ("/classify", {"model": "topic", "input": "a", "weight_version": 1}, "weight_version"),
    ("/v1/embeddings", {"model": "sql", "input": "a", "min_weight_version": 1}, "min_weight_version"),
    (
        "/score",
        {"model": "match", "text_1": "a", "text_2": "b", "return_weight_versions": True},
        "return_weight_versions",
    ),
    ("/pooling", {"model": "sql", "input": "a"}, "task"),
    ("/pooling", {"model": "sql", "input": "a", "task": "embed", "use_activation": True}, "use_activation"),
    ("/pooling", {"model": "topic", "input": "a", "task": "token_classify"}, "model"),
    ("/pooling", {"model": "topic", "input": "a", "task": "token_embed"}, "task"),
    ("/pooling", {"model": "topic", "input": "a", "dimensions": 2}, "dimensions"),
    ("/pooling", {"model": "topic", "input": "a", "normalize": True}, "normalize"),
    ("/pooling", {"model": "topic", "input": "a", "pooling": "mean"}, "pooling"),
    ("/score", {"model": "topic", "text_1": "a", "text_2": "b"}, "model"),
    ("/score", {"model": "tags", "text_1": "a", "text_2": "b"}, "model"),
    ("/score", {"model": "match", "text_1": ["a", "b"], "text_2": "b"}, "text_1"),
    ("/score", {"model": "match", "text_1": [], "text_2": "b"}, "text_1"),
    ("/score", {"model": "match", "text_1": "a", "text_2": []}, "text_2"),
    ("/score", {"model": "match", "text_1": "a", "text_2": "b", "pooling": "mean"}, "pooling"),
    ("/score", {"model": "sql", "text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
    ("/score", {"model": "sql", "text_1": "a", "text_2": ""}, "text_2"),
    ("/score", {"model": "match", "text_1": "a" * 17000, "text_2": ["b"] * 1000}, "text_2"),
    ("/rerank", {"model": "match", "query": "a", "documents": []}, "documents"),
    ("/rerank", {"model": "match", "query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"model": "match", "query": "a", "documents": ["b"], "max_tokens_per_doc": 4}, "max_tokens_per_doc"),
    ("/v1/completions", {"model": "topic", "prompt": "a"}, "model"),
    ("/v1/chat/completions", {"model": "tags", "messages": [{"role": "user", "content": "a"}]}, "model"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_what_cannot_be_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
