"""Finds out in which form a chat template takes the contents of messages: as one text, or as a list of parts.

It renders short conversations with a mark in both forms, and looks for the mark. So it needs no knowledge of how the
template is written. It runs in the process that renders an adapter's template, so it imports nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

# hidden: The template renders the role's messages, but shows their content in neither form.
# unknown: It raises an error in both forms, as many templates do for roles that they do not serve.
Form = Literal["text", "parts", "hidden", "unknown"]
FORMS: tuple[Form, ...] = ("text", "parts")
Message = dict[str, Any]
Render = Callable[[list[Message], list[Message] | None], str]  # of messages and tools

ROLES = ("user", "system", "developer", "assistant", "tool", "function")
_MARK = "Mark7of4the2Probe"  # Templates may change its case.
_NAME = "probe"
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
_CALL = {"id": "probe4id7", "type": "function", "function": {"name": _NAME, "arguments": {}}}


def find_forms(render: Render) -> dict[str, Form]:
    """Returns the form for each role. `render` may raise any error for messages that the template rejects."""
    forms: dict[str, Form] = {}
    for role in ROLES:
        forms[role] = _form(render, role, forms.get("user", "text"))
    return forms


def in_form(texts: list[str], form: Form) -> str | list[Message]:
    """Returns a content that consists of these texts."""
    if form != "parts":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts or [""]]


def _form(render: Render, role: str, users: Form) -> Form:
    is_rendered = False
    for form in FORMS:
        for messages, tools in _conversations(role, in_form([_MARK], form), users):
            try:
                text = render(messages, tools)
            except (MemoryError, RecursionError):
                raise
            except Exception:  # A template is a program, and may reject messages by any error.
                continue
            if _MARK.lower() in text.lower():
                return form
            is_rendered = True
    return "hidden" if is_rendered else "unknown"


def _conversations(
    role: str, content: str | list[Message], users: Form
) -> Iterator[tuple[list[Message], list[Message] | None]]:
    """Yields conversations with a message of the role and this content, and their tools."""
    marked: Message = {"role": role, "content": content}
    user: Message = {"role": "user", "content": in_form(["Hi"], users)}
    talk, tools = [marked, user], None
    match role:
        case "user":
            talk = [marked]
        case "assistant":
            talk = [user, marked, user]
        case "tool":
            calls = {"role": "assistant", "content": in_form([""], users), "tool_calls": [_CALL]}
            talk, tools = [user, calls, marked | {"tool_call_id": _CALL["id"], "name": _NAME}], [_TOOL]
        case "function":
            talk = [user, marked | {"name": _NAME}]
    yield talk, tools
    for form in FORMS:  # Some templates demand a system message.
        yield [{"role": "system", "content": in_form(["Hi"], form)}, *talk], tools
