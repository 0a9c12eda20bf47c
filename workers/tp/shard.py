"""Decides which part of a model one tensor-parallel rank holds, in Megatron's layout.

q, k, v, gate and up are divided by output, o and down by input. So a layer needs two sums over the ranks, one after o
and one after down. Embedding and head are divided by vocabulary. If there are fewer KV heads than ranks, several
ranks hold the same one. Each expert of a mixture is divided as an MLP is, and routers are whole on every rank. In a
recurrent layer, each rank has some heads with what they share, or some channels.

Source: Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.projection import Projection, Units
from lorafleet.workers.bases.recurrence_config import Mamba2Config
from lorafleet.workers.tp.own_parts import own_input, own_outputs, own_units, own_vocabulary, vocab_per_rank


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    size: int
    whole: ModelConfig  # as in config.json
    local: ModelConfig  # with this rank's heads and intermediate size; hidden size and vocabulary are the whole model's
    projections: dict[str, Projection] = field(repr=False)  # the whole model's, by module path

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Returns the part of one rank. Raises ConfigError if the model cannot be divided this way."""
        divided = {
            "num_attention_heads": {attention.num_heads for attention in config.attentions},
            "intermediate_size": {layer.mlp.intermediate_size for layer in config.layers if layer.mlp is not None},
        }
        recurrences = [layer.recurrence for layer in config.layers if layer.recurrence is not None]
        for recurrence in recurrences:
            for name, total in recurrence.divided_sizes.items():
                divided.setdefault(name, set()).add(total)
        if config.experts is not None:
            divided |= {name: {total} for name, total in config.experts.sizes.items()}
        if config.per_layer is not None:
            divided["hidden_size_per_layer_input"] = {config.per_layer.size}
        for name, totals in divided.items():
            for total in totals:
                if total % size:
                    sizes = [f"{name}={total}" for name, totals in divided.items() for total in sorted(totals)]
                    raise ConfigError(
                        f"tensor_parallel_size={size} does not divide the model's {name}={total}. Use a common divisor "
                        f"of {' and '.join(sizes)}.",
                        "tensor_parallel_size",
                    )
        shared = [("num_key_value_heads", attention.num_kv_heads) for attention in config.attentions]
        shared += [
            ("number of Mamba groups", mamba.num_groups) for mamba in recurrences if isinstance(mamba, Mamba2Config)
        ]
        for name, count in shared:
            if max(count, size) % min(count, size):
                raise ConfigError(
                    f"tensor_parallel_size={size} neither divides the model's {name}={count} nor is a "
                    "multiple of it. Use a size that does or is.",
                    "tensor_parallel_size",
                )
        experts = None if config.experts is None else config.experts.divided(size)
        local = replace(config, layers=tuple(_part(layer, size) for layer in config.layers), experts=experts)
        return cls(rank, size, config, local, config.projections())

    @property
    def vocabulary(self) -> slice:
        return own_vocabulary(self.whole.vocab_size, self.rank, self.size)

    @property
    def vocab_per_rank(self) -> int:
        return vocab_per_rank(self.whole.vocab_size, self.size)

    def is_row_parallel(self, projection: str) -> bool:
        """Returns whether ranks divide the projection's inputs, so that its output is a sum over them."""
        return self.projections[projection].split == "inputs"

    def outputs(self, projection: str) -> tuple[slice, ...]:
        """Returns own_outputs() of the projection with this module path."""
        return own_outputs(self.projections[projection], self.rank, self.size)

    def input(self, projection: str) -> slice:
        return own_input(self.projections[projection], self.rank, self.size)

    @property
    def whole_of_expert(self) -> int:
        """The intermediate size of each expert in the whole model."""
        assert self.whole.experts is not None
        return self.whole.experts.intermediate_size

    @property
    def of_expert(self) -> slice:
        """This rank's part of each expert's intermediate size: rows of its gate and up, columns of its down."""
        assert self.local.experts is not None
        return self._equal_part(self.local.experts.intermediate_size)

    def own(self, units: Units) -> slice:
        return own_units(units, self.rank, self.size)

    def _equal_part(self, size: int) -> slice:
        return slice(self.rank * size, (self.rank + 1) * size)


def _part(layer: LayerConfig, size: int) -> LayerConfig:
    mixer = None if layer.mixer is None else layer.mixer.divided(size)
    mlp = None if layer.mlp is None else replace(layer.mlp, intermediate_size=layer.mlp.intermediate_size // size)
    return replace(layer, mixer=mixer, mlp=mlp)
