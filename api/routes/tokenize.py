"""Serves vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.answer import token_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.prompts import checked_ids, encode, render_chat
from lorafleet.api.request.token_bodies import DetokenizeRequest, TokenizeRequest
from lorafleet.api.routes.operations import describe
from lorafleet.api.served_model import ServedModel
from lorafleet.protocol.errors import InvalidRequest


@describe("Convert a text or messages to tokens", body=TokenizeRequest, answer=token_types.Tokenized)
async def tokenize(state: AppState, request: Request) -> Response:
    body = await read_body(state, request, TokenizeRequest)
    model = await state.models.find(caller_of(request), body.model)
    text, special = await _text(state, request, model, body)
    token_ids = await encode(state.texts, model, text, add_special_tokens=special)
    charge_auxiliary(state, request, len(token_ids))
    return await run_by_count(state.long_work, model, len(token_ids), lambda: _write(state, body, model, token_ids))


def _write(state: AppState, body: TokenizeRequest, model: ServedModel, token_ids: list[int]) -> Response:
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": state.texts.max_model_len(model),
            "tokens": token_ids,
            "token_strs": [model.tokenizer.token_name(i) for i in token_ids] if body.return_token_strs else None,
        }
    )


async def _text(state: AppState, request: Request, model: ServedModel, body: TokenizeRequest) -> tuple[str, bool]:
    """Returns the text and whether special tokens are added. The defaults are those of completions and chat."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either `prompt` or `messages`.", "prompt")
    if body.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"`{name}` is allowed only with `messages`; remove it.", name)
        return body.prompt or "", body.add_special_tokens is not False
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
    return await render_chat(state, request, model, body, tools), bool(body.add_special_tokens)


@describe("Convert tokens to text", body=DetokenizeRequest, answer=token_types.Detokenized)
async def detokenize(state: AppState, request: Request) -> Response:
    body = await read_body(state, request, DetokenizeRequest)
    model = await state.models.find(caller_of(request), body.model)
    tokens = checked_ids(state.texts, model, body.tokens, "tokens")
    charge_auxiliary(state, request, len(tokens))
    text = await state.texts.tokenizing.decode(
        model.tokenizer, tokens, skip_special_tokens=False, group=model.turn_group
    )
    return json_response({"prompt": text})


def charge_auxiliary(state: AppState, request: Request, num_tokens: int) -> None:
    """Charges the tokens of a request that generates nothing."""
    state.access.quotas.charge_auxiliary(caller_of(request), num_tokens)
