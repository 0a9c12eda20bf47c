"""Says who uses the memory of a GPU, for a start that leaves too little of it for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes of one GPU by their users, before the KV cache is allocated."""

    total: int  # Of the GPU.
    utilization: float  # gpu_memory_utilization: the share that may be used, by whomever.
    others: int  # Other processes, the driver and the libraries.
    weights: int  # The base model, or this rank's part of it.
    slots: int  # Adapters' slots with their tables, states of recurrent layers, and a draft model.
    step: int  # The largest step: its activations, sampling and CUDA graphs.
    later: int = 0  # Set aside for what is allocated after the start.

    @property
    def free(self) -> int:
        """Bytes that are left for the KV cache. Negative if the others have more than the share already."""
        return int(self.total * self.utilization) - self.others - self.weights - self.slots - self.step - self.later

    def explained(self, error: ConfigError, needed: int) -> ConfigError:
        """Returns the error with the users of the memory, and with what to change.

        Args:
            needed: Bytes of the smallest KV cache that would do.
        """
        used = (
            f"Of this GPU's {_gib(self.total)}, gpu_memory_utilization={self.utilization:g} allows "
            f"{_gib(int(self.total * self.utilization))}. Other processes and the driver hold {_gib(self.others)}, "
            f"weights {_gib(self.weights)}, adapters' slots and states {_gib(self.slots)}; the largest step takes "
            f"{_gib(self.step)}, and {_gib(self.later)} are set aside for later. That leaves {_gib(self.free)} for the "
            f"KV cache, which needs at least {_gib(needed)}."
        )
        return ConfigError(f"{error.message} {used} {self._remedy(needed - self.free)}", error.param)

    def _remedy(self, missing: int) -> str:
        """Names what to change for so many bytes, the largest part first."""
        if self.others >= missing and self.others > max(self.weights, self.slots, self.step):
            return "Stop the other processes on this GPU (nvidia-smi lists them), or use another one."
        if int(self.total * (1 - self.utilization)) >= missing:
            return f"Raise gpu_memory_utilization to {self._enough(missing):.2f} or more, or lower max_model_len."
        if self.slots >= missing:
            return "Lower max_loras, max_lora_rank or lora_memory_gib."
        if self.step >= missing:
            return "Lower max_num_batched_tokens or max_num_seqs."
        return "Use quantization, a larger tensor_parallel_size, or a GPU with more memory."

    def _enough(self, missing: int) -> float:
        """Returns the utilization that gives so many bytes more, rounded up to hundredths."""
        return min(1.0, -(-int((self.utilization + missing / self.total) * 10_000) // 100) / 100)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
