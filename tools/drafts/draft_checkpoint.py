"""Makes, reads and writes draft models: small models with the tokenizer of their target, as transformers stores them.

A new draft is either the target's embeddings, first layers, norm and head, or a Llama with random weights.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.copied_tokenizer import copy_file, tokenizer_files
from lorafleet.workers.speculation.draft_model import read_draft_config

HEAD_DIM = 64  # The smallest that GPU attention kernels take.
MAX_NEW_BYTES = 64 << 30  # Largest draft in float32 that is made.


@dataclass(frozen=True, slots=True)
class DraftModelShape:
    """The options of a new draft model."""

    num_layers: int = 1
    init: Literal["target", "random"] = "target"
    hidden_size: int | None = None  # Only with init="random": a multiple of HEAD_DIM.

    def __post_init__(self) -> None:
        if (self.hidden_size is not None) != (self.init == "random"):
            raise ConfigError("--hidden-size is needed with --init random, and has no effect with --init target.")
        if self.hidden_size is not None and self.hidden_size % HEAD_DIM:
            raise ConfigError(f"--hidden-size is {self.hidden_size}; it must be a multiple of {HEAD_DIM}.")


def new_draft(target: Path, shape: DraftModelShape) -> PreTrainedModel:
    """Returns a draft in float32 on the CPU. Raises ConfigError if the target has too few layers or another form, or if
    its first layers cannot draft in the server.

    The embeddings and the head that come from the target need no gradients: they suit the target's vocabulary already,
    and with a large one they are most of the draft.
    """
    config = _config(target)
    if shape.init == "random":
        return LlamaForCausalLM(_checked(_llama_config(config, shape)))
    first = _first_layers(config, shape.num_layers, target)
    _check_served(first, target)
    draft = _read(target, _checked(first))
    for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        module.requires_grad_(False)
    return draft


def read_draft(folder: Path, target: Path) -> PreTrainedModel:
    """Returns the draft in float32 on the CPU. Raises ConfigError if the server cannot draft with it, or for another
    vocabulary."""
    config, expected = _config(folder), _config(target)
    if config.vocab_size != expected.vocab_size:
        raise ConfigError(
            f"the draft {folder} has a vocabulary of {config.vocab_size} tokens, and {target} one of "
            f"{expected.vocab_size}. Give a draft with the tokenizer of the target."
        )
    read_draft_config(folder)
    return _read(folder, _checked(config))


def dtype_of(target: Path) -> torch.dtype:
    """Returns the dtype in which the target's draft and its adapters are written."""
    return getattr(_config(target), "dtype", None) or torch.float32


def context_of(target: Path) -> int:
    """Returns the number of tokens that the target's positions are for."""
    length: int = _config(target).max_position_embeddings
    return length


def save_draft(model: PreTrainedModel, target: Path, folder: Path) -> None:
    """Writes the draft with the target's tokenizer into an empty folder."""
    dtype = dtype_of(target)
    saved = copy.deepcopy(model).to("cpu", dtype)
    saved.config.dtype = dtype
    saved.save_pretrained(folder)
    for name in tokenizer_files(target):
        copy_file(target, folder, name)


def _config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; give a local Hugging Face checkpoint.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many types for odd values
        raise ConfigError(f"{folder}: config.json cannot be read: {error}") from None
    return config.get_text_config()


def _first_layers(config: Any, num_layers: int, target: Path) -> Any:
    """Returns the config of a model that has only the target's first layers."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{target} is quantized, so its layers cannot be trained. Give --init random.")
    if config.num_hidden_layers <= num_layers:
        raise ConfigError(
            f"{target} has {config.num_hidden_layers} layers; a draft with {num_layers} would not be faster. Lower "
            "--layers."
        )
    first = copy.deepcopy(config)
    first.num_hidden_layers = num_layers
    if getattr(first, "layer_types", None):
        first.layer_types = first.layer_types[:num_layers]
    return first


def _check_served(first: Any, target: Path) -> None:
    """Raises ConfigError if the server cannot draft with a model of the target's first layers."""
    model = _without_weights(copy.deepcopy(first))
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory(prefix="lorafleet-draft-") as folder:
        model.config.save_pretrained(folder)
        try:
            read_draft_config(Path(folder))
        except ConfigError as error:
            why = error.message.replace(folder, str(target))
            raise ConfigError(
                f"the server cannot draft with the first layers of {target}: {why} Or give --init random and "
                "--hidden-size."
            ) from None


def _llama_config(config: Any, shape: DraftModelShape) -> LlamaConfig:
    assert shape.hidden_size is not None
    num_heads = shape.hidden_size // HEAD_DIM
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _checked(config: Any) -> Any:
    """Returns the config if a model of it is small enough to be made here. It allocates no weights."""
    num_bytes = 4 * sum(weight.numel() for weight in _without_weights(config).parameters())
    if num_bytes > MAX_NEW_BYTES:
        raise ConfigError(
            f"the draft has {num_bytes:,} bytes in float32; at most {MAX_NEW_BYTES:,} are trained. Lower --layers or "
            "--hidden-size."
        )
    return config


def _without_weights(config: Any) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"transformers cannot make a causal language model of {config.model_type!r}: {why}") from None
    return model


def _read(folder: Path, config: Any) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from None
    return model
