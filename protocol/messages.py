"""What crosses between a replica and its GPUWorker, as msgpack: one ClientBatch and one StepBatch a step at most.

Plain data without behaviour. protocol/transport.py carries it; workers/engine.py makes and takes it.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from lorafleet.protocol.errors import WireError
from lorafleet.protocol.histogram import Distribution
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams

# What is wanted of a prompt in the place of an answer: the last token's hidden state, or the mean of all.
Pooling = Literal["last", "mean"]
FinishReason = Literal["stop", "length", "abort", "error"]
# Where an adapter is nearest: in a slot, in host memory, in files of this node, or elsewhere, to be fetched.
Tier = Literal["gpu", "cpu", "disk", "remote"]

Id = TypeVar("Id", str, int)


class Vocabulary(msgspec.Struct, frozen=True):
    """What an adapter has in the place of the base's: ids 0 to size - 1, and those that end an answer."""

    size: int
    eos_token_ids: list[int]


class TokenizerFile(msgspec.Struct, frozen=True):
    """Where the worker finds a tokenizer of the front's, for structured output."""

    path: str
    digest: str
    vocab_size: int


class EngineRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate. `params.n` is 1 here: the front makes one request per sample.

    vocabulary: the adapter's own, which AdapterInfo and its tokenizer's files give; None: the base's. language: that of
    the files that the prompt was tokenized by (AdapterInfo.language). tokenizer: where params.structured_outputs is
    given. group: what all sequences of one client's request have in common; "" for one that is alone. group_sequences,
    group_tokens: how many sequences those are, and how many tokens their prompts have together. queue_timeout_s:
    how long it may wait to start; None: as long as it takes. cache_salt: only requests with the same one share keys and
    values. tenant: who takes turns with other tenants; "" is that of all callers without one. traced: its outputs tell
    its times. priority: among those that wait for one adapter, the lower is the sooner. pooling: an embedding is wanted
    and no answer; params.max_tokens is 1 then.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    lora: LoRARequest | None = None
    vocabulary: Vocabulary | None = None
    language: str = ""
    group: str = ""
    group_sequences: int = 1
    group_tokens: int = 0
    tokenizer: TokenizerFile | None = None
    queue_timeout_s: float | None = None
    priority: int = 0
    pooling: Pooling | None = None
    cache_salt: str = ""
    tenant: str = ""
    traced: bool = False


class SequenceTimes(msgspec.Struct, array_like=True):
    """Of one sequence, monotonic, which all processes of a machine share: queued, its adapter found in a slot (0 where
    it needs none, or had it from the start), first in a step, its first token, its last. 0: not yet."""

    queued_s: float = 0.0
    adapter_s: float = 0.0
    started_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Of one position: the token there, its logprob and rank (1 = most likely), and the k best, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step gave one sequence. The last one has a finish_reason.

    embedding: float32, of a request with a pooling, which has no tokens.
    stop_token_id: the eos or stop_token_ids entry that ended it; it is in token_ids too.
    prompt_logprobs: once, with the first token; None stands for the first prompt token, which has no predecessor.
    queue_s, tier, lora_rank: once, with the first token: how long the sequence waited to start, where its adapter was
    when it was queued ("" of the base), and that adapter's rank (0 of the base).
    times: with the first token and the last, where the request is traced.
    fallback_reason: set when on_lora_load_failure=base answered in the failed adapter's place: why it failed.
    """

    request_id: str
    token_ids: list[int] = []
    embedding: bytes = b""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: WireError | None = None
    fallback_reason: str | None = None
    queue_s: float = 0.0
    tier: Tier | Literal[""] = ""
    lora_rank: int = 0
    times: SequenceTimes | None = None


class LoadAdapter(msgspec.Struct, tag=True):
    """Read and check the adapter, keep it in the CPU tier; answered by an AdapterReply."""

    call_id: int
    lora: LoRARequest


class DropAdapter(msgspec.Struct, tag=True):
    """Forget the adapter's weights in every tier as soon as no request uses them."""

    call_id: int
    digest: str


class PinAdapter(msgspec.Struct, tag=True):
    """Load the adapter and keep it in a slot; answered when it is loaded."""

    call_id: int
    lora: LoRARequest


class UnpinAdapter(msgspec.Struct, tag=True):
    """Let the slot go to others again."""

    call_id: int
    digest: str


AdapterCall = LoadAdapter | DropAdapter | PinAdapter | UnpinAdapter


class AdapterReply(msgspec.Struct):
    call_id: int
    info: AdapterInfo | None = None
    error: WireError | None = None


class AdapterMove(msgspec.Struct, frozen=True):
    """An adapter came one tier nearer (remote to disk, disk to cpu, cpu to gpu), or was dropped and has left the tier
    where it was nearest, for "none": from the order on, with the wait for its requests in flight.

    lora_name: "" of one that was dropped. error: why a load failed, an error's class name; "" where it did not.
    """

    lora_name: str
    source: Tier
    target: Tier | Literal["none"]
    seconds: float
    error: str = ""


class GPUSteps(msgspec.Struct, frozen=True, array_like=True):
    """Those that were timed on the GPU, of one kind: "decode" or "prefill", with adapters or without, with up to so
    many tokens. count, seconds: of all of them."""

    kind: str
    adapters: bool
    tokens: int
    count: int
    seconds: float


class StepStats(msgspec.Struct, frozen=True):
    """Of all steps so far; see step_metrics.py, which has the bounds of the distributions. seconds: by kind."""

    seconds: dict[str, Distribution] = {}
    tokens: Distribution = Distribution()
    sequences: Distribution = Distribution()
    base_tokens: int = 0
    adapter_tokens: int = 0
    adapter_steps: int = 0
    on_gpu: list[GPUSteps] = []


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and running totals of one GPUWorker, for /metrics and the router."""

    num_running: int = 0
    num_waiting: int = 0
    running_tokens: int = 0  # of the running sequences: prompts and what is answered so far
    waiting_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0  # prompt tokens looked up
    prefix_cache_hits_total: int = 0  # of them, found
    preemptions_total: int = 0
    refused_total: dict[str, int] = {}  # by the bound that they hit: requests, tokens, deadline
    steps_total: int = 0
    steps: StepStats = StepStats()
    memory_bytes: dict[str, int] = {}  # by kind, see memory.py; over all GPUs of the replica
    lora_slots_total: int = 0
    lora_slots_used: int = 0
    lora_slots_idle: int = 0  # empty, or no running sequence needs what they hold
    lora_slots_pinned: int = 0
    lora_adapters_wanted: int = 0  # by running and waiting requests
    lora_cpu_adapters: int = 0
    lora_loads_total: int = 0  # disk to CPU
    lora_load_failures_total: int = 0
    lora_load_seconds_total: float = 0.0
    lora_fetches_total: int = 0  # from another place to this node's disk
    lora_fetch_failures_total: int = 0
    lora_fetched_bytes_total: int = 0
    lora_activations_total: int = 0  # CPU to slot
    lora_evictions_total: int = 0  # from slots
    lora_cpu_evictions_total: int = 0
    lora_slot_bytes: int = 0  # of the adapters in slots, over all GPUs of the replica
    lora_cpu_bytes: int = 0  # of those in host memory
    waiting_adapters: list[str] = []  # digests that waiting requests need, the next turn's first
    resident_slots: list[str] = []  # digests in GPU slots, by slot; "" where one is empty
    resident_cpu: list[str] = []  # digests in CPU memory


class Sealed(msgspec.Struct, Generic[Id], frozen=True, array_like=True):
    """An EngineRequest or an AdapterCall that is encoded by itself, see sealing.py. id: its request_id or call_id."""

    id: Id
    body: msgspec.Raw


class ClientBatch(msgspec.Struct):
    """Replica to worker. `sequence` counts up; the worker repeats it in StepBatch.acknowledged."""

    sequence: int
    requests: list[Sealed[str]] = []
    aborts: list[str] = []
    adapter_calls: list[Sealed[int]] = []


class StepBatch(msgspec.Struct):
    """Worker to replica, once a step. sent_s: monotonic."""

    acknowledged: int
    outputs: list[TokenOutput] = []
    adapter_replies: list[AdapterReply] = []
    adapter_moves: list[AdapterMove] = []
    stats: EngineStats | None = None
    fatal: str | None = None
    sent_s: float = 0.0


class EngineHello(msgspec.Struct, frozen=True):
    """What a replica learns from its worker when it starts."""

    vocab_size: int
    max_model_len: int
    kv_cache_tokens: int
    eos_token_ids: list[int]
    hidden_size: int = 0
    falls_back_to_base: bool = False  # where an adapter fails to load
