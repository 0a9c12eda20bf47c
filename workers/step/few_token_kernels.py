"""Chooses the kernels of mixtures and of delta nets for captured decode steps of few tokens without adapters.

They compute in few launches what takes many in other steps: kernels/moe/few_tokens.py, kernels/recurrent/delta_step.py.
The choice holds while a step is captured, as that of own_linears.py does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lorafleet.kernels.linear.linear_tuning import may_start_early
from lorafleet.kernels.moe import few_tokens
from lorafleet.kernels.recurrent import delta_step
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.delta_net import DeltaNet
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.models.sparse_mlp import SparseMLP


@contextmanager
def few_token_kernels(model: EngineModel, num_rows: int, *, has_drafts: bool = False) -> Iterator[int]:
    """Sets the kernels in the block, and yields how many mixtures and delta nets have one. Those of delta nets take one
    token of each sequence, so there are none if sequences have drafts.

    A tensor-parallel rank has none, since other kernels read the outputs of its mixtures.
    """
    mixtures: list[SparseMLP] = []
    delta_nets: list[DeltaNet] = []
    if isinstance(model, DecoderModel) and model.shard.size == 1:
        early = may_start_early(next(model.parameters()).device)
        if num_rows <= few_tokens.MOST_TOKENS:
            mixtures = [mixture for _, mixture in model.mixtures()]
        if num_rows <= delta_step.MOST_TOKENS and not has_drafts:
            delta_nets = [layer.mixer for layer in model.decoder_layers() if isinstance(layer.mixer, DeltaNet)]
        for mixture in mixtures:
            mixture.few_tokens = mixture.for_few_tokens(num_rows, early)
        for delta_net in delta_nets:
            delta_net.few_tokens = delta_net.for_few_tokens(early)
    try:
        yield sum(part.few_tokens is not None for part in (*mixtures, *delta_nets))
    finally:
        for mixture in mixtures:
            mixture.few_tokens = None
        for delta_net in delta_nets:
            delta_net.few_tokens = None
