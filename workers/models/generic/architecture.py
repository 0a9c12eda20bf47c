"""Chooses the implementation of a checkpoint's architecture, and finds transformers' class for it.

Only the classes of the installed transformers are used. Code inside a checkpoint is never run, and nothing is
downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lorafleet.protocol.config_json import read_config, read_json
from lorafleet.protocol.engine_config import EngineConfig, ModelImpl
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.bases.architecture_name import architecture_name
from lorafleet.workers.bases.families.architectures import FAMILIES

LAYER_TYPES = {"full_attention", "sliding_attention"}  # the others have a state, or masks that are not served
ROPES_BY_LENGTH = {"dynamic", "longrope"}  # transformers takes the longest sequence of a batch for all of it


@dataclass(frozen=True, slots=True)
class Architecture:
    """transformers' class for a checkpoint, and its config."""

    name: str
    model_class: Any
    config: Any  # a PreTrainedConfig


def implementation(asked: ModelImpl, folder: Path) -> Literal["lorafleet", "transformers"]:
    """Returns what runs the checkpoint. "auto" means our decoder wherever it has the architecture."""
    if asked != "auto":
        return asked
    raw = read_json(folder / "config.json") if folder.is_dir() else {}
    name = architecture_name(raw, frozenset(FAMILIES))
    return "lorafleet" if name is None or name in FAMILIES else "transformers"


def with_implementation(config: EngineConfig) -> EngineConfig:
    """Returns the options with the implementation that is used. Modules of transformers run without CUDA graphs."""
    chosen = implementation(config.model_impl, Path(config.model))
    return replace(config, model_impl=chosen, enforce_eager=config.enforce_eager or chosen == "transformers")


def find_architecture(folder: Path) -> Architecture:
    """Returns transformers' class for the checkpoint. Raises UnsupportedModel if it has none that can be served."""
    import transformers  # an import of seconds, and only for this
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    raw = read_config(folder / "config.json")
    name = architecture_name(raw, frozenset(FAMILIES))
    if name is None:
        raise UnsupportedModel(
            f"config.json has architectures={shown(raw.get('architectures'))} and "
            f"model_type={shown(raw.get('model_type'))}, which do not tell which model generates text."
        )
    model_class = getattr(transformers, name, None) if name in _class_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) else None
    if model_class is None:
        has_code = " Its auto_map names code inside the checkpoint, which is never run." if "auto_map" in raw else ""
        raise UnsupportedModel(
            f"architecture {name!r} is not supported: lorafleet has no decoder for it, and transformers "
            f"{transformers.__version__} has no class of that name that generates text.{has_code} lorafleet's own: "
            f"{', '.join(sorted(FAMILIES))}."
        )
    if raw.get("quantization_config") or (folder / "hf_quant_config.json").exists():
        raise UnsupportedModel(
            f"{name} runs as transformers' own module, which does not serve quantized checkpoints. Serve the "
            "unquantized one, perhaps with the option quantization.",
            "quantization",
        )
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{folder} has an adapter_config.json beside the model, which transformers would load into it. Move the "
            "adapter to a folder of its own.",
            "model",
        )
    try:
        config = model_class.config_class.from_dict(_without_kernels(raw))
    except Exception as error:  # transformers raises errors of many types for odd values
        raise ConfigError(f"transformers cannot read {folder / 'config.json'}: {error}", "model") from error
    _refuse(name, model_class, config)
    return Architecture(name, model_class, config)


def _refuse(name: str, model_class: Any, config: Any) -> None:
    """Raises UnsupportedModel for what is known from the class and its config."""
    reason = None
    other_layers = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    scalings = (getattr(config, key, None) for key in ("rope_parameters", "rope_scaling"))  # transformers 5 and 4
    ropes = set().union(*map(_rope_types, scalings)) & ROPES_BY_LENGTH
    if getattr(model_class, "_is_stateful", False):
        reason = "its layers have a recurrent state."
    elif getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        reason = "it has cross-attention."
    elif other_layers:
        reason = f"its layer_types have {', '.join(sorted(other_layers))}; only {', '.join(sorted(LAYER_TYPES))} are."
    elif ropes:
        reason = f"its rope scaling ({', '.join(sorted(ropes))}) depends on the length of each sequence."
    if reason is not None:
        raise UnsupportedModel(f"{name} cannot be served by model_impl=transformers: {reason}")


def _rope_types(parameters: object) -> set[str]:
    """Returns the types of rope scaling. The parameters may be nested by type of layer."""
    if not isinstance(parameters, dict):
        return set()
    own = {str(parameters[key]) for key in ("rope_type", "type") if key in parameters}
    return own.union(*map(_rope_types, parameters.values()))


def _without_kernels(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the config without the keys that choose implementations of attention and experts.

    transformers would download a kernel that such a key names, and run it. Attention is ours in any case.
    """
    kept = {key: value for key, value in raw.items() if not key.endswith("_implementation")}
    return {key: _without_kernels(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _class_names(mapping: dict[str, Any]) -> set[str]:
    return {name for names in mapping.values() for name in ((names,) if isinstance(names, str) else names)}
