"""Reads trained tokens, which are rows of the vocabulary that replace the base's.

Their values are absolute, in spite of the tensor's name trainable_tokens_delta. They are a PEFT method of their own,
or stand beside LoRA (trainable_token_indices).
"""

# N trained tokens · D hidden size

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, TABLES
from lorafleet.workers.adapters.forms import AdapterForms, TokenRows
from lorafleet.workers.adapters.kinds.kind import Kind, Target
from lorafleet.workers.adapters.peft_helper import MAX_ENTRIES, PEFTHelper
from lorafleet.workers.adapters.spellings import table_names

ROWS = "trainable_tokens_delta"


def trained_tokens(helper: PEFTHelper, tied: bool) -> Mapping[str, tuple[int, ...]]:
    """Returns the trained tokens of embedding and head, in the order of their rows.

    A tied head has the embedding's tokens, unless the config gives it its own.
    """
    if helper.method == "TRAINABLE_TOKENS":
        tokens = _checked(helper.fields.get("token_indices"), "token_indices")
        found = {
            table: tokens
            for table in TABLES
            if any(helper.targets(name, is_linear=False) for name in table_names(table))
        }
    else:
        found = _beside_lora(helper)
    if tied and EMBEDDING in found and HEAD not in found:
        found[HEAD] = found[EMBEDDING]
    return found


def _beside_lora(helper: PEFTHelper) -> dict[str, tuple[int, ...]]:
    value = helper.fields.get("trainable_token_indices")
    if value is None or value == [] or value == {}:
        return {}
    if isinstance(value, list):
        return {EMBEDDING: _checked(value, "trainable_token_indices")}
    if not isinstance(value, dict):
        raise AdapterMalformed(f"trainable_token_indices is {shown(value)}; it must be a list or an object of lists.")
    found = {}
    for name, tokens in value.items():
        named = [table for table in TABLES if name and any(known.endswith(name) for known in table_names(table))]
        table = named[0] if len(named) == 1 else None
        if table is None or table in found:
            raise AdapterUnsupported(
                f"trainable_token_indices names {shown(name)}; only {EMBEDDING} and {HEAD} are supported, each at most "
                "once."
            )
        found[table] = _checked(tokens, f"trainable_token_indices[{shown(name)}]")
    return found


def _checked(tokens: object, name: str) -> tuple[int, ...]:
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise AdapterMalformed(f"{name} is {shown(tokens)}; it must be a list of token ids.")
    if len(tokens) > MAX_ENTRIES or len(set(tokens)) != len(tokens):
        raise AdapterMalformed(
            f"{name} has {len(tokens)} tokens; at most {MAX_ENTRIES} are allowed, without duplicates."
        )
    return tuple(tokens)


def token_rows(tokens: tuple[int, ...], row_ND: Tensor) -> TokenRows:
    token_N, order = torch.tensor(tokens).sort()
    return TokenRows(token_N, row_ND[order])


def _no_linears(target: Target) -> int:
    raise AdapterMalformed(
        f"target_modules of TRAINABLE_TOKENS has {target.module}; only the embedding and the head are supported."
    )


TRAINED_TOKENS = Kind("trained tokens", (ROWS,), _no_linears, lambda _: AdapterForms())
