"""Builds the answers of /v1/messages: the content blocks as they grow, and Anthropic's events about them.

The order of events is message_start, ping, then for each block content_block_start, its deltas and content_block_stop,
and at the end message_delta and message_stop.
"""

from __future__ import annotations

import json
from typing import Any

from lorafleet.api.answer.responses import encode_json
from lorafleet.api.tool_calls.parser import CallArguments, CallStart, Event, Reasoning, Text

SIGNATURE = "unsigned"  # Clients require a signature of reasoning and return it; this server does not check it.

MessageBlock = dict[str, Any]


def named_event(kind: str, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode_json({"type": kind, **fields}) + b"\n\n"


class MessageBlocks:
    """The content of one message. Methods return the events of what they add.

    Args:
        shows_reasoning: Whether reasoning becomes blocks at all.
        omits_reasoning: Whether these blocks are empty.
    """

    def __init__(self, *, shows_reasoning: bool, omits_reasoning: bool) -> None:
        self.blocks: list[MessageBlock] = []
        self.has_called = False
        self._shows_reasoning = shows_reasoning
        self._omits_reasoning = omits_reasoning
        self._open: MessageBlock | None = None  # The last block, while it grows.
        self._blanks = ""  # Blanks before a text, which are no block of their own.
        self._arguments = ""  # The arguments of the open call so far.

    def add(self, event: Event) -> bytes:
        if isinstance(event, Text):
            return self._add_text(event.text)
        if isinstance(event, Reasoning):
            return self._add_reasoning(event.text) if self._shows_reasoning else b""
        if isinstance(event, CallStart):
            self.has_called = True
            self._blanks = ""
            return self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        return self._add_arguments(event)

    def close(self) -> bytes:
        """Closes the open block."""
        block, self._open = self._open, None
        if block is None:
            return b""
        events = b""
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        elif block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
            self._arguments = ""
        return events + named_event("content_block_stop", index=len(self.blocks) - 1)

    def _add_text(self, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != "text":
            self._blanks += text
            if not self._blanks.strip():
                return b""
            text, self._blanks = self._blanks, ""
            events = self._begin({"type": "text", "text": ""})
        assert self._open is not None
        self._open["text"] += text
        return events + self._delta({"type": "text_delta", "text": text})

    def _add_reasoning(self, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != "thinking":
            events = self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if self._omits_reasoning:
            return events
        assert self._open is not None
        self._open["thinking"] += text
        return events + self._delta({"type": "thinking_delta", "thinking": text})

    def _add_arguments(self, event: CallArguments) -> bytes:
        self._arguments += event.text
        return self._delta({"type": "input_json_delta", "partial_json": event.text})

    def _begin(self, block: MessageBlock) -> bytes:
        events = self.close()
        self.blocks.append(block)
        self._open = block
        return events + named_event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return named_event("content_block_delta", index=len(self.blocks) - 1, delta=delta)


def _input(arguments: str) -> dict[str, object]:
    """Returns the arguments as an object. Those that max_tokens has cut off are wrapped, as in Anthropic."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"INVALID_JSON": arguments}
