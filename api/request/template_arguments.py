"""Reads the arguments of a request for its chat template. A template ignores an argument that it does not read, so such
an argument is rejected here, unless it asks for nothing."""

from __future__ import annotations

from typing import Any

from lorafleet.api.request.request_bodies import ChatRequest, ConvertedChat
from lorafleet.api.request.token_bodies import TokenizeRequest
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text_service import TextService
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import cut

EFFORT, KWARGS = "reasoning_effort", "chat_template_kwargs"
_SWITCHES = ("enable_thinking", "thinking")  # Names under which templates read whether the model shall reason.


def template_arguments(
    texts: TextService, model: ServedModel, body: ChatRequest | TokenizeRequest
) -> dict[str, Any] | None:
    """Returns the arguments for the template, or None if there are none. Raises InvalidRequest."""
    given = dict(body.chat_template_kwargs or {})
    for name, value in list(given.items()):
        if not texts.knows_argument(model, name):
            if name not in _SWITCHES or value is not False:
                raise InvalidRequest(
                    f"`{KWARGS}` has {cut(name)!r}, which this model's chat template does not read; leave it out.",
                    KWARGS,
                )
            del given[name]  # The template cannot make the model reason, so there is nothing to switch off.
    if isinstance(body, ConvertedChat):
        wishes = body.template_wishes or {}
        given = {name: value for name, value in wishes.items() if texts.knows_argument(model, name)} | given
    if body.reasoning_effort is not None:
        _add_effort(texts, model, body.reasoning_effort, given)
    return given or None


def _add_effort(texts: TextService, model: ServedModel, effort: str, given: dict[str, Any]) -> None:
    if texts.knows_argument(model, EFFORT):
        if given.setdefault(EFFORT, effort) != effort:
            raise InvalidRequest(f"`{EFFORT}` and `{KWARGS}.{EFFORT}` differ; leave one of them out.", EFFORT)
        return
    switch = next((name for name in _SWITCHES if texts.knows_argument(model, name)), None)
    if effort == "none" and switch is not None:
        if given.setdefault(switch, False) is not False:
            raise InvalidRequest(f"`{EFFORT}` is none, but `{KWARGS}.{switch}` is not false.", EFFORT)
    elif effort == "none" and texts.reasoning_tags(model) is None:
        return
    elif effort != "medium":  # OpenAI's default asks for nothing.
        remedy = f"give 'none' or 'medium', or set {switch!r} in `{KWARGS}`" if switch else "leave it out"
        raise InvalidRequest(
            f"`{EFFORT}` is {effort!r}, but this model's chat template reads no degrees of reasoning; {remedy}.", EFFORT
        )
