"""Makes a stream of events out of samples' deltas, one body per engine output.

What a chunk looks like is the endpoint's: completions.py and chat.py. What is constant in a stream is encoded once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.answer.envelope import Envelope
from lorafleet.api.answer.generation import Sample, fallback_of, merged, usage_of
from lorafleet.api.answer.responses import DONE, EventStream, encode_json, event
from lorafleet.api.front import Front
from lorafleet.api.request.request_bodies import GenerationRequest
from lorafleet.api.text.output import Delta

FALLBACK_HEADER = "x-lorafleet-fallback"

_MARK = "\x00text\x00"


class ChunkWriter(Protocol):
    """Of one choice."""

    def write(self, delta: Delta) -> bytes:
        """Whole events, or nothing where the delta has nothing to show."""
        ...

    def count_values(self, delta: Delta) -> int:
        """Number of logprobs and token ids that write() would write now."""
        ...


class TextChunk:
    """A chunk in which only one string changes. Give it the chunk made with `TextChunk.mark` in that string's place."""

    mark = _MARK

    def __init__(self, chunk: object) -> None:
        # The last mark is ours: what comes before the choices, such as the request's id, is the client's.
        before, _, after = encode_json(chunk).rpartition(encode_json(_MARK))
        self._before = b"data: " + before
        self._after = after + b"\n\n"

    def with_text(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after


class StreamUsage:
    """What a stream says of its usage: nothing, a last chunk, or every chunk."""

    def __init__(self, body: GenerationRequest, samples: Sequence[Sample]) -> None:
        options = body.stream_options
        self.included = bool(options and options.include_usage)
        self.continuous = bool(self.included and options and options.continuous_usage_stats)
        self._samples = samples

    def field(self, sample: Sample | None = None) -> dict[str, object]:
        """The `usage` entry of a chunk. OpenAI's chunks have it as null where the last one has it in full."""
        if not self.included:
            return {}
        if sample is None:
            return {"usage": None}
        return {"usage": usage_of([sample])}

    def closing(self, envelope: dict[str, object]) -> bytes:
        if not self.included:
            return DONE
        return event({**envelope, "choices": [], "usage": usage_of(self._samples)}) + DONE


def event_stream(
    front: Front,
    samples: Sequence[Sample],
    envelope: Envelope,
    usage: StreamUsage,
    open_choice: Callable[[Sample], ChunkWriter],
) -> EventStream:
    """The answer of completions and chat with stream=true."""
    headers: dict[str, str] = {}  # filled at the first delta, before they are sent
    return EventStream(
        _events(front, samples, open_choice, lambda: usage.closing(envelope.chunk(samples[0])), headers), headers
    )


async def _events(
    front: Front,
    samples: Sequence[Sample],
    open_choice: Callable[[Sample], ChunkWriter],
    closing: Callable[[], bytes],
    headers: dict[str, str],
) -> AsyncGenerator[bytes, None]:
    """A choice is opened at its sample's first delta, when it is known which model answers."""
    writers: dict[int, ChunkWriter] = {}
    running = len(samples)
    async with aclosing(merged(samples)) as deltas:
        async for sample, delta in deltas:
            writer = writers.get(sample.index)
            if writer is None:
                writer = writers[sample.index] = open_choice(sample)
                headers.update(fallback_headers(samples))
            body = await run_by_count(front, sample.model, writer.count_values(delta), partial(writer.write, delta))
            if delta.finish_reason is not None:
                running -= 1
                if not running:
                    body += closing()
            if body:
                yield body


def fallback_headers(samples: Sequence[Sample]) -> dict[str, str]:
    return {} if fallback_of(samples) is None else {FALLBACK_HEADER: "base"}
