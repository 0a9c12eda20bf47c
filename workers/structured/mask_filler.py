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

from lorafleet.workers.structured.filled_masks import FilledMasks, FollowedDrafts

MAX_ERROR_CHARS = 400
# Most masks take 10 us, while the executor's threads take hundreds to start. They compute what is left after this
# time.
ALONE_S = 0.001
# Masks behind drafts, and forced tokens, are computed only within this time of a step, since the step could do without.
DRAFTS_S = 0.002
# Forced tokens that are told at a time: one that the step chooses, and as many as two steps can verify as drafts.
FORCED_TOKENS = 20
DEAD_END = "no token of this model's vocabulary can follow the answer so far"


# (number, row of the mask, tokens answered since the last time, drafts). The rows behind it are those of the drafts.
MaskRequest = tuple[int, int, list[int], list[int]]


@dataclass
class GrammarAnswer:
    """The answer of one sequence."""

    matcher: Any
    over: bool = False  # The grammar has ended, and only the end of the answer may follow.


class MaskFiller:
    """Follows the answers of all sequences through their grammars, and writes which tokens may come next.

    Args:
        mask_fd: Memory that holds the masks and is shared with the process that requests them.
        finds_forced: Whether fill() returns forced tokens.
        alone_s: Seconds after which the executor's threads compute the masks of a step that are left.
        drafts_s: Seconds after which the masks of drafts are left out.
    """

    def __init__(
        self,
        mask_fd: int,
        rows: int,
        vocab_size: int,
        num_threads: int,
        finds_forced: bool = False,
        alone_s: float = ALONE_S,
        drafts_s: float = DRAFTS_S,
    ) -> None:
        words = -(-vocab_size // 32)
        self.mask_BW = np.frombuffer(mmap.mmap(mask_fd, 4 * words * rows), np.int32).reshape(rows, words)
        self._executor = llguidance.LLExecutor(num_threads=num_threads)
        self._finds_forced = finds_forced
        self._alone_s = alone_s
        self._drafts_s = drafts_s
        self._answers: dict[int, GrammarAnswer] = {}

    def begin(self, number: int, compiled: Any) -> None:
        self._answers[number] = GrammarAnswer(compiled.deep_copy())

    def end(self, number: int) -> None:
        self._answers.pop(number, None)

    def fill(self, rows: list[MaskRequest]) -> FilledMasks:
        """Takes in the tokens answered since the last time, and writes the masks of the next ones. Then it writes the
        masks behind drafts, as far as the time allows."""
        began_s = time.perf_counter()
        left: list[tuple[Any, int]] = []
        for number, row, tokens, _ in rows:
            answer = self._answers[number]
            for token in tokens:
                if not answer.over:
                    answer.matcher.consume_token(token)
                    answer.over = answer.matcher.is_stopped() and not answer.matcher.is_error()
            if time.perf_counter() - began_s < self._alone_s:
                llguidance.numpy.fill_next_token_bitmask(answer.matcher, self.mask_BW, row)
            else:
                left.append((answer.matcher, row))
        if left:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, left, self.mask_BW)
        faults = self._faults(rows)
        faulty = {number for number, _ in faults}
        followed = [
            self._follow(number, row, drafts, began_s + self._drafts_s)
            for number, row, _, drafts in rows
            if number not in faulty and (drafts or self._finds_forced)
        ]
        return FilledMasks(faults, [found for found in followed if found.num_masked or found.forced])

    def _faults(self, rows: list[MaskRequest]) -> list[tuple[int, str]]:
        num_rows = max((row + 1 for _, row, _, _ in rows), default=0)
        some_B = np.bitwise_or.reduce(self.mask_BW[:num_rows], axis=1)
        faults = []
        for number, row, _, _ in rows:
            matcher = self._answers[number].matcher
            if matcher.is_error():
                faults.append((number, first_line(matcher.get_error())))
            elif not some_B[row]:
                faults.append((number, DEAD_END))
        return faults

    def _follow(self, number: int, row: int, drafts: list[int], until_s: float) -> FollowedDrafts:
        """Writes the masks behind drafts, up to the first draft that the grammar does not allow. The answer itself goes
        on without them."""
        matcher, num_masked = self._answers[number].matcher, 0
        if drafts:  # A copy takes a few us, and an error in it does no harm.
            matcher = matcher.deep_copy()
        forced = self._forced(matcher, until_s)
        found = [(0, forced)] if forced else []
        for draft in drafts:
            if time.perf_counter() > until_s or matcher.is_stopped() or not self._allows(row + num_masked, draft):
                break
            matcher.consume_token(draft)
            behind = row + num_masked + 1
            llguidance.numpy.fill_next_token_bitmask(matcher, self.mask_BW, behind)
            if matcher.is_error() or not self.mask_BW[behind].any():
                break
            num_masked += 1
            forced = forced[1:]
            if not forced and (forced := self._forced(matcher, until_s)):
                found.append((num_masked, forced))
        return FollowedDrafts(number, num_masked, found)

    def _forced(self, matcher: Any, until_s: float) -> list[int]:
        if not self._finds_forced or matcher.is_stopped() or time.perf_counter() > until_s:
            return []
        tokens: list[int] = matcher.compute_ff_tokens()
        return tokens[:FORCED_TOKENS]

    def _allows(self, row: int, token: int) -> bool:
        word, bit = divmod(token, 32)
        return word < self.mask_BW.shape[1] and bool(self.mask_BW[row, word] >> bit & 1)


def first_line(error: str) -> str:
    """Returns a sentence for the client from the library's message, which may go on with the library's own state."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if named:  # the regex parser first draws an arrow below the place
        return f"{lines[0].split('regex parse error:')[0].rstrip(': ')}: {named[0]}".removeprefix(": ")[
            :MAX_ERROR_CHARS
        ]
    if lines and lines[0] in ("NoExtension", "NoExtensionBias"):
        return "no text can match it, as if each alternative of a rule contained the rule itself"
    return lines[0][:MAX_ERROR_CHARS] if lines else "the grammar cannot be used"
