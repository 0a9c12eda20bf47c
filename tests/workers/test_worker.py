"""GPUWorker and EngineClient over a real ipc socket, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.engine_control import BoundQueue
from lorafleet.protocol.errors import AdapterMissing, ContextOverflow, EngineDead, QueueFull, QueueTimeout
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineHello, EngineRequest, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.sealing import CALL, unseal
from lorafleet.protocol.transport.engine_socket import EngineClient, WorkerSocket, ipc_address
from lorafleet.workers.worker import GPUWorker


@pytest.fixture(scope="module")
def worker(fleet, tmp_path_factory):
    address = ipc_address(str(tmp_path_factory.mktemp("ipc")))
    config = EngineConfig(model=str(fleet("llama3").base), kv_cache_tokens=2048, lora=LoRAConfig(max_loras=2))
    made = GPUWorker(config, address)
    made.address = address
    yield made
    made.shutdown()


@pytest.fixture
async def client(worker) -> AsyncIterator[EngineClient]:
    made = await EngineClient.connect(worker.address, worker.hello())
    yield made
    await made.close()


def request(name: str, ids: list[int], max_tokens: int, lora: LoRARequest | None = None) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=ids, params=params, lora=lora)


async def tokens_of(client: EngineClient, asked: EngineRequest) -> list[int]:
    return [token async for output in client.generate(asked) for token in output.token_ids]


async def test_many_requests_and_adapters_at_once(client, fleet, prompt):
    made = fleet("llama3")
    loras = {}
    for i, kind in enumerate(("all", "qv", "regex")):
        lora = LoRARequest(kind, i + 1, str(made.adapters[kind]))
        info = await client.load_adapter(lora)
        loras[kind] = LoRARequest(kind, i + 1, str(made.adapters[kind]), info.digest)
    kinds = [None, *loras] * 3
    asked = [request(f"m{i}", prompt(10 + i), 8, loras.get(kind)) for i, kind in enumerate(kinds)]
    answers = await asyncio.gather(*(tokens_of(client, one) for one in asked))
    for i, (kind, answer) in enumerate(zip(kinds, answers, strict=True)):
        assert answer == made.reference.greedy(prompt(10 + i), 8, made.adapters.get(kind)).tokens


async def test_leaving_a_stream_frees_its_sequence_within_a_step(client, worker, prompt):
    stream = client.generate(request("left", prompt(5), 400))
    await anext(stream)
    steps = worker._engine.stats().steps_total
    await stream.aclose()
    while worker._engine.stats().num_running:  # noqa: ASYNC110  # nothing announces it
        await asyncio.sleep(0.001)
    assert worker._engine.stats().steps_total - steps < 300  # of 400: the abort overtook the answer
    assert worker._engine.stats().kv_blocks_free == worker._engine.stats().kv_blocks_total


async def test_refusals_come_back_as_the_errors_they_are(client, prompt, tmp_path):
    with pytest.raises(ContextOverflow, match="600 tokens"):
        await tokens_of(client, request("long", prompt(600), 5))
    with pytest.raises(AdapterMissing):
        await client.load_adapter(LoRARequest("none", 1, str(tmp_path / "none")))
    assert len(await tokens_of(client, request("fine", prompt(5), 3))) == 3


async def test_at_most_one_message_a_step_in_each_direction(client, worker, prompt, monkeypatch):
    sent: list[int] = []
    real = client._sender._send_message
    monkeypatch.setattr(client._sender, "_send_message", lambda data: (sent.append(client.num_batches), real(data))[1])
    before = worker._engine.stats().steps_total

    async def late(i: int) -> list[int]:
        await asyncio.sleep(i * 0.0005)
        return await tokens_of(client, request(f"s{i}", prompt(5), 30))

    await asyncio.gather(*(late(i) for i in range(30)))
    assert len(sent) <= worker._engine.stats().steps_total - before + 1


async def test_a_client_that_connects_as_another_leaves_loses_nothing(tmp_path):
    address = ipc_address(str(tmp_path))
    socket = WorkerSocket(address)
    for i in range(100):
        client = await EngineClient.connect(address, EngineHello(1, 1, 1, []))
        asking = asyncio.create_task(client.load_adapter(LoRARequest(f"a{i}", 1, "/a")))
        heard: list[str] = []
        for _ in range(50):
            await asyncio.sleep(0)
            heard += [unseal(call, CALL).lora.lora_name for batch in socket.receive(20) for call in batch.adapter_calls]
            if heard:
                break
        assert heard == [f"a{i}"]
        await client.close()
        with pytest.raises(EngineDead):
            await asking
    socket.close()


async def test_a_client_that_has_asked_nothing_hears_of_the_worker(client):
    assert (await client.next_stats()).kv_blocks_total > 0


async def test_the_last_output_comes_with_the_stats_of_an_idle_engine(client, prompt):
    for i in range(10):  # stats that come by the clock alone would be late for most of them
        assert len(await tokens_of(client, request(f"idle {i}", prompt(5), 3))) == 3
        assert (client.stats.num_running, client.stats.num_waiting) == (0, 0)


async def test_a_dead_loop_ends_every_stream_and_fails_the_health_check(fleet, prompt, tmp_path, monkeypatch):
    config = EngineConfig(model=str(fleet("llama3").base), kv_cache_tokens=1024)
    worker = GPUWorker(config, ipc_address(str(tmp_path)))
    client = await EngineClient.connect(ipc_address(str(tmp_path)), worker.hello())
    worker.check_health()
    stream = client.generate(request("dies", prompt(5), 300))
    first: TokenOutput = await anext(stream)
    assert first.token_ids

    def explode(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(worker._engine.runner, "launch", explode)
    with pytest.raises(EngineDead, match="device lost"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDead, match="device lost"):
        worker.check_health()
    with pytest.raises(EngineDead):
        await tokens_of(client, request("after", prompt(5), 3))
    await client.close()


async def test_a_full_queue_and_a_deadline_refuse_the_late_ones_and_leave_the_running_alone(fleet, prompt, tmp_path):
    config = EngineConfig(model=str(fleet("llama3").base), kv_cache_tokens=2048, max_num_seqs=1, max_queued_requests=1)
    worker = GPUWorker(config, ipc_address(str(tmp_path)))
    client = await EngineClient.connect(ipc_address(str(tmp_path)), worker.hello())
    running = client.generate(request("runs", prompt(5), 400))
    tokens = list((await anext(running)).token_ids)
    waits = asyncio.create_task(tokens_of(client, request("waits", prompt(6), 3)))
    await asyncio.sleep(0)  # it is sent first
    with pytest.raises(QueueFull, match="1 requests wait") as full:
        await tokens_of(client, request("too many", prompt(7), 3))
    await client.control(BoundQueue(2, None))
    fits = asyncio.create_task(tokens_of(client, request("fits in the larger queue", prompt(7), 3)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_queued_requests=2"):
        await tokens_of(client, request("does not fit", prompt(7), 3))
    for queued in (waits, fits):
        queued.cancel()
    await asyncio.wait([waits, fits])
    asked = request("late", prompt(6), 3)
    asked.queue_timeout_s = 0.05
    with pytest.raises(QueueTimeout, match=r"within 0\.05 s") as late:
        await tokens_of(client, asked)
    assert full.value.retry_after_s >= 1 and late.value.retry_after_s >= 1
    patient = asyncio.create_task(tokens_of(client, request("patient", prompt(6), 3)))
    tokens += [token async for output in running for token in output.token_ids]
    assert tokens == fleet("llama3").reference.greedy(prompt(5), 400, likely=tokens).tokens
    assert await patient == fleet("llama3").reference.greedy(prompt(6), 3).tokens
    await client.close()
    worker.shutdown()
