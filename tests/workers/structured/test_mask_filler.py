"""The masks, filled in this process: what the threads of the executor do beside what the main thread does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.workers.structured import grammar_compiler, grammar_settings
from lorafleet.workers.structured.mask_filler import MaskFiller

REGEXES = ["a+", "[b-z]{3}", "x|y", "[0-9]*", "é", "(no|yes)"]
ROWS = [(number, number, list[int](), list[int]()) for number in range(len(REGEXES))]


@pytest.fixture
def settings(tokenizer: Tokenizer) -> Iterator[grammar_settings.Settings]:
    files = TokenizerFiles()
    file, memory = files.of(tokenizer), os.memfd_create("masks")
    os.ftruncate(memory, 4 * -(-file.vocab_size // 32) * 8)
    yield grammar_settings.Settings(
        file.path, file.vocab_size, [tokenizer.eos_token_id or 0], 8, memory, 2, 1, 1, 1, 1, 1, 1, True
    )
    os.close(memory)
    files.close()


def test_masks_of_the_executor_are_those_of_the_main_thread(settings: grammar_settings.Settings) -> None:
    library = grammar_compiler.read_tokenizer(settings)
    found = []
    for alone_s in (60.0, -1.0):
        masks = MaskFiller(settings.mask_fd, settings.rows, settings.vocab_size, settings.num_threads, alone_s=alone_s)
        for number, regex in enumerate(REGEXES):
            masks.begin(
                number, grammar_compiler.matcher_of(library, grammar_compiler.grammar_of(("regex", regex, False)))
            )
        masks.mask_BW[:] = 0
        assert masks.fill(ROWS) == ([], [])
        found.append(masks.mask_BW.copy())
    assert len({row.tobytes() for row in found[0][: len(ROWS)]}) == len(ROWS)
    assert (found[0] == found[1]).all()


REGEX = "(yes|no), (left|right) {3}x{2}"


@pytest.fixture
def library(settings: grammar_settings.Settings) -> Any:
    return grammar_compiler.read_tokenizer(settings)


def filler(settings: grammar_settings.Settings, library: Any, **options: Any) -> MaskFiller:
    """Returns one with two answers, 0 and 1, that have the same grammar."""
    made = MaskFiller(settings.mask_fd, settings.rows, settings.vocab_size, 1, drafts_s=60.0, **options)
    grammar = grammar_compiler.matcher_of(library, grammar_compiler.grammar_of(("regex", REGEX, False)))
    for number in (0, 1):
        made.begin(number, grammar)
    made.mask_BW[:] = 0
    return made


def one_by_one(masks: MaskFiller, tokens: list[int]) -> list[np.ndarray[Any, Any]]:
    """Returns the masks before the first token and behind each, as answer 1 gets them."""
    found = []
    for new in ([], *([token] for token in tokens)):
        assert masks.fill([(1, 0, new, [])]).faults == []
        found.append(masks.mask_BW[0].copy())
    return found


def test_masks_behind_drafts_are_those_of_an_answer_that_is_written_token_by_token(
    settings: grammar_settings.Settings, library: Any, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("yes, left")
    expected = one_by_one(filler(settings, library), tokens)
    masks = filler(settings, library)
    drafts = tokens[:5]
    filled = masks.fill([(1, 0, [], []), (0, 1, tokens[:1], drafts[1:])])
    assert filled == ([], [(0, len(drafts) - 1, [])])
    for i in range(len(drafts)):
        assert (masks.mask_BW[1 + i] == expected[1 + i]).all()
    assert masks.fill([(0, 0, tokens[1:3], [])]) == ([], []), "the answer itself has gone on without the drafts"
    assert (masks.mask_BW[0] == expected[3]).all()


def test_drafts_that_the_grammar_forbids_end_there_and_do_no_harm(
    settings: grammar_settings.Settings, library: Any, tokenizer: Tokenizer
) -> None:
    yes = tokenizer.encode("yes")
    [other] = tokenizer.encode("z")
    masks = filler(settings, library)
    assert masks.fill([(0, 0, [], [yes[0], other, yes[1]])]).followed == [(0, 1, [])]
    assert masks.fill([(0, 0, [], [other])]).followed == []
    assert masks.fill([(0, 0, [], [settings.vocab_size + 1000])]).followed == []
    assert masks.fill([(0, 0, yes, [])]).faults == []


def test_the_end_of_an_answer_has_a_mask_behind_drafts(
    settings: grammar_settings.Settings, library: Any, tokenizer: Tokenizer
) -> None:
    text = tokenizer.encode("no, right   xx")
    masks = filler(settings, library)
    expected = one_by_one(masks, text)
    assert masks.fill([(0, 0, text[:-1], [text[-1], tokenizer.eos_token_id or 0])]).followed == [(0, 1, [])]
    assert (masks.mask_BW[1] == expected[-1]).all()


def test_forced_tokens_are_told_wherever_they_begin_along_the_drafts(
    settings: grammar_settings.Settings, library: Any, tokenizer: Tokenizer
) -> None:
    masks = filler(settings, library, finds_forced=True)
    [y], es, left = tokenizer.encode("y"), tokenizer.encode("es, "), tokenizer.encode("left   xx")
    assert masks.fill([(0, 0, [], [])]).followed == [], "it is yes or no"
    assert masks.fill([(0, 0, [y], es)]).followed == [(0, len(es), [(0, es)])]
    assert masks.fill([(0, 0, es, [left[0]])]).followed == [(0, 1, [(1, left[1:])])]


def test_masks_of_drafts_are_left_out_where_those_of_answers_take_all_the_time(
    settings: grammar_settings.Settings, library: Any, tokenizer: Tokenizer
) -> None:
    masks = filler(settings, library, finds_forced=True)
    masks._drafts_s = -1.0
    [y] = tokenizer.encode("y")
    assert masks.fill([(0, 0, [], [y])]) == ([], [])
    assert masks.mask_BW[0].any()
