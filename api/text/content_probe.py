"""Finds out in which form a chat template takes the contents of messages: as one text, or as a list of parts.

It renders short conversations with marks in both forms, and looks for the marks. So it needs no knowledge of how the
template is written. It runs in the process that renders an adapter's template, so it imports nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

# both: The template renders a text and a list with it alike, and joins several parts in its own way.
# part: It takes a list, but shows its first part only.
# hidden: It renders the role's messages, but shows their content in neither form.
# unknown: It raises an error in both forms, as many templates do for roles that they do not serve.
Form = Literal["text", "parts", "both", "part", "hidden", "unknown"]
FORMS: tuple[Form, ...] = ("text", "parts")
Message = dict[str, Any]
Render = Callable[[list[Message], list[Message] | None], str]  # of messages and tools

ROLES = ("user", "system", "developer", "assistant", "tool", "function")
_MARK, _SECOND = "Mark7of4the2Probe", "Second3of8the5Probe"  # Templates may change their case.
_NAME = "probe"
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
_CALL = {"id": "probe4id7", "type": "function", "function": {"name": _NAME, "arguments": {}}}


class TooLong(ValueError):
    """The rendering of a template has more characters than it may have, whatever it renders."""


def find_forms(render: Render) -> dict[str, Form]:
    """Returns the form for each role. `render` may raise any error for messages that the template rejects."""
    forms: dict[str, Form] = {}
    for role in ROLES:
        forms[role] = _form(render, role, forms.get("user", "text"))
    return forms


def in_form(texts: list[str], form: Form) -> str | list[Message]:
    """Returns a content that consists of these texts."""
    if form == "parts" or (form == "both" and len(texts) > 1):
        return [{"type": "text", "text": text} for text in texts or [""]]
    joined = "\n".join(texts)
    return [{"type": "text", "text": joined}] if form == "part" else joined


def _form(render: Render, role: str, users: Form) -> Form:
    is_rendered = False
    for form in FORMS:
        for number, (messages, tools) in enumerate(_conversations(role, in_form([_MARK], form), users)):
            text = _rendered(render, messages, tools)
            if text is not None and _MARK.lower() in text.lower():
                return _form_of_several(render, role, users, number, text, form)
            is_rendered = is_rendered or text is not None
    return "hidden" if is_rendered else "unknown"


def _form_of_several(render: Render, role: str, users: Form, number: int, shown: str, form: Form) -> Form:
    """Returns the form for a role of which the template shows one text in this form.

    Args:
        number: that of the conversation in which it does.
        shown: what it renders there.
    """

    def parts(*texts: str) -> str | None:
        return _rendered(render, *list(_conversations(role, in_form([*texts], "parts"), users))[number])

    if form == "text" and parts(_MARK) != shown:
        return "text"
    two = parts(_MARK, _SECOND)
    shows_all = two is not None and all(mark.lower() in two.lower() for mark in (_MARK, _SECOND))
    if form == "text":
        return "both" if shows_all else "text"
    return "parts" if shows_all else "part"


def _rendered(render: Render, messages: list[Message], tools: list[Message] | None) -> str | None:
    """Returns None if the template rejects the messages."""
    try:
        return render(messages, tools)
    except (MemoryError, RecursionError, TooLong):
        raise
    except Exception:  # A template is a program, and may reject messages by any error.
        return None


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
    for form in FORMS:  # Some templates demand a system message, tools, or an answer before the last question.
        system: Message = {"role": "system", "content": in_form(["Hi"], form)}
        yield [system, *talk], tools
        yield [system, *talk], [_TOOL]
        if role == "user":
            answer: Message = {"role": "assistant", "content": in_form(["Hi"], form)}
            yield [marked, answer, marked], tools
            yield [marked, answer, marked], [_TOOL]
            yield [system, marked, answer, marked], [_TOOL]
    yield talk, [_TOOL]
