"""The frozen configuration with which a GPUWorker starts. YAML and command lines are parsed in cluster/config.py."""

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
    model: str  # Local Hugging Face folder with config.json, *.safetensors and tokenizer.json.
    device: Device = "auto"  # auto: cuda if there is a GPU, else cpu.
    dtype: DType = "auto"  # auto: the checkpoint's dtype.
    load_format: LoadFormat = "safetensors"  # dummy: random weights in the shapes of config.json, to measure speed.
    # Tokens of prompt and answer. None: the model's limit, or the size of the KV cache if that is smaller.
    max_model_len: int | None = None
    block_size: int = 16  # Tokens per KV block.
    gpu_memory_utilization: float = 0.9  # Share of the GPU's memory for weights, activations, adapters and KV cache.
    # Size of the KV cache in tokens. None: the memory that remains on a GPU, at most 65536 tokens on a CPU.
    kv_cache_tokens: int | None = None
    # Quantization of the linear layers. None: as in the checkpoint. nf4 is the smallest, fp8 the fastest.
    quantization: Method | None = None
    # auto: the model's dtype. fp8: e4m3, which holds twice the tokens and is less exact.
    kv_cache_dtype: KVCacheDType = "auto"
    max_num_seqs: int = 256  # Sequences in one step.
    max_num_batched_tokens: int = 2048  # Tokens in one step; raise it for throughput, at the price of memory.
    # Tokens in a step that mixes decoding with prompts; at least half of them are left for prompts. Lower it to
    # shorten the gaps between streamed tokens while prompts arrive; raise it to answer new requests sooner.
    max_num_mixed_tokens: int = 512
    # Requests are rejected with 429 while this many sequences wait beyond max_num_seqs. None: no bound.
    max_queued_requests: int | None = None
    # Requests are rejected with 429 if they would bring the waiting prompts above this many tokens. None: no bound.
    # Raise it if prompts are long.
    max_queued_tokens: int | None = None
    enable_prefix_caching: bool = True
    attention_backend: AttentionName = "auto"
    # Launch a step before the tokens of the last one are known. None: on GPUs only.
    async_scheduling: bool | None = None
    enforce_eager: bool = False  # Disables CUDA graphs, for debugging.
    # GPUs (or CPU processes) that share one model; raise it if the model does not fit on one.
    tensor_parallel_size: int = 1
    lora: LoRAConfig | None = None  # None: adapters are disabled.
    sources: SourcesConfig = field(default_factory=SourcesConfig)  # Sources of adapters besides local folders.
    on_lora_load_failure: OnLoadFailure = "error"  # base: answer from the base model and report it in the response.
    cpu_threads: int | None = None  # torch's intra-op threads. None: torch's default.
    seed: int = 0  # Seed for requests that give none.

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
