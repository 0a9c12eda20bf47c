"""Fields of a sound config that are not served, contradict each other or the tensors."""

from __future__ import annotations

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from tests.workers.adapters.bad_adapters.damage import Case, config_has

CASES: dict[str, Case] = {
    "LoRA's keys in LoHa": (config_has(peft_type="LOHA"), AdapterUnsupported, "'bias'"),
    "method of a later PEFT": (config_has(peft_type="WONDER"), AdapterUnsupported, "has no such method"),
    "prompt tuning": (config_has(peft_type="PROMPT_TUNING"), AdapterUnsupported, "PROMPT_TUNING"),
    "DoRA": (config_has(use_dora=True), AdapterMalformed, "without lora_magnitude_vector"),
    "unknown biases": (config_has(bias="some"), AdapterMalformed, "bias is 'some'"),
    "lora_bias": (config_has(lora_bias=True), AdapterMalformed, "without lora_B.bias"),
    "lora_bias with DoRA": (config_has(lora_bias=True, use_dora=True), AdapterUnsupported, "lora_bias with DoRA"),
    "two variants": (config_has(kasa_config={}, use_dora=True), AdapterUnsupported, "use_dora with kasa_config"),
    "KaSA over PiSSA": (config_has(kasa_config={}, init_lora_weights="pissa"), AdapterUnsupported, "kasa_config with"),
    "modules_to_save": (config_has(modules_to_save=["lm_head"]), AdapterMalformed, "modules_to_save"),
    "a whole linear saved": (
        config_has(modules_to_save=["k_proj"]),
        AdapterUnsupported,
        "self_attn.k_proj, which is not",
    ),
    "a whole MLP saved": (config_has(modules_to_save=["mlp"]), AdapterUnsupported, "replaces model.layers.0.mlp,"),
    "an expression saved": (config_has(modules_to_save=["(a|a)*"]), AdapterMalformed, "not a valid module name"),
    "norms saved, not there": (config_has(modules_to_save=["norm"]), AdapterMalformed, "has no tensor for it"),
    "trained tokens": (config_has(trainable_token_indices=[1]), AdapterMalformed, "trained tokens"),
    "trained tokens twice": (config_has(trainable_token_indices=[1, 1]), AdapterMalformed, "without duplicates"),
    "trained tokens are text": (config_has(trainable_token_indices=["a"]), AdapterMalformed, "list of token ids"),
    "trained tokens of another": (
        config_has(trainable_token_indices={"wte": [1]}),
        AdapterUnsupported,
        "trainable_token_indices names 'wte'",
    ),
    "aLoRA's tokens are text": (config_has(alora_invocation_tokens="<s>"), AdapterMalformed, "alora_invocation_tokens"),
    "aLoRA with biases": (config_has(alora_invocation_tokens=[1], bias="all"), AdapterUnsupported, "activated LoRA"),
    "layer replication": (config_has(layer_replication=[[0, 2]]), AdapterUnsupported, "layer replication"),
    "LoRA on parameters": (config_has(target_parameters=["experts"]), AdapterUnsupported, "target_parameters"),
    "QALoRA": (config_has(use_qalora=True), AdapterUnsupported, "QALoRA"),
    "KaSA": (config_has(kasa_config={"beta": 1e-4}), AdapterMalformed, "without lora_diag"),
    "PiSSA": (config_has(init_lora_weights="pissa_niter_16"), AdapterUnsupported, "PiSSA"),
    "CorDA": (config_has(init_lora_weights="corda"), AdapterUnsupported, "CorDA"),
    "LoftQ": (config_has(init_lora_weights="loftq"), AdapterUnsupported, "LoftQ"),
    "unknown initialization": (config_has(init_lora_weights="magic"), AdapterUnsupported, "'magic'"),
    "classifier without a head": (config_has(task_type="SEQ_CLS"), AdapterMalformed, "has no head"),
    "answers of a text's spans": (config_has(task_type="QUESTION_ANS"), AdapterUnsupported, "QUESTION_ANS"),
    "merged linears of 2023": (config_has(enable_lora=[True, False]), AdapterUnsupported, "enable_lora"),
    "key of a later PEFT": (config_has(use_wonders=True), AdapterUnsupported, "'use_wonders'"),
    "code in the config": (config_has(auto_map={"AutoModel": "evil.py"}), AdapterUnsupported, "'auto_map'"),
}
