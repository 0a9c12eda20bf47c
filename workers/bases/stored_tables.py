"""Decides by a checkpoint's tensors whether its head is its embedding, as transformers does since 5.8.

The flag tie_word_embeddings of config.json is often wrong: a merge leaves it as it was, and people copy a config.json.
Everything else reads the decision from the model's config.
"""

# V vocabulary · D hidden size

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.stored_names import EMBEDDING_WEIGHT, HEAD_WEIGHT, StoredNames, names_in_files
from lorafleet.workers.bases.stored_tensors import PLAIN_DTYPES, StoredTensors, has_all_files
from lorafleet.workers.bases.text_part import text_name

log = logging.getLogger(__name__)

CHUNK_VALUES = 4 << 20  # Numbers of each table that are in memory at once while the two are compared.


def with_stored_tables(config: ModelConfig, folder: Path, *, may_be_tied: bool = False) -> ModelConfig:
    """Returns the config with what the files say about names, embedding and head.

    If config.json calls the two tied, they are tied unless the files have two that differ, and the one that is there is
    both. If it does not, each is a table of its own; a model without a head cannot generate. Without files, the flag
    counts, since the weights may not exist yet or not be read.

    Args:
        config: Its tie_word_embeddings is the flag.
        may_be_tied: Another flag of config.json calls them tied. It counts if there is no head.
    """
    if not has_all_files(folder):
        return config
    with StoredTensors(folder) as tensors:
        names = names_in_files(tensors.names(), config.names.root, config.mtp_names)
        by_engine_name = {_engine_name(config, names.written(name)): name for name in tensors.names()}
        embedding, head = by_engine_name.get(EMBEDDING_WEIGHT), by_engine_name.get(HEAD_WEIGHT)
        if not config.tie_word_embeddings:
            has_head = head is not None
            if not has_head and not may_be_tied:
                log.warning(
                    "%s has no lm_head.weight, and its config.json does not tie the head to the embedding; the model "
                    "embeds texts, and requests that generate are rejected",
                    folder,
                )
            # Without a head, no memory is taken for one.
            return replace(
                config, stored_names=names, has_head=has_head or may_be_tied, tie_word_embeddings=not has_head
            )
        if embedding is None and head is not None:
            own_name = _own_embedding(config)
            names = replace(names, lone_heads=(head,), embedding=own_name)
        elif embedding is not None and head is not None and not equal_tables(tensors, embedding, head):
            log.warning(
                "config.json of %s has tie_word_embeddings=true, but %s and %s differ, so they are not tied; correct "
                "the file to silence this warning",
                folder,
                embedding,
                head,
            )
            return replace(config, stored_names=names, tie_word_embeddings=False, is_only_called_tied=True)
    return replace(config, stored_names=names)


def generic_names(folder: Path, root: str, *, is_tied: bool) -> StoredNames:
    """Returns the names of a checkpoint that transformers has loaded as a class whose decoder is called `root`."""
    with StoredTensors(folder) as tensors:
        stored = set(tensors.names())
    names = names_in_files(stored, root, ())
    embedding = f"{root}embed_tokens.weight"
    if is_tied and HEAD_WEIGHT in stored and embedding not in map(names.written, stored):
        return replace(names, lone_heads=(HEAD_WEIGHT,), embedding=embedding)
    return names


def equal_tables(tensors: StoredTensors, one: str, other: str) -> bool:
    """Compares two tensors some rows at a time, until they differ."""
    stored = tensors.stored(one), tensors.stored(other)
    shapes = [table.get_shape() for table in stored]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        return False
    if not {tensors.dtype_of(one), tensors.dtype_of(other)}.issubset(PLAIN_DTYPES):
        return False
    num_rows, size = shapes[0]
    step = max(1, CHUNK_VALUES // max(1, size))
    for first in range(0, num_rows, step):
        rows = (slice(first, min(first + step, num_rows)),)
        one_VD, other_VD = (table[rows] for table in stored)
        dtype = torch.promote_types(one_VD.dtype, other_VD.dtype)
        if not torch.equal(one_VD.to(dtype), other_VD.to(dtype)):
            return False
    return True


def _engine_name(config: ModelConfig, name: str) -> str:
    return config.names.engine_name(text_name(name) if config.is_text_part else name)


def _own_embedding(config: ModelConfig) -> str:
    """Returns the name that transformers' class gives the embedding's weight."""
    own = config.names.own_names(EMBEDDING_WEIGHT)[0]
    return own.replace("model.", "model.language_model.", 1) if config.is_text_part else own
