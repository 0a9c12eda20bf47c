"""Buffers the engine's outputs for one sequence until the front takes them.

A front that is behind takes the outputs of several steps at once. They are joined as they arrive, so its work per
sequence does not grow with the number of steps that it is behind. They are joined to pieces of bounded size, since a
piece is handled in one turn of the event loop. What waits for a slow client is bounded by unread_outputs.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from lorafleet.protocol.errors import ClientTooSlow, LorafleetError, from_wire
from lorafleet.protocol.messages import EngineRequest, TokenOutput
from lorafleet.protocol.transport.unread_outputs import TOKEN_BYTES, UnreadShare, bytes_of

PIECE_BYTES = 64 << 10  # Outputs are joined up to this size: 1,800 tokens, or 40 with the 20 best tokens of each.


class _Piece:
    """Outputs that were joined, and their bytes."""

    __slots__ = ("num_bytes", "num_counted", "output")

    def __init__(self, output: TokenOutput, num_bytes: int) -> None:
        self.output = output
        self.num_bytes = num_bytes
        self.num_counted = 0  # Bytes that were counted as unread.


class OutputStream:
    """The outputs of one sequence, for one consumer in the same event loop.

    Args:
        unread: Bounds the outputs that wait while the consumer is not in get(), because its client is slow.
        abort: Called once if they exceed the bound. get() then raises ClientTooSlow after what was kept.
    """

    __slots__ = ("_abort", "_failure", "_is_awaited", "_loop", "_unread", "_waiter", "_waiting")

    def __init__(self, unread: UnreadShare, abort: Callable[[], None]) -> None:
        self._waiting: deque[_Piece] = deque()
        self._failure: LorafleetError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None  # The future that the consumer awaits, if it waits.
        self._is_awaited = False  # Whether the consumer is in get(): it waits, or the event loop is about to resume it.
        self._unread = unread
        self._abort = abort

    @property
    def has_failed(self) -> bool:
        """Whether the sequence or the engine has failed, so that no more output will arrive."""
        return self._failure is not None

    def put(self, output: TokenOutput) -> None:
        if output.error is not None:
            self.fail(from_wire(output.error))
            return
        if self._failure is not None:
            return  # The sequence was aborted, and the engine had not read of it yet.
        num_bytes = bytes_of(output)
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.num_bytes + num_bytes > PIECE_BYTES:
            self._waiting.append(_Piece(output, num_bytes))
        else:
            join(last.output, output)
            last.num_bytes += num_bytes
        self._wake_or_count(num_bytes)

    def put_token(self, request_id: str, token: int) -> None:
        """Does what put() does with an output that has this token and nothing else."""
        if self._failure is not None:
            return
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.num_bytes + TOKEN_BYTES > PIECE_BYTES:
            self._waiting.append(_Piece(TokenOutput(request_id=request_id, token_ids=[token]), TOKEN_BYTES))
        else:
            last.output.token_ids.append(token)
            last.num_bytes += TOKEN_BYTES
        self._wake_or_count(TOKEN_BYTES)

    def fail(self, error: LorafleetError) -> None:
        """Makes get() raise this error once every earlier output has been taken."""
        self._failure = self._failure or error
        self._wake()

    async def get(self) -> TokenOutput:
        """Waits for the next output. Raises the error that ended the sequence."""
        if not self._waiting and self._failure is None:
            self._waiter = self._loop.create_future()
            self._is_awaited = True
            try:
                await self._waiter
            finally:
                self._is_awaited = False
        if not self._waiting:
            assert self._failure is not None, "woken without an output or an error"
            raise self._failure
        return self._take()

    def discard(self) -> None:
        """Drops what waits, because the consumer has left."""
        while self._waiting:
            self._take()

    def _take(self) -> TokenOutput:
        piece = self._waiting.popleft()
        if piece.num_counted:
            self._unread.remove(piece.num_counted)
        return piece.output

    def _wake_or_count(self, num_bytes: int) -> None:
        """Wakes the consumer if it is in get(), and otherwise counts the bytes of the last piece as unread."""
        if self._is_awaited:
            self._wake()
            return
        self._waiting[-1].num_counted += num_bytes
        self._unread.add(num_bytes)
        try:
            self._unread.check()
        except ClientTooSlow as error:
            self._failure = error
            self._abort()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # It is done if the consumer was canceled.
            waiter.set_result(None)


class SequenceOutputs:
    """Iterates over the outputs of one sequence, up to the one with a finish_reason.

    The request is sent when the first output is awaited. Closing the iterator before the last output aborts the
    sequence within a step. It raises the LorafleetError with which the engine rejected the request, or EngineDead.

    Args:
        start: Sends the request.
        end: Ends the request, and gets the number of tokens of its prompt and answer, and whether to abort it.
    """

    __slots__ = ("_end", "_is_over", "_num_tokens", "_request", "_start", "_stream")

    def __init__(
        self,
        request: EngineRequest,
        start: Callable[[EngineRequest], OutputStream],
        end: Callable[[EngineRequest, int, bool], None],
    ) -> None:
        self._request = request
        self._start = start
        self._end = end
        self._stream: OutputStream | None = None
        self._num_tokens = len(request.prompt_token_ids)
        self._is_over = False

    def __aiter__(self) -> SequenceOutputs:
        return self

    async def __anext__(self) -> TokenOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._stream is None:
                self._stream = self._start(self._request)
            output = await self._stream.get()
        except BaseException:
            self._close()
            raise
        self._num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._close(finished=True)
        return output

    async def aclose(self) -> None:
        self._close()

    def _close(self, *, finished: bool = False) -> None:
        stream, self._stream = self._stream, None
        self._is_over = True
        if stream is not None:
            stream.discard()
            self._end(self._request, self._num_tokens, not finished and not stream.has_failed)


def join(first: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Adds a later output of the same sequence to the first, and returns the first."""
    first.token_ids.extend(later.token_ids)
    if first.logprobs is None:
        first.logprobs = later.logprobs
    elif later.logprobs is not None:
        first.logprobs.extend(later.logprobs)
    if first.prompt_logprobs is None:
        first.prompt_logprobs = later.prompt_logprobs
    first.embedding = first.embedding or later.embedding
    first.routed_experts += later.routed_experts
    first.num_cached_tokens = first.num_cached_tokens or later.num_cached_tokens
    first.finish_reason, first.stop_token_id = later.finish_reason, later.stop_token_id
    first.fallback_reason = first.fallback_reason or later.fallback_reason
    first.queue_s = first.queue_s or later.queue_s
    first.tier, first.lora_rank = first.tier or later.tier, first.lora_rank or later.lora_rank
    first.times = later.times or first.times
    if later.drafts is not None:
        first.drafts = later.drafts if first.drafts is None else first.drafts + later.drafts
    if later.switches:
        first.switches = [*first.switches, *later.switches]
    return first
