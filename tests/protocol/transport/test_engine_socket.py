"""What a worker and a front do if the other one, or a client behind it, is slow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from lorafleet.protocol.errors import ClientTooSlow
from lorafleet.protocol.messages import ClientBatch, EngineHello, EngineRequest, StepBatch, TokenLogprobs, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.transport.engine_socket import (
    MAX_STEPS_WAITING,
    EngineClient,
    WorkerSocket,
    ipc_address,
)
from lorafleet.protocol.transport.output_stream import SequenceOutputs

WAIT_S = 60


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("s")
    return ipc_address(str(folder))


@pytest.fixture
def worker(address: str) -> Iterator[WorkerSocket]:
    socket = WorkerSocket(address)
    yield socket
    socket.close()


def with_logprobs(token: int) -> TokenOutput:
    entry = TokenLogprobs(token, -0.5, 1, list(range(20)), [-0.5] * 20)
    return TokenOutput(request_id="slow", token_ids=[token], logprobs=[entry])


async def test_a_sequence_that_nobody_takes_is_aborted_while_others_go_on(worker: WorkerSocket, address: str) -> None:
    client = await EngineClient.connect(address, EngineHello(1000, 1 << 20, 1 << 20, [2]))
    requests = [EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams()) for name in ("slow", "q")]
    slow, quick = (client.generate(request, lambda: True) for request in requests)
    first = asyncio.ensure_future(anext(slow))
    num_steps: list[int] = []

    def work() -> None:
        """Generates until it reads of the abort, as an engine would."""
        asked, aborts, step = 0, list[str](), 0
        while asked < 2:
            asked += sum(len(batch.requests) for batch in worker.receive(1000))
        while "slow" not in aborts and step < 100_000:
            worker.send(StepBatch(1, [with_logprobs(step), TokenOutput(request_id="q", token_ids=[step])]))
            aborts += [request_id for batch in worker.receive(0) for request_id in batch.aborts]
            step += 1
        num_steps.append(step)
        worker.send(StepBatch(2, [TokenOutput(request_id="q", finish_reason="length")]))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        async with asyncio.timeout(WAIT_S):
            # The client of the other sequence reads, and nobody takes more than the first output of this one.
            of_quick = [token async for output in quick for token in output.token_ids]
            taken = (await first).token_ids
            with pytest.raises(ClientTooSlow, match="reads this stream more slowly"):
                await _take_all(slow, taken)
    finally:
        thread.join()
        await client.close()
    assert of_quick == list(range(num_steps[0]))
    assert taken == list(range(len(taken)))
    assert 1000 < len(taken) <= num_steps[0] < 100_000


async def _take_all(stream: SequenceOutputs, taken: list[int]) -> None:
    async for output in stream:
        taken += output.token_ids


def test_a_worker_waits_for_a_front_that_does_not_read_and_loses_nothing(worker: WorkerSocket, address: str) -> None:
    num_steps, is_full, was_asked = 4 * MAX_STEPS_WAITING, threading.Event(), threading.Event()
    context = zmq.Context()
    front = context.socket(zmq.DEALER)
    front.setsockopt(zmq.LINGER, 0)
    front.setsockopt(zmq.RCVHWM, MAX_STEPS_WAITING)
    front.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
    front.connect(address)
    front.send(msgspec.msgpack.encode(ClientBatch(1)))

    def is_stopping() -> bool:
        is_full.set()
        return was_asked.is_set()

    def work() -> None:
        while not worker.receive(100):
            pass
        for number in range(num_steps):
            worker.send(StepBatch(number, fatal="x" * 10_000), is_stopping)

    thread = threading.Thread(target=work)
    thread.start()
    assert is_full.wait(WAIT_S)
    read = [msgspec.msgpack.decode(front.recv(), type=StepBatch).acknowledged for _ in range(num_steps)]
    thread.join()
    assert read == list(range(num_steps))
    front.close()
    context.term()


def test_a_worker_that_is_stopped_waits_for_no_front(worker: WorkerSocket, address: str) -> None:
    context = zmq.Context()
    front = context.socket(zmq.DEALER)
    front.setsockopt(zmq.LINGER, 0)
    front.setsockopt(zmq.RCVHWM, 1)
    front.connect(address)
    front.send(msgspec.msgpack.encode(ClientBatch(1)))
    while not worker.receive(100):
        pass
    for number in range(4 * MAX_STEPS_WAITING):
        worker.send(StepBatch(number, fatal="x" * 10_000), lambda: True)
    front.close()
    context.term()
