"""Declares what the answers of several APIs share, as types; the modules *_types.py beside it declare the rest of each.

/openapi.json is made from the types, and tests check real answers with them. Routes build plain dicts instead, because
these cost less per token.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12.

exactly = with_config(ConfigDict(extra="forbid"))

FinishReason = Literal["stop", "length", "abort", "error"]
Fallback = dict[str, str]  # Keys: requested, reason. The base model answered in an adapter's place.


@exactly
class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@exactly
class ErrorBody(TypedDict):
    error: Error


@exactly
class PromptTokensDetails(TypedDict):
    cached_tokens: int


@exactly
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@exactly
class WeightSpan(TypedDict):
    """Generated tokens from `start` to before `end`, and the weights that sampled them."""

    version: str | None
    digest: str | None
    start: int
    end: int


class CommonFields(TypedDict):
    id: str
    created: int
    model: str
    lora_fallback: NotRequired[Fallback]
