"""Decides which part of a model one tensor-parallel rank holds, in Megatron's layout.

q, k, v, gate and up are divided by output, o and down by input. So a layer needs two sums over the ranks, one after o
and one after down. Embedding and head are divided by vocabulary. If there are fewer KV heads than ranks, several ranks
hold the same one. Each expert of a mixture is divided as an MLP is, and routers are whole on every rank.

Source: Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import ModelConfig

ROW_PARALLEL = ("o_proj", "down_proj")  # all others are column parallel
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    size: int
    whole: ModelConfig  # as in config.json
    local: ModelConfig  # with this rank's heads and intermediate size; hidden size and vocabulary are the whole model's

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Returns the part of one rank. Raises ConfigError if the model cannot be divided this way."""
        divided = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
        if config.experts is not None:
            divided["moe_intermediate_size"] = config.experts.intermediate_size
        for name, total in divided.items():
            if total % size:
                sizes = [f"{name}={total}" for name, total in divided.items()]
                raise ConfigError(
                    f"tensor_parallel_size={size} does not divide the model's {name}={total}. Use a common divisor of "
                    f"{' and '.join(sizes)}.",
                    "tensor_parallel_size",
                )
        heads = config.num_kv_heads
        if max(heads, size) % min(heads, size):
            raise ConfigError(
                f"tensor_parallel_size={size} neither divides the model's num_key_value_heads={heads} nor is a "
                "multiple of it. Use a size that does or is.",
                "tensor_parallel_size",
            )
        local = replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=max(1, heads // size),
            intermediate_size=config.intermediate_size // size,
            experts=None
            if config.experts is None
            else replace(config.experts, intermediate_size=config.experts.intermediate_size // size),
        )
        return cls(rank, size, config, local)

    @property
    def vocabulary(self) -> slice:
        """The token ids of this rank. The last ranks may have fewer than the first, or none."""
        per_rank = self.vocab_per_rank
        start = min(self.rank * per_rank, self.whole.vocab_size)
        return slice(start, min(start + per_rank, self.whole.vocab_size))

    @property
    def vocab_per_rank(self) -> int:
        return -(-self.whole.vocab_size // self.size)

    def outputs(self, projection: str) -> tuple[slice, ...]:
        """Returns output() of each projection that is fused in this one."""
        fused = FUSED.get(projection.rpartition(".")[2])
        if fused is None:
            return (self.output(projection),)
        found, start = [], 0
        for name in fused:
            own = self.output(name)
            found.append(slice(start + own.start, start + own.stop))
            start += self._whole_output(name)
        return tuple(found)

    def output(self, projection: str) -> slice:
        """Returns the rows of the projection's weight and of a LoRA B. `projection` is a module path, or its last
        name."""
        name = projection.rpartition(".")[2]
        if name in ROW_PARALLEL:
            return slice(0, self.whole.hidden_size)
        if name in ("k_proj", "v_proj"):
            first = self.rank * self.whole.num_kv_heads // self.size
            start = first * self.whole.head_dim
            return slice(start, start + self.local.kv_size)
        if name == "gate" and self.whole.experts is not None:  # the router, which every rank has whole
            return slice(0, self.whole.experts.count)
        return self._equal_part(self.local.q_size if name == "q_proj" else self.local.intermediate_size)

    @property
    def of_expert(self) -> slice:
        """This rank's part of each expert's intermediate size: rows of its gate and up, columns of its down."""
        assert self.local.experts is not None
        return self._equal_part(self.local.experts.intermediate_size)

    def input(self, projection: str) -> slice:
        """Returns the columns of the projection's weight and of a LoRA A."""
        name = projection.rpartition(".")[2]
        if name not in ROW_PARALLEL:
            return slice(0, self.whole.hidden_size)
        return self._equal_part(self.local.q_size if name == "o_proj" else self.local.intermediate_size)

    def _whole_output(self, projection: str) -> int:
        sizes = {"q_proj": self.whole.q_size, "k_proj": self.whole.kv_size, "v_proj": self.whole.kv_size}
        return sizes.get(projection, self.whole.intermediate_size)

    def _equal_part(self, size: int) -> slice:
        return slice(self.rank * size, (self.rank + 1) * size)
