"""Reads the answer of a started chat as text, reasoning and calls, for APIs whose answers are lists of items."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from lorafleet.api.routes.chat import StartedChat
from lorafleet.api.text.output import Delta
from lorafleet.api.tool_calls.parser import Event, Text


class ReadDelta(NamedTuple):
    events: list[Event]
    delta: Delta
    num_reasoning_tokens: int  # Tokens of the delta that are reasoning.


async def answer_events(started: StartedChat, *, eager: bool) -> AsyncGenerator[ReadDelta, None]:
    """Yields each delta of the first sample, with the events that it completes.

    If not `eager`, all events come with the last delta, so that a call is only one if the whole of it is valid.
    """
    [sample, *_] = started.samples
    prompt_end = sample.prompt.ending(sample.model.tokenizer)
    reader = started.tools.reader(prompt_end, eager=eager) if started.tools.parses else None
    events: list[Event] = []
    async with aclosing(sample.run()) as deltas:
        async for _, delta in deltas:
            last, num_reasoning = delta.finish_reason is not None, 0
            if reader is not None:
                events += [*reader.push(delta.text), *(reader.finish() if last else ())]
                num_reasoning = len(delta.token_ids) if reader.is_reasoning else 0
            elif delta.text:
                events.append(Text(delta.text))
            if eager or last:
                yield ReadDelta(events, delta, num_reasoning)
                events = []
            else:
                yield ReadDelta([], delta, num_reasoning)
