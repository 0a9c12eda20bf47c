"""Processes of grammars that are late, stopped or busy: nobody waits for them in vain, and they are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import LorafleetError, Overloaded, QueueFull
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.structured.grammar_process import MAX_GRAMMARS_WAITING, MAX_UNSENT_BYTES
from tests.workers.structured.conftest import HOSTILE, LIMITS, Played, vocabularies

HASTY = replace(LIMITS, step_wait_s=0.01)


def test_a_late_mask_is_for_the_step_after_it_and_other_vocabularies_do_not_wait(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer, HASTY)
    [other_file] = vocabularies(file, 1)
    stopped, other = (
        played.begin(structured_spec.choice(["left"], "c")),
        played.open(structured_spec.choice(["a"], "c"), other_file),
    )
    joins = played.open(structured_spec.choice(["right"], "c"))
    assert played.wait(other, joins) == [None, None]
    assert stopped.grammar is not None
    pid = stopped.grammar.process.program.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        played.decoding.start([stopped])
        assert played.decoding.finish().late == [stopped]
        assert played.decoding.poll() == []
        while played.decoding.start([joins, other]) or (masked := played.decoding.finish()).masks is None:
            assert set(masked.late) == {joins, other} and played.wait(other) == [None]  # on a busy machine
        assert masked.late == [joins] and masked.masks.rows == [1] and not masked.faults
    finally:
        os.kill(pid, signal.SIGCONT)
    assert played.wait(stopped, joins) == [None, None]
    assert played.allowed(stopped).tolist() == played.tokenizer.encode("l"), "it need not be asked for again"
    played.decoding.close()


def test_a_process_that_stays_stopped_is_ended_and_its_answers_refused(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer, replace(HASTY, mask_s=0.2))
    stopped = played.begin(structured_spec.choice(["left"], "c"))
    assert stopped.grammar is not None
    process = stopped.grammar.process
    os.kill(process.program.process.pid, signal.SIGSTOP)
    played.decoding.start([stopped])
    assert played.decoding.finish().late == [stopped]
    assert isinstance(wait_refused(played, stopped), Overloaded)
    again = played.begin(structured_spec.choice(["left"], "c"))
    assert again.grammar is not None and again.grammar.process is not process
    process.join()
    assert process.program.process.returncode == -signal.SIGKILL
    played.decoding.close()


def wait_refused(played: Played, sequence: Sequence) -> LorafleetError | None:
    while not (told := played.decoding.poll()):
        time.sleep(0.01)
    [(refused, error)] = told
    assert refused is sequence
    played.decoding.leave(sequence)
    return error


def test_a_process_that_is_stopped_while_it_only_compiles_is_ended_and_its_requests_refused(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer, replace(LIMITS, ping_s=0.2))
    opening = played.open(structured_spec.choice(["left"], "c"))
    assert opening.grammar is not None
    process = opening.grammar.process
    os.kill(process.program.process.pid, signal.SIGSTOP)
    assert isinstance(wait_refused(played, opening), Overloaded)
    process.join()
    assert process.program.process.returncode == -signal.SIGKILL
    played.decoding.close()


def test_a_process_whose_forks_are_made_by_a_stopped_one_is_ended_too(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer, replace(LIMITS, ping_s=0.2))
    opening = played.open(HOSTILE["processor time"])
    assert opening.grammar is not None
    process = opening.grammar.process
    server = psutil.Process(process.program.process.pid)
    while not (children := server.children()):  # nothing is asked before there is one
        pass
    children[0].suspend()
    assert isinstance(wait_refused(played, opening), Overloaded)
    played.decoding.close()
    children[0].kill()


def test_a_process_that_goes_on_is_not_ended_however_long_its_grammars_compile(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer)
    sequence = played.open(HOSTILE["processor time"])
    assert sequence.grammar is not None
    process = sequence.grammar.process
    while len(below := psutil.Process(process.program.process.pid).children(recursive=True)) < 2:
        pass
    below[1].suspend()  # The trial itself, which so lasts as long as this test.
    asked_s: set[float] = set()
    while len(asked_s) < 2:  # It has answered when it is asked again.
        assert played.decoding.poll() == []
        asked_s.add(process.clock.pinged_s)
    assert not process.dead
    played.decoding.close()
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have been ended with the process that made it
        below[1].kill()


def test_a_trial_that_takes_too_long_by_the_clock_is_ended_and_may_be_tried_again(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer, replace(LIMITS, trial_cpu_s=1000.0, trial_s=0.2))
    for _ in range(2):
        sequence = played.open(HOSTILE["processor time"])
        [error] = played.wait(sequence)
        assert isinstance(error, QueueFull) and "did not compile within 0.2 s" in error.message
        played.decoding.leave(sequence)
    played.decoding.close()


def test_what_a_stopped_process_does_not_read_is_bounded_and_nobody_waits_for_it(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer)
    running = played.begin(structured_spec.choice(["left"], "c"))
    assert running.grammar is not None
    pid = running.grammar.process.program.process.pid
    os.kill(pid, signal.SIGSTOP)
    long = "a" * ((1 << 20) - 8)
    opened: list[Sequence] = []
    while len(opened) << 20 <= MAX_UNSENT_BYTES:
        opened.append(played.open(structured_spec.regex(long + str(len(opened)), "r")))
    with pytest.raises(Overloaded, match="does not read"):
        played.open(structured_spec.regex("short", "r"))
    for sequence in opened:
        played.decoding.leave(sequence)
    os.kill(pid, signal.SIGCONT)
    assert played.allowed(running).tolist() == played.tokenizer.encode("l")
    played.decoding.close()


def test_one_tenant_s_grammars_do_not_make_another_wait_and_have_a_bounded_queue(played: Played) -> None:
    slow = [structured_spec.regex(f"(a|b){{3,4000}}(c|d){{3,4000}}{i}", "r") for i in range(MAX_GRAMMARS_WAITING + 40)]
    loud = [played.open(one, group="loud") for one in slow]
    quiet = played.open(structured_spec.regex("quiet", "r"), group="quiet")
    told: dict[int, LorafleetError | None] = {}
    while id(quiet) not in told:
        assert played.woken.wait(120)
        played.woken.clear()
        told |= {id(sequence): error for sequence, error in played.decoding.poll()}
    assert told[id(quiet)] is None
    refused = [error for error in told.values() if isinstance(error, QueueFull)]
    assert 0 < len(refused) <= 40 and "128 jobs of the same tenant or model are waiting" in refused[0].message
    assert len(told) - len(refused) < MAX_GRAMMARS_WAITING // 4, "it waited for others' turns"
    for sequence in loud:
        played.decoding.leave(sequence)
    assert played.wait(played.open(structured_spec.regex("again", "r"), group="loud")) == [None], (
        "who has left is not compiled"
    )


def test_nothing_is_left_of_the_processes_when_they_are_ended(file: TokenizerFile, tokenizer: Tokenizer) -> None:
    played = Played(file, tokenizer)
    begun = played.begin(structured_spec.regex("a", "r"))
    played.open(structured_spec.regex("(a|b){3,4000}(c|d){3,4000}", "r"))
    assert begun.grammar is not None
    server = psutil.Process(begun.grammar.process.program.process.pid)
    below = server.children(recursive=True)
    assert below, "grammars are tried in a process of their own"
    played.decoding.close()
    _, alive = psutil.wait_procs([server, *below], timeout=120)
    assert not alive
