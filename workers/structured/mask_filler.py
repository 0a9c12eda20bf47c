"""Fills the masks of a step's answers, in the process of grammar_program.py."""

# B rows · W words of 32 tokens each

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

MAX_ERROR_CHARS = 400
# Most masks take 10 us, while the executor's threads take hundreds to start. They compute what is left after this
# time.
ALONE_S = 0.001
DEAD_END = "no token of this model's vocabulary can follow the answer so far"


@dataclass
class GrammarAnswer:
    """The answer of one sequence."""

    matcher: Any
    over: bool = False  # The grammar has ended, and only the end of the answer may follow.


class MaskFiller:
    """Follows the answers of all sequences through their grammars, and writes which tokens may come next.

    Args:
        mask_fd: Memory that holds the masks and is shared with the process that requests them.
        alone_s: Seconds after which the executor's threads compute the masks of a step that are left.
    """

    def __init__(self, mask_fd: int, rows: int, vocab_size: int, num_threads: int, alone_s: float = ALONE_S) -> None:
        words = -(-vocab_size // 32)
        self.mask_BW = np.frombuffer(mmap.mmap(mask_fd, 4 * words * rows), np.int32).reshape(rows, words)
        self._executor = llguidance.LLExecutor(num_threads=num_threads)
        self._alone_s = alone_s
        self._answers: dict[int, GrammarAnswer] = {}

    def begin(self, number: int, compiled: Any) -> None:
        self._answers[number] = GrammarAnswer(compiled.deep_copy())

    def end(self, number: int) -> None:
        self._answers.pop(number, None)

    def fill(self, rows: list[tuple[int, int, list[int]]]) -> list[tuple[int, str]]:
        """Takes in the tokens answered since the last time, writes the masks of the next ones, and returns the faults.

        The rows must be rows 0, 1, … of the mask, in this order.
        """
        began = time.perf_counter()
        left: list[tuple[Any, int]] = []
        for number, row, tokens in rows:
            answer = self._answers[number]
            for token in tokens:
                if not answer.over:
                    answer.matcher.consume_token(token)
                    answer.over = answer.matcher.is_stopped() and not answer.matcher.is_error()
            if time.perf_counter() - began < self._alone_s:
                llguidance.numpy.fill_next_token_bitmask(answer.matcher, self.mask_BW, row)
            else:
                left.append((answer.matcher, row))
        if left:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, left, self.mask_BW)
        some_B = np.bitwise_or.reduce(self.mask_BW[: len(rows)], axis=1)
        faults = []
        for number, row, _ in rows:
            matcher = self._answers[number].matcher
            if matcher.is_error():
                faults.append((number, first_line(matcher.get_error())))
            elif not some_B[row]:
                faults.append((number, DEAD_END))
        return faults


def first_line(error: str) -> str:
    """Returns a sentence for the client from the library's message, which may go on with the library's own state."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if named:  # the regex parser first draws an arrow below the place
        return f"{lines[0].split('regex parse error:')[0].rstrip(': ')}: {named[0]}".removeprefix(": ")[
            :MAX_ERROR_CHARS
        ]
    return lines[0][:MAX_ERROR_CHARS] if lines else "the grammar cannot be used"
