"""The options of adapters: bounds on the resources that they may take, and the PEFT features that are allowed.

The configuration is passed explicitly and never read from a global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.limits import Range
from lorafleet.protocol.options import Option, bounded_values, check_gib

if TYPE_CHECKING:
    import torch

LoRADType = Literal["auto", "float32", "bfloat16", "float16", "fp8"]

MAX_LORAS_BOUND = 4096  # Even an empty slot has a row in the device tables of every linear.
MAX_EXTRA_VOCAB_BOUND = 1 << 24
MAX_SCALING_FACTORS = 64
MAX_SCALING_FACTOR = 1024
MAX_RANK_BOUND = 4096  # A rank beyond the hidden size is of no use; the kernels' tiles are sized by the rank.

# The alternative to each option that has no effect. It is rejected when it is set, so that nobody relies on it.
_WITHOUT_EFFECT = {
    "bias_enabled": "adapters with biases are served without it. Leave it false.",
}


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """The options of adapters, with vLLM's names. Servers and LLM have them too."""

    max_loras: Annotated[
        int,
        Option(
            "Adapters that running requests use at the same time, at most. Raise it if requests wait for adapters.",
            Range(1, MAX_LORAS_BOUND),
        ),
    ] = 8
    max_gpu_loras: Annotated[
        int | None,
        Option(
            "GPU slots: adapters that stay on each GPU at most, in use or not. Default: max_cpu_loras.",
            Range(1, MAX_LORAS_BOUND),
        ),
    ] = None
    # An adapter takes the bytes of its own rank and modules only.
    lora_memory_gib: Annotated[
        float | None,
        Option(
            "GPU memory for A and B of the adapters in slots. Default: as much as max_loras adapters of max_lora_rank "
            "on every module take. With share_lora_memory it is the most that they take."
        ),
    ] = None
    share_lora_memory: Annotated[
        bool | None,
        Option(
            "Adapters in slots and KV blocks share GPU memory: adapters borrow from the KV cache what they need, and "
            "give it back. For one GPU a replica. Default: true where it can be, except with FlashInfer's attention or "
            "if lora_memory_gib is set."
        ),
    ] = None
    max_lora_rank: Annotated[int, Option("Largest adapter rank that is accepted.", Range(1, MAX_RANK_BOUND))] = 64
    max_cpu_loras: Annotated[int | None, Option("Adapters kept in host memory. Default: 2 x max_loras.")] = None
    lora_dtype: Annotated[
        LoRADType,
        Option("Dtype of adapters' weights. auto: the base's. fp8 (e4m3) takes half the memory with less precision."),
    ] = "auto"
    # It divides the matrix that every GPU otherwise holds whole: A by LoRA rank, or B by output. On GPUs it is as fast
    # in steps of many requests (benchmarks/tensor_parallel.py); the collectives of CPUs are slow.
    fully_sharded_loras: Annotated[
        bool | None,
        Option(
            "Under tensor parallelism, shard both A and B over the ranks, which costs one more small exchange per "
            "linear layer. Default: false on CPUs; on GPUs true, unless steps of max_num_seqs sequences are faster "
            "without it according to measurements of the GPU."
        ),
    ] = None
    # It is allocated on demand from what gpu_memory_utilization leaves. An adapter beyond it is rejected or waits.
    extra_memory_gib: Annotated[
        float,
        Option(
            "GPU memory for what adapters in slots have besides A and B: vectors, norms, vocabulary tables, LoRA on "
            "the experts of a mixture."
        ),
    ] = 4.0
    bias_enabled: Annotated[bool, Option("Adapters with biases are served without this option. Rejected if set.")] = (
        False
    )
    # Without a limit of its own, extra_memory_gib limits it.
    lora_extra_vocab_size: Annotated[
        int | None,
        Option(
            "Most tokens that an adapter may add to the base's vocabulary. Default: no limit.",
            Range(0, MAX_EXTRA_VOCAB_BOUND),
        ),
    ] = None
    # CUDA graphs are captured for the longest context that it allows.
    long_lora_scaling_factors: Annotated[
        tuple[float, ...] | None,
        Option(
            "Factors of linear rope scaling that adapters may have of their own (LongLoRA); others are then rejected. "
            "max_model_len may then exceed the base's context by the largest. Default: any scaling is served."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(LoRAOptions):
    """Checked options of adapters, and what follows from them."""

    def __post_init__(self) -> None:
        for name, value, bounds, _ in bounded_values(self):
            # `type`, because True is an int to isinstance.
            if type(value) is not int or value not in bounds:
                raise ConfigError(
                    f"lora.{name} is {value!r}; it must be an integer from {bounds.low} to {bounds.high}. Set a value "
                    "in this range.",
                    name,
                )
        if self.max_cpu_loras is not None:
            self._check_max_cpu_loras(self.max_cpu_loras)
        if self.max_gpu_loras is not None and not self.max_loras <= self.max_gpu_loras <= self.cpu_loras:
            raise ConfigError(
                f"lora.max_gpu_loras is {self.max_gpu_loras}; it must be from lora.max_loras={self.max_loras} to "
                f"lora.max_cpu_loras={self.cpu_loras}, since every adapter on the GPU is also kept in host memory. "
                "Set a value in this range, or leave it out.",
                "max_gpu_loras",
            )
        if self.lora_dtype not in get_args(LoRADType):
            raise ConfigError(
                f"lora.lora_dtype is {self.lora_dtype!r}; it must be one of {', '.join(get_args(LoRADType))}.",
                "lora_dtype",
            )
        for name, remedy in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value not in (None, False, 0):
                raise ConfigError(f"lora.{name}={value!r} has no effect in this version: {remedy}", name)
        self._check_scaling_factors()
        check_gib("lora.extra_memory_gib", self.extra_memory_gib)
        if self.lora_memory_gib is not None:
            check_gib("lora.lora_memory_gib", self.lora_memory_gib)

    @property
    def largest_scaling_factor(self) -> float:
        """The largest declared factor by which an adapter may exceed the base's context."""
        return max(self.long_lora_scaling_factors or (), default=1.0)

    @property
    def extra_memory_bytes(self) -> int:
        return int(self.extra_memory_gib * 2**30)

    @property
    def gpu_loras(self) -> int:
        """The value of max_gpu_loras with its default filled in."""
        return min(self.cpu_loras, MAX_LORAS_BOUND) if self.max_gpu_loras is None else self.max_gpu_loras

    def lora_memory_bytes(self, largest_bytes: int) -> int:
        """Returns the bytes of lora_memory_gib with its default filled in. `largest_bytes` is the size of A and B of
        the largest adapter."""
        return self.max_loras * largest_bytes if self.lora_memory_gib is None else int(self.lora_memory_gib * 2**30)

    @property
    def cpu_loras(self) -> int:
        """The value of max_cpu_loras with its default filled in."""
        return 2 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def is_fully_sharded(self, device: torch.device) -> bool:
        """Returns the option's value, or its default where nothing was measured (workers/tp/sharding_choice.py)."""
        return device.type == "cuda" if self.fully_sharded_loras is None else self.fully_sharded_loras

    def serving_dtype(self, base: torch.dtype) -> torch.dtype:
        if self.lora_dtype == "auto":
            return base
        import torch  # imported here, so that reading a configuration does not import torch

        return {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "fp8": torch.float8_e4m3fn,
        }[self.lora_dtype]

    def _check_scaling_factors(self) -> None:
        factors = self.long_lora_scaling_factors
        if factors is not None and (
            not 1 <= len(factors) <= MAX_SCALING_FACTORS
            or not all(type(factor) in (int, float) and 1 <= factor <= MAX_SCALING_FACTOR for factor in factors)
        ):
            raise ConfigError(
                f"lora.long_lora_scaling_factors is {factors!r}; it must have 1 to {MAX_SCALING_FACTORS} numbers "
                f"from 1 to {MAX_SCALING_FACTOR}. Set such numbers, or leave it unset to serve any scaling.",
                "long_lora_scaling_factors",
            )

    def _check_max_cpu_loras(self, value: int) -> None:
        if type(value) is not int or value < self.max_loras:
            raise ConfigError(
                f"lora.max_cpu_loras is {value!r}; every adapter on the GPU is also kept in host memory, so it must be "
                f"an integer >= lora.max_loras={self.max_loras}. Raise max_cpu_loras or lower max_loras.",
                "max_cpu_loras",
            )
