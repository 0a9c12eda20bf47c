from __future__ import annotations

import os
import signal

import pytest

from lorafleet.workers.errors import ConfigError, EngineDead
from lorafleet.workers.llm import SamplingParams
from ranks import start_llm


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
