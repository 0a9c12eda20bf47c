"""A replica of two ranks with adapters divided as the base model is, and what becomes of a lost rank.

test_http.py has the whole API over two ranks, with adapters fully sharded.
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
import torch

from tests.cluster.harness import (
    descendants_named,
    free_port,
    greedy_answers,
    running_server,
    start_server,
    stop_server,
)

KINDS = ("all", "qv", "large")


def rank_pids(rank: int, server: int) -> list[int]:
    return descendants_named(server, f"WorkerActor:rank{rank}")


@pytest.fixture(scope="module")
def made(fleet):
    return fleet("llama3")


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
            ],
        ),
    ],
)
def url(request, made, tmp_path_factory) -> Iterator[str]:
    arguments = ["--model", str(made.base), "--served-model-name", "tiny", "--device", request.param, "--tp", "2"]
    arguments += ["--lora-modules", *(f"{kind}={made.adapters[kind]}" for kind in KINDS), "--max-loras", "2"]
    arguments += ["--kv-cache-tokens", "4096", "--max-num-batched-tokens", "32", "--max-num-seqs", "8"]
    with running_server(arguments, tmp_path_factory.mktemp("log") / "serve.log") as address:
        yield address


def test_a_burst_equals_transformers_and_peft(url, made, prompt):
    jobs = [(prompt(n), kind) for n in (4, 19, 50) for kind in (None, *KINDS)]
    answers = asyncio.run(greedy_answers(url, jobs))
    for (ids, kind), answer in zip(jobs, answers, strict=True):
        expected = made.reference.greedy(ids, 10, made.adapters.get(kind))
        assert answer.choices[0].model_extra["token_ids"] == expected.tokens, kind
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_a_rank_lost_amid_a_stream_ends_it_with_an_error_and_the_replica_is_replaced(url):
    body = {"model": "qv", "prompt": "the harbour", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    short = body | {"max_tokens": 8}
    [lost], [peer] = rank_pids(1, os.getpid()), rank_pids(0, os.getpid())
    with httpx.Client(base_url=url, timeout=60) as client:
        expected = client.post("/v1/completions", json=short).json()["choices"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            os.kill(lost, signal.SIGKILL)
            killed_s = time.monotonic()
            *_, last, done = lines
            assert time.monotonic() - killed_s < 5
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], done) == ("engine_dead", "data: [DONE]")
        assert "rank" in error["message"] and not re.search("gloo|nccl", error["message"], re.IGNORECASE)
        while (again := client.post("/v1/completions", json=short)).status_code == 503:
            assert time.monotonic() - killed_s < 60, again.text
            time.sleep(0.1)
        assert again.json()["choices"] == expected
    assert len(rank_pids(0, os.getpid())) == len(rank_pids(1, os.getpid())) == 1
    assert not psutil.pid_exists(lost) and not psutil.pid_exists(peer)


def test_a_rank_lost_during_the_start_ends_it(made, tmp_path):
    process = start_server(["--model", str(made.base), "--tp", "2", "--port", str(free_port())], tmp_path / "serve.log")
    try:
        deadline = time.monotonic() + 60
        while not (ranks := rank_pids(1, process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(ranks[0], signal.SIGKILL)
        assert process.wait(30) == 1
    finally:
        _, left = stop_server(process, signal.SIGTERM)
    assert left == []
    printed = (tmp_path / "serve.log").read_text()
    assert "rank 1 ended" in printed and "Traceback" not in printed


def test_a_size_that_does_not_divide_the_model_is_refused(made, tmp_path):
    process = start_server(["--model", str(made.base), "--tp", "3", "--port", str(free_port())], tmp_path / "serve.log")
    assert process.wait(60) == 1
    printed = (tmp_path / "serve.log").read_text()
    assert "tensor_parallel_size=3 does not divide the model's num_attention_heads=4" in printed
    assert "Traceback" not in printed
