from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from engine_steps import step_until_done
from living import is_alive
from lorafleet.offline.llm import SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterMalformed, ConfigError, EngineDead
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import EngineRequest, TokenOutput
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.workers.follower import RankWorker
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.startup import build_engine
from ranks import start_llm, start_process


def test_a_model_that_cannot_be_divided_is_refused_and_leaves_no_process(fleet):
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide"):
        start_llm(str(fleet("llama3").base), 3)


def test_a_rank_that_dies_ends_the_engine_at_once(fleet, prompt):
    llm = start_llm(str(fleet("llama3").base), 2)
    asked = [{"prompt_token_ids": prompt(9)}]
    llm.generate(asked, SamplingParams(max_tokens=2))
    assert llm._ranks is not None
    other = llm._ranks.processes[0]
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    with pytest.raises((EngineDead, RuntimeError)):  # by the link, or by gloo in a collective
        llm.generate(asked, SamplingParams(max_tokens=2))
    llm.close()


UNGUARDED = """
import sys
from lorafleet.offline.llm import LLM

LLM(sys.argv[1], device="cpu", kv_cache_tokens=512, tensor_parallel_size=2, cpu_threads=1)
"""


def test_a_program_that_its_ranks_run_again_is_told_so_at_once(fleet, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    ended = subprocess.run(
        [sys.executable, script, fleet("llama3").base], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "rank 1 of the replica has ended with exit code 1 before it was ready" in ended.stderr
    assert '`if __name__ == "__main__":`' in ended.stderr


PARENT = """
import sys, time
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.workers.rank_processes import RankProcesses

if __name__ == "__main__":
    config = EngineConfig(sys.argv[1], device="cpu", kv_cache_tokens=512, tensor_parallel_size=2, cpu_threads=1)
    print(RankProcesses(config).processes[0].pid, flush=True)
    time.sleep(600)
"""


def test_the_other_ranks_end_with_a_parent_that_is_killed(fleet, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script, fleet("llama3").base], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    rank = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + 120
    while is_alive(rank):
        assert time.monotonic() < deadline_s, "the rank has outlived its parent"
        time.sleep(0.1)


def rank_that_cannot_read(config: EngineConfig, rank: int, addresses: RankAddresses) -> None:
    """As on a machine where the files of one adapter are damaged."""
    read = LoRAModel.from_local_checkpoint

    def fail(path: str, *, name: str, **rest: Any) -> LoRAModel:
        if name == "bad":
            raise AdapterMalformed("the file is cut off on this machine")
        return read(path, name=name, **rest)

    LoRAModel.from_local_checkpoint = fail
    RankWorker(config, rank, addresses).wait()


def test_an_adapter_that_one_rank_cannot_read_fails_on_all_and_leaves_nothing_behind(fleet, prompt):
    config = EngineConfig(
        str(fleet("llama3").base),
        kv_cache_tokens=512,
        tensor_parallel_size=2,
        cpu_threads=1,
        lora=LoRAConfig(max_loras=2, max_lora_rank=64),
    )
    addresses = RankAddresses(2, tempfile.mkdtemp(prefix="lf-"))
    other = start_process(rank_that_cannot_read, config, 1, addresses)
    engine = build_engine(config, addresses=addresses)

    def load(name: str, kind: str) -> Future[AdapterInfo]:
        asked = engine.load_adapter(LoRARequest(name, 1, str(fleet("llama3").adapters[kind])))
        step_until_done(engine, asked)
        return asked

    def answer(digest: str, kind: str) -> list[int]:
        lora = LoRARequest(kind, 1, str(fleet("llama3").adapters[kind]), digest=digest)
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        engine.add(EngineRequest(request_id="r", prompt_token_ids=prompt(9), params=params, lora=lora))
        outputs: list[TokenOutput] = []
        while engine.has_work:
            outputs += engine.step()
        return [token for output in outputs for token in output.token_ids]

    digest = load("good", "qv").result().digest
    before = answer(digest, "qv")
    with pytest.raises(AdapterMalformed, match="cut off on this machine"):
        load("bad", "all").result()
    assert engine.loras is not None and engine.loras.resident_cpu() == [digest] and not engine.loras.loading
    assert len(before) == 5 and answer(digest, "qv") == before
    assert load("under another name", "all").result().rank == 8
    engine.close()
    other.join(120)
    assert other.exitcode == 0
