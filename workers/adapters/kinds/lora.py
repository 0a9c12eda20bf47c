"""Turns LoRA and the variants that share its peft_type into forms of y = W x + b + s (B A x + c).

The variants are:
- DoRA, which scales rows (dora.py),
- initializations that make PEFT change the base when it loads the adapter (mutated_base.py),
- blocks on a diagonal (block_diagonal.py),
- activated LoRA, which acts only from an invocation on.
"""

# R rank · D in features · O out features

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds import block_diagonal, mutated_base
from lorafleet.workers.adapters.kinds.dora import row_scale
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each
from lorafleet.workers.adapters.kinds.pairs import check_pair, joined
from lorafleet.workers.adapters.peft_helper import PEFTHelper

A, B, B_BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
MAGNITUDE = "lora_magnitude_vector"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
DIAG = "lora_diag"
VELORA = "lora_velora_embed"  # VeLoRA uses it only in its backward pass

KASA = "kasa_config"
# PEFT's variants of a LoRA layer. PEFT has no class that combines two of them.
_VARIANTS = ("use_dora", "use_bdlora", "alora_invocation_tokens", KASA, "velora_config")


def check_config(helper: PEFTHelper) -> None:
    mutated_base.check_init(helper)
    variants = [name for name in _VARIANTS if helper.is_set(name) or helper.has_object(name)]
    if helper.fields.get("init_lora_weights") == "mica":
        variants.append("init_lora_weights='mica'")
    if len(variants) > 1:
        raise AdapterUnsupported(f"{' with '.join(variants)} is not supported; PEFT 0.21 does not support it either.")
    if helper.has_object(KASA) and mutated_base.is_named(helper):
        raise AdapterUnsupported("kasa_config with an init_lora_weights that changes the base is not supported.")
    if helper.flag("lora_bias") and (
        helper.flag("use_dora") or isinstance(helper.fields.get("init_lora_weights"), str)
    ):
        raise AdapterUnsupported(
            "lora_bias with DoRA or with a named init_lora_weights is not supported; PEFT 0.21 rejects it too."
        )
    if invocation_tokens(helper) and (
        helper.bias != "none" or helper.modules_to_save or helper.is_set("trainable_token_indices")
    ):
        raise AdapterUnsupported(
            "activated LoRA (alora_invocation_tokens) with biases, modules_to_save or trained tokens is not supported: "
            "those would take effect before the invocation too."
        )


def invocation_tokens(helper: PEFTHelper) -> tuple[int, ...]:
    tokens = helper.fields.get("alora_invocation_tokens")
    if tokens is None:
        return ()
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise AdapterMalformed(f"alora_invocation_tokens is {shown(tokens)}; it must be a list of token ids.")
    return tuple(tokens)


def check(target: Target) -> int:
    helper, rank = target.helper, target.rank
    wanted = {
        B_BIAS: helper.flag("lora_bias"),
        MAGNITUDE: helper.flag("use_dora"),
        DIAG: helper.has_object(KASA),
        VELORA: helper.has_object("velora_config"),
    }
    extra = [leaf for leaf, is_wanted in wanted.items() if is_wanted]
    target.expect_leaves(A, B, *extra)
    inputs, outputs = target.shape
    if helper.has_object("use_bdlora"):
        block_diagonal.check(target, A, B)
    else:
        check_pair(target, A, B, rank)
    if B_BIAS in extra:
        target.expect(B_BIAS, outputs)
    if MAGNITUDE in extra:
        target.expect(MAGNITUDE, outputs)
    if DIAG in extra:
        target.expect(DIAG, rank)
    if not mutated_base.mutates(helper) or target.saved_weight is not None:
        return rank
    mutated_base.check_rank(target)
    return min(2 * rank, inputs, outputs)


def keeps_pairs(helper: PEFTHelper) -> bool:
    """Returns whether the forms have A and B as they lie in the file."""
    return not mutated_base.mutates(helper) and not helper.has_object("use_bdlora")


def form(target: Target) -> LinearForm:
    helper = target.helper
    a_RD, b_OR = _pair(target)
    scaling = target.scaling
    pairs, scale_O = [LowRank(a_RD, b_OR, scaling)], None
    if helper.flag("use_dora") or mutated_base.mutates(helper):
        with target.weights.beside_the_steps():
            pairs += mutated_base.removed(target, scaling)
            if helper.flag("use_dora"):
                scale_O = row_scale(target.base_weight(), pairs, target.value(MAGNITUDE), target.module)
    low_rank = pairs[0] if len(pairs) == 1 else joined(*pairs)
    return LinearForm(low_rank, out_scale_O=scale_O, bias_O=_bias(target, scaling))


def _pair(target: Target) -> tuple[Tensor, Tensor]:
    if target.helper.has_object("use_bdlora"):
        return block_diagonal.pair(target, A, B)
    a_RD, b_OR = target.value(A), target.value(B)
    if target.helper.has_object(KASA):
        return target.float32(DIAG).unsqueeze(1) * a_RD.float(), b_OR
    return a_RD, b_OR


def _bias(target: Target, scaling: float) -> Tensor | None:
    if not target.has(B_BIAS):
        return None
    base_O = target.bias()
    added_O = scaling * target.float32(B_BIAS)
    return added_O if base_O is None else torch.add(base_O, added_O)


LORA = Kind(
    "LoRA", (A, B, B_BIAS, MAGNITUDE, EMBEDDING_A, EMBEDDING_B, DIAG, VELORA), check, each(form), (), check_config
)
