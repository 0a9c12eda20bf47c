"""Runs the steps of a draft model on rank 0, and those of a head on all ranks, each of which has a part of it.

Rank 0 decides what is drafted. The other ranks run each step of a head when rank 0 orders it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.workers.device.host_copy import Download
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.speculation.feature_rows import FeatureRows
from lorafleet.workers.step.step_runner import StepRunner
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import RunDraftStep, SentPlan
from lorafleet.workers.tp.shared_unread import SentUnread, share_unread


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
        self._check = None if others is None else others.check

    @torch.inference_mode()
    def run(self, plan: StepPlan, sources: list[int] | Tensor, unread: UnreadInputs | None = None) -> None:
        """Queues a step that chooses the likeliest tokens, which are in StepInputs.sampled_B on each rank.

        Args:
            sources: For a head, the row of the feature of each token, as in FeatureRows.begin.
            unread: What the plan lacks.
        """
        assert plan.is_greedy, "drafts that are drawn would have to be sent to the other ranks"
        if self._others is not None:
            unread, sources = self._send(self._others, plan, sources, unread)
        if self.rows is not None:
            self.rows.begin(sources)
        self.runner.run(plan, unread=unread, check=self._check)
        if self.rows is not None:
            self.rows.end(plan.sampling, self.runner.inputs.sampled_B)

    def read(self, tokens_B: Tensor) -> list[int]:
        """Returns tokens that were drawn. Waits for the device. Raises EngineDead if another rank ends meanwhile."""
        download = Download(self.runner.device, self._check)
        on_host_B = download.add(tokens_B)
        download.close()
        download.wait()
        return on_host_B.tolist()

    @torch.inference_mode()
    def run_ordered(self, order: RunDraftStep) -> None:
        """Queues a step that rank 0 has ordered."""
        plan = order.sent.plan(self._block_size)
        if order.unread is None:
            self.run(plan, order.sources)
            return
        unread, source_T = share_unread(self.runner.model.group, order.unread, self.runner.device)
        self.run(plan, order.sources if source_T is None else source_T, unread)

    def _send(
        self, others: OtherRanks, plan: StepPlan, sources: list[int] | Tensor, unread: UnreadInputs | None
    ) -> tuple[UnreadInputs | None, list[int] | Tensor]:
        """Orders the other ranks to run the step, and gives them what only this device knows. Returns both as all
        ranks have them."""
        source_T, known = (sources, []) if isinstance(sources, Tensor) else (None, sources)
        sent = None if unread is None else SentUnread.of(unread, source_T)
        others.send(RunDraftStep(SentPlan.of(plan, self._block_size), known, sent))
        if sent is None:
            return None, sources
        shared, shared_T = share_unread(self.runner.model.group, sent, self.runner.device, unread, source_T)
        return shared, known if shared_T is None else shared_T
