"""What an adapter does to its base, in the few forms that the engine serves. Every kind of adapter is turned into these
(workers/lora/kinds/); behind them nobody asks of which kind it was.

All values are whole (not one rank's part), on the CPU, and as exact as the files allow: matrices in the dtype in which
they were stored, or float32 where they were computed. lora_model.py casts them and takes a rank's part.
"""

# R LoRA rank · D in features · O out features · V vocabulary · N rows · E experts · G groups of outputs

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adds scaling * B A. scaling is kept apart, since multiplying it in would round B."""

    a_RD: Tensor
    b_OR: Tensor
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        return self.b_OR.shape[1]


@dataclass(frozen=True, slots=True)
class Kronecker:
    """Adds scaling * (w1 (x) w2): output o1 * O2 + o2 reads input d1 * D2 + d2. Too high a rank for A and B, but few
    bytes."""

    w1: Tensor  # [O1, D1]
    w2: Tensor  # [O2, D2]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class LinearForm:
    """One projection with its adapter: y = out_scale * ((W + dW) x) + bias, where dW is low_rank or kronecker.

    out_scale_O: float32, None is 1. bias_O: float32, in the place of the base's own bias; None: the base's bias, which
    out_scale does not scale. So DoRA has out_scale alone, and IA3, which scales the base's bias too, both.
    """

    low_rank: LowRank | None = None
    kronecker: Kronecker | None = None
    out_scale_O: Tensor | None = None
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackedLowRank:
    """Of all experts of a layer. Their outputs are G equal groups, each of which has A of its own: expert e adds
    scaling_EG[e, g] * (g-th part of b_EOR[e]) a_EGRD[e, g] to group g. scaling_EG: float32."""

    a_EGRD: Tensor
    b_EOR: Tensor
    scaling_EG: Tensor

    @property
    def rank(self) -> int:
        return self.b_EOR.shape[2]


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """A mixture of experts. gate_up: outputs are gate_proj's, then up_proj's; they may share A (G = 1) or not."""

    gate_up: StackedLowRank | None = None
    down: StackedLowRank | None = None

    @property
    def stacks(self) -> list[StackedLowRank]:
        return [stack for stack in (self.gate_up, self.down) if stack is not None]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of a table of the vocabulary that the adapter has in the place of the base's."""

    token_N: Tensor  # int64, ascending, distinct
    row_ND: Tensor


@dataclass(frozen=True, slots=True)
class VocabForm:
    """The embedding or the head. table_VD replaces the base's, and may have more or fewer rows; rows replaces some of
    its rows; low_rank is added to what is there then: of an embedding A is [R, V] and B [D, R], of a head A is [R, D]
    and B [V, R]. bias_V: of a head, float32."""

    low_rank: LowRank | None = None
    table_VD: Tensor | None = None
    rows: TokenRows | None = None
    bias_V: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdapterForms:
    """Modules are called as in the base without "model.": linears "layers.0.self_attn.q_proj", norms
    "layers.0.input_layernorm", "layers.0.self_attn.q_norm" or "norm", with their replaced weights [D], experts
    "layers.0.mlp.experts".

    Where the base ties embedding and head, each form says for itself what changes: a form for one of them unties them.
    invocation_tokens: of an activated LoRA (aLoRA), which works from the last place on where the prompt has them.
    """

    linears: Mapping[str, LinearForm] = field(default_factory=dict)
    embedding: VocabForm | None = None
    head: VocabForm | None = None
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Mapping[str, ExpertsForm] = field(default_factory=dict)
    invocation_tokens: tuple[int, ...] = ()
