"""The options of an engine, and the frozen configuration with which a GPUWorker starts.

YAML and command lines are parsed in cluster/config.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.protocol.limits import LogprobsMode, Range
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.options import Option, at_least, bounded_values, check_gib
from lorafleet.protocol.quantization_methods import Method
from lorafleet.protocol.sources import SourcesConfig

Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["safetensors", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "triton", "flashinfer"]
KVCacheDType = Literal["auto", "fp8"]
ModelImpl = Literal["auto", "lorafleet", "transformers"]
OnLoadFailure = Literal["error", "base"]

LEAST_SAMPLED = 384  # Tokens that a step may choose with drafts, though max_num_seqs is smaller.

LOOKUP_LENGTHS = 4, 2  # By default, the most and the fewest tokens of a sequence that "ngram" compares.

_DRAFT_BOUNDS = {
    "num_speculative_tokens": Range(1, 8),
    "prompt_lookup_max": Range(1, 16),
    "prompt_lookup_min": Range(1, 16),
}

# vLLM's names of "mtp" for the families that have such layers here.
_MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp")

# Options that servers or LLM declare again, with a default or a check of their own (AppArgs, LLMOptions).
QueuedRequests = Annotated[
    int | None,
    Option(
        "Requests that may wait on one replica besides the max_num_seqs that it runs. More are rejected with 429 and "
        "Retry-After.",
        at_least(0),
    ),
]
QueuedTokens = Annotated[
    int | None,
    Option(
        "Prompt tokens that may wait on one replica. A request beyond this limit is rejected with 429, unless "
        "nothing waits.",
        at_least(1),
    ),
]
TensorParallelSize = Annotated[
    int,
    Option(
        "GPUs of one node that share each replica's model. Raise it if one GPU is too small or too slow.", at_least(1)
    ),
]
AsyncScheduling = Annotated[
    bool | None, Option("Launch a step before the tokens of the previous one are known. Default: on GPUs only.")
]


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The options of speculative decoding, with vLLM's names. Other methods and other names are refused."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    # grammar: only what the grammar of an answer forces is drafted, as it is with every other method too.
    # ngram: drafts are copied from where the last tokens stood before. draft_model: a small model computes them.
    # eagle3: a head that was trained for the base computes them from its hidden states. mtp: the base's checkpoint has
    # such a head. vLLM's names of it for single families mean the same, and become "mtp".
    method: Literal[
        "grammar",
        "ngram",
        "draft_model",
        "eagle3",
        "mtp",
        "deepseek_mtp",
        "glm4_moe_mtp",
        "glm4_moe_lite_mtp",
        "qwen3_next_mtp",
        "qwen3_5_mtp",
    ]
    num_speculative_tokens: int = 4  # Most draft tokens of one sequence in a step.
    # For ngram: last tokens of a sequence that are compared. Of two places, the longer match counts.
    prompt_lookup_max: int = LOOKUP_LENGTHS[0]
    prompt_lookup_min: int = LOOKUP_LENGTHS[1]  # For ngram: fewest of them that must be equal.
    # For draft_model: the folder of a model with the base's tokenizer. For eagle3: that of the head.
    model: str | None = None

    @property
    def needs_model(self) -> bool:
        """Whether a model or a head drafts, which may be a part of the base's checkpoint."""
        return self.method not in ("grammar", "ngram")

    @property
    def is_on_one_gpu(self) -> bool:
        """Whether one GPU of a replica has the whole model that drafts. Otherwise it is divided as the base is."""
        return self.method == "draft_model"

    @property
    def most_rows(self) -> int:
        """Most tokens of one sequence that a step computes: its last one and its drafts."""
        return 1 + self.num_speculative_tokens

    def __post_init__(self) -> None:
        if self.method in _MTP_NAMES:
            object.__setattr__(self, "method", "mtp")
        if self.method not in ("grammar", "ngram", "draft_model", "eagle3", "mtp"):
            raise ConfigError(
                f"speculative_config: method={self.method!r} is not served. The methods are 'grammar', 'ngram' and "
                "'mtp', which need no model, 'draft_model' and 'eagle3'."
            )
        self._check_model()
        for name, bounds in _DRAFT_BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or value not in bounds:
                raise ConfigError(f"speculative_config: {name}={value!r} must be an integer in {bounds}.")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} exceeds "
                f"prompt_lookup_max={self.prompt_lookup_max}. Lower the first or raise the second."
            )

    def _check_model(self) -> None:
        """Raises ConfigError for a model that is missing or unused, and for fields that its method does not read."""
        has_model = self.method in ("draft_model", "eagle3")
        if not has_model and self.model is not None:
            raise ConfigError(
                f"speculative_config: model={self.model!r} has no use with method={self.method!r}. Leave it out, or "
                "give method='draft_model'."
            )
        if has_model and (type(self.model) is not str or not self.model):
            raise ConfigError(
                f"speculative_config: model={self.model!r} must be the folder of a draft model or head with "
                f"method={self.method!r}. Give one, or method='ngram'."
            )
        if self.method != "ngram" and (self.prompt_lookup_max, self.prompt_lookup_min) != LOOKUP_LENGTHS:
            raise ConfigError(
                f"speculative_config: prompt_lookup_max and prompt_lookup_min have no use with "
                f"method={self.method!r}. Leave them out."
            )

    @classmethod
    def of(cls, given: object) -> SpeculativeConfig | None:
        """Returns the configuration that is given as an object, as a mapping, or as None. Raises ConfigError."""
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f'speculative_config: {str(given)[:100]!r} is no JSON object. Give one as {{"method": "ngram"}}.'
            )
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"speculative_config: {name!r} is not known. Known: {', '.join(known)}.")
        if "method" not in given:
            raise ConfigError("speculative_config: method is missing. Give method='ngram'.")
        return cls(**given)  # The constructor checks each value.


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine that servers and LLM have under the same names and with the same defaults."""

    model: Annotated[str, Option("Local Hugging Face folder: config.json, *.safetensors, tokenizer.json.")]
    _: KW_ONLY
    device: Annotated[Device, Option("auto: a GPU if the cluster has one.")] = "auto"
    dtype: Annotated[DType, Option("auto: the checkpoint's own dtype.")] = "auto"
    model_impl: Annotated[
        ModelImpl,
        Option(
            "lorafleet: its own decoders. transformers: transformers' module of the architecture with lorafleet's "
            "attention and adapters; slower. auto: the first that has the architecture."
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat, Option("dummy: random weights in the shape of config.json, for measurements of speed.")
    ] = "safetensors"
    quantization: Annotated[
        Method | None,
        Option(
            "Quantize the linear layers while they are loaded: nf4 (4 bits, as bitsandbytes), int4 (integers of 4 bits "
            "with a scale per 128 inputs; smallest) or fp8 (e4m3 with one scale per output channel; fastest). Default: "
            "as the checkpoint stores them."
        ),
    ] = None
    # The size of the KV cache limits it too.
    max_model_len: Annotated[
        int | None, Option("Tokens of prompt and answer together. Default: what the model allows.", at_least(1))
    ] = None
    block_size: Annotated[int, Option("Tokens in a KV block.", at_least(1))] = 16
    gpu_memory_utilization: Annotated[
        float, Option("Share of a GPU's memory that the worker may use, 0 to 1.", Range(0, 1, open_low=True))
    ] = 0.9
    kv_cache_tokens: Annotated[
        int | None,
        Option(
            "Tokens in the KV cache. Default: as many as fit in the GPU's remaining memory; at most 65536 on a CPU.",
            at_least(1),
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType, Option("auto: the model's own. fp8 (e4m3) holds twice the tokens with less precision.")
    ] = "auto"
    max_num_seqs: Annotated[int, Option("Most sequences in one step.", at_least(1))] = 256
    max_num_batched_tokens: Annotated[
        int, Option("Most tokens in one step. Raise it for throughput; it costs memory.", at_least(1))
    ] = 2048
    max_gap_ms: Annotated[
        float,
        Option(
            "Milliseconds between two tokens of a stream that a step with prompts should not exceed. Lower it for "
            "steadier streams; raise it to start new requests sooner.",
            at_least(1),
        ),
    ] = 50.0
    ttft_target_ms: Annotated[
        float,
        Option(
            "Milliseconds in which a request should have its first token. While prompts are behind, steps take as long "
            "as max_gap_ms allows; otherwise they are shorter.",
            at_least(1),
        ),
    ] = 500.0
    # At least half of them are left for prompts.
    max_num_mixed_tokens: Annotated[
        int | None,
        Option(
            "Most tokens in a step that processes prompts beside decoding sequences, within max_gap_ms. Default: as "
            "many as max_gap_ms allows.",
            at_least(1),
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Option("Reuse the KV blocks of prompts that share a prefix.")] = True
    state_snapshots: Annotated[
        int | None,
        Option(
            "Snapshots of states in the prefix cache of a model with recurrent layers. Each takes as much memory as "
            "the state of a sequence. 0: such a model has no prefix cache. Default: a quarter of max_num_seqs, and at "
            "least 16.",
            at_least(0),
        ),
    ] = None
    # All ranks have as many blocks, each its own part of them.
    kv_host_gib: Annotated[
        float,
        Option(
            "Host memory in GiB, for each GPU, for KV blocks that leave the prefix cache on the GPU. It is locked at "
            "the start. Half of it is for snapshots of states if the model has recurrent layers. 0: such blocks are "
            "lost, and computed again when they are needed."
        ),
    ] = 0.0
    kv_disk_dir: Annotated[
        str | None, Option("Folder on a fast local disk for KV blocks that leave kv_host_gib. Default: none.")
    ] = None
    kv_disk_gib: Annotated[
        float, Option("Space in GiB, for each GPU, for KV blocks in kv_disk_dir. It is freed when the server ends.")
    ] = 0.0
    speculative_config: Annotated[
        SpeculativeConfig | None,
        Option(
            "Draft several tokens of an answer and check them in one step, where that is faster; the answers stay the "
            'same. JSON as in vLLM: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, '
            '"prompt_lookup_min": 2}, or {"method": "draft_model", "model": FOLDER}, or the same with eagle3, '
            'or {"method": "mtp"}. {"method": "grammar"} drafts only what grammars force. Default: no drafts.'
        ),
    ] = None
    attention_backend: Annotated[AttentionName, Option("auto: the fastest one installed.")] = "auto"
    batch_invariant: Annotated[
        bool,
        Option(
            "Compute the same bits of logprobs for a request whatever else is in the batch. Slower, above all the "
            "prompts on a CPU. What cannot be computed so is refused at the start."
        ),
    ] = False
    enforce_eager: Annotated[bool, Option("Do not use CUDA graphs. Slower; for debugging.")] = False
    cpu_threads: Annotated[
        int | None,
        Option("torch threads of a CPU worker. Default: cores / (replicas x tensor_parallel_size).", at_least(1)),
    ] = None
    seed: Annotated[int, Option("Seed for requests that set none. Each replica mixes it with its own id.")] = 0
    logprobs_mode: Annotated[
        LogprobsMode,
        Option(
            "raw_logprobs: logprobs are of the model's own probabilities. processed_logprobs: of those with which the "
            "tokens were drawn, after penalties, biases, masks, temperature, min_p, top_k and top_p. A request may "
            "choose by its field of the same name."
        ),
    ] = "raw_logprobs"
    enable_return_routed_experts: Annotated[
        bool,
        Option(
            "Record the experts of each token, for requests with return_routed_experts. For bases with experts. The "
            "prompts of such requests are computed whole, without the prefix cache."
        ),
    ] = False
    on_lora_load_failure: Annotated[
        OnLoadFailure, Option("base: if an adapter fails to load, answer from the base model and mark the answer.")
    ] = "error"
    tensor_parallel_size: TensorParallelSize = 1


@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    _: KW_ONLY
    max_queued_requests: QueuedRequests = None
    max_queued_tokens: QueuedTokens = None
    async_scheduling: AsyncScheduling = None
    lora: LoRAConfig | None = None  # None: adapters are disabled.
    sources: SourcesConfig = field(default_factory=SourcesConfig)  # Sources of adapters besides local folders.
    kv_events: KVEventsConfig | None = None  # None: none are published.
    most_replicas: int = 1  # Replicas that may run on one machine, each with its own ports for KV events.

    @property
    def most_sampled(self) -> int:
        """Most tokens that one step chooses: one of each sequence, and those that follow drafts."""
        if self.speculative_config is None:
            return self.max_num_seqs
        most = self.max_num_seqs * self.speculative_config.most_rows
        return min(max(self.max_num_seqs, min(most, LEAST_SAMPLED)), self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        for name, value, bounds, is_optional in bounded_values(self):
            if value not in bounds:
                wanted = f"at least {bounds.low}" if bounds.high == math.inf else f"in {bounds}"
                raise ConfigError(f"{name}={value} must be {wanted}{', or left out' if is_optional else ''}.", name)
        if self.state_snapshots and not self.enable_prefix_caching:
            raise ConfigError(
                f"state_snapshots={self.state_snapshots} has no use with enable_prefix_caching=False. Leave one of "
                "them out.",
                "state_snapshots",
            )
        if self.kv_events is not None and self.kv_events.is_on:
            self.kv_events.check_ports(self.most_replicas)
            if not self.enable_prefix_caching:
                raise ConfigError(
                    "kv_events_config has no use with enable_prefix_caching=False, since no block can be found again. "
                    "Leave one of them out.",
                    "kv_events_config",
                )
        self._check_tiers()
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.block_size:
            raise ConfigError(
                f"kv_cache_tokens={self.kv_cache_tokens} is less than one KV block of block_size={self.block_size} "
                "tokens. Raise the first or lower the second.",
                "kv_cache_tokens",
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} exceeds max_num_batched_tokens={self.max_num_batched_tokens}: a "
                "step could not hold one token of each sequence. Lower the first or raise the second.",
                "max_num_seqs",
            )

    def _check_tiers(self) -> None:
        for name, value in (("kv_host_gib", self.kv_host_gib), ("kv_disk_gib", self.kv_disk_gib)):
            check_gib(name, value)
        if self.kv_host_gib and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_host_gib={self.kv_host_gib} has no use with enable_prefix_caching=False. Leave one of them out.",
                "kv_host_gib",
            )
        if (self.kv_disk_dir is None) != (self.kv_disk_gib == 0):
            given, other = (
                ("kv_disk_gib", "kv_disk_dir") if self.kv_disk_dir is None else ("kv_disk_dir", "kv_disk_gib")
            )
            raise ConfigError(f"{given} has no use without {other}. Set both, or neither.", given)
        if self.kv_disk_dir is not None and not self.kv_host_gib:
            raise ConfigError(
                "kv_disk_dir has no use without kv_host_gib, since KV blocks go through host memory. Set kv_host_gib "
                "too.",
                "kv_disk_dir",
            )
