"""Sorts the keys of adapter_config.json by PEFT method: used, harmless, or a feature that is rejected when it is set.

The tables have every field that PEFT 0.21 writes for a served method, and those that older versions wrote. A key in
none of the tables may change the mathematics, so it is rejected too, unless it is unset. peft_helper.py and kinds/
read the values of the used keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorafleet.protocol.adapter_formats.adapter_classifier import HEAD_TASKS
from lorafleet.protocol.adapter_formats.adapter_rope import ROPE_KEYS
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one method's config."""

    used: frozenset[str]
    harmless: frozenset[str] = frozenset()
    features: Mapping[str, str] = field(default_factory=dict)  # key to the name of a feature that is not served
    alpha: str = ""  # key of LoRA's alpha, if the method has one
    default_rank: int = 8  # PEFT's
    default_alpha: float = 8.0  # PEFT's

    def __post_init__(self) -> None:
        assert not self.used & self.harmless and not (self.used | self.harmless) & self.features.keys()


# The rope keys are not PEFT's, see adapter_rope.py.
_ANY_USED = frozenset(
    {"base_model_name_or_path", "modules_to_save", "peft_type", "target_modules", "task_type", *ROPE_KEYS}
)
_ANY_HARMLESS = frozenset({"auto_mapping", "inference_mode", "peft_version", "revision"})
_LAYERS = frozenset({"layers_pattern", "layers_to_transform"})


def _fields(used: str, harmless: str = "", layers: bool = True, **more: object) -> Fields:
    wanted = _ANY_USED | frozenset(used.split()) | (_LAYERS if layers else frozenset())
    return Fields(wanted, _ANY_HARMLESS | frozenset(harmless.split()), **more)  # type: ignore[arg-type]  # Fields' own


# For LoRA, and for AdaLoRA, whose config inherits all of LoRA's keys.
_LORA_HARMLESS = (
    "corda_config eva_config loftq_config lora_ga_config "  # init_lora_weights says which one applies
    "fan_in_fan_out "  # PEFT resets it on Linear layers
    "lora_dropout megatron_config megatron_core runtime_config "
    "merge_weights "  # written in 2023
    "qalora_group_size"  # used only with use_qalora
)
_LORA_FEATURES = {
    "arrow_config": "Arrow routing between adapters",
    "enable_lora": "PEFT's MergedLinear layer of 2023",
    "layer_replication": "layer replication",
    "monteclora_config": "MonteCLoRA, which samples its weights,",
    "use_qalora": "QALoRA, which pools its inputs,",
}
_IGNORED_BY_ADALORA = {
    key: f"{name} in AdaLoRA, where PEFT ignores it,"
    for key, name in {
        "alora_invocation_tokens": "activated LoRA",
        "alpha_pattern": "alpha_pattern",
        "ensure_weight_tying": "weight tying",
        "kasa_config": "KaSA",
        "lora_bias": "a bias on lora_B",
        "target_parameters": "LoRA on parameters",
        "trainable_token_indices": "the training of token embeddings",
        "use_bdlora": "block-diagonal LoRA",
        "use_dora": "DoRA",
        "use_rslora": "rsLoRA",
        "velora_config": "VeLoRA",
    }.items()
}

FIELDS: Mapping[str, Fields] = {
    "LORA": _fields(
        "alora_invocation_tokens alpha_pattern bias ensure_weight_tying exclude_modules init_lora_weights kasa_config "
        "lora_alpha lora_bias r rank_pattern target_parameters trainable_token_indices use_bdlora use_dora use_rslora "
        "velora_config",  # changes only the backward pass, which has a tensor of its own
        _LORA_HARMLESS,
        features=_LORA_FEATURES,
        alpha="lora_alpha",
    ),
    "ADALORA": _fields(
        "bias exclude_modules init_r lora_alpha rank_pattern",
        f"{_LORA_HARMLESS} init_lora_weights r beta1 beta2 deltaT orth_reg_weight target_r tfinal tinit total_step",
        features=_LORA_FEATURES | _IGNORED_BY_ADALORA,
        alpha="lora_alpha",
    ),
    "LOHA": _fields(
        "alpha alpha_pattern exclude_modules r rank_pattern",
        "init_weights module_dropout rank_dropout use_effective_conv2d",
        alpha="alpha",
    ),
    "LOKR": _fields(
        "alpha alpha_pattern exclude_modules r rank_pattern",
        # The last two determined the sizes of w1 and w2, which their shapes show.
        "init_weights module_dropout rank_dropout rank_dropout_scale use_effective_conv2d decompose_both "
        "decompose_factor",
        alpha="alpha",
    ),
    "IA3": _fields("exclude_modules feedforward_modules", "fan_in_fan_out init_ia3_weights", layers=False),
    "VERA": _fields(
        "bias projection_prng_key r save_projection",
        "d_initial fan_in_fan_out init_weights vera_dropout",
        default_rank=256,
    ),
    "VBLORA": _fields(
        "bias exclude_modules num_vectors r save_only_topk_weights topk vector_length",
        "fan_in_fan_out init_logits_std init_vector_bank_bound vblora_dropout",
        default_rank=4,
    ),
    "HRA": _fields("apply_GS bias exclude_modules r", "init_weights"),
    "MISS": _fields("bias exclude_modules init_weights mini_r r", "miss_dropout", default_rank=64),
    "DELORA": _fields(
        "bias exclude_modules r rank_pattern",
        "delora_lambda init_weights lambda_pattern module_dropout",  # lambda is a tensor in the file
    ),
    "GRALORA": _fields(
        "alpha bias gralora_k hybrid_r r",
        "fan_in_fan_out gralora_dropout init_weights",
        alpha="alpha",
        default_rank=32,
        default_alpha=64.0,
    ),
    "TRAINABLE_TOKENS": _fields("token_indices", "init_weights", layers=False),
}

_NOT_LOW_RANK = "its change of the weights is not of low rank and cannot be batched with other adapters"
_NOT_WEIGHTS = "it does not change weights, but the model's inputs or how it runs"
_OWN_NETWORK = "it adds a network of its own beside the layers"
_RANDOM = "it is computed from random numbers that its files do not contain"

REFUSED_METHODS: Mapping[str, str] = {
    "ADAMSS": _NOT_LOW_RANK,
    "ADAPTION_PROMPT": _NOT_WEIGHTS,
    "BEFT": "it trains one bias for each module instead of a low rank; LoRA with bias='all' can express that",
    "BOFT": _NOT_LOW_RANK,
    "BONE": "PEFT has replaced it with MISS",
    "C3A": _NOT_LOW_RANK,
    "CARTRIDGE": _NOT_WEIGHTS,
    "CPT": _NOT_WEIGHTS,
    "DEFT": _NOT_LOW_RANK,
    "FOURIERFT": _NOT_LOW_RANK,
    "FROD": _NOT_LOW_RANK,
    "GLORA": _NOT_LOW_RANK,
    "HIRA": _NOT_LOW_RANK,
    "LILY": _OWN_NETWORK,
    "LN_TUNING": "it trains only norms; save them with LoRA's modules_to_save, which is supported",
    "MULTITASK_PROMPT_TUNING": _NOT_WEIGHTS,
    "OFT": _NOT_LOW_RANK,
    "OSF": _NOT_LOW_RANK,
    "PEANUT": _OWN_NETWORK,
    "POLY": "it mixes several adapters by task",
    "PREFIX_TUNING": _NOT_WEIGHTS,
    "PROMPT_TUNING": _NOT_WEIGHTS,
    "PSOFT": _NOT_LOW_RANK,
    "PVERA": "it is VeRA with sampled weights",
    "P_TUNING": _NOT_WEIGHTS,
    "RANDLORA": _NOT_LOW_RANK,
    "ROAD": "it rotates a layer's outputs, which cannot be batched with other adapters",
    "SHADOW": _OWN_NETWORK,
    "SHIRA": "it changes scattered weights, which is not a change of low rank",
    "SUPERTUNING": _NOT_LOW_RANK,
    "TINYLORA": _RANDOM,
    "UNILORA": _RANDOM,
    "WAVEFT": _NOT_LOW_RANK,
    "XLORA": "it routes between several adapters by what they compute",
}

_TASK_TYPES = frozenset({"CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM", *HEAD_TASKS})


def check_fields(config: Mapping[str, object]) -> str:
    """Returns the PEFT method. Raises AdapterUnsupported, naming the feature, for the first unserved key."""
    method = _method(config)
    fields = FIELDS[method]
    for key, value in config.items():
        nested = value == {} and key.endswith("_config")  # PEFT fills an empty one with defaults
        if key in fields.used or key in fields.harmless or (is_unset(value) and not nested):
            continue
        if key in fields.features:
            raise AdapterUnsupported(f"{fields.features[key]} ({key}={shown(value)}) is not supported.")
        raise AdapterUnsupported(
            f"adapter_config.json sets {shown(key)} to {shown(value)}; PEFT 0.21 has no such field for {method}, so "
            "its meaning is unknown. Remove it if it does not change what the adapter computes."
        )
    _check_task_type(config.get("task_type"))
    return method


def is_known(method: object, key: str) -> bool:
    """Returns whether the method's config has such a field in PEFT 0.21, or had it in an older version."""
    fields = FIELDS.get(method) if isinstance(method, str) else None
    return fields is not None and (key in fields.used or key in fields.harmless or key in fields.features)


def is_unset(value: object) -> bool:
    return value is None or value is False or value in ([], {}, "") or (type(value) in (int, float) and value == 0)


def _method(config: Mapping[str, object]) -> str:
    method = config.get("peft_type")
    if method is None:
        raise AdapterMalformed('adapter_config.json has no "peft_type"; PEFT writes "LORA" there.')
    if not isinstance(method, str) or method not in FIELDS:
        known = isinstance(method, str) and method in REFUSED_METHODS
        why = REFUSED_METHODS[str(method)] if known else "PEFT 0.21 has no such method"
        raise AdapterUnsupported(
            f"the PEFT method {shown(method)} (peft_type) is not supported: {why}. Supported methods: "
            f"{', '.join(FIELDS)}."
        )
    return method


def _check_task_type(task_type: object) -> None:
    if task_type is None or (isinstance(task_type, str) and task_type in _TASK_TYPES):
        return
    if task_type == "QUESTION_ANS":
        raise AdapterUnsupported(
            "adapters with a head for question answering (task_type='QUESTION_ANS') are not supported."
        )
    raise AdapterMalformed(f"task_type is {shown(task_type)}; PEFT has no such task type.")
