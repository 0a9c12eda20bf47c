"""Tests which outputs of a sequence reach a consumer that reads quickly, and one that reads slowly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from lorafleet.protocol.errors import ClientTooSlow, EngineDead, InvalidRequest, to_wire
from lorafleet.protocol.messages import DraftCounts, EngineRequest, TokenLogprobs, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.transport.output_stream import PIECE_BYTES, OutputStream, SequenceOutputs
from lorafleet.protocol.transport.unread_outputs import TOKEN_BYTES, UnreadOutputs, bytes_of


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, [token_id], [-0.5])


def new_stream(
    unread: UnreadOutputs | None = None, aborts: list[str] | None = None, tenant: str = "", *, stalled: bool = True
) -> OutputStream:
    """Returns a stream that adds its tenant to `aborts` when it aborts its sequence."""
    share = (unread or UnreadOutputs()).share(tenant, lambda: stalled)
    return OutputStream(share, lambda: aborts.append(tenant) if aborts is not None else None)


FIRST = TokenOutput(
    request_id="r",
    token_ids=[5],
    logprobs=[logprobs_of(5)],
    prompt_logprobs=[None, logprobs_of(3)],
    num_cached_tokens=16,
    queue_s=0.25,
    tier="gpu",
    lora_rank=8,
)
SECOND = TokenOutput(request_id="r", token_ids=[6], logprobs=[logprobs_of(6)])
LAST = TokenOutput(request_id="r", token_ids=[2], logprobs=[logprobs_of(2)], finish_reason="stop", stop_token_id=2)


async def test_a_consumer_that_keeps_up_gets_each_output_as_it_came() -> None:
    stream = new_stream()
    for output in (FIRST, SECOND, LAST):
        stream.put(msgspec.convert(msgspec.to_builtins(output), TokenOutput))
        assert await stream.get() == output


async def test_outputs_that_wait_are_joined_into_one_that_says_the_same() -> None:
    stream = new_stream()
    for output in (FIRST, SECOND, LAST):
        stream.put(msgspec.convert(msgspec.to_builtins(output), TokenOutput))
    assert await stream.get() == msgspec.structs.replace(
        FIRST,
        token_ids=[5, 6, 2],
        logprobs=[logprobs_of(5), logprobs_of(6), logprobs_of(2)],
        finish_reason="stop",
        stop_token_id=2,
    )


async def test_single_tokens_reach_a_consumer_as_the_outputs_that_they_stand_for() -> None:
    stream = new_stream()
    stream.put_token("r", 5)
    assert await stream.get() == TokenOutput(request_id="r", token_ids=[5])
    stream.put(TokenOutput(request_id="r", token_ids=[6], num_cached_tokens=16))
    stream.put_token("r", 7)
    stream.put_token("r", 8)
    stream.put(TokenOutput(request_id="r", token_ids=[2], finish_reason="length"))
    joined = TokenOutput(request_id="r", token_ids=[6, 7, 8, 2], num_cached_tokens=16, finish_reason="length")
    assert await stream.get() == joined


async def test_a_single_token_wakes_a_consumer_that_waits() -> None:
    stream = new_stream()
    taken = asyncio.ensure_future(stream.get())
    await asyncio.sleep(0)
    stream.put_token("r", 5)
    assert (await taken).token_ids == [5]


async def test_experts_of_outputs_that_wait_follow_each_other() -> None:
    stream = new_stream()
    for token, experts in ((1, b"\1\2"), (2, b"\3"), (3, b"\4")):
        stream.put(TokenOutput(request_id="r", token_ids=[token], routed_experts=experts))
    assert (await stream.get()).routed_experts == b"\1\2\3\4"


async def test_drafts_of_outputs_that_wait_are_added_up() -> None:
    stream = new_stream()
    stream.put(TokenOutput(request_id="r", token_ids=[1]))
    stream.put(TokenOutput(request_id="r", token_ids=[2], drafts=DraftCounts(1, 4, 0)))
    stream.put(TokenOutput(request_id="r", token_ids=[3, 4], drafts=DraftCounts(1, 3, 1)))
    assert (await stream.get()).drafts == DraftCounts(2, 7, 1)


@pytest.mark.parametrize("refused", [True, False])
async def test_an_error_comes_after_the_outputs_before_it(refused: bool) -> None:
    stream = new_stream()
    stream.put(msgspec.convert(msgspec.to_builtins(SECOND), TokenOutput))
    if refused:
        error = to_wire(InvalidRequest("too long", "prompt"))
        stream.put(TokenOutput(request_id="r", finish_reason="error", error=error))
    else:
        stream.fail(EngineDead("gone"))
        stream.fail(EngineDead("gone again"))
    assert stream.has_failed
    assert (await stream.get()).token_ids == [6]
    with pytest.raises(InvalidRequest if refused else EngineDead, match="too long" if refused else "gone$"):
        await stream.get()


async def test_a_consumer_waits_for_the_next_output() -> None:
    stream = new_stream()
    stream.put(msgspec.convert(msgspec.to_builtins(SECOND), TokenOutput))
    await stream.get()
    waiting = asyncio.ensure_future(stream.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(msgspec.convert(msgspec.to_builtins(LAST), TokenOutput))
    assert (await waiting).finish_reason == "stop"


@dataclass
class Connection:
    """Starts a sequence whose outputs the test puts, and records how it ended."""

    streams: list[OutputStream] = field(default_factory=list)
    ended: list[tuple[int, bool]] = field(default_factory=list)  # Number of tokens, and whether it was aborted.
    dead: bool = False

    def outputs(self) -> SequenceOutputs:
        request = EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams())
        return SequenceOutputs(
            request, self._start, lambda _, num_tokens, aborts: self.ended.append((num_tokens, aborts))
        )

    def _start(self, _: EngineRequest) -> OutputStream:
        if self.dead:
            raise EngineDead("gone")
        self.streams.append(new_stream())
        return self.streams[0]


async def test_a_sequence_starts_when_its_first_output_is_awaited_and_ends_with_the_last() -> None:
    connection = Connection()
    outputs = connection.outputs()
    assert not connection.streams
    first = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    for output, got in ((SECOND, first), (LAST, None)):
        connection.streams[0].put(msgspec.convert(msgspec.to_builtins(output), TokenOutput))
        assert await (got or anext(outputs)) == output
    assert connection.ended == [(5, False)]
    assert [output async for output in outputs] == []
    await outputs.aclose()
    assert connection.ended == [(5, False)]


@pytest.mark.parametrize("canceled", [True, False])
async def test_a_sequence_that_is_not_read_to_its_end_is_aborted_once(canceled: bool) -> None:
    connection = Connection()
    outputs = connection.outputs()
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    if canceled:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        connection.streams[0].put(SECOND)  # Comes too late, and disturbs nothing.
    else:
        connection.streams[0].put(SECOND)
        await waiting
    await outputs.aclose()
    assert connection.ended == [(3 if canceled else 4, True)]


async def test_a_sequence_that_failed_is_not_aborted() -> None:
    connection = Connection()
    outputs = connection.outputs()
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    connection.streams[0].fail(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await waiting
    assert connection.ended == [(3, False)]


async def test_a_sequence_that_cannot_start_raises_the_reason_and_has_nothing_to_end() -> None:
    connection = Connection(dead=True)
    outputs = connection.outputs()
    with pytest.raises(EngineDead):
        await anext(outputs)
    assert [output async for output in outputs] == []
    assert connection.ended == []


def wide(token: int) -> TokenOutput:
    """Returns an output with the 20 best tokens."""
    entry = TokenLogprobs(token, -0.5, 1, list(range(20)), [-0.5] * 20)
    return TokenOutput(request_id="r", token_ids=[token], logprobs=[entry])


async def taken_from(stream: OutputStream) -> list[TokenOutput]:
    """Takes what waits, up to the error."""
    taken: list[TokenOutput] = []
    try:
        while True:
            taken.append(await stream.get())
    except ClientTooSlow:
        return taken


async def test_a_sequence_whose_client_does_not_read_is_aborted_and_its_client_gets_what_was_kept_and_the_error() -> (
    None
):
    aborts: list[str] = []
    unread = UnreadOutputs(max_bytes=1 << 30, max_bytes_of_one=1 << 20)
    stream = new_stream(unread, aborts)
    for token in range(2000):
        stream.put(wide(token))
    assert aborts == [""]
    assert 1 << 20 < unread.num_bytes <= (1 << 20) + bytes_of(wide(0))
    stream.put_token("r", 5)  # The worker has sent it before it reads of the abort.
    taken = await taken_from(stream)
    tokens = [token for output in taken for token in output.token_ids]
    assert tokens == list(range(len(tokens)))
    assert len(tokens) * bytes_of(wide(0)) > 1 << 20
    assert max(map(bytes_of, taken)) <= PIECE_BYTES  # So no piece takes the event loop long.
    assert unread.num_bytes == 0


async def test_a_stream_that_is_left_counts_no_longer() -> None:
    unread = UnreadOutputs()
    stream = new_stream(unread)
    for _ in range(100):
        stream.put_token("r", 5)
    assert unread.num_bytes == 100 * TOKEN_BYTES
    stream.discard()
    assert unread.num_bytes == 0


async def test_outputs_that_a_busy_event_loop_has_not_passed_on_yet_are_not_the_client_s_fault() -> None:
    aborts: list[str] = []
    unread = UnreadOutputs(max_bytes=1000, max_bytes_of_one=1000)
    stream = new_stream(unread, aborts)
    taken = asyncio.ensure_future(stream.get())
    await asyncio.sleep(0)
    for token in range(1000):
        stream.put_token("r", token)
    assert (await taken).token_ids == list(range(1000))
    assert not aborts
    assert unread.num_bytes == 0


async def test_a_tenant_s_slow_clients_end_its_own_sequences_alone() -> None:
    aborts: list[str] = []
    unread = UnreadOutputs(max_bytes=2000 * TOKEN_BYTES, max_bytes_of_one=600 * TOKEN_BYTES)
    greedy, quiet = [new_stream(unread, aborts, "greedy") for _ in range(4)], new_stream(unread, aborts, "quiet")
    for _ in range(500):
        for stream in (*greedy, quiet):
            stream.put_token("r", 5)
    assert set(aborts) == {"greedy"}
    assert unread.num_bytes <= 1600 * TOKEN_BYTES  # Half of the bound, a token more, and the quiet tenant's.


async def test_all_tenants_together_have_a_bound_that_hits_those_that_have_most() -> None:
    aborts: list[str] = []
    unread = UnreadOutputs(max_bytes=1000 * TOKEN_BYTES)
    streams = {name: new_stream(unread, aborts, name) for name in ("a", "b", "c", "d")}
    streams["d"].put_token("r", 5)
    for _ in range(400):
        for name in ("a", "b", "c"):
            streams[name].put_token("r", 5)
    streams["d"].put_token("r", 5)
    assert aborts
    assert "d" not in aborts
    assert unread.num_bytes <= 1010 * TOKEN_BYTES


async def test_a_front_that_is_behind_aborts_no_sequence() -> None:
    aborts: list[str] = []
    stream = new_stream(UnreadOutputs(max_bytes_of_one=1000), aborts, stalled=False)
    for token in range(1000):
        stream.put_token("r", token)
    assert not aborts
    assert (await stream.get()).token_ids == list(range(1000))
