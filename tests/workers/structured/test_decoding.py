"""The processes that hold grammars, over a vocabulary of single bytes and a few more; the engine's part is played."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest, LorafleetError, Overloaded, QueueFull
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.structured.decoding import StructuredDecoding
from lorafleet.workers.structured.grammar_process import MAX_GRAMMARS_WAITING, MAX_UNSENT_BYTES, GrammarLimits
from lorafleet.workers.structured.vocabularies import MAX_VOCABULARIES, MAX_VOCABULARIES_OF_ONE

LIMITS = GrammarLimits(trial_cpu_s=1.0, trial_memory_bytes=256 << 20, step_wait_s=120, mask_s=120)
HASTY = replace(LIMITS, step_wait_s=0.01)
ROWS = 8


class Played:
    """What the engine does with a StructuredDecoding, one answer at a time."""

    def __init__(self, file: TokenizerFile, tokenizer: Tokenizer, limits: GrammarLimits = LIMITS) -> None:
        self.woken = threading.Event()
        self.file = file
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id or 0
        self.decoding = StructuredDecoding(ROWS, self.woken.set, limits)

    def open(
        self,
        given: structured_spec.StructuredOutputs,
        file: TokenizerFile | None = None,
        group: str = "",
        *,
        base: bool = False,
    ) -> Sequence:
        params = SamplingParams(structured_outputs=given)
        sequence = Sequence("x", [5, 6], 2, params, seed=0, max_tokens=1000)
        self.decoding.open(sequence, file or self.file, [self.end], group, base=base)
        return sequence

    def wait(self, *sequences: Sequence) -> list[LorafleetError | None]:
        """What poll() says of each."""
        found: dict[int, LorafleetError | None] = {}
        while any(id(sequence) not in found for sequence in sequences):
            assert self.woken.wait(120)
            self.woken.clear()
            found |= {id(sequence): error for sequence, error in self.decoding.poll()}
        return [found[id(sequence)] for sequence in sequences]

    def begin(self, given: structured_spec.StructuredOutputs) -> Sequence:
        sequence = self.open(given)
        [error] = self.wait(sequence)
        if error is not None:
            self.decoding.leave(sequence)
            raise error
        return sequence

    def allowed(self, sequence: Sequence) -> np.ndarray[Any, Any]:
        self.decoding.start([sequence])
        masked = self.decoding.finish()
        if masked.faults:
            raise masked.faults[0][1]
        assert masked.masks is not None and masked.masks.rows == [0]
        return np.flatnonzero(np.unpackbits(masked.masks.bits_NW[0].view(np.uint8), bitorder="little"))

    def write(self, given: structured_spec.StructuredOutputs, rng: random.Random, most: int = 400) -> str | None:
        """A random answer; None where it does not end."""
        sequence = self.begin(given)
        for _ in range(most):
            allowed = self.allowed(sequence)
            token = self.end if self.end in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
            sequence.tokens.append(token)
            if token == self.end:
                break
        self.decoding.leave(sequence)
        text = b"".join(self.tokenizer.token_bytes(i) for i in sequence.tokens[2:-1])
        return text.decode() if sequence.tokens[-1] == self.end else None


@pytest.fixture(scope="module")
def file(tokenizer: Tokenizer) -> Iterator[TokenizerFile]:
    files = TokenizerFiles()
    yield files.of(tokenizer)
    files.close()


@pytest.fixture(scope="module")
def played(file: TokenizerFile, tokenizer: Tokenizer) -> Iterator[Played]:
    played = Played(file, tokenizer)
    yield played
    played.decoding.close()


def schema(given: object) -> structured_spec.StructuredOutputs:
    return structured_spec.json_schema(given, "response_format", any_whitespace=False)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, object]:
    kinds: list[Callable[[], dict[str, object]]] = [
        lambda: {"type": "integer", "minimum": rng.randrange(-50, 0), "exclusiveMaximum": rng.randrange(1, 2000)},
        lambda: {"type": "number", "minimum": rng.randrange(5), "maximum": rng.randrange(5, 80) + 0.5},
        lambda: {"type": "integer", "multipleOf": rng.randrange(2, 13), "minimum": 0, "maximum": 999},
        lambda: {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-z]{2,4}$", "^\\d+-\\d{2}$", "[aeiou]"]), "maxLength": 9},
        lambda: {"type": "string", "format": rng.choice(["date", "uuid", "time", "ipv4"])},
        lambda: {"enum": rng.sample(["a", 'b"', "c\\", 1, 2.5, None, True, {"k": [1]}, "ü"], rng.randrange(1, 6))},
        lambda: {"const": rng.choice(["x y", 0, False, ["z"]])},
        lambda: {"type": rng.sample(["boolean", "null", "integer"], 2)},
    ]
    if depth < 3:
        kinds += 2 * [
            lambda: {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": rng.randrange(2),
                "maxItems": rng.randrange(2, 4),
            },
            lambda: {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in ("a", "b ü", 'c"')},
                "required": rng.sample(["a", "b ü", 'c"'], rng.randrange(4)),
                "additionalProperties": False,
            },
            lambda: {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]},
            lambda: {"$ref": "#/$defs/shared"},
        ]
    return rng.choice(kinds)()


def test_random_answers_to_random_schemas_are_valid(played: Played):
    rng = random.Random(7)
    num_written = 0
    for _ in range(40):
        made = random_schema(rng) | {"$defs": {"shared": random_schema(rng, depth=3)}}
        jsonschema.Draft202012Validator.check_schema(made)
        text = played.write(schema(made), rng)
        if text is not None:
            num_written += 1
            checker = jsonschema.Draft202012Validator(made, format_checker=jsonschema.FormatChecker())
            checker.validate(json.loads(text))
    assert num_written >= 30


# As JSON schema has them; what cannot be enforced must not be passed over.
UNENFORCED: list[tuple[object, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": False}, "if"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, "oneOf"),
    ({"type": "string", "format": "shoe-size"}, "shoe-size"),
    ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
]


@pytest.mark.parametrize(("part", "named"), UNENFORCED, ids=[named for _, named in UNENFORCED])
def test_what_would_not_be_enforced_is_refused_with_its_place(played: Played, part: object, named: str):
    whole = {"type": "object", "properties": {"good": {"type": "string"}, "list": {"items": part}}}
    with pytest.raises(InvalidRequest, match=named) as refused:
        played.begin(schema(whole))
    assert "at /properties/list/items: " in refused.value.message
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "given", [schema({"$ref": "#"}), structured_spec.grammar("start: start", "g")], ids=["schema", "grammar"]
)
def test_what_no_text_can_match_is_refused_in_words(played: Played, given: structured_spec.StructuredOutputs):
    with pytest.raises(InvalidRequest, match="cannot be enforced: no text can match it"):
        played.begin(given)


LIGHTLY = {"x-guidance": {"lenient": True}}


def test_a_schema_cannot_ask_to_be_taken_lightly(played: Played):
    asking = {"type": "array", "uniqueItems": True} | LIGHTLY
    for given in (asking, {"type": "array", "items": asking}):
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            played.begin(schema(given))


def test_a_schema_that_is_a_part_is_refused_with_its_own_place(played: Played):
    part = {"type": "object", "properties": {"list": {"items": {"type": "array", "uniqueItems": True}}}}
    parts = [
        structured_spec.JsonPart("a", {"type": "null"}, "`a`"),
        structured_spec.JsonPart("b", part | LIGHTLY, "`b`"),
    ]
    with pytest.raises(InvalidRequest, match=r"`tools` cannot be enforced: in `b`: at /properties/list/items:.*unique"):
        played.begin(structured_spec.tagged('start: "x" a | "y" b', parts, "tools"))
    assert played.write(structured_spec.tagged('start: "x" a', parts[:1], "tools"), random.Random(0)) == "xnull"


HOSTILE = {
    "processor time": schema({"type": "integer", "multipleOf": 99_999_989}),
    "nested too deeply": structured_spec.grammar(
        "start: A0\n" + "\n".join(f'A{i}: A{i + 1} "y"' for i in range(20_000)) + '\nA20000: "x"', "g"
    ),
    "": structured_spec.regex("((a|b)*c" * 300 + ")*" * 300 + "(x{1,1000}){1,1000}", "r"),
}


def test_a_hostile_grammar_is_refused_and_harms_no_other(played: Played):
    other = played.begin(structured_spec.choice(["left", "right"], "c"))
    played.allowed(other)
    opened = {why: played.open(given) for why, given in HOSTILE.items()}
    errors = played.wait(*opened.values())
    for why, error in zip(opened, errors, strict=True):
        assert isinstance(error, InvalidRequest)
        assert why in error.message
    for sequence in opened.values():
        played.decoding.leave(sequence)
    other.tokens.append(played.tokenizer.encode("r")[0])
    assert played.tokenizer.encode("i")[0] in played.allowed(other)
    played.decoding.leave(other)


def test_grammars_are_tried_in_forks_of_a_process_without_threads(played: Played):
    """A fork has the locks that other threads held, and would wait for them for ever."""
    begun, sequence = (
        played.begin(structured_spec.regex("a+", "r")),
        played.open(structured_spec.regex("a{1000000}", "r")),
    )
    assert begun.grammar is not None
    process = psutil.Process(begun.grammar.process.program.process.pid)
    played.woken.clear()
    forking = None
    while forking is None:
        assert not played.woken.is_set(), "tried in a fork of another process"
        forking = next((p for p in process.children() if p.children()), None)
    assert process.num_threads() > 1 and forking.num_threads() == 1
    [error] = played.wait(sequence)
    assert error is not None
    for each in (begun, sequence):
        played.decoding.leave(each)


def test_masks_of_several_vocabularies_come_in_the_order_of_their_rows(played: Played, file: TokenizerFile):
    # The same tokens, but another end: a process of its own.
    params = SamplingParams(structured_outputs=structured_spec.choice(["b"], "c"))
    second = Sequence("second", [5], 1, params, seed=0, max_tokens=9)
    other_end = played.tokenizer.encode("z")[0]
    played.decoding.open(second, file, [other_end])
    assert played.wait(second) == [None]
    first, free = (
        played.begin(structured_spec.choice(["a"], "c")),
        Sequence("f", [1], 1, SamplingParams(), seed=0, max_tokens=9),
    )
    played.decoding.start([free, first, free, second])
    masked = played.decoding.finish()
    masks = masked.masks
    assert masks is not None and not masked.faults
    bits = np.unpackbits(masks.bits_NW.view(np.uint8), axis=1, bitorder="little")
    found = {row: np.flatnonzero(row_bits).tolist() for row, row_bits in zip(masks.rows, bits, strict=True)}
    assert found == {1: played.tokenizer.encode("a"), 3: played.tokenizer.encode("b")}
    second.tokens.append(played.tokenizer.encode("b")[0])
    assert played.allowed(second).tolist() == [other_end]
    for sequence in (first, second):
        played.decoding.leave(sequence)


def test_when_the_process_ends_its_answers_end_with_it_and_the_next_are_served(played: Played):
    running = played.begin(structured_spec.choice(["left"], "c"))
    assert running.grammar is not None
    process = running.grammar.process
    os.kill(process.program.process.pid, signal.SIGSTOP)
    opening = played.open(structured_spec.choice(["right"], "c"))
    played.decoding.start([running])
    os.kill(process.program.process.pid, signal.SIGKILL)
    masked = played.decoding.finish()
    [(failed, error)] = masked.faults
    assert masked.masks is None and failed is running and isinstance(error, Overloaded)
    [error] = played.wait(opening)
    assert isinstance(error, Overloaded)
    for sequence in (running, opening):
        played.decoding.leave(sequence)
    assert played.write(structured_spec.choice(["right"], "c"), random.Random(0)) == "right"


def test_a_tokenizer_that_cannot_be_read_is_told(played: Played, tmp_path: Path):
    path = tmp_path / "broken.json"
    path.write_text("{}")
    broken = TokenizerFile(str(path), "broken", 300)
    sequence = played.open(structured_spec.regex("a", "r"), broken)
    [error] = played.wait(sequence)
    assert isinstance(error, InvalidRequest) and "tokenizer" in error.message
    played.decoding.leave(sequence)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        played.open(structured_spec.regex("a", "r"), broken)


def test_an_idle_vocabulary_makes_room_for_another_and_one_in_use_does_not(file: TokenizerFile, tokenizer: Tokenizer):
    played = Played(file, tokenizer)
    files = [TokenizerFile(file.path, f"digest {i}", file.vocab_size) for i in range(MAX_VOCABULARIES + 1)]
    open_ones = [played.open(structured_spec.regex("a", "r"), one) for one in files[:-1]]
    with pytest.raises(Overloaded, match="all are in use"):
        played.open(structured_spec.regex("a", "r"), files[-1])
    played.decoding.leave(open_ones[1])
    assert played.wait(played.open(structured_spec.regex("a", "r"), files[-1])) == [None]
    played.decoding.close()


def vocabularies(file: TokenizerFile, count: int) -> list[TokenizerFile]:
    return [TokenizerFile(file.path, f"digest {i}", file.vocab_size) for i in range(count)]


def test_one_tenant_s_vocabularies_leave_a_place_for_others_and_the_base_has_its_own(
    file: TokenizerFile, tokenizer: Tokenizer
) -> None:
    played = Played(file, tokenizer)
    files = vocabularies(file, MAX_VOCABULARIES + 2)
    for one in files[:MAX_VOCABULARIES_OF_ONE]:
        played.open(structured_spec.regex("a", "r"), one, group="loud")
    with pytest.raises(Overloaded, match=f"with {MAX_VOCABULARIES_OF_ONE} tokenizers at once"):
        played.open(structured_spec.regex("a", "r"), files[-1], group="loud")
    played.open(structured_spec.regex("b", "r"), files[0], group="loud")
    quiet = played.open(structured_spec.regex("a", "r"), files[-1], group="quiet")
    of_base = [
        played.open(structured_spec.regex("a", "r"), files[-2], group=group, base=True) for group in ("third", "loud")
    ]
    assert played.wait(quiet, *of_base) == [None] * 3
    played.decoding.close()


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
