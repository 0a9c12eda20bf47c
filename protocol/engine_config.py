"""What one GPUWorker is told at its start, frozen. YAML and command lines are parsed in cluster/config.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.quantization_methods import Method
from lorafleet.protocol.sources import SourcesConfig

Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["safetensors", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "triton", "flashinfer"]
KVCacheDType = Literal["auto", "fp8"]
OnLoadFailure = Literal["error", "base"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str  # local Hugging Face folder: config.json, *.safetensors, tokenizer.json
    device: Device = "auto"  # auto: cuda where there is a GPU, else cpu
    dtype: DType = "auto"  # auto: the checkpoint's own
    load_format: LoadFormat = "safetensors"  # dummy: random weights in config.json's shape, to measure speed with
    max_model_len: int | None = None  # tokens of prompt and answer; None: the model's limit, or the KV cache's if less
    block_size: int = 16  # tokens a KV block
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations, adapters and KV cache
    kv_cache_tokens: int | None = None  # size of the KV cache; None: what is left on a GPU, 65536 or less on a CPU
    # How linears are held; None: as the checkpoint has them. nf4 for the smallest base, fp8 for the fastest.
    quantization: Method | None = None
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's; fp8: e4m3, twice the tokens, less exact
    max_num_seqs: int = 256  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step; raise it for throughput, at the price of memory
    # Tokens in a step that decodes beside prompts, half of them at least left for prompts. Lower it to shorten the gaps
    # between streamed tokens while prompts arrive, raise it to answer new requests sooner.
    max_num_mixed_tokens: int = 512
    # Requests are refused with 429 while this many sequences wait beyond max_num_seqs; None: none is.
    max_queued_requests: int | None = None
    # And while so many tokens of prompts would wait with theirs; None: no bound. Raise it if prompts are long.
    max_queued_tokens: int | None = None
    enable_prefix_caching: bool = True
    attention_backend: AttentionName = "auto"
    async_scheduling: bool | None = None  # launch a step before the last one's tokens are known; None: on a GPU
    enforce_eager: bool = False  # no CUDA graphs; to find faults with
    tensor_parallel_size: int = 1  # GPUs (or CPU processes) that share one model; raise it where it does not fit one
    lora: LoRAConfig | None = None  # None: no adapters
    sources: SourcesConfig = field(default_factory=SourcesConfig)  # where adapters may come from, but local folders
    on_lora_load_failure: OnLoadFailure = "error"  # base: answer from the base model, and say so in the response
    cpu_threads: int | None = None  # torch's intra-op threads; None: torch's own choice
    seed: int = 0  # seeds the requests that name none

    def __post_init__(self) -> None:
        counts = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_num_mixed_tokens")
        for name in (*counts, "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", name)
        for name in ("max_model_len", "kv_cache_tokens", "max_queued_tokens", "cpu_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1, or left out.", name)
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ConfigError(
                f"max_queued_requests={self.max_queued_requests} must be at least 0, or left out.",
                "max_queued_requests",
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1].", "gpu_memory_utilization"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} is over max_num_batched_tokens={self.max_num_batched_tokens}: "
                "a step could not hold one token of each sequence. Lower the first or raise the second.",
                "max_num_seqs",
            )
