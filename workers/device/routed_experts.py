"""Records which experts each token of a step was routed to, for requests that want it (router replay of trainers).

The routers of all layers write their choices into one block of memory instead of new memory, so that a step costs the
same with and without it, and captured graphs record as well. Only steps with a request that wants them are read.
"""

# L layers of the model · T tokens of the step · K experts a token

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.messages import RoutedShape
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.engine_model import EngineModel

MOST_OF_BYTE = 256  # experts whose numbers fit one byte


class RoutedExperts:
    """The choices of the last step. `most_tokens` is the largest number of tokens of a step, with its padding.

    Raises ConfigError if the model's experts cannot be recorded.
    """

    def __init__(self, model: EngineModel, most_tokens: int, device: torch.device) -> None:
        layers = list(model.decoder_layers()) if isinstance(model, DecoderModel) else []
        mixtures = {i: layer.mixture for i, layer in enumerate(layers) if layer.mixture is not None}
        sizes = {(mixture.experts.count, mixture.experts.rule.per_token) for mixture in mixtures.values()}
        if len(sizes) != 1:
            raise ConfigError(
                "enable_return_routed_experts is for bases whose layers have equally many experts and whose decoder is "
                f"lorafleet's own; {model.config.architecture} is none. Leave it out.",
                "enable_return_routed_experts",
            )
        [(count, per_token)] = sizes
        self._dtype = torch.uint8 if count <= MOST_OF_BYTE else torch.int16
        self.shape = RoutedShape(len(layers), per_token, self._dtype.itemsize)
        self._expert_LTK = torch.zeros(len(layers), most_tokens, per_token, dtype=torch.int32, device=device)
        for i, mixture in mixtures.items():
            mixture.recorded_TK = self._expert_LTK[i]

    def of_step(self, num_tokens: int) -> Tensor:
        """Returns the choices of the last step [T, L, K] on the device, uint8, or int16 if there are many experts.
        Layers without experts have zeros."""
        return self._expert_LTK[:, :num_tokens].transpose(0, 1).to(self._dtype, memory_format=torch.contiguous_format)
