"""A bad request or message ends that request, or the connection loudly; never the engine, and nothing silently."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import EngineDead, InvalidRequest, LorafleetError
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import AdapterMove, EngineHello, EngineRequest, EngineStats, StepBatch, Vocabulary
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.transport.engine_socket import EngineClient, WorkerSocket, ipc_address
from lorafleet.workers.answer_progress import AnswerProgress
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.worker import GPUWorker


@pytest.fixture(scope="module")
def worker(fleet, tmp_path_factory):
    address = ipc_address(str(tmp_path_factory.mktemp("ipc")))
    made = GPUWorker(EngineConfig(model=str(fleet("llama3").base), kv_cache_tokens=2048), address)
    made.address = address
    yield made
    made.check_health()
    made.shutdown()


@pytest.fixture
async def client(worker) -> AsyncIterator[EngineClient]:
    made = await EngineClient.connect(worker.address, worker.hello())
    yield made
    assert made.dead is None
    await made.close()


def request(name: str, ids: list[int], **fields: Any) -> EngineRequest:
    params = fields.pop("params", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    return EngineRequest(request_id=name, prompt_token_ids=ids, params=params, **fields)


async def tokens_of(client: EngineClient, asked: EngineRequest) -> list[int]:
    return [token async for output in client.generate(asked) for token in output.token_ids]


def params_of_another_type(**fields: Any) -> SamplingParams:
    """Past the checks of the constructor, as an older or broken front might send them."""
    params = SamplingParams(temperature=0, max_tokens=4)
    for name, value in fields.items():
        msgspec.structs.force_setattr(params, name, value)
    return params


BAD_FIELDS: list[dict[str, Any]] = [
    {"vocabulary": Vocabulary(256, [10**30])},
    {"vocabulary": Vocabulary(256, [256]), "params": SamplingParams(min_tokens=2)},
    {"vocabulary": Vocabulary(256, [-1])},
    {"vocabulary": Vocabulary(256, [2**63])},
    {"vocabulary": Vocabulary(10**30, [1])},
    {"prompt_token_ids": [10**30]},
    {"params": SamplingParams(stop_token_ids=[10**30])},
    {"params": SamplingParams(logit_bias={10**30: 1.0})},
    {"params": SamplingParams(logit_bias={-1: 1.0})},
    {"params": SamplingParams(allowed_token_ids=[10**30])},
    {"params": SamplingParams(bad_words_token_ids=[[-1]])},
    {"params": SamplingParams(allowed_token_ids=[5, 6], bad_words_token_ids=[[5], [9, 6]])},
    {"params": SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2)},
    {"params": params_of_another_type(top_k=1.5)},
    {"params": params_of_another_type(seed=2**70)},
    {"params": params_of_another_type(temperature=-1.0)},
    {"params": params_of_another_type(stop=["\ud800"])},
    {"priority": 10**40},
    {"cache_salt": "\udfff"},
    {"lora": LoRARequest("\ud800", 1, "/a", "digest")},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
async def test_a_request_that_cannot_be_carried_or_served_fails_alone(client, prompt, fields):
    asked = request("bad", prompt(5))
    for name, value in fields.items():
        setattr(asked, name, value)
    good, refused, more = await asyncio.gather(
        tokens_of(client, request("good", prompt(6))),
        tokens_of(client, asked),
        tokens_of(client, request("more", prompt(7))),
        return_exceptions=True,
    )
    assert isinstance(refused, InvalidRequest)
    assert len(good) == len(more) == 4
    assert len(await tokens_of(client, request("after", prompt(5)))) == 4


async def test_an_id_that_cannot_be_encoded_fails_alone(client, prompt):
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await tokens_of(client, request("\ud800", prompt(5)))
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await client.load_adapter(LoRARequest("a", 10**30, "/a"))
    assert len(await tokens_of(client, request("after", prompt(5)))) == 4


async def test_an_exception_while_a_call_about_an_adapter_is_taken_in_refuses_that_call(
    client, worker, prompt, monkeypatch
):
    monkeypatch.setattr(worker._engine, "load_adapter", lambda _: 1 // 0)
    with pytest.raises(LorafleetError, match="ZeroDivisionError"):
        await client.load_adapter(LoRARequest("a", 1, "/a"))
    assert len(await tokens_of(client, request("after", prompt(5)))) == 4


async def test_an_exception_while_a_request_is_taken_in_refuses_that_request(client, worker, prompt, monkeypatch):
    add = worker._engine.scheduler.add

    def trip(sequence: Sequence) -> object:
        return 1 // 0 if sequence.request_id == "trips" else add(sequence)

    monkeypatch.setattr(worker._engine.scheduler, "add", trip)
    with pytest.raises(LorafleetError, match="ZeroDivisionError"):
        await tokens_of(client, request("trips", prompt(5)))
    assert len(await tokens_of(client, request("after", prompt(5)))) == 4


async def test_an_exception_of_one_sequence_in_a_step_ends_that_sequence(client, worker, prompt, monkeypatch):
    advance = AnswerProgress.advance

    def trip(answers: AnswerProgress, sequence: Sequence, end: int, *others: Any) -> object:
        return 1 // 0 if (sequence.request_id, end) == ("trips", 5) else advance(answers, sequence, end, *others)

    monkeypatch.setattr(AnswerProgress, "advance", trip)
    good, refused = await asyncio.gather(
        tokens_of(client, request("good", prompt(5))),
        tokens_of(client, request("trips", prompt(5))),
        return_exceptions=True,
    )
    assert len(good) == 4 and type(refused) is LorafleetError
    stats = worker._engine.stats()
    assert (stats.num_running, stats.kv_blocks_free) == (0, stats.kv_blocks_total)


async def test_a_message_that_is_no_message_does_not_end_the_engine(client, prompt):
    client._socket.send(b"\xc1 is never used in msgpack")
    client._socket.send(msgspec.msgpack.encode({"sequence": "one"}))
    assert len(await tokens_of(client, request("after", prompt(5)))) == 4


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  nothing announces it
            await asyncio.sleep(0.001)


async def dead_client(tmp_path, **options: Any) -> tuple[WorkerSocket, EngineClient, asyncio.Task[list[int]]]:
    """A client, and a request of it that its worker has got and will never answer."""
    socket = WorkerSocket(ipc_address(str(tmp_path)))
    client = await EngineClient.connect(ipc_address(str(tmp_path)), EngineHello(9, 9, 9, []), **options)
    asked = asyncio.create_task(tokens_of(client, request("waits", [1])))
    await until(lambda: bool(socket.receive(10)))
    return socket, client, asked


async def test_a_batch_that_is_never_acknowledged_ends_the_connection_with_its_cause(tmp_path):
    socket, client, asked = await dead_client(tmp_path, unacknowledged_s=60.0)
    now = time.monotonic()
    all_read = asyncio.create_task(client.next_stats())
    await asyncio.sleep(0)
    for later_s in (1.0, 59.0):
        socket.send(StepBatch(0, sent_s=now + later_s))
    # One late message may end a step that began before the batch came.
    socket.send(StepBatch(0, sent_s=now + 61.0, stats=EngineStats()))
    await all_read
    assert client.dead is None
    socket.send(StepBatch(0, sent_s=now + 62.0))
    with pytest.raises(EngineDead, match="has not read a message"):
        await asked
    assert client.dead is not None
    await client.close()
    socket.close()


async def test_a_slow_step_is_no_fault(tmp_path):
    socket, client, asked = await dead_client(tmp_path, unacknowledged_s=60.0)
    now = time.monotonic()
    socket.send(StepBatch(0, sent_s=now + 100.0))
    socket.send(StepBatch(1, sent_s=now + 101.0))
    socket.send(StepBatch(1, sent_s=now + 500.0))
    socket.send(StepBatch(1, sent_s=now + 501.0, fatal="the end"))
    with pytest.raises(EngineDead, match="the end"):
        await asked
    await client.close()
    socket.close()


async def test_an_exception_in_receiving_or_sending_ends_every_stream_and_call(tmp_path, monkeypatch):
    def trip(_: object) -> None:
        raise RuntimeError("tripped")

    for i, fault in enumerate(("a message", "a listener", "a send", "a cancellation")):
        folder = tmp_path / str(i)
        folder.mkdir()
        socket, client, asked = await dead_client(folder)
        loading = asyncio.create_task(client.load_adapter(LoRARequest("a", 1, "/a")))
        await asyncio.sleep(0)
        if fault == "a message":
            socket._socket.send_multipart((socket._client, b"\xc1"))
        elif fault == "a listener":
            client.listen_to_moves(trip)
            socket.send(StepBatch(0, adapter_moves=[AdapterMove("a", "disk", "cpu", 0.1)]))
        elif fault == "a send":
            monkeypatch.setattr(client._sender, "_send_message", trip)
            socket.send(StepBatch(1))
        else:
            client._receiver.cancel()
        for waiting in (asked, loading):
            with pytest.raises(EngineDead, match=r"tripped|cannot be processed|has ended"):
                await waiting
        assert client.dead is not None
        with pytest.raises(EngineDead):
            await tokens_of(client, request("later", [1]))
        await client.close()
        socket.close()
