"""Declares the bodies of the requests that get vectors, classes or scores in place of generated tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lorafleet.api.request.body_fields import (
    Dimensions,
    ModelName,
    Priority,
    Prompts,
    RequestId,
    Salt,
    Text,
    Truncation,
    Weights,
)
from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict, Tolerant
from lorafleet.protocol import limits
from lorafleet.protocol.messages import HeadTask, Pooling

TopN = Annotated[int, Within(limits.TOP_N)]
Texts = Text | Annotated[list[Text], AtMost(limits.MAX_PROMPTS)]


class PooledRequest(Tolerant):
    """The fields that these requests share."""

    model: ModelName | None = None
    lora_weights: Weights | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None  # Keeps the last k tokens; -1 keeps as many as fit.
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None


class EmbeddingRequest(PooledRequest):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None  # Keeps only the first numbers, normalized again.
    pooling: Pooling | None = None  # Default: the server's.
    normalize: bool | None = None  # To length 1; default: true.


class PoolingRequest(EmbeddingRequest):
    """The body of vLLM's /pooling."""

    task: Literal["embed"] | HeadTask | None = None  # Default: the task of the adapter's head.
    use_activation: bool | None = None  # Whether a head's outputs become probabilities; default: true.


class ClassifyRequest(PooledRequest):
    input: Prompts
    use_activation: bool | None = None


class ScoreRequest(PooledRequest):
    """The body of vLLM's /score. One text in `text_1` is paired with each in `text_2`; otherwise both are as long."""

    text_1: Texts
    text_2: Texts
    pooling: Pooling | None = None  # How embeddings are made, if the adapter has no head.
    use_activation: bool | None = None


class Document(Strict):
    text: Text


class RerankRequest(PooledRequest):
    query: Text
    documents: Annotated[list[Text | Document], AtMost(limits.MAX_PROMPTS)] = Field(min_length=1)
    top_n: TopN | None = None  # Number of documents in the answer; default: all.
    return_documents: bool | None = None  # Default: true.
    pooling: Pooling | None = None
    use_activation: bool | None = None
