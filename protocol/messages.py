"""The messages between a replica and its GPUWorker, encoded as msgpack: at most one ClientBatch and one StepBatch per
step.

They are plain data without behavior. protocol/transport/engine_socket.py carries them; workers/ creates and consumes
them.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from lorafleet.protocol.engine_control import EngineControl, PauseMode
from lorafleet.protocol.errors import WireError
from lorafleet.protocol.histogram import Distribution
from lorafleet.protocol.limits import LogprobsMode
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams

# The embedding of a prompt: the hidden state of its last token, the mean over all tokens, or that of its first token.
Pooling = Literal["last", "mean", "cls"]
# The outputs of an adapter's own head: for the last token, or for every token.
HeadTask = Literal["classify", "token_classify"]
HEADS: tuple[HeadTask, ...] = ("classify", "token_classify")
FinishReason = Literal["stop", "length", "abort", "error"]
# The nearest place of an adapter: a slot, host memory, files of this node, or elsewhere, from where it must be fetched.
Tier = Literal["gpu", "cpu", "disk", "remote"]

# any: the client takes any version. least: it has named the least. exact: it has named the version.
VersionDemand = Literal["any", "least", "exact"]

Id = TypeVar("Id", str, int)


class Vocabulary(msgspec.Struct, frozen=True):
    """An adapter's own vocabulary: ids 0 to size - 1, and the ids that end an answer."""

    size: int
    eos_token_ids: list[int]


class TokenizerFile(msgspec.Struct, frozen=True):
    """A file from which the worker reads one of the front's tokenizers, for structured output."""

    path: str
    digest: str  # sha256 of the file.
    vocab_size: int  # Width of the masks: all token ids are below.


class EngineRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate."""

    request_id: str  # Unique among the requests in flight.
    prompt_token_ids: list[int]
    params: SamplingParams  # `params.n` is 1 here: the front sends one request per sample.
    lora: LoRARequest | None = None
    # The adapter's own, from AdapterInfo and its tokenizer's files. None: the base's.
    vocabulary: Vocabulary | None = None
    # The eos token of the base's tokenizer, which ends answers beside EngineHello.eos_token_ids. Not read if there is a
    # vocabulary. None: the tokenizer has none.
    base_eos_id: int | None = None
    language: str = ""  # AdapterInfo.language of the files that the prompt was tokenized with.
    context_length: int | None = None  # AdapterInfo.context_length, by the same files. None: the base's context.
    group: str = ""  # Shared by all sequences of one client request; "" for a single sequence.
    group_sequences: int = 1  # Number of sequences in the group.
    group_tokens: int = 0  # Tokens in all prompts of the group together.
    tokenizer: TokenizerFile | None = None  # Set if params.structured_outputs is.
    queue_timeout_s: float | None = None  # Longest time that it may wait to start. None: no limit.
    # Among requests that wait for one adapter, lower values start sooner. BACKGROUND starts after all other requests.
    priority: int = 0
    # If set, an embedding or the outputs of the adapter's head are returned instead of an answer; params.max_tokens is
    # 1 then.
    pooling: Pooling | HeadTask | None = None
    cache_salt: str = ""  # Only requests with the same salt share keys and values.
    tenant: str = ""  # Tenants are scheduled in turns; all callers without a tenant count as "".
    traced: bool = False  # If set, the outputs include SequenceTimes.
    returns_experts: bool = False  # If set, the outputs include the experts of all tokens.
    # What the client demands: a push neither switches nor aborts a request that is for one exact version, nor, if it
    # goes back to an earlier version, one that is for the least one. The base answers neither.
    version_demand: VersionDemand = "any"


class SequenceTimes(msgspec.Struct, array_like=True):
    """Timestamps of one sequence on the monotonic clock, which all processes of a machine share. 0 means not yet."""

    queued_s: float = 0.0  # When it was queued.
    adapter_s: float = 0.0  # When its adapter was in a slot; 0 if it needs none or had it from the start.
    started_s: float = 0.0  # When it was first part of a step.
    first_s: float = 0.0  # When it got its first token.
    ended_s: float = 0.0  # When it got its last token.


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The log probabilities at one position: those of the token there and of the k best tokens."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely.
    top_ids: list[int]  # The k best, best first.
    top_logprobs: list[float]


class WeightSwitch(msgspec.Struct, frozen=True, array_like=True):
    """A change of the adapter's version within an answer."""

    start: int  # Index, among all generated tokens, of the first that the new version has sampled.
    lora: LoRARequest


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """The drafts of one sequence that steps have verified."""

    num_drafts: int = 0  # Steps that verified some.
    num_tokens: int = 0  # Draft tokens in them.
    num_accepted: int = 0  # Those of the tokens that were right.

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_tokens + other.num_tokens,
            self.num_accepted + other.num_accepted,
        )


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The output of one step for one sequence. The last one has a finish_reason."""

    request_id: str
    token_ids: list[int] = []
    # float32; only for a request with pooling, which has no tokens. Outputs of a head: [labels] or [tokens, labels].
    embedding: bytes = b""
    logprobs: list[TokenLogprobs] | None = None
    # Of the tokens computed since the last output, see RoutedShape; b"" unless the request wants them.
    routed_experts: bytes = b""
    # Sent once, with the first token. The first prompt token has None, because it has no predecessor.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0  # Tokens of the prompt that were in the cache; sent once, with the first token.
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # The eos or stop_token_ids entry that ended the sequence; token_ids includes it.
    error: WireError | None = None
    # The reason why the adapter failed, if on_lora_load_failure=base answered in its place.
    fallback_reason: str | None = None
    queue_s: float = 0.0  # Time that the sequence waited to start; sent once, with the first token.
    # Tier of the adapter when the sequence was queued, "" for the base; sent once, with the first token.
    tier: Tier | Literal[""] = ""
    lora_rank: int = 0  # Rank of the adapter, 0 for the base; sent once, with the first token.
    switches: list[WeightSwitch] = []  # Switches to versions that were pushed meanwhile.
    times: SequenceTimes | None = None  # Sent with the first and the last token if the request is traced.
    drafts: DraftCounts | None = None  # Counts since the last output; None if nothing was drafted.


class PlainTokens(msgspec.Struct, array_like=True):
    """The output of one step for sequences that got one token and have nothing else to tell: most of a large batch."""

    request_ids: list[str] = []
    token_ids: list[int] = []  # One for each of these.


class LoadAdapter(msgspec.Struct, tag=True):
    """Command to read and check the adapter and to cache it in the CPU tier; an AdapterReply answers it."""

    call_id: int
    lora: LoRARequest


class DropAdapter(msgspec.Struct, tag=True):
    """Command to delete the adapter's weights from every tier as soon as no request uses them."""

    call_id: int
    digest: str


class PinInSlot(msgspec.Struct, tag=True):
    """Command to load the adapter and to pin it in a slot; it is answered when the adapter is loaded."""

    call_id: int
    lora: LoRARequest


class UnpinFromSlot(msgspec.Struct, tag=True):
    """Command to make the slot available to other adapters again."""

    call_id: int
    digest: str


class ControlCall(msgspec.Struct, tag=True):
    """Command that concerns all requests; it is answered when it has been carried out."""

    call_id: int
    control: EngineControl


AdapterCall = LoadAdapter | DropAdapter | PinInSlot | UnpinFromSlot
EngineCall = AdapterCall | ControlCall


class AdapterReply(msgspec.Struct):
    call_id: int
    info: AdapterInfo | None = None
    error: WireError | None = None


class AdapterMove(msgspec.Struct, frozen=True):
    """A change of an adapter's nearest tier.

    An adapter comes one tier nearer (remote to disk, disk to cpu, cpu to gpu), or a dropped adapter has left its
    nearest tier. In the second case target is "none", and the time counts from the command and includes the wait for
    requests in flight.
    """

    lora_name: str  # "" for an adapter that was dropped.
    source: Tier
    target: Tier | Literal["none"]
    seconds: float
    error: str = ""  # Class name of the error that made a load fail; "" after a success.


class GPUSteps(msgspec.Struct, frozen=True, array_like=True):
    """The steps of one kind that were timed on the GPU."""

    kind: str  # "decode" or "prefill".
    adapters: bool  # Whether the steps used adapters.
    tokens: int  # Upper bound of tokens per step, a power of two.
    count: int  # Number of these steps.
    seconds: float  # Total duration of these steps.


class StepStats(msgspec.Struct, frozen=True):
    """Statistics of all steps so far; step_metrics.py defines the bounds of the distributions."""

    seconds: dict[str, Distribution] = {}  # By kind of step.
    tokens: Distribution = Distribution()
    sequences: Distribution = Distribution()
    base_tokens: int = 0  # Tokens without an adapter.
    adapter_tokens: int = 0  # Tokens with one.
    adapter_steps: int = 0  # Steps with such tokens.
    on_gpu: list[GPUSteps] = []  # The steps that were timed on the GPU.


class KVEventStats(msgspec.Struct, frozen=True, array_like=True):
    """The publisher of KV events."""

    port: int = 0  # Where subscribers connect; 0 if no events are published.
    batches: int = 0  # Batches so far, with those that were dropped.
    dropped: int = 0


class KVTierStats(msgspec.Struct, frozen=True):
    """The tiers below the GPU, host and disk, of KV blocks and snapshots of states. All is empty without tiers."""

    num_bytes: dict[str, int] = {}  # Bytes of the blocks and snapshots in a tier, by tier; of all GPUs of the replica.
    hit_tokens_total: dict[str, int] = {}  # Tokens whose keys and values came back, by tier.
    moved_bytes_total: dict[str, int] = {}  # By direction, as in tier_counts.py; of all GPUs of the replica.
    evictions_total: dict[str, int] = {}  # Blocks and snapshots, by tier.
    lost_blocks_total: dict[str, int] = {}  # By reason, as in tier_counts.py.
    disk_takes_blocks: int = 0  # 1 while blocks are written to disk, 0 without a disk tier or after a failed write.


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and running totals of one GPUWorker, for /metrics and the router."""

    paused: PauseMode | Literal[""] = ""  # Mode of the present pause; "" if there is none. keep: also while asleep.
    sleeping: int = 0  # 1 while GPU memory is given back, else 0.
    base_digest: str = ""  # Of the base's weights in memory, see workers/bases/weights_digest.py.
    base_changes_total: int = 0  # Wake-ups that have found other weights in the checkpoint.
    num_running: int = 0  # Sequences in steps.
    num_waiting: int = 0  # Sequences in the queue, or outside of it for a grammar.
    running_tokens: int = 0  # Tokens of the running sequences: prompts and answers so far.
    waiting_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0  # Prompt tokens that were looked up.
    prefix_cache_hits_total: int = 0  # Prompt tokens that were found.
    # The time, by time.monotonic() of this node, since which every prompt that was in use is still in the prefix cache:
    # 0 if none has left it, and infinity if there is no prefix cache.
    prefixes_kept_since_s: float = 0.0
    state_snapshots_total: int = 0  # Slots for snapshots of recurrent states.
    state_snapshots_used: int = 0
    kv_events: KVEventStats = KVEventStats()
    kv_tiers: KVTierStats = KVTierStats()
    preemptions_total: int = 0
    refused_total: dict[str, int] = {}  # By the bound that was hit: requests, tokens, deadline.
    steps_total: int = 0
    steps: StepStats = StepStats()
    attention_waits: int = 0  # 1 while a faster attention is compiled beside the steps, else 0.
    attention_switched_s: float = 0.0  # Unix time of the change to it; 0 if there was none.
    decode_graphs: int = 0  # CUDA graphs for decode steps that are captured.
    memory_bytes: dict[str, int] = {}  # By kind, see engine_statistics.py; summed over all GPUs of the replica.
    lora_slots_total: int = 0
    lora_slots_used: int = 0
    lora_slots_idle: int = 0  # Empty, or holding an adapter that no running sequence needs.
    lora_slots_pinned: int = 0
    lora_in_use: int = 0  # Adapters that running sequences use.
    lora_in_use_limit: int = 0  # Most adapters that they may use at the same time.
    lora_usable: int = 0  # Further adapters that they may use now, as far as these are in slots or fit into them.
    lora_adapters_wanted: int = 0  # Adapters that running and waiting requests need.
    lora_cpu_adapters: int = 0
    lora_loads_total: int = 0  # Disk to CPU.
    lora_load_failures_total: int = 0
    lora_load_seconds_total: float = 0.0
    lora_fetches_total: int = 0  # From a remote source to this node's disk.
    lora_fetch_failures_total: int = 0
    lora_fetched_bytes_total: int = 0
    lora_neighbor_fetches_total: dict[str, int] = {}  # From other nodes' caches, by outcome.
    lora_activations_total: int = 0  # CPU to slot.
    lora_evictions_total: int = 0  # From slots.
    lora_cpu_evictions_total: int = 0
    lora_slot_bytes: int = 0  # Adapters in slots, summed over all GPUs of the replica.
    lora_memory_total_bytes: int = 0  # Memory for A and B of adapters in slots, on all GPUs.
    lora_memory_used_bytes: int = 0  # The part of that memory that holds adapters.
    lora_memory_borrowed_bytes: int = 0  # The part of it that was the KV cache's, or is on its way there or back.
    lora_memory_moves_total: dict[str, int] = {}  # Groups of KV blocks that were lent for it, and returned.
    lora_cpu_bytes: int = 0  # Adapters in host memory.
    waiting_adapters: list[str] = []  # Digests that waiting requests need, in scheduling order.
    resident_slots: list[str] = []  # Digests in GPU slots, by slot; "" for an empty slot.
    pinned_slots: list[int] = []  # Indices of the slots whose adapters are pinned.
    resident_cpu: list[str] = []  # Digests in host memory.


class Sealed(msgspec.Struct, Generic[Id], frozen=True, array_like=True):
    """An EngineRequest or an EngineCall that is encoded separately from its batch; see sealing.py."""

    id: Id  # Its request_id or call_id.
    body: msgspec.Raw


class ClientBatch(msgspec.Struct):
    """A message from the replica to the worker."""

    sequence: int  # Counts up; the worker repeats it in StepBatch.acknowledged.
    requests: list[Sealed[str]] = []
    aborts: list[str] = []  # Request ids.
    adapter_calls: list[Sealed[int]] = []


class StepBatch(msgspec.Struct):
    """A message from the worker to the replica, sent once per step."""

    acknowledged: int  # ClientBatch.sequence of the last batch that the worker has read.
    outputs: list[TokenOutput] = []  # They follow those in `plain` if a sequence has both kinds.
    plain: PlainTokens = msgspec.field(default_factory=PlainTokens)
    adapter_replies: list[AdapterReply] = []
    adapter_moves: list[AdapterMove] = []
    stats: EngineStats | None = None
    fatal: str | None = None  # The reason why the worker ends; None while it works.
    sent_s: float = 0.0  # Monotonic time.


class RoutedShape(msgspec.Struct, frozen=True):
    """The numbers of one token's experts in TokenOutput.routed_experts: [layers, experts a token], of layers without
    experts too."""

    num_layers: int
    per_token: int
    itemsize: int  # Bytes of a number: 1, or 2 if there are more than 256 experts.


class LoRALimits(msgspec.Struct, frozen=True):
    """The limits of an engine for adapters, which options of the same names set."""

    max_lora_rank: int
    max_loras: int
    max_gpu_loras: int
    max_cpu_loras: int
    lora_dtype: str


class EngineHello(msgspec.Struct, frozen=True):
    """The properties of a worker that its replica receives at the start."""

    vocab_size: int  # The base's.
    max_model_len: int  # Largest number of tokens of a prompt and its answer together, for the base.
    kv_cache_tokens: int  # Number of tokens that the KV cache holds.
    eos_token_ids: list[int]  # The tokens that end an answer by the base's generation_config.json or config.json.
    hidden_size: int = 0  # Dimensions of an embedding.
    falls_back_to_base: bool = False  # Whether the base answers if an adapter fails to load.
    rope_positions: int = 0  # Number of tokens that the base's rope would be for without scaling.
    max_adapter_len: int = 0  # Longest sequence of adapters that have a context of their own. 0 without adapters.
    tensor_parallel_size: int = 1
    dtype: str = ""  # The base's, with torch's name: "bfloat16".
    lora: LoRALimits | None = None  # None: the server runs without adapters.
    routed: RoutedShape | None = None  # None: the experts of tokens are not recorded.
    logprobs_mode: LogprobsMode = "raw_logprobs"  # The mode of requests that do not name one.
    device: str = "cpu"  # UUID of rank 0's GPU, as nvidia-smi shows it; "cpu" without a GPU.
    can_generate: bool = True  # False: the base's checkpoint has no head, so it only embeds texts.

    def ends(self, base_eos_id: int | None) -> list[int]:
        """Returns all tokens that end the base's answers: those of its configuration, and the eos token of its
        tokenizer, as far as the model has it."""
        if base_eos_id is None or base_eos_id in self.eos_token_ids or not 0 <= base_eos_id < self.vocab_size:
            return self.eos_token_ids
        return [*self.eos_token_ids, base_eos_id]

    def context_limit(self, context_length: int | None) -> int:
        """Returns max_model_len for an adapter whose own context length is given; None if it has the base's."""
        return self.max_model_len if context_length is None else min(context_length, self.max_adapter_len)
