"""The table of the vocabulary: embedding, head, or both if they are tied. Each rank holds its part of the rows."""

# T tokens · D hidden size · V vocabulary · W rows of a rank, its padding included

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.extras.slot_embedding import EmbeddingSlots
from lorafleet.kernels.linear.fixed_linear import fixed_linear
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.models.layers import parameter
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.model_shard import ModelShard

NEVER = float("-inf")


class VocabTable(nn.Module):
    """One rank's part of the table.

    weight is [W, D], and bias, of a head that has one, is [W]. The rows from num_tokens on are padding of zeros, so
    that all ranks have equally many. slots is the adapters' changes to the embedding. It is None until adapters are
    enabled. has_fixed_order is set if logits must have the same bits in every batch.
    """

    def __init__(
        self, shard: ModelShard, group: TPGroup, dtype: torch.dtype, device: torch.device, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = shard.whole.vocab_size
        self.scale = shard.whole.logits_scale
        self.softcap = shard.whole.final_softcap
        self.first_token = shard.vocabulary.start
        self.num_tokens = shard.vocabulary.stop - shard.vocabulary.start
        self.weight = parameter(shard.vocab_per_rank, shard.whole.hidden_size, dtype=dtype, device=device)
        self.weight[self.num_tokens :].zero_()
        self.bias = parameter(shard.vocab_per_rank, dtype=dtype, device=device) if has_bias else None
        if self.bias is not None:
            self.bias[self.num_tokens :].zero_()
        self.slots: EmbeddingSlots | None = None
        self.has_fixed_order = False

    def embed(self, token_T: Tensor, batch: LoRABatch | None) -> Tensor:
        """Returns [T, D], to be summed over the ranks. A token's row is on one of them, and the others have zeros."""
        if batch is None or self.slots is None:
            return self._embed(token_T)
        # Adapters may have tokens that the base does not have.
        return self.slots.apply(token_T, self._embed(token_T.clamp(max=self.vocab_size - 1)), batch)

    def _embed(self, token_T: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_T, self.weight)
        local_T = token_T - self.first_token
        row_T = local_T.clamp(0, max(self.num_tokens - 1, 0))
        elsewhere_T1 = (row_T != local_T).unsqueeze(1)
        return F.embedding(row_T, self.weight).masked_fill_(elsewhere_T1, 0)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns this rank's columns, [T, W] in x's dtype. Those of the padding are -inf."""
        product = fixed_linear if self.has_fixed_order else F.linear
        return self.finish(product(x_TD, self.weight, self.bias), self.num_tokens)

    def finish(self, logits_TW: Tensor, num_tokens: int) -> Tensor:
        """Scales and caps the products with a table, bias included, as the model does, and sets the columns from
        num_tokens on to -inf, in place."""
        if self.scale != 1.0:
            logits_TW.mul_(self.scale)
        if self.softcap is not None:
            logits_TW.div_(self.softcap).tanh_().mul_(self.softcap)
        if num_tokens < logits_TW.shape[1]:
            logits_TW[:, num_tokens:] = NEVER
        return logits_TW

    @property
    def changes_products(self) -> bool:
        """Whether logits differ from the products with the table."""
        return self.bias is not None or self.scale != 1.0 or self.softcap is not None

    def project(self, x_TD: Tensor) -> Tensor:
        """Returns the product with the table alone, [T, W]. The padding's columns have no meaning."""
        return F.linear(x_TD, self.weight)

    def gather(self, logits_TW: Tensor) -> Tensor:
        """Returns [T, V] on every rank, from each rank's own columns."""
        gathered_NTW = self.group.all_gather(logits_TW)
        return gathered_NTW.transpose(0, 1).flatten(1)[:, : self.vocab_size]
