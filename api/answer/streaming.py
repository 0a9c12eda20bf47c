"""Converts the deltas of samples to a stream of events, with one body per engine output.

The endpoints define their chunks (completions.py and chat.py). Constant parts of a stream are encoded once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.access.long_work import run_by_count
from lorafleet.api.answer.envelope import Envelope
from lorafleet.api.answer.generation import Sample, fallback_of, merged, usage_of
from lorafleet.api.answer.responses import DONE, EventStream, encode_json, event
from lorafleet.api.request.request_bodies import GenerationRequest
from lorafleet.api.text.output import Delta
from lorafleet.protocol.admin_verbs import DIGEST_HEADER, VERSION_HEADER

FALLBACK_HEADER = "x-lorafleet-fallback"

_MARK = "\x00text\x00"


class ChunkWriter(Protocol):
    """Writes the chunks of one choice."""

    def write(self, delta: Delta) -> bytes:
        """Returns whole events, or b"" if the delta has nothing to show."""
        ...

    def count_values(self, delta: Delta) -> int:
        """Returns the number of logprobs and token IDs that write() would write now."""
        ...


class TextChunk:
    """A chunk in which only one string changes. `chunk` must have `TextChunk.mark` in place of that string."""

    mark = _MARK

    def __init__(self, chunk: object) -> None:
        # The last mark is the one to replace: earlier ones come from the client, for example in the request's ID.
        before, _, after = encode_json(chunk).rpartition(encode_json(_MARK))
        self._before = b"data: " + before
        self._after = after + b"\n\n"

    def with_text(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after


class StreamUsage:
    """The usage in a stream, which is reported never, in a last chunk, or in every chunk."""

    def __init__(self, body: GenerationRequest, samples: Sequence[Sample]) -> None:
        options = body.stream_options
        self.included = bool(options and options.include_usage)
        self.continuous = bool(self.included and options and options.continuous_usage_stats)
        self._samples = samples

    def field(self, sample: Sample | None = None) -> dict[str, object]:
        """Returns the `usage` entry of a chunk. As in OpenAI's streams, it is null if only the last chunk has usage."""
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
    threads: FairThreads,
    samples: Sequence[Sample],
    envelope: Envelope,
    usage: StreamUsage,
    open_choice: Callable[[Sample], ChunkWriter],
) -> EventStream:
    """Returns the response of completions and chat with stream=true."""
    headers: dict[str, str] = {}  # Filled at the first delta, before they are sent.
    return EventStream(
        choice_events(threads, samples, open_choice, lambda: usage.closing(envelope.chunk(samples[0])), headers),
        headers,
    )


async def choice_events(
    threads: FairThreads,
    samples: Sequence[Sample],
    open_choice: Callable[[Sample], ChunkWriter],
    closing: Callable[[], bytes],
    headers: dict[str, str],
) -> AsyncGenerator[bytes, None]:
    """Yields the events of all samples. A choice is opened at its first delta, when the answering model is known."""
    writers: dict[int, ChunkWriter] = {}
    running = len(samples)
    async with aclosing(merged(samples)) as deltas:
        async for sample, delta in deltas:
            writer = writers.get(sample.index)
            if writer is None:
                writer = writers[sample.index] = open_choice(sample)
                headers.update(answer_headers(samples))
            num_values = writer.count_values(delta)
            if num_values:
                body = await run_by_count(threads, sample.model, num_values, partial(writer.write, delta))
            else:
                body = writer.write(delta)
            if delta.finish_reason is not None:
                running -= 1
                if not running:
                    body += closing()
            if body:
                yield body


def answer_headers(samples: Sequence[Sample]) -> dict[str, str]:
    """Returns the headers that say which model answers, as far as that is known. A stream's headers say which weights
    sampled its first token, those of a whole answer which sampled the last one."""
    headers = {} if fallback_of(samples) is None else {FALLBACK_HEADER: "base"}
    if samples[0].names_weights:
        names = {VERSION_HEADER: samples[0].weights_now["version"], DIGEST_HEADER: samples[0].weights_now["digest"]}
        headers |= {name: str(value) for name, value in names.items() if value is not None}
    return headers
