"""What a consumer gets of a sequence's outputs, be it quick or slow."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from lorafleet.protocol.errors import EngineDead, InvalidRequest, to_wire
from lorafleet.protocol.messages import TokenLogprobs, TokenOutput
from lorafleet.protocol.transport.output_stream import OutputStream


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, [token_id], [-0.5])


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
    stream = OutputStream()
    for output in (FIRST, SECOND, LAST):
        stream.put(msgspec.convert(msgspec.to_builtins(output), TokenOutput))
        assert await stream.get() == output


async def test_outputs_that_wait_are_joined_into_one_that_says_the_same() -> None:
    stream = OutputStream()
    for output in (FIRST, SECOND, LAST):
        stream.put(msgspec.convert(msgspec.to_builtins(output), TokenOutput))
    assert await stream.get() == msgspec.structs.replace(
        FIRST,
        token_ids=[5, 6, 2],
        logprobs=[logprobs_of(5), logprobs_of(6), logprobs_of(2)],
        finish_reason="stop",
        stop_token_id=2,
    )


@pytest.mark.parametrize("refused", [True, False])
async def test_an_error_comes_after_the_outputs_before_it(refused: bool) -> None:
    stream = OutputStream()
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
    stream = OutputStream()
    stream.put(msgspec.convert(msgspec.to_builtins(SECOND), TokenOutput))
    await stream.get()
    waiting = asyncio.ensure_future(stream.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(msgspec.convert(msgspec.to_builtins(LAST), TokenOutput))
    assert (await waiting).finish_reason == "stop"
