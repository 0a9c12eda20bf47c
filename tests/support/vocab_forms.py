"""Makes adapters of every form of embedding and head by hand, and the transformers model that each is equivalent to."""

# V vocabulary · D hidden size · N replaced rows

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from adapter_forms import applied
from lorafleet.workers.adapters.forms import AdapterForms, LowRank, TokenRows, VocabForm

NUM_ADDED = 13
NUM_CUT = 41


class Maker:
    """Makes random forms for a vocabulary of this size."""

    def __init__(self, vocab_size: int, hidden: int, seed: int, std: float) -> None:
        self.vocab_size = vocab_size
        self.hidden = hidden
        self.std = std
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return self.std * torch.randn(*shape, generator=self._generator)

    def table(self, vocab_size: int | None = None) -> Tensor:
        return self.normal(self.vocab_size if vocab_size is None else vocab_size, self.hidden)

    def embedding_lora(self, rank: int, vocab_size: int | None = None) -> LowRank:
        tokens = self.vocab_size if vocab_size is None else vocab_size
        return LowRank(self.normal(rank, tokens), self.normal(self.hidden, rank), 0.75)

    def head_lora(self, rank: int) -> LowRank:
        return LowRank(self.normal(rank, self.hidden), self.normal(self.vocab_size, rank), 1.25)


def embedding_lora(make: Maker) -> AdapterForms:
    return AdapterForms(embedding=VocabForm(make.embedding_lora(5)))


def head_lora(make: Maker) -> AdapterForms:
    return AdapterForms(head=VocabForm(make.head_lora(20)))


def both_loras(make: Maker) -> AdapterForms:
    head = VocabForm(make.head_lora(4), bias_V=make.normal(make.vocab_size))
    return AdapterForms(embedding=VocabForm(make.embedding_lora(20)), head=head)


def replaced_embedding(make: Maker) -> AdapterForms:
    return AdapterForms(embedding=VocabForm(table_VD=make.table()))


def replaced_head(make: Maker) -> AdapterForms:
    return AdapterForms(head=VocabForm(table_VD=make.table()))


def resized(make: Maker) -> AdapterForms:
    """Has one table for both embedding and head, and LoRA on top of the embedding."""
    size = make.vocab_size + NUM_ADDED
    table_VD = make.table(size)
    embedding = VocabForm(make.embedding_lora(3, size), table_VD)
    return AdapterForms(embedding=embedding, head=VocabForm(table_VD=table_VD))


def cut(make: Maker) -> AdapterForms:
    """Has fewer tokens than the base."""
    size = make.vocab_size - NUM_CUT
    return AdapterForms(embedding=VocabForm(table_VD=make.table(size)), head=VocabForm(table_VD=make.table(size)))


def trained_tokens(make: Maker) -> AdapterForms:
    size = make.vocab_size
    token_N = torch.tensor([0, 3, 7, size // 2, size - 2, size - 1])
    rows = TokenRows(token_N, make.normal(len(token_N), make.hidden))
    head = VocabForm(rows=replace(rows, row_ND=make.normal(len(token_N), make.hidden)))
    return AdapterForms(embedding=VocabForm(rows=rows), head=head)


def everything(make: Maker) -> AdapterForms:
    """Replaces some rows of the embedding twice, by its table and one by one."""
    token_N = torch.arange(5, 60, 5)
    rows = TokenRows(token_N, make.normal(len(token_N), make.hidden))
    embedding = VocabForm(make.embedding_lora(2), make.table(), rows)
    return AdapterForms(
        embedding=embedding, head=VocabForm(make.head_lora(33), make.table(), rows, make.normal(make.vocab_size))
    )


VOCAB_KINDS: dict[str, Callable[[Maker], AdapterForms]] = {
    kind.__name__: kind
    for kind in (
        embedding_lora,
        head_lora,
        both_loras,
        replaced_embedding,
        replaced_head,
        resized,
        cut,
        trained_tokens,
        everything,
    )
}


def make_vocab_forms(vocab_size: int, hidden: int, std: float = 0.2) -> dict[str, AdapterForms]:
    """Returns the adapters by kind."""
    return {kind: make(Maker(vocab_size, hidden, seed, std)) for seed, (kind, make) in enumerate(VOCAB_KINDS.items())}


def whole_table(form: VocabForm | None, base_VD: Tensor, *, is_head: bool) -> Tensor:
    """Returns the table that the form makes from the base's table, in float64."""
    if form is None:
        return base_VD.double().clone()
    table_VD = (base_VD if form.table_VD is None else form.table_VD).double().clone()
    if form.rows is not None:
        table_VD[form.rows.token_N] = form.rows.row_ND.double()
    if form.low_rank is not None:
        product = form.low_rank.b_OR.double() @ form.low_rank.a_RD.double()
        table_VD += form.low_rank.scaling * (product if is_head else product.T)
    return table_VD


@torch.no_grad()
def applied_with_tables(folder: Path, forms: AdapterForms) -> Any:
    """Returns the transformers model with the adapter merged into its weights."""
    model = applied(folder, forms)
    model.set_attn_implementation("eager")  # This implementation caps scores in every version of transformers.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    base_embedding_VD, base_head_VD = embedding.weight.detach().clone(), head.weight.detach().clone()
    embedding.weight = Parameter(whole_table(forms.embedding, base_embedding_VD, is_head=False).float())
    head.weight = Parameter(whole_table(forms.head, base_head_VD, is_head=True).float())
    if forms.head is not None and forms.head.bias_V is not None:
        head.bias = Parameter(forms.head.bias_V.clone())
    return model
