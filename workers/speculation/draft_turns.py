"""Says which steps have no drafts though these should pay, and which have some though these should not, so that both
kinds of steps are timed again and again.

Steps with prompts are not timed.
"""

from __future__ import annotations

PROBE_STEPS = 128  # Steps without drafts after which drafts are verified though that should not pay.
FIRST_PROBES = 3  # Number of such steps at first: the first ones wait for what is done once, such as loading kernels.
DRAFTED_STEPS = 128  # Steps since the last timed one without drafts, after which some have none.
PLAIN_STEPS = 3  # Number of these, all of decodes alone. The first one did not overlap with the step before.
LATER_PROBES = 2  # Number of probes after these steps: other numbers of drafts may have become faster.
MOVED = 1.5  # Factor by which the number of decodes has changed when they come earlier, since other steps take longer.
MOVED_STEPS = 16  # Steps after which they come then.
ROW_WEIGHT = 1 / 8  # Weight of one row of steps without prompts in their mean number.


class DraftTurns:
    """The turns of one engine."""

    def __init__(self) -> None:
        self._num_plain = PROBE_STEPS  # Steps without drafts since the last one with drafts.
        self._num_probes_left = FIRST_PROBES  # Steps with drafts that are probes, however many had none.
        self._num_due = PLAIN_STEPS  # Steps that must have no drafts.
        self._decodes = 0  # Decodes of the last timed step without drafts.
        self._num_since = 0  # Steps since then.
        self._row = 0  # Steps since the last one with prompts.
        self._usual_row = 1.0  # Mean number of steps between two with prompts.

    @property
    def is_plain(self) -> bool:
        """Whether the next step must have no drafts."""
        return self._num_due > 0

    @property
    def is_probe(self) -> bool:
        """Whether drafts are verified though that should not pay."""
        return self._num_plain >= PROBE_STEPS or self._num_probes_left > 0

    @property
    def num_in_row(self) -> float:
        """Number of steps without prompts that usually follow each other, at least 1."""
        return max(self._usual_row, float(self._row))

    def ended(self, num_decodes: int, *, has_drafts: bool, has_prompts: bool) -> bool:
        """Takes in a step. Returns whether its time is that of such steps."""
        self._num_plain = 0 if has_drafts else self._num_plain + 1
        self._num_probes_left = max(0, self._num_probes_left - has_drafts)
        self._num_since += 1
        if has_prompts:
            if self._row:
                self._usual_row += ROW_WEIGHT * (self._row - self._usual_row)
            self._row = 0
            return False
        self._row += 1
        if not has_drafts:
            self._num_due = max(0, self._num_due - 1)
        if self._num_plain > 1:
            self._decodes, self._num_since = num_decodes, 0
        fewer, more = sorted((num_decodes, self._decodes))
        if self._num_since >= (MOVED_STEPS if more > MOVED * fewer else DRAFTED_STEPS):
            self._num_due, self._num_since = PLAIN_STEPS, 0
            self._num_probes_left = LATER_PROBES
        return self._num_plain != 1
