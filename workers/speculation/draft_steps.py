"""Runs the steps of a draft model on rank 0, and those of a head on all ranks, each of which has a part of it.

Rank 0 decides what is drafted. The other ranks run each step of a head when rank 0 orders it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.speculation.feature_rows import FeatureRows
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import RunDraftStep, SentPlan


class DraftSteps:
    """The steps of one draft model or head on one rank.

    Args:
        runner: Runs the model of this rank.
        block_size: Tokens of a block of its KV cache.
        rows: What a head reads and writes beside the inputs. None for a model of its own.
        others: The ranks that run each step as well. None on these ranks themselves, and if there are none.
    """

    def __init__(
        self, runner: StepRunner, block_size: int, rows: FeatureRows | None, others: OtherRanks | None = None
    ) -> None:
        self.runner = runner
        self.rows = rows
        self._block_size = block_size
        self._others = others

    @torch.inference_mode()
    def run(self, plan: StepPlan, sources: list[int] | Tensor, unread: UnreadInputs | None = None) -> None:
        """Queues a step that chooses the likeliest tokens, which are in StepInputs.sampled_B on each rank.

        Args:
            sources: For a head, the row of the feature of each token, as in FeatureRows.begin.
            unread: What the plan lacks. There must be no other ranks then, which could not find it.
        """
        assert plan.is_greedy, "drafts that are drawn would have to be sent to the other ranks"
        if self._others is not None:
            assert unread is None and isinstance(sources, list)
            self._others.send(RunDraftStep(SentPlan.of(plan, self._block_size), sources))
        if self.rows is None:
            self.runner.run(plan, unread=unread)
            return
        self.rows.begin(sources)
        self.runner.run(plan, unread=unread)
        self.rows.end(plan.sampling, self.runner.inputs.sampled_B)
