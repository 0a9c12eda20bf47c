"""One sequence in the engine: its tokens, how far they are computed, and what it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.base_identity import BaseIdentity
from lorafleet.workers.schedule.kv_cache import PrefixMatch, SequenceBlocks

if TYPE_CHECKING:
    from lorafleet.protocol.messages import HeadTask, Pooling, SequenceTimes, Tier, TokenLogprobs, VersionDemand
    from lorafleet.workers.kv_tiers.arrivals import Arrival
    from lorafleet.workers.schedule.routed_rows import RoutedRows
    from lorafleet.workers.structured.decoding import Grammar

UNKNOWN = -1  # a token that the device has sampled or will sample, and that the host has not read yet


@dataclass(slots=True, eq=False)
class TenantTotals:
    """The totals of one tenant over its flows in the FairQueue, apart for those in the background."""

    name: str
    is_background: bool = False
    served: int = 0  # Virtual counter in weighted tokens, as in Flow.
    num_waiting: int = 0  # Number of its sequences that wait.
    waiting_tokens: int = 0  # Tokens of these sequences.


@dataclass(slots=True, eq=False)
class Flow:
    """One tenant's requests for one adapter in the FairQueue. Those in the background are another flow."""

    digest: str  # "" for the base.
    tenant: TenantTotals
    served: int = 0  # Virtual counter in weighted tokens.
    sort_key: tuple[bool, int, int] = (False, 0, 0)  # The smaller it is, the sooner a sequence starts.
    waiting: deque[Sequence] = field(default_factory=deque)  # In the order in which they start.
    unfinished: int = 0  # Sequences that wait or run.


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one client's request."""

    name: str  # EngineRequest.group; "" for a single sequence.
    unfinished: int = 0  # Sequences that wait or run.
    started: bool = False  # A sequence has been in a step, or will be in the next.


@dataclass(slots=True)
class SequenceSnapshots:
    """The snapshots of recurrent states that concern a running sequence, see snapshot_policy.py."""

    last: int  # Number of tokens of the last one that it took or resumed from, or 0.
    stops: list[int]  # Numbers of tokens at which chunks must end, since a snapshot is wanted; ascending.
    resumes_from: tuple[int, int] | None = None  # Node and slot that its first step copies; pinned until then.
    reserved: int | None = None  # Slot for its next snapshot.
    taken: tuple[int, int] | None = None  # Slot and number of tokens of one that is not published yet.
    answer_node: int | None = None  # Node of the one within its answer.


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
    needs_adapter: bool = (
        False  # The base could not answer in its place: the vocabulary or the length is not the base's.
    )
    vocab_size: int = 0  # Size of its own vocabulary: all of its tokens are below.
    stop_ids: frozenset[int] = field(default_factory=frozenset)  # Tokens that end the answer.
    pooling: Pooling | HeadTask | None = None  # If set, it gets an embedding or a head's outputs, and no answer.
    priority: int = 0  # Among the sequences of its flow, lower values start sooner.
    tenant: str = ""  # "" for all callers without a tenant.
    cache_salt: str = ""  # Blocks are shared only among sequences with the same salt.
    base: BaseIdentity = field(default_factory=BaseIdentity)  # The base's weights, the same object for all sequences.
    group: Group = field(default_factory=lambda: Group(""))
    language: str = ""  # EngineRequest.language.
    context_length: int | None = None  # EngineRequest.context_length.
    version_demand: VersionDemand = "any"  # EngineRequest.version_demand.
    takes_best: bool = field(init=False)  # Its tokens have the largest logits of the model, and nobody sees logits.
    is_plain: bool = field(init=False)  # Nothing is computed of its logits and states but its next tokens.
    last_end: int = field(init=False)  # Tokens that are computed when the last one of its longest answer is sampled.
    # What it holds
    slot: int | None = None  # The adapter's slot while the sequence holds it.
    blocks: SequenceBlocks | None = None  # None while the sequence waits.
    state_slot: int | None = None  # Slot of its recurrent state while it runs, if the model has such layers.
    # Slots for the states behind its own tokens of a step with drafts and behind each draft but the last.
    draft_slots: list[int] = field(default_factory=list)
    # Those and state_slot of the step in flight while a step behind it is planned or in flight too. It depends on the
    # accepted drafts which of them has which of the later states, see StateSlots.verified().
    state_ring: list[int] = field(default_factory=list)
    snapshots: SequenceSnapshots | None = None  # None while it waits, or if there are no snapshots.
    next_chunk: Chunk | None = None  # Its next token alone; the same object in each step while it runs.
    # Bounds of num_computed below which nothing is due but the next token: for the scheduler in a step, and for
    # AnswerProgress behind it. They are 0 if something may be due in each step, and once the sequence has stopped.
    decodes_until: int = 0
    quiet_until: int = 0
    arrival: Arrival | None = None  # Set while its KV blocks come back from a tier; it is in no step then.
    avoids_tiers: bool = False  # A state did not come back for it, so it is computed without the tiers.
    grammar: Grammar | None = None  # Set if the answer has one, until the sequence ends.
    # What the chunks so far have added: for "mean" the sum [D], for "cls" the first hidden state [D], for
    # "token_classify" the outputs [T, L] of each chunk, on their way to the host.
    pooled: list[Tensor] = field(default_factory=list)
    # How far it is
    num_computed: int = 0  # Tokens with keys and values in the cache, including those of the step in flight.
    num_unverified: int = 0  # Drafts in flight. Those that are accepted will count as computed, once it is known.
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
    routed: RoutedRows | None = None  # Set if the request wants the experts of its tokens.
    switched: bool = False  # A push has given it another version, and no output says so yet.
    fallback_reason: str | None = None  # The error of its adapter, if the base answers in the adapter's place.
    tier: Tier | Literal[""] = ""  # Where its adapter was when it was queued.
    queued_s: float = 0.0  # time.monotonic(); 0 until then.
    started_s: float = 0.0  # time.monotonic() of its first start; 0 until then.
    times: SequenceTimes | None = None  # None if the request is not traced.

    def __post_init__(self) -> None:
        params = self.params
        shows_logits = params.edits_logits or params.logprobs is not None or params.structured_outputs is not None
        self.takes_best = params.greedy and not shows_logits
        self.is_plain = (
            not shows_logits and params.prompt_logprobs is None and self.pooling is None and self.routed is None
        )
        self.num_rotated = self.num_prompt
        self.last_end = self.num_prompt + self.max_tokens - 1

    @property
    def digest(self) -> str:
        """The digest of its adapter; "" for the base."""
        return "" if self.lora is None else self.lora.digest

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Number of answer tokens that it may still get if all drafts in flight are accepted."""
        return self.max_tokens - self.num_generated - self.num_unverified

    @property
    def reuses_prefixes(self) -> bool:
        """Whether cached keys and values of its first tokens can be used instead of computing them."""
        if self.wants_prompt_logprobs or (self.routed is not None and self.num_generated == 0):
            return False
        return self.pooling not in ("mean", "cls", "token_classify")

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_generated == 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence that a step computes, from num_computed on."""

    sequence: Sequence
    num_tokens: int  # Drafts included.
    resumes_from: int | None = None  # Slot from which the sequence's recurrent states are copied before the step.
    snapshot: int | None = None  # Slot to which they are copied after the step.
    drafts: Many[int] = ()  # Tokens that may follow the sequence's own. The step verifies them.

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next one is sampled."""
        sequence = self.sequence
        return self.num_tokens - len(self.drafts) == len(sequence.tokens) - sequence.num_computed

    @property
    def num_sampled(self) -> int:
        """Number of tokens that are sampled: the next one, and one behind each draft."""
        return 1 + len(self.drafts) if self.samples else 0
