"""The masks, filled in this process: what the threads of the executor do beside what the main thread does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.workers.structured import grammar_program as program
from lorafleet.workers.structured.mask_filler import MaskFiller

REGEXES = ["a+", "[b-z]{3}", "x|y", "[0-9]*", "é", "(no|yes)"]
ROWS = [(number, number, list[int]()) for number in range(len(REGEXES))]


@pytest.fixture
def settings(tokenizer: Tokenizer) -> Iterator[program.Settings]:
    files = TokenizerFiles()
    file, memory = files.of(tokenizer), os.memfd_create("masks")
    os.ftruncate(memory, 4 * -(-file.vocab_size // 32) * 8)
    yield program.Settings(file.path, file.vocab_size, [tokenizer.eos_token_id or 0], 8, memory, 2, 1, 1, 1, 1, 1, 1)
    os.close(memory)
    files.close()


def test_masks_of_the_executor_are_those_of_the_main_thread(settings: program.Settings) -> None:
    library = program.read_tokenizer(settings)
    found = []
    for alone_s in (60.0, -1.0):
        masks = MaskFiller(settings.mask_fd, settings.rows, settings.vocab_size, settings.num_threads, alone_s)
        for number, regex in enumerate(REGEXES):
            masks.begin(number, program.matcher_of(library, program.grammar_of(("regex", regex, False))))
        masks.mask_BW[:] = 0
        assert masks.fill(ROWS) == []
        found.append(masks.mask_BW.copy())
    assert len({row.tobytes() for row in found[0][: len(ROWS)]}) == len(ROWS)
    assert (found[0] == found[1]).all()
