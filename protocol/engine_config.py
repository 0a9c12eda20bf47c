"""The options of an engine, and the frozen configuration with which a GPUWorker starts.

YAML and command lines are parsed in cluster/config.py.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Literal

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.limits import Range
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.options import Option, at_least, bounded_values
from lorafleet.protocol.quantization_methods import Method
from lorafleet.protocol.sources import SourcesConfig

Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["safetensors", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "triton", "flashinfer"]
KVCacheDType = Literal["auto", "fp8"]
OnLoadFailure = Literal["error", "base"]

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


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine that servers and LLM have under the same names and with the same defaults."""

    model: Annotated[str, Option("Local Hugging Face folder: config.json, *.safetensors, tokenizer.json.")]
    _: KW_ONLY
    device: Annotated[Device, Option("auto: a GPU if the cluster has one.")] = "auto"
    dtype: Annotated[DType, Option("auto: the checkpoint's own dtype.")] = "auto"
    load_format: Annotated[
        LoadFormat, Option("dummy: random weights in the shape of config.json, for measurements of speed.")
    ] = "safetensors"
    quantization: Annotated[
        Method | None,
        Option(
            "Quantize the linear layers while they are loaded: nf4 (4 bits, as bitsandbytes; smallest) or fp8 (e4m3 "
            "with one scale per output channel; fastest). Default: as the checkpoint stores them."
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
    attention_backend: Annotated[AttentionName, Option("auto: the fastest one installed.")] = "auto"
    enforce_eager: Annotated[bool, Option("Do not use CUDA graphs. Slower; for debugging.")] = False
    cpu_threads: Annotated[
        int | None,
        Option("torch threads of a CPU worker. Default: cores / (replicas x tensor_parallel_size).", at_least(1)),
    ] = None
    seed: Annotated[int, Option("Seed for requests that set none. Each replica mixes it with its own id.")] = 0
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

    def __post_init__(self) -> None:
        for name, value, bounds, is_optional in bounded_values(self):
            if value not in bounds:
                wanted = f"at least {bounds.low}" if bounds.high == math.inf else f"in {bounds}"
                raise ConfigError(f"{name}={value} must be {wanted}{', or left out' if is_optional else ''}.", name)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} exceeds max_num_batched_tokens={self.max_num_batched_tokens}: a "
                "step could not hold one token of each sequence. Lower the first or raise the second.",
                "max_num_seqs",
            )
