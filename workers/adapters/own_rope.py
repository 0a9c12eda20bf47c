"""Turns the rope that an adapter's files state into the one that its tokens get on a given base."""

from __future__ import annotations

from lorafleet.protocol.adapter_formats.adapter_rope import AdapterRope
from lorafleet.protocol.errors import AdapterUnsupported
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.forms import BASE_ROPE, AdapterForms, OwnRope
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.bases.rope_parameters import scaled_rope


def own_rope(stated: AdapterRope | None, base: Base, is_activated: bool) -> OwnRope:
    """Returns the adapter's own rope. Raises AdapterUnsupported if the base cannot have it.

    `is_activated` is true for an activated LoRA, whose first tokens are computed as the base's.
    """
    if stated is None:
        return BASE_ROPE
    replaced, positions = base.layout.rope, base.layout.rope_positions
    if replaced is None:
        raise AdapterUnsupported(
            f"the adapter has a rope scaling or a context length of its own, which {base.named} cannot have: it "
            "runs as transformers' module, or it has latent attention, or its own rope is dynamic, longrope, "
            "proportional or scaled by an alpha. Serve the adapter from a server whose base has the scaling in its "
            "config.json."
        )
    scaling = stated.scaling_for(positions)
    if stated.scaling is None and scaling is not None and replaced.rope_type != "default":
        raise AdapterUnsupported(
            f"context_length={stated.context_length} exceeds the {positions} positions of {base.named}, whose rope is "
            f"scaled already ({replaced.rope_type}), so it does not say which scaling the adapter was trained with. "
            "State it as rope_scaling in adapter_config.json or lorafleet.json."
        )
    rope = replaced if scaling is None else scaled_rope(replaced, scaling, positions)
    if rope != replaced and is_activated:
        raise AdapterUnsupported(
            "a rope scaling of an activated LoRA (alora_invocation_tokens) is not supported: the tokens before the "
            "invocation are rotated as the base's."
        )
    return OwnRope(None if rope == replaced else rope, stated.context_limit(positions))


def check_scaling_factor(forms: AdapterForms, config: LoRAConfig, name: str) -> None:
    """Raises AdapterUnsupported if the option declares the adapters' scalings and this adapter's is not among them."""
    factors, rope = config.long_lora_scaling_factors, forms.own_rope.rope
    if factors is None or rope is None or (rope.rope_type == "linear" and rope.factor in factors):
        return
    raise AdapterUnsupported(
        f"adapter {name!r} has the rope scaling {shown(rope.rope_type)} with the factor {rope.factor:g}; this server "
        f"allows linear scaling by lora.long_lora_scaling_factors={factors}. Add the factor and restart, or leave the "
        "option unset to serve any scaling."
    )
