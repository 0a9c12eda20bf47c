"""A request whose grammar is being compiled, beside others. Its process is stopped, so that this takes as long as it
takes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.protocol import structured_spec
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import QueueFull
from lorafleet.protocol.messages import EngineRequest, TokenizerFile, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine


@pytest.fixture
def engine(fleet) -> Iterator[Engine]:
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, max_queued_requests=9))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def file(fleet) -> Iterator[TokenizerFile]:
    files, tokenizer = TokenizerFiles(), Tokenizer.from_folder(fleet("llama3").base)
    yield files.of(tokenizer)
    files.close()


def add(
    engine: Engine, file: TokenizerFile, name: str, prompt: list[int], given: structured_spec.StructuredOutputs | None
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=given is None, structured_outputs=given)
    engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, tokenizer=file))


def finished(engine: Engine, name: str) -> TokenOutput:
    while True:
        for output in engine.step():
            assert output.request_id == name
            if output.finish_reason is not None:
                return output


def test_others_run_while_a_grammar_is_compiled(engine: Engine, file, prompt):
    add(engine, file, "bound", prompt(5), structured_spec.choice(["ab"], "x"))
    [process] = engine._structured._vocabularies.processes
    pid = process.program.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        add(engine, file, "free", prompt(6), None)
        assert finished(engine, "free").finish_reason == "length"
        assert engine.stats().num_waiting == 1
        assert not engine.has_work
    finally:
        os.kill(pid, signal.SIGCONT)
    assert finished(engine, "bound").finish_reason == "stop"
    assert engine.stats().num_waiting == 0


def test_one_that_is_given_up_while_its_grammar_is_compiled_leaves_nothing(engine: Engine, file, prompt):
    add(engine, file, "bound", prompt(5), structured_spec.choice(["ab"], "x"))
    engine.abort("bound")
    assert engine.stats().num_waiting == 0
    add(engine, file, "bound", prompt(5), structured_spec.choice(["cd"], "x"))
    assert finished(engine, "bound").finish_reason == "stop"


def test_those_that_wait_for_a_grammar_count_for_the_bound_of_the_queue(fleet, file, prompt):
    config = EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, max_num_seqs=1, max_queued_requests=1)
    engine = build_engine(config)
    add(engine, file, "first", prompt(5), structured_spec.choice(["ab"], "x"))
    add(engine, file, "second", prompt(5), structured_spec.choice(["ab"], "x"))
    with pytest.raises(QueueFull):
        add(engine, file, "third", prompt(5), None)
    engine.close()


@pytest.mark.parametrize("alone", [True, False])
def test_a_process_that_ends_amid_answers_ends_those_alone_whose_grammars_it_held(fleet, file, prompt, alone):
    """The step behind the one whose masks never come has been scheduled and planned with them by then."""
    config = EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=True)
    engine = build_engine(config)
    free = [] if alone else ["free"]
    for name in free:
        add(engine, file, name, prompt(6), None)
        undisturbed = tokens_of_the_only_answer(engine)
        add(engine, file, name, prompt(6), None)
    for name in ("left", "right"):
        add(engine, file, name, prompt(5), structured_spec.regex(f"{name}[a-z]+", "x"))
    ended: dict[str, TokenOutput] = {}
    tokens: dict[str, list[int]] = {}
    while set(ended) != {"left", "right", *free}:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ended[output.request_id] = output
        if len(tokens.get("left", [])) == 2 and engine._structured._vocabularies.processes:
            [process] = engine._structured._vocabularies.processes
            process.program.process.kill()  # as often as it is met: it may be gone
    assert {ended[name].finish_reason for name in ("left", "right")} == {"error"}
    assert not engine.has_work and engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    for name in free:
        assert ended[name].finish_reason == "length" and tokens[name] == undisturbed
    add(engine, file, "next", prompt(5), structured_spec.choice(["ab"], "x"))
    assert finished(engine, "next").finish_reason == "stop"
    engine.close()


def answers(engine: Engine, tokens: dict[str, list[int]], until: Callable[[TokenOutput], bool]) -> None:
    """Steps until one of the outputs is as wanted."""
    while True:
        found = False
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            found |= until(output)
        if found:
            return


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stopped_process_holds_up_its_own_answers_alone_and_they_go_on_where_they_were(fleet, file, prompt, overlap):
    """Their places in the step are free meanwhile: there are two, and two answers wait."""
    config = EngineConfig(
        str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=overlap, max_num_seqs=2, block_size=4
    )
    engine = build_engine(config)
    undisturbed: dict[str, list[int]] = {}
    given = {
        "left": structured_spec.regex("left[a-z]+", "x"),
        "right": structured_spec.regex("right[a-z]+", "x"),
        "free": None,
    }

    def begin(name: str) -> None:
        params = SamplingParams(
            temperature=0.9, seed=3, max_tokens=16, ignore_eos=True, frequency_penalty=1.0,
            structured_outputs=given[name], prompt_logprobs=1, logprobs=1,
        )  # fmt: skip
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt(7), params=params, tokenizer=file))

    for name in given:
        begin(name)
        answers(engine, undisturbed, lambda output: output.finish_reason is not None)
    tokens: dict[str, list[int]] = {}
    for name in ("left", "right"):
        begin(name)
    answers(engine, tokens, lambda _: len(tokens.get("left", [])) > 2 and len(tokens.get("right", [])) > 2)
    [process] = engine._structured._vocabularies.processes
    os.kill(process.program.process.pid, signal.SIGSTOP)
    try:
        begin("free")
        answers(engine, tokens, lambda output: output.request_id == "free" and output.finish_reason is not None)
        assert engine.stats().num_waiting == 2 and not engine.has_work
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    finally:
        os.kill(process.program.process.pid, signal.SIGCONT)
    ended: set[str] = set()
    while len(ended) < 2:
        answers(engine, tokens, lambda output: output.finish_reason is not None and not ended.add(output.request_id))
    assert tokens == undisturbed
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    engine.close()


def test_an_answer_whose_process_is_stopped_can_be_given_up(fleet, file, prompt):
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024))
    add(engine, file, "bound", prompt(5), structured_spec.regex("left[a-z]+", "x"))
    tokens: dict[str, list[int]] = {}
    answers(engine, tokens, lambda output: bool(output.token_ids))
    [process] = engine._structured._vocabularies.processes
    os.kill(process.program.process.pid, signal.SIGSTOP)
    while engine.has_work:
        engine.step()
    engine.abort("bound")
    assert engine.stats().num_waiting == 0 and engine.num_unfinished == 0
    os.kill(process.program.process.pid, signal.SIGCONT)
    add(engine, file, "next", prompt(5), structured_spec.choice(["ab"], "x"))
    assert finished(engine, "next").finish_reason == "stop"
    engine.close()


def tokens_of_the_only_answer(engine: Engine) -> list[int]:
    tokens: list[int] = []
    while True:
        for output in engine.step():
            tokens += output.token_ids
            if output.finish_reason is not None:
                return tokens
