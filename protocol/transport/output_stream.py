"""Buffers the engine's outputs for one sequence until the front takes them.

A front that is behind takes the outputs of several steps at once. They are joined as they arrive, so its work per
sequence does not grow with the number of steps that it is behind.
"""

from __future__ import annotations

import asyncio

from lorafleet.protocol.errors import LorafleetError, from_wire
from lorafleet.protocol.messages import TokenOutput


class OutputStream:
    """The outputs of one sequence, for one consumer in the same event loop."""

    def __init__(self) -> None:
        self._waiting: TokenOutput | None = None
        self._failure: LorafleetError | None = None
        self._came = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        """Whether the sequence or the engine has failed, so that no more output will arrive."""
        return self._failure is not None

    def put(self, output: TokenOutput) -> None:
        if output.error is not None:
            self.fail(from_wire(output.error))
            return
        self._waiting = output if self._waiting is None else join(self._waiting, output)
        self._came.set()

    def fail(self, error: LorafleetError) -> None:
        """Makes get() raise this error once every earlier output has been taken."""
        self._failure = self._failure or error
        self._came.set()

    async def get(self) -> TokenOutput:
        """Waits for the next output. Raises the error that ended the sequence."""
        await self._came.wait()
        output, self._waiting = self._waiting, None
        if output is None:
            assert self._failure is not None, "an event without an output or an error"
            raise self._failure
        if self._failure is None:
            self._came.clear()
        return output


def join(first: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Adds a later output of the same sequence to the first, and returns the first."""
    first.token_ids.extend(later.token_ids)
    if later.logprobs is not None:
        first.logprobs = [*(first.logprobs or ()), *later.logprobs]
    if first.prompt_logprobs is None:
        first.prompt_logprobs = later.prompt_logprobs
    first.embedding = first.embedding or later.embedding
    first.num_cached_tokens = first.num_cached_tokens or later.num_cached_tokens
    first.finish_reason, first.stop_token_id = later.finish_reason, later.stop_token_id
    first.fallback_reason = first.fallback_reason or later.fallback_reason
    first.queue_s = first.queue_s or later.queue_s
    first.tier, first.lora_rank = first.tier or later.tier, first.lora_rank or later.lora_rank
    first.times = later.times or first.times
    return first
