"""Loads a checkpoint as a module of transformers, after an empty copy of it has shown that it can be served."""

# T tokens · D hidden size

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorafleet.protocol.engine_config import EngineConfig, LoadFormat
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.attention.attention_backend import AttentionBatch, KVCache
from lorafleet.workers.attention.torch_backend import TorchAttention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.auto_options import base_dtype
from lorafleet.workers.bases.checkpoint import read_ends
from lorafleet.workers.bases.families.config_fields import DTYPES
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.stored_names import AS_WRITTEN
from lorafleet.workers.bases.stored_tables import generic_names
from lorafleet.workers.models.generic.architecture import Architecture, find_architecture
from lorafleet.workers.models.generic.attention_probe import probe
from lorafleet.workers.models.generic.divided_module import check_division
from lorafleet.workers.models.generic.generic_config import GenericConfig, served_tables
from lorafleet.workers.models.generic.generic_shard import GenericShard
from lorafleet.workers.models.generic.head_table import LogitsFinisher
from lorafleet.workers.models.generic.module_paths import ROOT, engine_path
from lorafleet.workers.models.generic.sharding_plan import read_plan
from lorafleet.workers.models.transformers_model import TransformersModel, check_answers
from lorafleet.workers.tp.group import TPGroup

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"\.\d+\.")  # of a layer
CHECK_BLOCK = 16  # tokens, at least the longest sequence of the check


def read_generic_config(folder: Path) -> GenericConfig:
    """Reads the checkpoint's config.json, and finds out how its module of transformers works. No weights are read.

    Raises ConfigError (UnsupportedModel among them) that names what cannot be served.
    """
    found = find_architecture(folder)
    config = found.config
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise UnsupportedModel(f"config.json of {found.name} has no max_position_embeddings.")
    empty = _empty(found)
    paths = {module: path for path, module in empty.named_modules()}
    embedding, head = empty.get_input_embeddings(), empty.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or "." in paths[head]:
        raise UnsupportedModel(
            f"{found.name} cannot be served by model_impl=transformers: its embedding is {type(embedding).__name__} "
            f"and its head {type(head).__name__}; they must be a plain nn.Embedding and a plain nn.Linear that follows "
            "the last layer."
        )
    if embedding.weight.shape != head.weight.shape:
        raise UnsupportedModel(
            f"{found.name} cannot be served by model_impl=transformers: its embedding has shape "
            f"{list(embedding.weight.shape)} and its head {list(head.weight.shape)}; they must be equal."
        )
    modules = {engine_path(path) for path, module in empty.named_modules() if [*module.parameters(recurse=False)]}
    seen = probe(empty, found.name, context)
    own_linears = {path: linear for path, linear in seen.linears.items() if path != paths[head]}
    plan = read_plan(empty, f"{empty.base_model_prefix}.", own_linears, seen.attention)
    _check_head(empty, paths[head], found.name)
    if not own_linears:
        raise UnsupportedModel(
            f"{found.name} cannot be served by model_impl=transformers: its layers have no nn.Linear."
        )
    tables = served_tables(paths[embedding], paths[head], head_has_bias=head.bias is not None)
    linears = {engine_path(path): linear for path, linear in own_linears.items()}
    dtype = getattr(config, "dtype", None)
    return GenericConfig(
        architecture=found.name,
        vocab_size=embedding.num_embeddings,
        hidden_size=embedding.embedding_dim,
        context_limit=context,
        eos_token_ids=read_ends(folder, embedding.num_embeddings, config.eos_token_id),
        dtype=DTYPES.get(dtype) if isinstance(dtype, str) else dtype,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention=seen.attention,
        plan=plan,
        linears={name: (linear.in_features, linear.out_features) for name, linear in linears.items()},
        biased=frozenset(name for name, linear in linears.items() if linear.has_bias),
        tables=tables,
        unserved=frozenset(modules - linears.keys() - tables),
        has_root=empty.base_model_prefix == ROOT.removesuffix("."),
    )


def find_shard(options: EngineConfig, rank: int) -> GenericShard:
    """Returns the part of the model that one rank holds. Raises as read_generic_config does, and ConfigError if the
    model cannot be divided among options.tensor_parallel_size ranks."""
    folder, size = Path(options.model), options.tensor_parallel_size
    config = replace(read_generic_config(folder), quantization=resolved(None, options.quantization))
    shard = GenericShard.of(config, rank, size)
    if size > 1:
        check_division(_empty(find_architecture(folder)), shard)
    return shard


@torch.inference_mode()
def load_generic(options: EngineConfig, shard: GenericShard, group: TPGroup, device: torch.device) -> TransformersModel:
    """Loads this rank's part of the model, and checks that it computes in our steps what transformers computes by
    itself. Raises ConfigError if the checkpoint cannot be read, and UnsupportedModel if the answers differ."""
    folder, started, config = Path(options.model), time.monotonic(), shard.whole
    dtype = base_dtype(options, config, folder)
    whole = _loaded(find_architecture(folder), folder, options.load_format, dtype)
    model = TransformersModel(whole, _with_tables(shard, whole, options), group, dtype, device)
    check_answers(model, _steps)
    log.info(
        "model_impl=transformers: %s runs as transformers' own module with our attention and adapters, without CUDA "
        "graphs, which is slower than lorafleet's own decoders; adapters may target %s; loaded and checked in %.1f s",
        config.architecture,
        ", ".join(sorted({name.rpartition(".")[2] for name in config.linears} | config.tables)),
        time.monotonic() - started,
    )
    return model


def _with_tables(shard: GenericShard, loaded: Any, options: EngineConfig) -> GenericShard:
    """Returns the shard with what transformers found in the files: whether embedding and head are tied, and names."""
    is_tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    names = AS_WRITTEN
    if options.load_format != "dummy":
        names = generic_names(Path(options.model), f"{loaded.base_model_prefix}.", is_tied=is_tied)

    def known(config: GenericConfig) -> GenericConfig:
        called_tied = config.tie_word_embeddings and not is_tied
        return replace(config, tie_word_embeddings=is_tied, is_only_called_tied=called_tied, stored_names=names)

    return replace(shard, whole=known(shard.whole), local=known(shard.local))


def _empty(found: Architecture) -> Any:
    """Returns the model on the meta device, where it has no values. Its dtype is one that all operators have."""
    try:
        with torch.device("meta"):
            return found.model_class(found.config).to(torch.bfloat16).eval()
    except Exception as error:  # transformers raises errors of many types for odd values, and for missing packages
        raise UnsupportedModel(
            f"{found.name} cannot be built by transformers from this config.json ({type(error).__name__}: {error})."
        ) from error


def _check_head(empty: Any, head: str, architecture: str) -> None:
    """Raises UnsupportedModel if the class cannot finish logits that are given to it. Takes the empty model apart."""
    finish = LogitsFinisher(empty, empty.base_model_prefix, head)
    try:
        finish(torch.zeros(2, 3, dtype=torch.bfloat16, device="meta"))
    except Exception as error:  # the class may expect anything of its decoder
        raise UnsupportedModel(
            f"{architecture} cannot be served by model_impl=transformers: its class needs more than hidden states for "
            f"the logits ({type(error).__name__}: {error})."
        ) from error


def _loaded(found: Architecture, folder: Path, load_format: LoadFormat, dtype: torch.dtype) -> Any:
    if load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # so that all ranks have parts of one model
            return found.model_class(found.config).to(dtype)
    try:
        model, loading = found.model_class.from_pretrained(
            folder,
            config=found.config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises errors of many types for damaged files
        raise ConfigError(f"transformers cannot load {folder}: {error}", "model") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} tensors; the first is {missing[0]!r}.", "model")
    if loading["unexpected_keys"]:
        unexpected = sorted(loading["unexpected_keys"])
        _refuse_contradictions(unexpected, model, folder)
        log.warning(
            "%s does not use %d tensors of the checkpoint, such as %s", found.name, len(unexpected), unexpected[0]
        )
    return model


def _refuse_contradictions(unexpected: list[str], model: Any, folder: Path) -> None:
    """Raises ConfigError for a tensor that config.json says the model does not have, although the file has it: of a
    module that exists, such as a bias, or of a further layer. transformers would leave it out."""
    parameters = {name for name, _ in model.named_parameters()}
    modules = {name.rpartition(".")[0] for name in parameters}
    for name in unexpected:
        if name.rpartition(".")[0] in modules or _NUMBER.sub(".0.", name, count=1) in parameters:
            raise ConfigError(
                f"{folder} has the tensor {name!r}, which the model does not have by config.json. Correct the file.",
                "model",
            )


@torch.inference_mode()
def _steps(model: TransformersModel, sequences: list[Tensor]) -> list[Tensor]:
    """Returns each sequence's hidden states [T, D], computed in two steps that have a chunk of every sequence."""
    config, weight = model.shard.local, model.embed_tokens.weight
    spec = attention_spec(config, CHECK_BLOCK, weight.dtype, weight.dtype, weight.device, model.sinks())
    shape = len(sequences), CHECK_BLOCK, config.attention.num_kv_heads, config.attention.head_dim
    caches = [KVCache(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in config.attentions]
    attention = TorchAttention(spec, caches)
    found: list[list[Tensor]] = [[] for _ in sequences]
    cuts = [-(-len(token_T) // 2) for token_T in sequences]
    chunks = [[slice(0, cut) for cut in cuts], [slice(cut, len(s)) for cut, s in zip(cuts, sequences, strict=True)]]
    for step in chunks:
        used = [(b, chunk) for b, chunk in enumerate(step) if chunk.stop > chunk.start]
        if not used:
            continue
        lengths = [chunk.stop - chunk.start for _, chunk in used]
        attention.plan(AttentionBatch(lengths, [chunk.stop for _, chunk in used], [[b] for b, _ in used]))
        token_T = torch.cat([sequences[b][chunk] for b, chunk in used])
        position_T = torch.cat([torch.arange(chunk.start, chunk.stop, device=weight.device) for _, chunk in used])
        block_T = torch.cat(
            [torch.full((n,), b, device=weight.device) for (b, _), n in zip(used, lengths, strict=True)]
        )
        slot_T = block_T * CHECK_BLOCK + position_T
        hidden_TD = model(token_T, position_T, position_T + 1, slot_T, caches, attention, None)
        for (b, _), part_TD in zip(used, hidden_TD.split(lengths), strict=True):
            found[b].append(part_TD)
    return [torch.cat(parts) for parts in found]
