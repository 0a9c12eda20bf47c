"""Names an adapter's kind for people, by its config and tensor names. Only the reader decides what is served."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lorafleet.workers.adapters.kinds.table import KINDS

_OPTIONS = {
    "use_dora": "DoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
}
_EXTRAS = {
    "use_rslora": "rsLoRA",
    "lora_bias": "bias on B",
    "modules_to_save": "replaced modules",
    "target_parameters": "parameters",
    "trainable_token_indices": "trained tokens",
    "rank_pattern": "ranks by module",
    "alpha_pattern": "alphas by module",
}
_UNCONVERTED = {"pissa": "PiSSA (unconverted)", "olora": "OLoRA (unconverted)", "corda": "CorDA", "loftq": "LoftQ"}
# Changes that no A and B can hold on any base, by the config field that requests them.
_NEVER_PLAIN = {
    "use_dora": "DoRA scales rows",
    "alora_invocation_tokens": "an activated LoRA has no effect before its invocation",
    "lora_bias": "it has biases",
    "modules_to_save": "it replaces modules",
    "trainable_token_indices": "it trains rows of the vocabulary",
    "target_parameters": "it changes the parameters of experts",
}
_PLAIN_LEAVES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


def kind_of(config: Mapping[str, object]) -> str:
    """Returns a name such as "DoRA" or "LoRA, rsLoRA, replaced modules"."""
    peft_type = config.get("peft_type")
    if not isinstance(peft_type, str):
        return "not a PEFT adapter"
    if peft_type != "LORA":
        return KINDS[peft_type].label if peft_type in KINDS else peft_type
    special = [name for field, name in _OPTIONS.items() if config.get(field)]
    if isinstance(config.get("kasa_config"), dict):  # An empty one counts.
        special.append("KaSA")
    init = _mutating_init(config)
    main = ", ".join(special) or init or "LoRA"
    extras = [name for field, name in _EXTRAS.items() if config.get(field)]
    if config.get("bias") not in (None, "none"):
        extras.append(f"trained biases ({config['bias']})")
    return ", ".join([main, *extras])


def is_plain(config: Mapping[str, object], tensor_names: Collection[str]) -> bool:
    """Returns whether the adapter has nothing but A and B of each module, under PEFT's own names."""
    if config.get("peft_type") != "LORA" or why_never_plain(config) is not None or _mutating_init(config):
        return False
    return not config.get("use_bdlora") and all(name.endswith(_PLAIN_LEAVES) for name in tensor_names)


def why_never_plain(config: Mapping[str, object]) -> str | None:
    """Returns why the adapter cannot be a plain LoRA on any base, or None if it might be one on some base."""
    if config.get("peft_type") == "IA3":
        return "IA3 scales outputs"
    if config.get("peft_type") == "TRAINABLE_TOKENS":
        return _NEVER_PLAIN["trainable_token_indices"]
    if config.get("bias") not in (None, "none"):
        return _NEVER_PLAIN["lora_bias"]
    return next((reason for name, reason in _NEVER_PLAIN.items() if config.get(name)), None)


def _mutating_init(config: Mapping[str, object]) -> str | None:
    """Returns the name of an initialization that PEFT repeats when it loads the adapter, and that changes the base.
    None if there is none."""
    init = config.get("init_lora_weights")
    if not isinstance(init, str):
        return None
    return next((name for start, name in _UNCONVERTED.items() if init.lower().startswith(start)), None)
