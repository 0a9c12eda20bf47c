"""Sorts the keys of adapter_config.json: used, harmless, or a feature that is not served and is refused when it is set.

Knows every field of PEFT 0.21's LoraConfig and those that older versions wrote. A key that is in none of the tables may
change the mathematics, so it is refused too, unless it is unset. The values of the used ones are peft_helper.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

from lorafleet.workers.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.workers.lora.strict_json import shown

USED = frozenset(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)

# No part in what the adapter computes once it is loaded over the base's Linear layers.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "corda_config",  # the *_configs of initialisations: init_lora_weights says whether one is in force
        "ensure_weight_tying",  # of embeddings and heads, which are refused by their tensors
        "eva_config",
        "fan_in_fan_out",  # PEFT resets it on Linear layers
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "merge_weights",  # 2023
        "peft_version",
        "qalora_group_size",  # of use_qalora
        "revision",
        "runtime_config",
        "velora_config",  # another backward pass; the forward one is plain
    }
)

FEATURES = {
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow routing between adapters",
    "enable_lora": "the merged linear layers of 2023",
    "kasa_config": "KaSA",
    "layer_replication": "layer replication",
    "lora_bias": "a bias on lora_B",
    "modules_to_save": "replacing whole modules",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "LoRA on parameters (mixture of experts)",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
}

_TASK_TYPES = frozenset({"CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM"})
_TASKS_WITH_A_HEAD = frozenset({"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"})

# Labels that do not matter once weights are loaded. lora_ga changes the base in training only.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
_CONVERT = (
    "Convert it where it was trained: save_pretrained(…, path_initial_model_for_weight_conversion=<initial adapter>) "
    "writes a plain LoRA."
)


def check_fields(config: Mapping[str, object]) -> None:
    """Raises AdapterUnsupported, naming the feature, for the first key that asks for what is not served."""
    _check_peft_type(config)
    for key, value in config.items():
        if key in USED or key in HARMLESS or _is_unset(value):
            continue
        if key in FEATURES:
            raise AdapterUnsupported(f"{FEATURES[key]} ({key}={shown(value)}) is not served yet; plain LoRA is.")
        raise AdapterUnsupported(
            f"adapter_config.json sets {shown(key)} to {shown(value)}; PEFT 0.21 has no such field, so what it "
            f"asks for is unknown. Remove it if it does not change what the adapter computes."
        )
    _check_bias(config.get("bias"))
    _check_init(config.get("init_lora_weights", True))
    _check_task_type(config.get("task_type"))


def _is_unset(value: object) -> bool:
    return value is None or value is False or value in ([], {}, "") or (type(value) in (int, float) and value == 0)


def _check_peft_type(config: Mapping[str, object]) -> None:
    peft_type = config.get("peft_type")
    if peft_type is None:
        raise AdapterMalformed('adapter_config.json has no "peft_type"; PEFT writes "LORA" there.')
    if peft_type != "LORA":
        raise AdapterUnsupported(f"the PEFT method {shown(peft_type)} (peft_type) is not served yet; LORA is.")


def _check_bias(bias: object) -> None:
    if bias not in (None, "none"):
        raise AdapterUnsupported(f"trained biases (bias={shown(bias)}) are not served yet; bias='none' is.")


def _check_init(init: object) -> None:
    """PEFT runs the initialisation again when it loads the adapter, and some of them change the base's weights."""
    if init is None or isinstance(init, bool):
        return
    if not isinstance(init, str):
        raise AdapterMalformed(f"init_lora_weights is {shown(init)}; it must be true, false or a name.")
    if init.startswith("pissa"):
        raise AdapterUnsupported(f"unconverted PiSSA (init_lora_weights={shown(init)}) is not served yet. {_CONVERT}")
    if init.lower() == "olora":
        raise AdapterUnsupported(f"unconverted OLoRA (init_lora_weights={shown(init)}) is not served yet. {_CONVERT}")
    if init.startswith("corda"):
        raise AdapterUnsupported(
            f"unconverted CorDA (init_lora_weights={shown(init)}) cannot be served: the base it was trained over is "
            f"not in its files. {_CONVERT}"
        )
    if init == "loftq":
        raise AdapterUnsupported(
            "LoftQ (init_lora_weights='loftq') cannot be served: the base it was trained over is not in its files. "
            "Serve the quantised base that LoftQ wrote, and set init_lora_weights to true."
        )
    if init.lower() not in _PLAIN_INITS:
        raise AdapterUnsupported(f"init_lora_weights={shown(init)} is not known; PEFT 0.21 has no such initialisation.")


def _check_task_type(task_type: object) -> None:
    if task_type is None or (isinstance(task_type, str) and task_type in _TASK_TYPES):
        return
    if isinstance(task_type, str) and task_type in _TASKS_WITH_A_HEAD:
        raise AdapterUnsupported(f"adapters with a head of their own (task_type={shown(task_type)}) are not served.")
    raise AdapterMalformed(f"task_type is {shown(task_type)}; PEFT knows no such task.")
