"""Maps PEFT's tensor names to (module, leaf), and names the feature behind a tensor that has no place.

A module is named as in BaseLayout, such as "layers.0.self_attn.q_proj". A leaf is the rest as PEFT 0.21 writes it,
such as "lora_A.weight". Prefixes that tools are known to drop, double or insert are accepted. Two names for one
tensor, and any name that is not understood, are errors. Tensors of the parts for pictures and sound are left out, since
no text passes through these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.base_layout import HEAD, TABLES, BaseLayout
from lorafleet.workers.adapters.spellings import known_name, root_in_file, without_wrappers
from lorafleet.workers.bases.text_part import is_of_pictures

MAX_NAME_CHARS = 1024  # PEFT's are about 80

# Leaves that an adapter of any kind may have beside its kind's own.
SAVED = "weight"  # from modules_to_save, or from the base when its embeddings were saved too
SAVED_BIAS = "bias"
BASE_COPY = "base_layer.weight"
BASE_BIAS = "base_layer.bias"
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"
TOKEN_BASE = "token_adapter.base_layer.weight"
# For a resized vocabulary with modules_to_save, PEFT writes SAVED, the same again, and the base's own tensor.
SAVED_TWICE = "modules_to_save.weight"
SAVED_ORIGINAL = "original_module.weight"
_OF_ANY_KIND = (
    *(TOKEN_BASE, TOKEN_ROWS, BASE_COPY, BASE_BIAS),
    *(SAVED_TWICE, SAVED_ORIGINAL, SAVED, SAVED_BIAS),
)

# Names inside PEFT's own model. Files with either name load.
_ALIASES = {"lora_magnitude_vector.weight": "lora_magnitude_vector"}

# A single "base_model.model." is normal. "language_model." is a multimodal checkpoint's name for the same decoder.
_PREFIX = re.compile(r"(?:base_model\.model\.|model\.|language_model\.|backbone\.)*+")

# The features that unknown leaves point to, tried in this order.
_FEATURES = (
    (re.compile(r"lora_magnitude_vector"), "DoRA"),
    (re.compile(r"lora_embedding_[AB]"), "LoRA on the embedding"),
    (re.compile(r"lora_E|ranknum"), "AdaLoRA"),
    (re.compile(r"lora_diag"), "KaSA"),
    (re.compile(r"hada_"), "LoHa"),
    (re.compile(r"lokr_"), "LoKr"),
    (re.compile(r"ia3_l"), "IA3"),
    (re.compile(r"vblora_"), "VB-LoRA"),
    (re.compile(r"vera_"), "VeRA"),
    (re.compile(r"oft_|boft_"), "OFT"),
    (re.compile(r"prompt_(embeddings|encoder)"), "prompt tuning"),
    (re.compile(r"trainable_tokens_(delta|indices)"), "trained token embeddings (trainable_token_indices)"),
    (re.compile(r"\.lora_[ab](\.weight)?$"), "mlx-lm's layout (lora_a, lora_b)"),
    (re.compile(r"\.lora_[AB]\."), "an adapter whose name is in its tensors' names, or an unknown part of LoRA"),
)


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The file's tensor names, sorted by the modules that they belong to."""

    by_module: dict[str, dict[str, str]] = field(default_factory=dict)  # by module, then by leaf
    shared: dict[str, str] = field(default_factory=dict)  # by leaf, tensors that belong to no module
    spelled: dict[str, str] = field(default_factory=dict)  # by module, its name in the file without PEFT's prefix
    # By tensor, the name in the file without PEFT's prefix, for parts that no text passes through.
    left_out: dict[str, str] = field(default_factory=dict)
    root: str | None = None  # what stands before the modules' names in the file; None if PEFT did not write that

    @property
    def left_out_parts(self) -> tuple[str, ...]:
        """The names of the parts whose tensors are left out, such as "vision_tower"."""
        return tuple(sorted(set(map(left_out_part, self.left_out))))

    def is_adapted(self, module: str) -> bool:
        """Returns whether the file has tensors of the adapter's kind for the module."""
        return not self.by_module.get(module, {}).keys() <= frozenset(_OF_ANY_KIND)


def name_tensors(
    names: Iterable[str], leaves: tuple[str, ...], shared: tuple[str, ...], label: str, layout: BaseLayout, base: str
) -> NamedTensors:
    """Returns all tensors of the file, sorted. Raises an AdapterError for the first that cannot be served.

    `leaves`, `shared` and `label` are the kind's. `base` names the base in messages.
    """
    aliases = [alias for alias, leaf in _ALIASES.items() if leaf in leaves]
    pattern = _leaf_pattern((*leaves, *aliases, *_OF_ANY_KIND))
    named = NamedTensors()
    absent: dict[str, None] = {}
    root: str | None = None
    for name in yielding_gil(names):
        if len(name) > MAX_NAME_CHARS:
            raise AdapterMalformed(
                f"the tensor {shown(name)} has a name of {len(name)} characters; at most {MAX_NAME_CHARS} are allowed."
            )
        inner = without_wrappers(name)
        common = inner.removeprefix("base_model.")
        if common in shared:
            _put(named.shared, common, name, "the adapter")
            continue
        if left_out_part(name):
            named.left_out[name] = known_name(inner)
            continue
        match = pattern.fullmatch(inner)
        if match is None:
            raise _feature(name) or AdapterMalformed(
                f"the tensor {shown(name)} is not one that PEFT writes for {label}."
            )
        path = match["module"]
        if match["leaf"] not in _OF_ANY_KIND:
            path = path.removesuffix(".weight")  # some tools append the adapter's leaves to the base tensor's name
        own = engine_name(path)
        module = layout.engine_name(own)
        if module in layout.absent:
            absent.setdefault(module)
            continue  # transformers has no such module either, so the tensor has no effect
        if not layout.targetable(module):
            raise _unknown_module(name, module, layout, base)
        leaf = match["leaf"].replace(".default", "")
        leaf = _ALIASES.get(leaf, leaf)
        _put(named.by_module.setdefault(module, {}), leaf, name, module)
        named.spelled.setdefault(module, known_name(path))
        if root is None and module != HEAD:
            root = root_in_file(path, own, layout.names.root)
    if not named.by_module:
        effectless = [*absent, *named.left_out.values()]
        ignored = f" but those of {shown(effectless[0])}, which has no effect in {base}" if effectless else ""
        raise AdapterMalformed(f"the weights file has no tensors{ignored}, so the adapter would do nothing.")
    return replace(named, root=root)


def left_out_part(name: str) -> str:
    """Returns the part that the tensor is for, such as "vision_tower", if no text passes through it, else ""."""
    own = engine_name(without_wrappers(name))
    return own.partition(".")[0] if is_of_pictures(own) else ""


def engine_name(module: str) -> str:
    """Removes the prefixes that the file puts before a module's name."""
    match = _PREFIX.match(module)
    return module if match is None else module[match.end() :]


def _leaf_pattern(leaves: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that splits a tensor's name into module and leaf.

    PEFT omits its adapter's name from the leaf. Tools that save a state dict themselves leave "default" in.
    """
    parts = []
    for leaf in leaves:
        head, dot, rest = leaf.partition(".")
        parts.append(rf"{re.escape(head)}(?:\.default)?{re.escape(dot + rest)}")
    return re.compile(rf"(?P<module>.+?)\.(?P<leaf>{'|'.join(parts)})")


def _put(found: dict[str, str], leaf: str, name: str, owner: str) -> None:
    other = found.setdefault(leaf, name)
    if other != name:
        raise AdapterMalformed(f"{shown(other)} and {shown(name)} are both {leaf.removesuffix('.weight')} of {owner}.")


def _feature(name: str) -> AdapterUnsupported | None:
    for pattern, feature in _FEATURES:
        if pattern.search(name):
            return AdapterUnsupported(
                f"the tensor {shown(name)} belongs to {feature}, which adapter_config.json does not ask for or which "
                "is not supported there."
            )
    return None


def _unknown_module(name: str, module: str, layout: BaseLayout, base: str) -> AdapterMismatch | AdapterUnsupported:
    inside = _feature(f"{module}.")
    if inside is not None:
        return inside
    if module in layout.unserved and not layout.is_generic:
        return AdapterUnsupported(
            f"the tensor {shown(name)} changes {module}, which is not supported. Train the adapter without it."
        )
    if module in layout.unserved or module in TABLES:
        return AdapterUnsupported(
            f"the tensor {shown(name)} is for {shown(module)} of {base}, which runs as transformers' own module "
            "(model_impl=transformers); adapters can change only its linears, and embedding and head where they have "
            "the usual names and no bias. Train LoRA on the linears instead."
        )
    return AdapterMismatch(
        f"the tensor {shown(name)} is for the module {shown(module)}, which {base} does not have; it has "
        f"{layout.describe()}. The adapter was made for another model."
    )
