"""Bounds on the resources that adapters may take, and the PEFT features that are allowed.

The configuration is passed explicitly and never read from a global.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lorafleet.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

LoRADType = Literal["auto", "float32", "bfloat16", "float16", "fp8"]

MAX_LORAS_BOUND = 4096  # Even an empty slot has a row in the device tables of every linear.
MAX_EXTRA_VOCAB_BOUND = 1 << 24
MAX_RANK_BOUND = 4096  # A rank beyond the hidden size is of no use; the kernels' tiles are sized by the rank.

# The alternative to each field that has no effect.
_WITHOUT_EFFECT = {
    "bias_enabled": "adapters with biases are served without it. Leave it false.",
    "long_lora_scaling_factors": "the length of the context and the angles of all keys are the base's here, not each "
    "adapter's, as in vLLM since it removed this field. Leave it unset, and serve adapters that were trained with "
    "another rope scaling from a server of their own, with that scaling in the base's config.json.",
}


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Configuration of adapters, with vLLM's field names. A field that has no effect yet is rejected when it is set,
    so that nobody relies on it."""

    max_loras: int = 8  # Adapters resident per GPU; raise it if adapters are swapped often.
    max_lora_rank: int = 64  # Largest accepted rank; a slot takes memory for its adapter's actual rank only.
    # Adapters cached in host memory. None: 2 x max_loras. Raise it if the disk is slow.
    max_cpu_loras: int | None = None
    # Serving dtype of A and B; auto is the base's. fp8 (e4m3, with scales) halves an adapter's memory and the bytes
    # that a step reads of it, and is less exact.
    lora_dtype: LoRADType = "auto"
    # Under tensor parallelism, also divide the matrix that every GPU otherwise holds whole: A by LoRA rank, or B by
    # output. Each device then holds 1/N of an adapter, at the price of one more small exchange per linear. On one
    # device it has no effect. None: enabled on GPUs, where it is as fast (benchmarks/tensor_parallel.py), and
    # disabled on CPUs, whose collectives are slow.
    fully_sharded_loras: bool | None = None
    # Memory per GPU for the parts of adapters in slots other than A and B: vectors, norms, vocabulary tables, LoRA on
    # experts. It is allocated on demand from what gpu_memory_utilization leaves. Raise it if such an adapter is
    # rejected or waits.
    extra_memory_gib: float = 4.0
    bias_enabled: bool = False
    # Largest number of tokens that an adapter may add to the base's vocabulary. None: limited by extra_memory_gib
    # only.
    lora_extra_vocab_size: int | None = None
    long_lora_scaling_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_int("max_loras", self.max_loras, 1, MAX_LORAS_BOUND)
        _check_int("max_lora_rank", self.max_lora_rank, 1, MAX_RANK_BOUND)
        if self.max_cpu_loras is not None:
            self._check_max_cpu_loras(self.max_cpu_loras)
        if self.lora_dtype not in get_args(LoRADType):
            raise ConfigError(
                f"lora.lora_dtype is {self.lora_dtype!r}; it can be one of {', '.join(get_args(LoRADType))}.",
                "lora_dtype",
            )
        for field, remedy in _WITHOUT_EFFECT.items():
            value = getattr(self, field)
            if value not in (None, False, 0):
                raise ConfigError(f"lora.{field}={value!r} has no effect in this version: {remedy}", field)

        if self.lora_extra_vocab_size is not None:
            _check_int("lora_extra_vocab_size", self.lora_extra_vocab_size, 0, MAX_EXTRA_VOCAB_BOUND)
        if type(self.extra_memory_gib) not in (int, float) or not 0 <= self.extra_memory_gib < math.inf:
            raise ConfigError(
                f"lora.extra_memory_gib is {self.extra_memory_gib!r}; it must be a number of GiB >= 0. Set one.",
                "extra_memory_gib",
            )

    @property
    def extra_memory_bytes(self) -> int:
        return int(self.extra_memory_gib * 2**30)

    @property
    def cpu_loras(self) -> int:
        """The value of max_cpu_loras with its default filled in."""
        return 2 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def is_fully_sharded(self, device: torch.device) -> bool:
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

    def _check_max_cpu_loras(self, value: int) -> None:
        if type(value) is not int or value < self.max_loras:
            raise ConfigError(
                f"lora.max_cpu_loras is {value!r}; every adapter on the GPU is also kept in host memory, so it must be "
                f"an integer >= lora.max_loras={self.max_loras}. Raise max_cpu_loras or lower max_loras.",
                "max_cpu_loras",
            )


def _check_int(field: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:  # `type`, because True is an int to isinstance
        raise ConfigError(
            f"lora.{field} is {value!r}; it must be an integer from {low} to {high}. Set a value within.", field
        )
