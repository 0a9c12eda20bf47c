"""The head of a model that runs as transformers' module, with everything that its class does to the logits."""

# T tokens · D hidden size · V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.model_shard import ModelShard


class _Stub(nn.Module):
    """Returns a given value, whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None

    def forward(self, *_positional: object, **_named: object) -> Any:
        return self.value


class LogitsFinisher:
    """Applies what the class of a causal language model does to the head's output: scales, caps, slices.

    The class's own forward() runs, with stubs in place of the decoder and of the head.
    """

    def __init__(self, model: Any, body: str, head: str) -> None:
        self._model = model
        self._body, self._head = _Stub(), _Stub()
        setattr(model, body, self._body)
        setattr(model, head, self._head)

    def __call__(self, logits_TV: Tensor) -> Tensor:
        from transformers.modeling_outputs import MoeModelOutputWithPast  # loaded already, and only for this

        # With one field more, this output has those of all others.
        self._body.value = MoeModelOutputWithPast(last_hidden_state=logits_TV[None, :, :1])
        self._body.value.cross_attentions = None
        self._head.value = logits_TV.unsqueeze(0)
        finished: Tensor = self._model(use_cache=False, return_dict=True).logits
        self._body.value = self._head.value = None
        return finished[0].to(logits_TV.dtype)


class HeadTable(VocabTable):
    """The head of a whole model. `finisher` is None if its class leaves the logits as they are."""

    def __init__(
        self, shard: ModelShard, group: TPGroup, weight: nn.Parameter, bias_V: Tensor | None, finisher: LogitsFinisher
    ) -> None:
        super().__init__(shard, group, weight.dtype, torch.device("meta"))
        self.weight = weight
        self.bias = None if bias_V is None else nn.Parameter(bias_V, requires_grad=False)
        sample_TV = torch.linspace(-60, 60, 2 * self.vocab_size, dtype=weight.dtype, device=weight.device).view(2, -1)
        self._finisher = None if torch.equal(finisher(sample_TV), sample_TV) else finisher

    @property
    def changes_products(self) -> bool:
        return self.bias is not None or self._finisher is not None

    def finish(self, logits_TW: Tensor, num_tokens: int) -> Tensor:
        return super().finish(logits_TW if self._finisher is None else self._finisher(logits_TW), num_tokens)
