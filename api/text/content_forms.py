"""Gives the contents of messages the form that a chat template takes, as content_probe.py has found it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lorafleet.api.text.content_probe import Form, in_form
from lorafleet.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms of one template. Roles that are left out have one text."""

    by_role: Mapping[str, Form] = field(default_factory=dict)

    def shaped(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Returns the messages with their contents in the template's form. The contents are texts or lists of texts.

        Raises InvalidRequest if the model would not see what the user says.
        """
        return [{**message, "content": self._shaped(message, i)} for i, message in enumerate(messages)]

    def _shaped(self, message: Mapping[str, object], index: int) -> object:
        role, content = str(message["role"]), message.get("content")
        form = self.by_role.get(role, "text")
        if role == "user" and form == "hidden":
            raise InvalidRequest(
                "The chat template shows the text of a user's message neither as a string nor as a list of parts of "
                "the type 'text', so that the model would not see it. Correct the template, or use /v1/completions.",
                f"messages.{index}.content",
            )
        texts = [content] if isinstance(content, str) else content
        return in_form(texts, form) if isinstance(texts, list) else content


TEXTS = ContentForms()
