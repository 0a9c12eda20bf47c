"""Converts a request of /v1/messages to a chat request, whose errors it names as the client's own fields.

Results of tools become messages of the role `tool`, reasoning becomes `reasoning_content`, and consecutive messages of
one role are joined, as Anthropic's servers join them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lorafleet.api.answer.error_responses import in_own_words
from lorafleet.api.anthropic.message_bodies import (
    AnthropicMessage,
    AnthropicTool,
    AnyChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
    NoToolChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
)
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.structured_spec import StructuredOutputs

# Claude Code begins its system prompt with this block, which differs in each request, so no prefix would be cached.
_BILLING = "x-anthropic-billing-header:"
_FIELDS = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens", "response_format": "output_config.format"}
# The names under which templates read whether the model reasons, and how much.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_DEFAULT_EFFORT = "high"
_REASONING = "reasoning_content"

ChatMessage = dict[str, object]


def as_chat(body: CountTokensRequest) -> dict[str, object]:
    """Returns the body of a ConvertedChat. Raises InvalidRequest for combinations that no such request can express."""
    choice, messages = body.tool_choice, _messages(body.messages)
    continues = messages[-1]["role"] == "assistant"
    if continues and (messages[-1].get("tool_calls") or not messages[-1]["content"]):
        raise InvalidRequest(
            "`messages` ends with a message of the assistant that has calls or no text, and only a text can be "
            "continued; add the results of the calls, or a message of the user.",
            "messages",
        )
    one_call = not isinstance(choice, NoToolChoice | None) and choice.disable_parallel_tool_use
    chat: dict[str, object] = {
        "model": body.model,
        "messages": [*_system(body), *messages],
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _choice(body),
        "parallel_tool_calls": False if one_call else None,
        "continue_final_message": continues,
        "chat_template_kwargs": body.chat_template_kwargs,
        "template_wishes": _template_wishes(body),
    }
    if isinstance(body, MessagesRequest):
        _check_budget(body)
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
        chat["thinking_wish"] = body.thinking.budget_tokens if isinstance(body.thinking, ThinkingEnabled) else None
        same = ("temperature", "top_p", "top_k", "lora_weights", "priority", "cache_salt", "request_id")
        chat |= {name: getattr(body, name) for name in same}
    return chat


def output_format(body: CountTokensRequest) -> StructuredOutputs | None:
    config = body.output_config
    if config is None or config.format is None:
        return None
    return structured_spec.json_schema(config.format.schema_, "output_config.format.schema")


def in_anthropics_words(error: InvalidRequest) -> InvalidRequest:
    """Renames the fields in an error of the chat request."""
    field_name, dot, _ = (error.param or "").partition(".")
    if field_name in ("messages", "tools") and dot:  # Chat messages are numbered differently.
        return type(error)(error.message.replace(f"`{error.param}`", f"`{field_name}`"), field_name)
    return in_own_words(error, _FIELDS)


def _check_budget(body: MessagesRequest) -> None:
    thinking = body.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= body.max_tokens:
        raise InvalidRequest(
            f"`thinking.budget_tokens` is {thinking.budget_tokens}; it must be less than `max_tokens`, which is "
            f"{body.max_tokens}.",
            "thinking.budget_tokens",
        )


def _system(body: CountTokensRequest) -> list[ChatMessage]:
    given = body.system
    texts = [given] if isinstance(given, str) else [block.text for block in given or ()]
    texts = [text for text in texts if text and not text.startswith(_BILLING)]
    return [{"role": "system", "content": _content(texts)}] if texts else []


def _messages(given: list[AnthropicMessage]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for i, message in enumerate(given):
        where = f"messages.{i}.content"
        blocks: list[Block] = (
            [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        )
        if message.role == "assistant":
            _add_answer(messages, blocks, where)
        else:
            _add_turn(messages, message.role, blocks, where)
    for made in messages:
        reasoning = made.get(_REASONING)
        if isinstance(reasoning, list):
            made[_REASONING] = "\n\n".join(reasoning)
    return messages


def _add_turn(messages: list[ChatMessage], role: str, blocks: list[Block], where: str) -> None:
    """Adds a message of the user or system. Texts between results of tools become messages in their order."""
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock) and role == "user":
            _add_texts(messages, role, texts)
            texts = []
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        else:
            raise _misplaced(block, role, f"{where}.{i}")
    _add_texts(messages, role, texts)


def _add_texts(messages: list[ChatMessage], role: str, texts: list[str]) -> None:
    if not texts:
        return
    last = messages[-1] if messages and messages[-1]["role"] == role else None
    if last is None:
        messages.append({"role": role, "content": _content(texts)})
    else:
        before = last["content"]
        parts = last["content"] = before if isinstance(before, list) else [_part(str(before))]
        parts.extend(map(_part, texts))


def _add_answer(messages: list[ChatMessage], blocks: list[Block], where: str) -> None:
    """Adds a message of the assistant, or extends the last one. Its texts of reasoning are joined at the end, once."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    last, texts, calls, reasoning = messages[-1], list[object](), list[object](), list[str]()
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts += [_part(block.text)] if block.text else []
        elif isinstance(block, ToolUseBlock):
            calls.append(_call(block))
        elif isinstance(block, ThinkingBlock):
            reasoning += [block.thinking] if block.thinking else []  # Clients may have asked to omit it.
        else:
            raise _misplaced(block, "assistant", f"{where}.{i}")
    _extend(last, "content", texts)
    _extend(last, "tool_calls", calls)
    if reasoning:
        _extend(last, _REASONING, reasoning)


def _extend(message: ChatMessage, name: str, entries: Sequence[object]) -> None:
    before = message.get(name)
    joined: list[object] = before if isinstance(before, list) else []
    joined += entries
    message[name] = joined or None


def _misplaced(block: Block, role: str, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"`{where}` is a block of type {block.type!r}, which no message of the {role} can have.", f"{where}.type"
    )


def _call(block: ToolUseBlock) -> ChatMessage:
    function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock) -> object:
    given = block.content
    texts = [given] if isinstance(given, str) else [part.text for part in given or ()]
    if block.is_error:  # Chat templates have no other place for it.
        texts = [f"Error: {texts[0]}" if texts else "Error", *texts[1:]]
    return _content(texts)


def _content(texts: list[str]) -> object:
    return texts[0] if len(texts) == 1 else [_part(text) for text in texts] if texts else ""


def _part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _tool(tool: AnthropicTool) -> ChatMessage:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(body: CountTokensRequest) -> object:
    choice = body.tool_choice
    if choice is None or isinstance(choice, NoToolChoice):
        return None if choice is None else "none"
    if isinstance(choice, AnyChoice):
        return "required" if choice.type == "any" else "auto"
    return {"type": "function", "function": {"name": choice.name}}


def _template_wishes(body: CountTokensRequest) -> dict[str, object]:
    arguments: dict[str, object] = {}
    if body.thinking is not None:
        arguments |= dict.fromkeys(_SWITCHES, not isinstance(body.thinking, ThinkingDisabled))
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        arguments[_EFFORT] = _EFFORTS[effort]
    return arguments


def check_effort(body: CountTokensRequest, template: str) -> None:
    """Checks that the model's template reads the requested effort. The default effort asks for nothing."""
    effort = None if body.output_config is None else body.output_config.effort
    if effort in (None, _DEFAULT_EFFORT) or _EFFORT in template:
        return
    raise InvalidRequest(
        f"`output_config.effort` is {effort!r}, but this model's chat template does not read an effort; leave it out "
        f"or set it to {_DEFAULT_EFFORT!r}.",
        "output_config.effort",
    )
