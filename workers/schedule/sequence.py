"""One sequence in the engine: its tokens, how far they are computed, and what it holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import Pooling, SequenceTimes, Tier, TokenLogprobs
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.kv_cache import SequenceBlocks

if TYPE_CHECKING:
    from lorafleet.workers.structured.decoding import Grammar

UNKNOWN = -1  # a token that the device has sampled, or will, and the host has not read yet


@dataclass(slots=True, eq=False)
class TenantTurn:
    """One tenant in the FairQueue."""

    name: str
    served: int = 0  # virtual counter, in weighted tokens, as a Lane's
    num_waiting: int = 0
    waiting_tokens: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """One adapter's requests of one tenant in the FairQueue. served: its virtual counter, in weighted tokens. place:
    the smaller, the sooner it is its turn. unfinished: its sequences that wait or run."""

    digest: str
    tenant: TenantTurn
    served: int = 0
    place: tuple[int, int] = (0, 0)
    waiting: deque[Sequence] = field(default_factory=deque)
    unfinished: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one client's request. started: one of them has been in a step, or will be in the next."""

    name: str
    unfinished: int = 0
    started: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """tokens: prompt, then answer; the last is UNKNOWN while the step that samples it is under way. num_computed: how
    many of them have their keys and values in the cache, or will after that step.

    seed is always set: the request's own, or one drawn for it. slot: the adapter's, while it is held. first_adapted:
    the first token that it works on (workers/slots/activation.py), known from when the slot is. blocks: None while
    waiting. lane: its adapter's, from add() on. queued_s, started_s: monotonic; 0 before. prompt_logprobs fill up chunk
    by chunk and go out with the first token. own_vocabulary: its adapter has another vocabulary than the base, which
    could not answer in its place. cache_salt: its blocks are shared only with sequences that have the same one. times:
    None where nobody traces it.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    max_tokens: int
    lora: LoRARequest | None = None
    slot: int | None = None
    first_adapted: int = 0
    blocks: SequenceBlocks | None = None
    num_computed: int = 0
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    fallback_reason: str | None = None
    own_vocabulary: bool = False
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    group: Group = field(default_factory=lambda: Group(""))
    priority: int = 0
    pooling: Pooling | None = None
    pooled_D: Tensor | None = None  # of its mean, the sum so far
    num_rotated: int = field(init=False)
    lane: Lane = field(init=False)
    tier: Tier | Literal[""] = ""  # where its adapter was when it was queued
    grammar: Grammar | None = None
    queued_s: float = 0.0
    started_s: float = 0.0
    cache_salt: str = ""
    tenant: str = ""
    times: SequenceTimes | None = None
    deadline_number: int | None = None  # of its entry among Admission's deadlines
    vocab_size: int = 0  # of its own vocabulary: all of its tokens are below

    def __post_init__(self) -> None:
        self.num_rotated = self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def reuses_prefixes(self) -> bool:
        """Whether its first tokens need not be computed where their keys and values are in the cache."""
        return not self.wants_prompt_logprobs and self.pooling != "mean"

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_generated == 0
