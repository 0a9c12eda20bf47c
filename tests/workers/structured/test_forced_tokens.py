"""The tokens that a grammar forces, by what has been answered since it was asked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.workers.structured import grammar_compiler, grammar_settings
from lorafleet.workers.structured.forced_tokens import ForcedTokens
from lorafleet.workers.structured.mask_filler import MaskFiller

DEMO = Path(__file__).parents[3] / "demo" / "model"
PROMPT = [1, 2]
SCHEMA = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer"},
        "customer_name": {"type": "string"},
        "delivery_state": {"enum": ["delivered", "pending", "cancelled"]},
        "is_paid": {"type": "boolean"},
    },
    "required": ["order_number", "customer_name", "delivery_state", "is_paid"],
    "additionalProperties": False,
}
ANSWER = '{"order_number":4711,"customer_name":"Ada Lovelace","delivery_state":"delivered","is_paid":true}'


def test_forced_tokens_follow_those_that_came_since() -> None:
    forced = ForcedTokens()
    assert forced.after(PROMPT, 2) == []
    forced.replace(2, [], [(0, [7, 8, 9])])
    assert forced.after(PROMPT, 2) == [7, 8, 9]
    assert forced.after([*PROMPT, 7], 3) == [8, 9]
    assert forced.after([*PROMPT, 7, 8, -1], 4) == [9], "the token in flight is not known"
    assert forced.after([*PROMPT, 7, 8, 9], 5) == []


def test_what_is_forced_behind_a_wrong_draft_is_dropped() -> None:
    forced = ForcedTokens()
    forced.replace(2, [4, 5, 6], [(1, [5]), (3, [7, 8])])
    assert forced.after([*PROMPT, 4], 3) == [5]
    assert forced.after([*PROMPT, 4, 5, 6], 5) == [7, 8]
    assert forced.after([*PROMPT, 4, 5, 9], 5) == []
    assert forced.after([*PROMPT, 3], 3) == []
    forced.replace(5, [], ())
    assert forced.after([*PROMPT, 4, 5, 6], 5) == []


@pytest.mark.parametrize(("any_whitespace", "num_steps"), [(False, {0: 62, 4: 29, 8: 26}), (True, {4: 38, 8: 35})])
def test_an_answer_in_json_takes_half_of_the_steps(any_whitespace: bool, num_steps: dict[int, int]) -> None:
    """The figures of docs/speculative-decoding.md: steps by the most draft tokens of one. No draft is wrong."""
    tokenizer, files = Tokenizer.from_folder(DEMO), TokenizerFiles()
    file, memory = files.of(tokenizer), os.memfd_create("masks")
    os.ftruncate(memory, 4 * -(-file.vocab_size // 32) * 16)
    settings = grammar_settings.Settings(
        file.path, file.vocab_size, [tokenizer.eos_token_id or 0], 16, memory, 2, 1, 1, 1, 1, 1, 1, True
    )
    schema = ("json_schema", json.dumps(SCHEMA), any_whitespace)
    compiled = grammar_compiler.matcher_of(
        grammar_compiler.read_tokenizer(settings), grammar_compiler.grammar_of(schema)
    )
    for most, expected in num_steps.items():
        masks = MaskFiller(memory, settings.rows, settings.vocab_size, 1, finds_forced=True, drafts_s=60.0)
        masks.begin(0, compiled)
        assert steps_of(masks, tokenizer.encode(ANSWER), most) == expected
    os.close(memory)
    files.close()


def steps_of(masks: MaskFiller, tokens: list[int], most: int) -> int:
    """Returns the number of steps that choose these tokens, with up to `most` forced ones as drafts in each."""
    forced, count, num_known, new = ForcedTokens(), 0, 0, list[int]()
    while num_known < len(tokens):
        drafts = forced.after(tokens[:num_known], num_known)[:most]
        filled = masks.fill([(0, 0, new, drafts)])
        forced.replace(num_known, drafts, filled.followed[0].forced if filled.followed else ())
        new = tokens[num_known : num_known + len(drafts) + 1]
        assert new[: len(drafts)] == drafts
        num_known += len(new)
        count += 1
    return count
