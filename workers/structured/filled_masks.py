"""Defines the answer of a process of grammar_program.py to a request for masks."""

from __future__ import annotations

from typing import NamedTuple


class FollowedDrafts(NamedTuple):
    """The result of following one sequence's grammar along its drafts."""

    number: int  # The sequence's, as in GrammarProcess.open.
    num_masked: int  # Number of its first drafts behind which there is a mask.
    # (number of drafts, tokens): after so many of the drafts, the grammar allows only these tokens one after another.
    forced: list[tuple[int, list[int]]]


class FilledMasks(NamedTuple):
    faults: list[tuple[int, str]]  # The sequences that cannot go on, and why.
    followed: list[FollowedDrafts]  # Sequences about whose drafts or forced tokens there is something to tell.
