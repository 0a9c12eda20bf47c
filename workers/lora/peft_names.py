"""Maps PEFT's tensor names to (module, "A" or "B"), and names the feature behind every other tensor.

A module is called as the base calls it without "model.": "layers.0.self_attn.q_proj". Prefixes that tools are known to
drop, double or insert are understood; two names for one tensor, and any name that is not understood, are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorafleet.workers.errors import AdapterMalformed, AdapterMismatch, AdapterUnsupported
from lorafleet.workers.lora.giving_way import giving_way
from lorafleet.workers.lora.strict_json import shown

_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# "base_model.model." once is normal; "language_model." is a multimodal checkpoint's name for the same decoder.
_PREFIX = re.compile(r"(?:base_model\.model\.|model\.|language_model\.)*+")

# What a tensor that is not lora_A or lora_B of a linear gives away, tried in this order.
_FEATURES = (
    (re.compile(r"lora_magnitude_vector"), "DoRA"),
    (re.compile(r"lora_embedding_[AB]"), "LoRA on the embedding"),
    (re.compile(r"lora_B(\.default)?\.bias"), "a bias on lora_B (lora_bias)"),
    (re.compile(r"lora_E|ranknum"), "AdaLoRA"),
    (re.compile(r"lora_diag"), "KaSA"),
    (re.compile(r"hada_w"), "LoHa"),
    (re.compile(r"lokr_w"), "LoKr"),
    (re.compile(r"ia3_l"), "IA3"),
    (re.compile(r"vera_"), "VeRA"),
    (re.compile(r"oft_|boft_"), "OFT"),
    (re.compile(r"prompt_(embeddings|encoder)"), "prompt tuning"),
    (re.compile(r"trainable_tokens_(delta|indices)"), "trained token embeddings (trainable_token_indices)"),
    (re.compile(r"\.lora_[ab](\.weight)?$"), "mlx-lm's layout (lora_a, lora_b)"),
    (re.compile(r"\.base_layer\.weight"), "a copy of a base layer (an embedding or head that LoRA targets)"),
    (re.compile(r"\.bias$"), "a trained bias (bias='all' or 'lora_only')"),
    (re.compile(r"\.experts\.|block_sparse_moe"), "LoRA on a mixture of experts"),
    (re.compile(r"modules_to_save|\.weight$"), "a replaced module (modules_to_save)"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The names, in the file, of one module's two matrices."""

    a: str
    b: str


def pair_names(names: Iterable[str], base_modules: Mapping[str, object], base_name: str) -> dict[str, Pair]:
    """Every tensor of the file, as pairs by module. Raises for the first that cannot be served."""
    sides: dict[str, dict[str, str]] = {}
    for name in giving_way(names):
        module, side = _split(name)
        _check_module(module, name, base_modules, base_name)
        other = sides.setdefault(module, {}).setdefault(side, name)
        if other != name:
            raise AdapterMalformed(f"{shown(other)} and {shown(name)} are both lora_{side} of {module}.")
    if not sides:
        raise AdapterMalformed("the weights file has no tensors, so the adapter would do nothing.")
    return {module: _pair(module, found) for module, found in sides.items()}


def _pair(module: str, found: Mapping[str, str]) -> Pair:
    if len(found) == 2:
        return Pair(found["A"], found["B"])
    (side,) = found
    missing = "B" if side == "A" else "A"
    raise AdapterMalformed(f"{module} has lora_{side} ({shown(found[side])}) without lora_{missing}.")


def _split(name: str) -> tuple[str, str]:
    match = _LORA.fullmatch(name)
    if match is not None:
        module = match["module"]
        return module[_prefix_end(module) :], match["side"]
    for pattern, feature in _FEATURES:
        if pattern.search(name):
            raise AdapterUnsupported(f"{feature} is not served yet; the tensor {shown(name)} asks for it.")
    raise AdapterMalformed(f"the tensor {shown(name)} is not one that PEFT writes for LoRA.")


def _prefix_end(module: str) -> int:
    match = _PREFIX.match(module)
    return 0 if match is None else match.end()


def _check_module(module: str, name: str, base_modules: Mapping[str, object], base_name: str) -> None:
    if module in base_modules:
        return
    leaf = module.rsplit(".", 1)[-1]
    if leaf in ("lm_head", "embed_tokens"):
        raise AdapterUnsupported(f"LoRA on {leaf} is not served yet; the tensor {shown(name)} asks for it.")
    if ".experts." in module or "block_sparse_moe" in module:
        raise AdapterUnsupported(f"LoRA on a mixture of experts is not served yet; the tensor is {shown(name)}.")
    raise AdapterMismatch(
        f"the tensor {shown(name)} is for the module {shown(module)}, which the base model{_named(base_name)} does not "
        f"have; it has {_described(base_modules)}. The adapter was made for another model."
    )


def _named(base_name: str) -> str:
    return f" {base_name!r}" if base_name else ""


def _described(base_modules: Mapping[str, object]) -> str:
    layers = {m.split(".")[1] for m in base_modules if m.startswith("layers.")}
    leaves = sorted({m.rsplit(".", 1)[-1] for m in base_modules})
    return f"{len(layers)} layers of {', '.join(leaves)}"
