"""Declares the answers that are not text: embeddings, classes, scores and rankings."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12.

from lorafleet.api.answer.answer_types import CommonFields, Fallback, Usage, exactly


@exactly
class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@exactly
class Embedding(TypedDict):
    """One embedding, as numbers or as the bytes of little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@exactly
class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    lora_fallback: NotRequired[Fallback]


@exactly
class TextClass(TypedDict):
    index: int
    label: str  # The most likely class.
    probs: list[float]
    num_classes: int


@exactly
class Classes(CommonFields):
    object: Literal["list"]
    data: list[TextClass]
    usage: Usage


@exactly
class PooledEntry(TypedDict):
    """An embedding, a head's outputs, or its outputs for each token; or the bytes of their float32 in base64."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


@exactly
class PooledList(CommonFields):
    object: Literal["list"]
    data: list[PooledEntry]
    usage: Usage


@exactly
class PairScore(TypedDict):
    object: Literal["score"]
    index: int
    score: float


@exactly
class Scores(CommonFields):
    object: Literal["list"]
    data: list[PairScore]
    usage: Usage


@exactly
class DocumentText(TypedDict):
    text: str


@exactly
class RankedDocument(TypedDict):
    index: int  # The document's place in the request.
    document: NotRequired[DocumentText]
    relevance_score: float


@exactly
class Ranking(TypedDict):
    """The answer of /rerank, best documents first."""

    id: str
    model: str
    usage: Usage
    results: list[RankedDocument]
    lora_fallback: NotRequired[Fallback]
