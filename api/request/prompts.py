"""Converts the prompt of a request to token IDs that fit the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from lorafleet.api.access.long_work import run_by_size
from lorafleet.api.app_state import AppState
from lorafleet.api.request.chat_messages import read_messages, string
from lorafleet.api.request.request_bodies import ChatRequest
from lorafleet.api.request.template_arguments import template_arguments
from lorafleet.api.request.token_bodies import TokenizeRequest
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text.token_table import TokenTable
from lorafleet.api.text_service import TextService
from lorafleet.protocol.errors import ContextOverflow, InvalidRequest
from lorafleet.protocol.limits import (
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_TEXT_CHARS,
    MAX_TOKEN_IDS,
    MAX_TOKENIZE_CHARS,
    shown_number,
)

# A text with more characters than this for each token of the context is rejected before it is tokenized, unless it has
# at most MAX_TOKENIZE_CHARS (about a million). Tokens of well-known models have 3 to 5 characters.
MAX_CHARS_PER_TOKEN = 16
ENDING_TOKENS = 32  # Tokens or characters of a prompt's end, in which tags of reasoning are searched.


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None  # The prompt that the client sent; None if it sent token IDs.

    def ending(self, tokenizer: TokenTable) -> str:
        """Returns the last characters of the prompt, with special tokens."""
        if self.text is not None:
            return self.text[-ENDING_TOKENS:]
        return tokenizer.decode(self.token_ids[-ENDING_TOKENS:], skip_special_tokens=False)

    def written(self, tokenizer: TokenTable) -> str:
        return tokenizer.decode(self.token_ids) if self.text is None else self.text


async def encode(
    texts: TextService, model: ServedModel, text: str, *, add_special_tokens: bool, must_fit: str | None = None
) -> list[int]:
    """Returns the token IDs of a text. Raises ContextOverflow if it is too long to be tokenized.

    If `must_fit` is given, the text must also fit the context, and errors name this field.
    """
    if must_fit is not None:
        _check_may_fit(texts, model, text, must_fit)
    most_chars = max(MAX_TOKENIZE_CHARS, MAX_CHARS_PER_TOKEN * texts.context_len(model))
    if len(text) > most_chars:
        raise ContextOverflow(
            f"{_limit(texts, model)} However, your prompt has {len(text)} characters; at most {most_chars} are "
            "tokenized. Shorten it.",
            must_fit or "prompt",
        )
    token_ids = await texts.tokenizing.encode(
        model.tokenizer, text, add_special_tokens=add_special_tokens, group=model.turn_group
    )
    if must_fit is not None:  # Before the next prompt is read, so that only one can be too long.
        fit_max_tokens(texts, model, len(token_ids), None, None, must_fit)
    return token_ids


def _check_may_fit(texts: TextService, model: ServedModel, text: str, param: str) -> None:
    fewest = model.tokenizer.fewest_tokens(text)
    if fewest >= texts.context_len(model):
        raise ContextOverflow(
            f"{_limit(texts, model)} However, your prompt of {len(text)} characters has at least {fewest} tokens. "
            "Shorten it.",
            param,
        )


class PromptTotal:
    """Counts the tokens of a request's prompts while they are read, so that no more are kept than may be computed.

    Args:
        param: The field of the prompts, for the error message.
    """

    def __init__(self, param: str) -> None:
        self._param = param
        self._num_tokens = 0

    def add(self, prompt: Prompt) -> Prompt:
        """Counts a prompt, which has been truncated if it will be, and returns it. Raises InvalidRequest."""
        self._num_tokens += len(prompt.token_ids)
        if self._num_tokens > MAX_PROMPT_TOKENS:
            raise InvalidRequest(
                f"`{self._param}` has more than {MAX_PROMPT_TOKENS} tokens in total, which is the limit of one "
                "request. Send fewer or shorter prompts.",
                self._param,
            )
        return prompt


def listed_prompts(given: object, param: str) -> list[object]:
    """Returns each prompt as it was given, from a string, token IDs, or a list of either. Raises InvalidRequest."""
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise InvalidRequest(
            f"`{param}` must be a string, a list of strings, a list of token ids or a list of such lists.", param
        )
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(
            f"`{param}` has {len(given)} prompts; at most {MAX_PROMPTS} are allowed in one request.", param
        )
    return given


async def read_prompt(
    texts: TextService,
    model: ServedModel,
    given: object,
    *,
    add_special_tokens: bool,
    param: str,
    must_fit: bool = True,
) -> Prompt:
    """Reads and checks one prompt. `must_fit` is false if the prompt will be truncated. Raises InvalidRequest."""
    if isinstance(given, str):
        string(given, param, MAX_TEXT_CHARS)
        named = param if must_fit else None
        prompt = Prompt(await encode(texts, model, given, add_special_tokens=add_special_tokens, must_fit=named), given)
    elif isinstance(given, list) and given and isinstance(given[0], int):
        prompt = Prompt(_read_ids(texts, model, given, param, must_fit=must_fit), None)
    else:
        raise _mixed_kinds(param)
    if not prompt.token_ids:
        raise InvalidRequest(f"`{param}` is empty: a model needs at least one token to begin with.", param)
    return prompt


def _read_ids(texts: TextService, model: ServedModel, given: list[Any], param: str, *, must_fit: bool) -> list[int]:
    """Checks a prompt of token IDs. A prompt that cannot fit is rejected before its IDs are checked."""
    if must_fit and len(given) >= texts.context_len(model):
        fit_max_tokens(texts, model, len(given), None, None, param)
    if len(given) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"`{param}` has {len(given)} token ids; at most {MAX_TOKEN_IDS} are allowed.", param)
    if set(map(type, given)) != {int}:
        raise _mixed_kinds(param)
    return checked_ids(texts, model, given, param)


def _mixed_kinds(param: str) -> InvalidRequest:
    return InvalidRequest(f"`{param}` mixes strings and token ids, or holds a value that is neither.", param)


def checked_ids(texts: TextService, model: ServedModel, given: list[int], param: str) -> list[int]:
    """Returns the token IDs. Raises InvalidRequest with an ID that the model does not have."""
    vocab_size = texts.vocab_size(model)
    for token_id in (min(given, default=0), max(given, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"`{param}` has the token id {shown_number(token_id)}; this model's vocabulary has ids 0 to "
                f"{vocab_size - 1}.",
                param,
            )
    return given


async def render_chat(
    state: AppState,
    request: Request,
    model: ServedModel,
    body: ChatRequest | TokenizeRequest,
    tools: list[dict[str, Any]] | None,
) -> str:
    """Renders the body's messages and `tools` by the adapter's chat template if it has one, else by the server's."""
    given = body.messages
    assert given is not None
    generate, go_on = body.add_generation_prompt, bool(body.continue_final_message)
    if go_on and generate:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` cannot both be true; set one of them to false.",
            "continue_final_message",
        )
    generates = not go_on if generate is None else generate
    arguments = template_arguments(state.texts, model, body)
    if model.language.template is not None:
        return await state.texts.templates.render(
            model.language.template,
            await run_by_size(state.long_work, request, lambda: read_messages(given)),
            group=model.turn_group,
            tools=tools,
            add_generation_prompt=generates,
            continue_final_message=go_on,
            template_kwargs=arguments,
        )
    return await run_by_size(
        state.long_work,
        request,
        lambda: state.texts.tokenizer.render_chat(
            read_messages(given),
            tools=tools,
            add_generation_prompt=generates,
            continue_final_message=go_on,
            chat_template=state.texts.chat_template,
            template_kwargs=arguments,
        ),
    )


def truncate(
    texts: TextService, model: ServedModel, prompt: Prompt, keep: int | None, max_tokens: int | None
) -> Prompt:
    """Keeps the last `keep` tokens, as vLLM's truncate_prompt_tokens. -1 keeps as many as leave room for the answer."""
    if keep is None:
        return prompt
    if keep == -1:
        keep = texts.context_len(model) - max(1, max_tokens or 1)
    if keep < 1:
        raise InvalidRequest(f"truncate_prompt_tokens={keep} is out of range; give -1 or at least 1.", TRUNCATE)
    return prompt if len(prompt.token_ids) <= keep else Prompt(prompt.token_ids[-keep:], None)


TRUNCATE = "truncate_prompt_tokens"


def fit_max_tokens(
    texts: TextService, model: ServedModel, num_prompt: int, asked: int | None, default: int | None, param: str
) -> int:
    """Returns the number of tokens that the answer may have. Raises ContextOverflow.

    This is `asked`, or else `default` if there is room for it, or else all the room in the context.
    """
    room = texts.context_len(model) - num_prompt
    if room < 1:
        raise ContextOverflow(
            f"{_limit(texts, model)} However, your prompt has {num_prompt} tokens, which leaves no room for an answer. "
            "Shorten the prompt.",
            param,
        )
    if asked is None:
        return room if default is None else min(room, default)
    if asked > room:
        raise ContextOverflow(
            f"{_limit(texts, model)} However, you requested {num_prompt + asked} tokens ({num_prompt} in the prompt, "
            f"{asked} for the answer). Shorten the prompt or lower max_tokens to {room}.",
            param,
        )
    return asked


def _limit(texts: TextService, model: ServedModel) -> str:
    served, own = texts.context_len(model), texts.max_model_len(model)
    if served < own:
        return f"This server's KV cache holds {served} tokens (model context: {own})."
    return f"This model's maximum context length is {served} tokens."
