"""Converts a request's fields to SamplingParams: the request's values, else the model's own defaults, else OpenAI's."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request

from lorafleet.api.access.long_work import run_by_size
from lorafleet.api.app_state import AppState
from lorafleet.api.request.request_bodies import GenerationRequest
from lorafleet.api.request.structured import read_structured
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text.bad_words import spellings, token_sequences
from lorafleet.api.text_service import TextService
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import cut
from lorafleet.protocol.sampling_params import SamplingParams

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
# Parameters that are converted from fields of a request. The others have the same name and value there.
_CONVERTED = {"max_tokens", "logprobs", "logit_bias", "bad_words_token_ids", "structured_outputs"}
_SAME_NAMES = [name for name in SamplingParams.__struct_fields__ if name not in _CONVERTED]


async def read_params(
    state: AppState,
    request: Request,
    model: ServedModel,
    body: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Returns the parameters of a whole request: `n` is as requested, and max_tokens is not yet fitted to a prompt."""
    given = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    if body.best_of is not None and body.best_of != given.get("n", 1):
        raise InvalidRequest("`best_of` is supported only if it equals n; leave it out.", "best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("`prompt_logprobs` cannot be streamed; set stream to false.", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` is allowed only if stream is true.", "stream_options")
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": read_logit_bias(body.logit_bias)}
    given["structured_outputs"] = await run_by_size(state.long_work, request, lambda: read_structured(model, body))
    params = SamplingParams(**{**state.config.generation_defaults, **given})
    params = await with_banned_tokens(state.texts, model, params)
    params.check_vocabulary(state.texts.vocab_size(model))
    return params


async def with_banned_tokens(texts: TextService, model: ServedModel, params: SamplingParams) -> SamplingParams:
    """Returns the parameters with the tokens of their bad_words, in the spellings of the model's tokenizer."""
    if not params.bad_words:
        return params
    encode, group = texts.tokenizing.encode, model.turn_group
    encoded = [
        await encode(model.tokenizer, text, add_special_tokens=False, group=group)
        for text in spellings(params.bad_words)
    ]
    return msgspec.structs.replace(params, bad_words_token_ids=token_sequences(encoded))


def read_logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """Converts the keys to token IDs. Each ID has one spelling, since one of "7" and "07" would silently win."""
    for token in given or ():
        if not _TOKEN_ID.fullmatch(token):
            raise InvalidRequest(
                f"`logit_bias` has the key {cut(repr(token))}; keys must be token ids, written as decimal numbers "
                'without signs, spaces or leading zeros, such as "7".',
                "logit_bias",
            )
    return {int(token): bias for token, bias in given.items()} if given else None


def fitted(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """Returns the parameters with the max_tokens that one prompt leaves room for."""
    return msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
