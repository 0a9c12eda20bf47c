"""Serves vLLM's /score, and /rerank as Jina and Cohere have it: how well pairs of texts belong together.

An adapter whose head has one label scores each pair as one prompt (a cross-encoder). Without a head, a score is the
cosine of the two texts' embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.answer import pooling_types
from lorafleet.api.answer.generation import Sample
from lorafleet.api.answer.pooled_work import PooledWork, Values, activated, vector_of
from lorafleet.api.answer.responses import WholeReply
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.pooled_bodies import Document, RerankRequest, ScoreRequest, Texts
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.routes.operations import STARTING, describe
from lorafleet.api.text.output import Delta
from lorafleet.protocol.adapter_formats.adapter_classifier import AdapterClassifier
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_PAIR_CHARS
from lorafleet.protocol.messages import Pooling

Pairs = list[tuple[int, int]]  # of indices into two lists of texts


@dataclass(frozen=True, slots=True)
class _Texts:
    """The two lists of texts of a request, with the names of their fields."""

    first: Sequence[str]
    second: Sequence[str]
    params: tuple[str, str]

    def pairs(self) -> Pairs:
        """Pairs one text with each of the others, or two lists of one length. Raises InvalidRequest."""
        if len(self.first) not in (1, len(self.second)):
            first, second = self.params
            raise InvalidRequest(
                f"`{first}` has {len(self.first)} texts and `{second}` has {len(self.second)}; give one text in "
                f"`{first}`, or as many in both.",
                first,
            )
        return [(0 if len(self.first) == 1 else i, i) for i in range(len(self.second))]


@dataclass(frozen=True, slots=True)
class _StartedScores:
    """Scores that the engine is computing."""

    samples: list[Sample]
    read: Callable[[list[Delta]], list[float]]


@describe("Scores of pairs of texts", body=ScoreRequest, answer=pooling_types.Scores, headers=STARTING)
async def score(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, ScoreRequest)
    texts = _Texts(_listed(body.text_1), _listed(body.text_2), ("text_1", "text_2"))
    work = await PooledWork.begin(state, request, body, "score-", deadline)
    started = await _start(work, body, texts)

    def write(deltas: list[Delta]) -> dict[str, object]:
        scores = started.read(deltas)
        return work.listed([{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)])

    return WholeReply(lambda: work.answer(started.samples, write))


@describe("Documents ordered by relevance", body=RerankRequest, answer=pooling_types.Ranking, headers=STARTING)
async def rerank(state: AppState, request: Request) -> Response:
    deadline = RequestDeadline.of(request, state.config.queue_timeout_s)
    body = await read_body(state, request, RerankRequest)
    documents = [entry.text if isinstance(entry, Document) else entry for entry in body.documents]
    work = await PooledWork.begin(state, request, body, "rerank-", deadline)
    started = await _start(work, body, _Texts([body.query], documents, ("query", "documents")))

    def write(deltas: list[Delta]) -> dict[str, object]:
        scores = started.read(deltas)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results: list[dict[str, object]] = []
        for i in best:
            document = {} if body.return_documents is False else {"document": {"text": documents[i]}}
            results.append({"index": i, **document, "relevance_score": scores[i]})
        return {"id": work.id, "results": results}

    return WholeReply(lambda: work.answer(started.samples, write))


async def _start(work: PooledWork, body: ScoreRequest | RerankRequest, texts: _Texts) -> _StartedScores:
    pairs = texts.pairs()
    head = work.model.language.classifier
    if head is None:
        if body.use_activation is not None:
            raise InvalidRequest(
                f"`use_activation` does not apply, since {work.model.name!r} has no classification head and scores are "
                "cosines of embeddings; leave it out.",
                "use_activation",
            )
        return await _start_cosines(work, texts, pairs, body.pooling or work.state.config.pooling)
    if body.pooling is not None:
        raise InvalidRequest(
            f"`pooling` does not apply, since {work.model.name!r} has a classification head, which reads the last "
            "token; leave it out.",
            "pooling",
        )
    if len(head.labels) != 1 or head.task != "classify":
        raise InvalidRequest(
            f"the head of {work.model.name!r} has {len(head.labels)} labels for the task {head.task!r}; scores need a "
            "head with one label, trained with task type SEQ_CLS.",
            "model",
        )
    return await _start_head(work, texts, pairs, head, body.use_activation)


async def _start_cosines(work: PooledWork, texts: _Texts, pairs: Pairs, pooling: Pooling) -> _StartedScores:
    first = await work.read(list(texts.first), texts.params[0])
    second = await work.read(list(texts.second), texts.params[1])

    def read(deltas: list[Delta]) -> list[float]:
        vectors = [vector_of(delta) for delta in deltas]
        return [_cosine(vectors[i], vectors[len(first) + k]) for i, k in pairs]

    return _StartedScores(await work.start([*first, *second], pooling), read)


async def _start_head(
    work: PooledWork, texts: _Texts, pairs: Pairs, head: AdapterClassifier, use_activation: bool | None
) -> _StartedScores:
    num_chars = sum(len(texts.first[i]) + len(texts.second[k]) for i, k in pairs) + head.num_chars * len(pairs)
    if num_chars > MAX_PAIR_CHARS:
        raise InvalidRequest(
            f"the {len(pairs)} prompts, each of two texts, have {num_chars} characters in total; at most "
            f"{MAX_PAIR_CHARS} are allowed in one request. Send fewer or shorter texts.",
            texts.params[1],
        )
    prompts = await work.read([head.pair(texts.first[i], texts.second[k]) for i, k in pairs], texts.params[1])

    def read(deltas: list[Delta]) -> list[float]:
        return [activated(head, delta, use_activation).item() for delta in deltas]

    return _StartedScores(await work.start(prompts, "classify"), read)


def _listed(given: Texts) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _cosine(x_D: Values, y_D: Values) -> float:
    norms = float(np.linalg.norm(x_D)) * float(np.linalg.norm(y_D))
    return float(x_D @ y_D) / max(norms, 1e-12)
