"""A replica of two ranks with adapters fully sharded, and what becomes of a lost rank.

tests/workers/tp has adapters divided as the base model is, tests/api/answer/test_whole_api.py the whole API.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from openai import DefaultHttpxClient, OpenAI

from living import is_alive
from tests.cluster.harness import (
    START_S,
    descendants_named,
    free_port,
    greedy_answers,
    serving,
    start_server,
    stop_server,
)
from tests.cluster.two_ranks import KINDS, TwoRanks, arguments_of_two_ranks

pytestmark = pytest.mark.xdist_group("two_ranks")


def rank_pids(rank: int, server: int) -> list[int]:
    return descendants_named(server, f"WorkerActor:rank{rank}")


@pytest.fixture(scope="module")
def made(fleet):
    return fleet("llama3")


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu(2)),
    ],
)
def server(request, made, tmp_path_factory) -> Iterator[TwoRanks]:
    if request.param == "cpu":
        yield request.getfixturevalue("two_ranks")
        return
    with serving(arguments_of_two_ranks(made, request.param), tmp_path_factory.mktemp("log") / "serve.log") as running:
        yield TwoRanks(running.url, running.pid)


def test_a_burst_equals_transformers_and_peft(server, made, prompt):
    loaded = httpx.post(
        f"{server.url}/v1/load_lora_adapter",
        json={"lora_name": "patterns", "lora_path": str(made.adapters["patterns"])},
        timeout=300,
        verify=server.verify,
    )
    assert loaded.status_code == 200, loaded.text
    jobs = [(prompt(n), kind) for n in (4, 19, 50) for kind in (None, *KINDS, "patterns")]
    answers = asyncio.run(greedy_answers(server.url, jobs, verify=server.verify))
    for (ids, kind), answer in zip(jobs, answers, strict=True):
        expected = made.reference.greedy(ids, 10, made.adapters.get(kind))
        assert answer.choices[0].model_extra["token_ids"] == expected.tokens, kind
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_prompts_and_mixtures_are_scored_as_peft_scores_them(server, made, prompt):
    ids, parts = prompt(30), {made.adapters["qv"]: 0.6, made.adapters["all"]: -0.4}
    http = DefaultHttpxClient(verify=server.verify)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300, http_client=http) as client:
        for model, extra, expected in (
            ("all", {}, made.reference.logprobs(ids, made.adapters["all"])),
            ("qv+all", {"lora_weights": [0.6, -0.4]}, made.reference.mixed_logprobs(ids, parts)),
        ):
            answer = client.completions.create(
                model=model, prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0, extra_body=extra
            )
            assert answer.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)


def test_a_rank_lost_amid_a_stream_ends_it_with_an_error_and_the_replica_is_replaced(server):
    body = {"model": "qv", "prompt": "the harbour", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    short = body | {"max_tokens": 8}
    [lost], [peer] = rank_pids(1, server.pid), rank_pids(0, server.pid)
    old = [psutil.Process(pid) for pid in (lost, peer)]
    with httpx.Client(base_url=server.url, timeout=300, verify=server.verify) as client:
        expected = client.post("/v1/completions", json=short).json()["choices"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            os.kill(lost, signal.SIGKILL)
            killed_s = time.monotonic()
            *_, last, done = lines
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], done) == ("engine_dead", "data: [DONE]")
        assert "rank" in error["message"] and not re.search("gloo|nccl", error["message"], re.IGNORECASE)
    # A new connection each: HAProxy closes idle ones when it learns of another replica.
    while (again := httpx.post(f"{server.url}/v1/completions", json=short, timeout=300, verify=server.verify)).is_error:
        assert again.status_code == 503 and time.monotonic() - killed_s < START_S, again.text
        time.sleep(0.1)
    assert again.json()["choices"] == expected
    assert len(rank_pids(0, server.pid)) == len(rank_pids(1, server.pid)) == 1
    assert not any(is_alive(one) for one in old)


def test_a_rank_lost_during_the_start_ends_it(made, tmp_path):
    """A model that cannot be divided ends it in the same way; tests/workers/tp/test_failures.py has that error."""
    process = start_server(["--model", str(made.base), "--tp", "2", "--port", str(free_port())], tmp_path / "serve.log")
    try:
        deadline = time.monotonic() + START_S
        while not (ranks := rank_pids(1, process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(ranks[0], signal.SIGKILL)
        assert process.wait(START_S) == 1
    finally:
        _, left = stop_server(process, signal.SIGTERM)
    assert left == []
    printed = (tmp_path / "serve.log").read_text()
    assert "rank 1 ended" in printed and "Traceback" not in printed
