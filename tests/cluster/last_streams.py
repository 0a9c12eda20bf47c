"""Streams that a server must finish although it is told to end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

NUM_STREAMS, NUM_TOKENS = 4, 200


@contextmanager
def streaming_to_the_end(url: str, model: str) -> Iterator[None]:
    """Has the server answer some streams while the caller ends it, and checks that none was cut.

    The streams have begun when the caller gets the control.
    """
    begun = threading.Barrier(NUM_STREAMS + 1)

    def stream() -> list[Any]:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = next(lines)
            begun.wait()
            return [first, *lines]

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream) for _ in range(NUM_STREAMS)]
        begun.wait()
        yield
        for one in streams:
            *chunks, last = one.result()
            assert last == "data: [DONE]", last
            ends = [json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks]
            assert [choice["finish_reason"] for choices in ends for choice in choices][-1] == "length"
