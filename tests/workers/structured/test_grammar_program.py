"""The program's own parts, in this process: what the threads of its executor do beside what its main one does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.workers.structured import grammar_program as program

REGEXES = ["a+", "[b-z]{3}", "x|y", "[0-9]*", "é", "(no|yes)"]


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[program.Server]:
    files = TokenizerFiles()
    file, memory = files.of(tokenizer), os.memfd_create("masks")
    settings = program.Settings(
        file.path, file.vocab_size, [tokenizer.eos_token_id or 0], 8, memory, 2, 1, 1, 1, 1, 1, 1
    )
    os.ftruncate(memory, 4 * -(-file.vocab_size // 32) * settings.rows)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = program.Server(ours, theirs, settings, program.read_tokenizer(settings))
        for number, regex in enumerate(REGEXES):
            grammar = program.grammar_of(("regex", regex, False))
            made.answers[number] = program.GrammarAnswer(program.matcher_of(made.tokenizer, grammar))
        yield made
    os.close(memory)
    files.close()


def test_masks_of_the_executor_are_those_of_the_main_thread(server: program.Server) -> None:
    rows: list[tuple[int, int, list[int]]] = [(number, number, []) for number in range(len(REGEXES))]
    found = []
    for alone_s in (60.0, -1.0):
        server.alone_s = alone_s
        server.mask_BW[:] = 0
        assert server.fill(rows) == []
        found.append(server.mask_BW.copy())
    assert len({row.tobytes() for row in found[0][: len(rows)]}) == len(rows)
    assert (found[0] == found[1]).all()
