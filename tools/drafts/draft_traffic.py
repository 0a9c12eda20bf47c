"""Reads the prompts and recorded requests that a draft is trained on, as JSON lines.

A line is a prompt, a request to /v1/chat/completions or /v1/completions with its response, or a line of a batch:

    {"prompt": …} or {"messages": […]}, with "answer" and "model" if they are known
    {"request": {"model": …, "messages": […], …}, "response": {"choices": […], …}}
    {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.strict_json import shown
from lorafleet.tools.examples import given_answer

MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 4 << 20
MAX_LINES = 100_000
# Fields of a request that change the prompt's tokens in ways that only the server knows.
_SHAPES_PROMPT = (
    *("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "suffix"),
)

# Fields of a message that has more than its text. vLLM and SGLang name the reasoning differently.
_NOT_IN_TEXT = ("tool_calls", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class TrafficLine:
    """One prompt, and the answer if the line has one."""

    place: str  # File and line, for errors.
    model: str | None  # Name of the model that answered or should answer; None: any model.
    prompt: str = ""  # Empty if there are messages or tokens.
    messages: tuple[Mapping[str, object], ...] = ()
    prompt_ids: tuple[int, ...] = ()  # The prompt's tokens, if the response has them.
    answer: str | None = None  # Text of a whole answer.
    answer_ids: tuple[int, ...] = ()  # The answer's tokens, if the response has them.

    @property
    def is_answered(self) -> bool:
        return self.answer is not None or bool(self.answer_ids)


def read_traffic(path: Path) -> list[TrafficLine]:
    """Reads a file of JSON lines. Raises InvalidRequest, which names the line."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_FILE_BYTES} bytes, the most that are read. Split it.")
        found = list(_lines(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.") from None
    if not found:
        raise InvalidRequest(f"{path} has no prompts.")
    return found


def _lines(path: Path) -> Iterator[TrafficLine]:
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path}, line {number}"
            if len(raw) > MAX_LINE_BYTES:
                raise InvalidRequest(f"{place} has more than {MAX_LINE_BYTES} bytes; shorten it or leave it out.")
            if number > MAX_LINES:
                raise InvalidRequest(f"{path} has more than {MAX_LINES} lines, the most that are read. Split it.")
            if raw.strip():
                yield parse_line(raw.decode("utf-8"), place)


def parse_line(text: str, place: str) -> TrafficLine:
    """Returns the line's prompt and answer. Raises InvalidRequest, which names the place."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place} is not valid JSON: {error}.") from None
    match fields:
        case {"request": dict(request), "response": dict(response), **rest} if not rest:
            return _recorded(request, response, place)
        case {"body": dict(request), "custom_id": str(), "method": "POST", "url": str(url)}:
            if url not in ("/v1/chat/completions", "/v1/completions"):
                raise InvalidRequest(f"{place}: the url {shown(url)} is not one of chat/completions or completions.")
            return _recorded(request, {}, place)
        case {"prompt": _, **rest} | {"messages": _, **rest} if rest.keys() <= {"answer", "model"}:
            return _given(fields, place)
    raise InvalidRequest(
        f'{place}: give {{"prompt": "…"}} or {{"messages": […]}}, with "answer" and "model" if they are known, or '
        '{"request": {…}, "response": {…}}, or a line of a batch.'
    )


def _given(fields: Mapping[str, Any], place: str) -> TrafficLine:
    answer = given_answer(fields, place)
    prompt, messages = _prompt(fields, place)
    return TrafficLine(place, _model(fields, place), prompt, messages, answer=answer)


def _recorded(request: Mapping[str, Any], response: Mapping[str, Any], place: str) -> TrafficLine:
    choice = _choice(response, place)
    prompt_ids = _token_ids(choice.get("prompt_token_ids") or response.get("prompt_token_ids"), place)
    answer_ids = _token_ids(choice.get("token_ids"), place)
    if prompt_ids:
        return TrafficLine(place, _model(request, place), prompt_ids=prompt_ids, answer_ids=answer_ids)
    for name in _SHAPES_PROMPT:
        if request.get(name) is not None:
            raise InvalidRequest(
                f"{place}: the request has {name!r}, so its prompt is known to the server only. Leave the line out, or "
                "record responses with return_token_ids: their prompt_token_ids are taken as they are."
            )
    prompt, messages = _prompt(request, place)
    text = None if request.get("echo") else _text(choice)  # An echo begins with the prompt.
    return TrafficLine(place, _model(request, place), prompt, messages, (), text, answer_ids)


def _choice(response: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    match response.get("choices"):
        case [dict(choice), *_]:
            return choice
        case None if "error" not in response:
            return {}
        case _:
            raise InvalidRequest(f"{place}: the response has no choice. Leave the line out.")


def _text(choice: Mapping[str, Any]) -> str | None:
    """Returns the text of an answer that ended by itself, or None. Of an answer that a limit or a stop string cut
    off, calls tools or was reasoned about, the text is not all that the model wrote; its prompt is answered anew."""
    if choice.get("stop_reason") is not None:
        return None
    match choice:
        case {"finish_reason": "stop", "message": {"content": str(text), **rest}} if text:
            return None if any(rest.get(name) for name in _NOT_IN_TEXT) else text
        case {"finish_reason": "stop", "text": str(text)} if text:
            return text
    return None


def _prompt(fields: Mapping[str, Any], place: str) -> tuple[str, tuple[Mapping[str, object], ...]]:
    match fields:
        case {"messages": [*messages]} if messages and "prompt" not in fields:
            return "", tuple(_message(message, place) for message in messages)
        case {"prompt": str(prompt)} if prompt and "messages" not in fields:
            return prompt, ()
    raise InvalidRequest(f"{place}: give either a prompt, one string, or messages, a list; neither may be empty.")


def _message(message: object, place: str) -> Mapping[str, object]:
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        fields: dict[str, object] = message
        if isinstance(fields.get("content"), str) and not fields.get("tool_calls"):
            return fields
    raise InvalidRequest(
        f"{place}: a message is an object with a role and a text as content. Others are taken as tokens only, from "
        "responses that were recorded with return_token_ids."
    )


def _model(fields: Mapping[str, Any], place: str) -> str | None:
    model = fields.get("model")
    if model is not None and not (isinstance(model, str) and model):
        raise InvalidRequest(f"{place}: the model is {shown(model)}; it must be a name.")
    return model


def _token_ids(given: object, place: str) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or any(type(token) is not int or token < 0 for token in given):
        raise InvalidRequest(f"{place}: token ids must be a list of integers of 0 or more.")
    return tuple(given)
