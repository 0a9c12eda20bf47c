"""One sequence in the engine: its tokens, how far they are computed, and what it holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.kv_cache import PrefixMatch, SequenceBlocks

if TYPE_CHECKING:
    from lorafleet.protocol.messages import Pooling, SequenceTimes, Tier, TokenLogprobs
    from lorafleet.workers.structured.decoding import Grammar

UNKNOWN = -1  # a token that the device has sampled or will sample, and that the host has not read yet


@dataclass(slots=True, eq=False)
class TenantTotals:
    """The totals of one tenant over its flows in the FairQueue."""

    name: str
    served: int = 0  # Virtual counter in weighted tokens, as in Flow.
    num_waiting: int = 0  # Number of its sequences that wait.
    waiting_tokens: int = 0  # Tokens of these sequences.


@dataclass(slots=True, eq=False)
class Flow:
    """One tenant's requests for one adapter in the FairQueue."""

    digest: str  # "" for the base.
    tenant: TenantTotals
    served: int = 0  # Virtual counter in weighted tokens.
    sort_key: tuple[int, int] = (0, 0)  # The smaller it is, the sooner a sequence starts.
    waiting: deque[Sequence] = field(default_factory=deque)  # In the order in which they start.
    unfinished: int = 0  # Sequences that wait or run.


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one client's request."""

    name: str  # EngineRequest.group; "" for a single sequence.
    unfinished: int = 0  # Sequences that wait or run.
    started: bool = False  # A sequence has been in a step, or will be in the next.


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """The state of one sequence in the engine."""

    # The request
    request_id: str
    tokens: list[int]  # Prompt, then answer; the last is UNKNOWN while the step that samples it is in flight.
    num_prompt: int  # Number of tokens of the prompt.
    params: SamplingParams
    seed: int  # The request's own, or one drawn for it.
    max_tokens: int  # Largest number of answer tokens, bounded by the longest sequence served.
    lora: LoRARequest | None = None  # The adapter; None for the base, which may answer if the adapter fails to load.
    own_vocabulary: bool = False  # The adapter's vocabulary is not the base's, which could not answer in its place.
    vocab_size: int = 0  # Size of its own vocabulary: all of its tokens are below.
    stop_ids: frozenset[int] = field(default_factory=frozenset)  # Tokens that end the answer.
    pooling: Pooling | None = None  # If set, it gets an embedding in place of an answer.
    priority: int = 0  # Among the sequences of its flow, lower values start sooner.
    tenant: str = ""  # "" for all callers without a tenant.
    cache_salt: str = ""  # Blocks are shared only among sequences with the same salt.
    group: Group = field(default_factory=lambda: Group(""))
    # What it holds
    slot: int | None = None  # The adapter's slot while the sequence holds it.
    blocks: SequenceBlocks | None = None  # None while the sequence waits.
    grammar: Grammar | None = None  # Set if the answer has one, until the sequence ends.
    pooled_D: Tensor | None = None  # For mean pooling, the sum so far.
    # How far it is
    num_computed: int = 0  # Tokens with keys and values in the cache, including those of the step in flight.
    num_cached: int = 0  # Tokens of the prompt that were in the cache at its first start.
    num_rotated: int = field(init=False)  # Tokens that were computed as a prompt, see RopeConfig.turns_anew.
    first_adapted: int = 0  # First token that the adapter works on (activation.py); known once the slot is.
    ended: bool = False  # It has ended or was aborted; what steps in flight compute for it is dropped.
    # Its place in the queue
    flow: Flow = field(init=False)  # The adapter's flow, set by FairQueue.add().
    deadline_number: int | None = None  # Number of its entry among QueueAdmission's deadlines.
    prefix: PrefixMatch | None = None  # Its cached blocks as of its last attempt to start, if that found too few free.
    # For its outputs
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # Filled chunk by chunk; sent with the first token.
    fallback_reason: str | None = None  # The error of its adapter, if the base answers in the adapter's place.
    tier: Tier | Literal[""] = ""  # Where its adapter was when it was queued.
    queued_s: float = 0.0  # time.monotonic(); 0 until then.
    started_s: float = 0.0  # time.monotonic() of its first start; 0 until then.
    times: SequenceTimes | None = None  # None if the request is not traced.

    def __post_init__(self) -> None:
        self.num_rotated = self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Number of answer tokens that it may still get."""
        return self.max_tokens - self.num_generated

    @property
    def reuses_prefixes(self) -> bool:
        """Whether cached keys and values of its first tokens can be used instead of computing them."""
        return not self.wants_prompt_logprobs and self.pooling != "mean"

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_generated == 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence that a step computes, from num_computed on."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next one is sampled."""
        return self.num_tokens == self.sequence.num_uncomputed
