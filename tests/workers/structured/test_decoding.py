"""What grammars allow and refuse, and how vocabularies and their processes are shared."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import psutil
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest, Overloaded
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.structured.vocabularies import MAX_VOCABULARIES, MAX_VOCABULARIES_OF_ONE
from tests.workers.structured.conftest import HOSTILE, Played, schema, vocabularies


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
