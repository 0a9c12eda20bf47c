"""Runs ranks of a tensor-parallel group for tests: processes of their own with gloo over loopback."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from lorafleet.offline.llm import LLM
from lorafleet.workers.tp.group import TPGroup

TIMEOUT_S = 120
PRELOADED = [
    "lorafleet.offline.llm",
    "lorafleet.workers.follower",
    "peft",
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
]


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """Returns the results of function(group, *arguments) on each rank.

    The function belongs to a test module, and its results are pickled. On "cuda" each rank sees a GPU of its own. If a
    rank fails, this raises AssertionError with the first failed rank's traceback.
    """
    source = inspect.getsourcefile(function)
    assert source is not None
    context = _processes(device)
    meeting = os.path.join(tempfile.mkdtemp(prefix="lf-"), "store")
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, rank, size, meeting, device, (source, function.__name__), arguments)
        )
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return [_result(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def start_process(function: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Runs a function of a test module in a process of its own."""
    source = inspect.getsourcefile(function)
    assert source is not None
    process = _processes("cpu").Process(target=_call, args=((source, function.__name__), arguments), daemon=True)
    process.start()
    return process


def _processes(device: str) -> multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext:
    """Ranks on the CPU are forked from one process that has imported what they need, which costs each of them seconds.

    On "cuda" a rank must see its own GPU before it imports anything.
    """
    if device == "cuda":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _result(pipe: Connection, rank: int) -> Any:
    assert pipe.poll(TIMEOUT_S), f"rank {rank} gave no result within {TIMEOUT_S} s"
    succeeded, result = pickle.loads(pipe.recv_bytes())
    assert succeeded, f"rank {rank}:\n{result}"
    return result


def _run(
    pipe: Connection,
    rank: int,
    size: int,
    meeting: str,
    device: str,
    function: tuple[str, str],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    try:
        group = TPGroup.join(rank, size, meeting, torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
        answer = True, _load(*function)(group, *arguments)
        group.leave()
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))


def _call(function: tuple[str, str], arguments: tuple[Any, ...]) -> None:
    _load(*function)(*arguments)


def _load(source: str, name: str) -> Callable[..., Any]:
    """Imports a test module from its source, as it is in no package that another process could import."""
    spec = importlib.util.spec_from_file_location("of_a_rank", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def start_llm(folder: str, size: int, **options: Any) -> LLM:
    """Starts an engine over `size` ranks with one thread each; prompts over 64 tokens take more than one step.

    The ranks are forked, as those of on_ranks() are. test_failures.py starts them as applications do.
    """
    with patch.object(multiprocessing, "get_context", lambda _: _processes("cpu")):
        return LLM(
            folder,
            device="cpu",
            dtype="float32",
            kv_cache_tokens=2048,
            max_num_batched_tokens=64,
            max_num_seqs=16,
            tensor_parallel_size=size,
            cpu_threads=1,
            **{"enable_lora": False, **options},
        )
