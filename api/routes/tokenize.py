"""Serves vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.answer import answer_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.front import Front, ServedModel
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.prompts import checked_ids, encode, render_chat
from lorafleet.api.request.request_bodies import DetokenizeRequest, TokenizeRequest
from lorafleet.api.routes.operations import describe
from lorafleet.protocol.errors import InvalidRequest


@describe("Tokens of a text or of messages", body=TokenizeRequest, answer=answer_types.Tokenized)
async def tokenize(front: Front, request: Request) -> Response:
    body = await read_body(front, request, TokenizeRequest)
    model = await front.model(caller_of(request), body.model)
    text, special = await _text(front, request, model, body)
    token_ids = await encode(front, model, text, add_special_tokens=special)
    charge_auxiliary(front, request, len(token_ids))
    return await run_by_count(front, model, len(token_ids), lambda: _write(front, body, model, token_ids))


def _write(front: Front, body: TokenizeRequest, model: ServedModel, token_ids: list[int]) -> Response:
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": front.max_model_len,
            "tokens": token_ids,
            "token_strs": [model.tokenizer.token_name(i) for i in token_ids] if body.return_token_strs else None,
        }
    )


async def _text(front: Front, request: Request, model: ServedModel, body: TokenizeRequest) -> tuple[str, bool]:
    """Returns the text and whether special tokens are added. The defaults are those of completions and chat."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either `prompt` or `messages`.", "prompt")
    if body.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"`{name}` goes with `messages` only; remove it.", name)
        return body.prompt or "", body.add_special_tokens is not False
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
    return await render_chat(front, request, model, body, tools), bool(body.add_special_tokens)


@describe("The text of tokens", body=DetokenizeRequest, answer=answer_types.Detokenized)
async def detokenize(front: Front, request: Request) -> Response:
    body = await read_body(front, request, DetokenizeRequest)
    model = await front.model(caller_of(request), body.model)
    tokens = checked_ids(front, model, body.tokens, "tokens")
    charge_auxiliary(front, request, len(tokens))
    text = await front.tokenizing.decode(model.tokenizer, tokens, skip_special_tokens=False, group=model.turn_group)
    return json_response({"prompt": text})


def charge_auxiliary(front: Front, request: Request, num_tokens: int) -> None:
    """Charges the tokens of a request that generates nothing."""
    if front.quotas is not None:
        front.quotas.charge_auxiliary(caller_of(request), num_tokens)
