"""Builds the answers of /v1/responses: the items as they grow, and the events about them, in OpenAI's order."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from lorafleet.api.answer.responses import encode_json
from lorafleet.api.request.packed_reasoning import packed
from lorafleet.api.tool_calls.parser import CallArguments, CallStart, Event, Reasoning, Text

Item = dict[str, Any]
_CALL_BYTES = 1024  # The item of a call, without its arguments.


class ResponseItems:
    """The output of one response. `items` is the output so far, and methods return the events of what they add.

    If `summarizes`, reasoning takes the place of its summary, which is the form that OpenAI's clients show. If
    `packs_reasoning`, an item of reasoning also has its text in `encrypted_content`, once it is closed.
    """

    def __init__(self, *, summarizes: bool = False, packs_reasoning: bool = False) -> None:
        self._summarizes = summarizes
        self._packs_reasoning = packs_reasoning
        self.items: list[Item] = []
        self.num_bytes = 0  # About those of the texts and logprobs of the items.
        self._number = 0
        self._open: Item | None = None  # The last item, while it grows.
        self._logprobs: list[object] = []  # Logprobs of tokens whose text has not arrived yet.

    def event(self, kind: str, **fields: object) -> bytes:
        body = encode_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def add_logprobs(self, logprobs: Sequence[msgspec.Raw]) -> None:
        """Adds the logprobs of the next text's tokens or, at the end, of tokens without text."""
        self._logprobs += logprobs
        self.num_bytes += sum(map(len, logprobs))

    def add(self, event: Event) -> bytes:
        self.num_bytes += _CALL_BYTES if isinstance(event, CallStart) else len(event.text)
        if isinstance(event, Text):
            return self._add_text(event.text)
        if isinstance(event, Reasoning):
            return self._add_reasoning(event.text)
        if isinstance(event, CallStart):
            return self.close() + self._begin(_custom_call(event) if event.is_custom else _function_call(event))
        return self._add_arguments(event)

    def close(self, status: str = "completed") -> bytes:
        """Closes the open item, which is complete or will not be completed, and returns its last events."""
        item, self._open = self._open, None
        if item is None:
            return b""
        item["status"] = status
        place = self._place(item)
        if item["type"] == "custom_tool_call":
            done = self.event("response.custom_tool_call_input.done", **place, input=item["input"])
        elif item["type"] == "function_call":
            done = self.event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        elif item["type"] == "reasoning":
            done = self._close_reasoning(item)
        else:
            part = item["content"][0]
            part["logprobs"] += self._take_logprobs()
            place["content_index"] = 0
            done = self.event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            done += self.event("response.content_part.done", **place, part=part)
        return done + self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _add_text(self, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != "message":
            events = self.close() + self._begin(_message())
            assert self._open is not None
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            place = self._place(self._open)
            events += self.event("response.content_part.added", **place, content_index=0, part=part)
            self._open["content"] = [part]
        assert self._open is not None
        part, logprobs = self._open["content"][0], self._take_logprobs()
        part["text"] += text
        part["logprobs"] += logprobs
        place = self._place(self._open)
        return events + self.event(
            "response.output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs
        )

    def _add_reasoning(self, text: str) -> bytes:
        events = b""
        name, index = ("summary", "summary_index") if self._summarizes else ("content", "content_index")
        if self._open is None or self._open["type"] != "reasoning":
            events = self.close() + self._begin(_reasoning())
            assert self._open is not None
            self._open[name] = [{"type": "summary_text" if self._summarizes else "reasoning_text", "text": ""}]
            added = "response.reasoning_summary_part.added" if self._summarizes else "response.content_part.added"
            events += self.event(added, **self._place(self._open), **{index: 0}, part=self._open[name][0])
        assert self._open is not None
        self._open[name][0]["text"] += text
        return events + self.event(self._reasoning_event("delta"), **self._place(self._open), **{index: 0}, delta=text)

    def _close_reasoning(self, item: Item) -> bytes:
        name, index = ("summary", "summary_index") if self._summarizes else ("content", "content_index")
        place, part = {**self._place(item), index: 0}, item[name][0]
        if self._packs_reasoning:
            item["encrypted_content"] = packed(part["text"])
        done = "response.reasoning_summary_part.done" if self._summarizes else "response.content_part.done"
        return self.event(self._reasoning_event("done"), **place, text=part["text"]) + self.event(
            done, **place, part=part
        )

    def _reasoning_event(self, kind: str) -> str:
        return f"response.reasoning_{'summary_text' if self._summarizes else 'text'}.{kind}"

    def _take_logprobs(self) -> list[object]:
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _add_arguments(self, event: CallArguments) -> bytes:
        assert self._open is not None
        if event.is_custom:
            self._open["input"] += event.text
            return self.event("response.custom_tool_call_input.delta", **self._place(self._open), delta=event.text)
        self._open["arguments"] += event.text
        return self.event("response.function_call_arguments.delta", **self._place(self._open), delta=event.text)

    def _begin(self, item: Item) -> bytes:
        self.items.append(item)
        self._open = item
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _place(self, item: Item) -> dict[str, object]:
        return {"item_id": item["id"], "output_index": len(self.items) - 1}


def _message() -> Item:
    item_id = "msg_" + uuid.uuid4().hex
    return {"type": "message", "id": item_id, "status": "in_progress", "role": "assistant", "content": []}


def _reasoning() -> Item:
    return {"type": "reasoning", "id": "rs_" + uuid.uuid4().hex, "summary": [], "status": "in_progress"}


def _function_call(start: CallStart) -> Item:
    return {
        "type": "function_call",
        "id": "fc_" + uuid.uuid4().hex,
        "call_id": start.id,
        "name": start.name,
        "arguments": "",
        "status": "in_progress",
    }


def _custom_call(start: CallStart) -> Item:
    return {
        "type": "custom_tool_call",
        "id": "ctc_" + uuid.uuid4().hex,
        "call_id": start.id,
        "name": start.name,
        "input": "",
        "status": "in_progress",
    }
