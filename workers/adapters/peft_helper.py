"""Reads the keys of adapter_config.json that all PEFT methods share.

They say which modules an adapter targets, which it brings whole, and the rank and alpha of each. This module checks
the values that are used. peft_fields.py decides which keys are served at all, and kinds/ reads a method's own keys.
Nothing here knows about tensors. Module names are PEFT's: "model.layers.0.self_attn.q_proj".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import read_json_object, shown
from lorafleet.workers.adapters.pattern_values import PatternValues
from lorafleet.workers.adapters.patterns import Budget, NameList, Pattern
from lorafleet.workers.adapters.peft_fields import FIELDS, check_fields, is_unset
from lorafleet.workers.adapters.spellings import Spelled

# PEFT's targets if target_modules is null. One family served here has the third, the others have the first two.
DEFAULT_TARGETS = ("q_proj", "v_proj", "qkv_proj")
MAX_ENTRIES = 16_384  # in a list or a pattern table; a 126-layer model has 882 linears

MAX_SAVED = 1024  # modules_to_save; a 126-layer model has 253 norms

_LORA_TARGETS = frozenset({"LORA", "ADALORA", "LOHA", "LOKR", "VERA", "VBLORA", "HRA", "MISS", "DELORA", "GRALORA"})
_MODULE_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")

# Finds PEFT's layer number if layers_pattern is not given. It is our own, takes linear time and costs next to nothing.
_ANY_LAYERS = Pattern("[^.]*", "layers_pattern")


@dataclass(frozen=True, slots=True)
class PEFTHelper:
    """The checked config of one adapter. Build it with from_bytes or from_dict."""

    method: str  # PEFT's peft_type
    fields: Mapping[str, object]  # the keys as written, for kinds/
    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...]  # in file order: the first match wins
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    target_modules: NameList | Pattern  # list of names, or one regular expression
    all_linear: bool
    exclude_modules: NameList | Pattern
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[Pattern, ...]
    target_parameters: NameList
    modules_to_save: tuple[str, ...]
    bias: str
    base_model_name_or_path: str | None
    budget: Budget = field(default_factory=Budget, compare=False, repr=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> PEFTHelper:
        return cls.from_dict(read_json_object(data, CONFIG_NAME))

    @classmethod
    def from_dict(cls, config: Mapping[str, object]) -> PEFTHelper:
        method = check_fields(config)
        known = FIELDS[method]
        targets = config.get("target_modules")
        ranks = _table(config, "rank_pattern") if {"r", "rank_pattern"} <= known.used else []
        helper = cls(
            method=method,
            fields=config,
            r=_rank(config.get("r", known.default_rank), "r") if "r" in known.used else known.default_rank,
            alpha=_alpha(config.get(known.alpha, known.default_alpha), known.alpha) if known.alpha else 1.0,
            use_rslora=_flag(config.get("use_rslora"), "use_rslora"),
            rank_pattern=tuple((p, _rank(v, p.field)) for p, v in ranks),
            alpha_pattern=tuple((p, _alpha(v, p.field)) for p, v in _table(config, "alpha_pattern")),
            target_modules=_names_or_pattern(DEFAULT_TARGETS if targets is None else targets, "target_modules"),
            all_linear=isinstance(targets, str) and targets.lower() == "all-linear",
            exclude_modules=_names_or_pattern(config.get("exclude_modules") or (), "exclude_modules"),
            layers_to_transform=_layers(config.get("layers_to_transform")),
            layers_pattern=_layers_pattern(config.get("layers_pattern")),
            target_parameters=NameList(_names(config.get("target_parameters") or (), "target_parameters")),
            modules_to_save=_saved(config.get("modules_to_save")),
            bias=_bias(config.get("bias")),
            base_model_name_or_path=_base_name(config.get("base_model_name_or_path")),
        )
        helper._check_layer_choice()
        if targets is None and method not in _LORA_TARGETS:
            raise AdapterMalformed(
                f"target_modules is null, whose meaning in {method} depends on the model family. Name the modules."
            )
        return helper

    def flag(self, name: str) -> bool:
        return _flag(self.fields.get(name), name)

    def integer(self, name: str, default: int) -> int:
        value = self.fields.get(name, default)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise AdapterMalformed(f"{name} is {shown(value)}; it must be an integer of at least 0.")
        return value

    def is_set(self, name: str) -> bool:
        return not is_unset(self.fields.get(name))

    def has_object(self, name: str) -> bool:
        """Returns whether the key holds a nested config. An empty one counts, since PEFT fills it with defaults."""
        return isinstance(self.fields.get(name), dict)

    def pattern(self, name: str) -> Pattern:
        """Returns the pattern of a key that holds one string."""
        return Pattern(str(self.fields[name]), name)

    def names(self, name: str) -> tuple[str, ...]:
        value = self.fields.get(name)
        return () if value is None else _names(value, name)

    def ranks(self) -> PatternValues[int]:
        return PatternValues("rank_pattern", self.rank_pattern, self.r, self.budget)

    def alphas(self) -> PatternValues[float]:
        return PatternValues("alpha_pattern", self.alpha_pattern, self.alpha, self.budget)

    def scaling(self, alpha: float, rank: int) -> float:
        """Returns the factor of B A."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, parameter: str) -> bool:
        """Returns whether PEFT would put LoRA on a parameter itself, such as "model.layers.0.mlp.experts.down_proj".

        The names in target_parameters are not patterns, and no key excludes any of them.
        """
        return self.target_parameters.has_ending(parameter)

    def targets_parameter_as(self, names: Spelled, *, is_held: bool) -> bool:
        """Returns whether PEFT would put LoRA on the parameter itself, as targets_as() decides it."""
        return any(map(self.targets_parameter, names.own)) or (
            is_held and any(map(self.targets_parameter, names.foreign))
        )

    def targets_as(self, names: Spelled, *, is_held: bool, is_linear: bool = True) -> bool:
        """Returns whether PEFT would put LoRA on this module in the class that the adapter was trained with.

        The names of other classes count only as far as the file agrees: `is_held` says whether it has the module's
        tensors.
        """
        if any(self.targets(name, is_linear=is_linear) for name in names.own):
            return is_held or not any(map(self._excludes, names.foreign))
        if not is_held or any(map(self._excludes, names.own)):
            return False
        return any(self.targets(name, is_linear=is_linear) for name in names.foreign)

    def saves_as(self, names: Spelled, *, is_held: bool) -> bool:
        """Returns whether the adapter brings this module whole, as targets_as() decides it."""
        return any(map(self.saves, names.own)) or (is_held and any(map(self.saves, names.foreign)))

    def saves(self, module: str) -> bool:
        """Returns whether the adapter brings this module whole. PEFT compares name endings, even within a segment."""
        return module.endswith(self.modules_to_save) if self.modules_to_save else False

    def targets(self, module: str, *, is_linear: bool = True) -> bool:
        """Returns whether PEFT would put LoRA on this module.

        `is_linear` says whether "all-linear" includes the module, which is false for the head.
        """
        if self._excludes(module):
            return False
        if self.all_linear:
            return is_linear
        if isinstance(self.target_modules, Pattern):
            return self.target_modules.fullmatch(module, self.budget)
        if self.target_modules.has(module):  # a full name matches whatever layers_to_transform says
            return True
        return self.target_modules.has_ending(module) and self._is_chosen_layer(module)

    def _excludes(self, module: str) -> bool:
        if self.modules_to_save and not _segment_runs(module).isdisjoint(self.modules_to_save):
            return True
        if isinstance(self.exclude_modules, Pattern):
            return self.exclude_modules.fullmatch(module, self.budget)
        return self.exclude_modules.has_ending(module)

    def _is_chosen_layer(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        for pattern in self.layers_pattern or (_ANY_LAYERS,):
            index = pattern.layer_index(module, self.budget)
            if index is not None:
                return index in self.layers_to_transform
        return False

    def _check_layer_choice(self) -> None:
        """Raises AdapterMalformed for choices that PEFT itself rejects when an adapter is made."""
        chooses_layers = self.layers_to_transform is not None
        if chooses_layers and (self.all_linear or isinstance(self.target_modules, Pattern)):
            raise AdapterMalformed("layers_to_transform is set, but target_modules is not a list of names.")
        if self.layers_pattern and not chooses_layers:
            raise AdapterMalformed("layers_pattern is set without layers_to_transform.")


def _rank(value: object, name: str) -> int:
    if type(value) is not int or value < 1:  # `type`, because True is an int to isinstance
        raise AdapterMalformed(f"{name} is {shown(value)}; a rank must be an integer of at least 1.")
    return value


def _alpha(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise AdapterMalformed(f"{name} is {shown(value)}; it must be a finite number.")
    return float(value)


def _flag(value: object, name: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise AdapterMalformed(f"{name} is {shown(value)}; it must be true or false.")


def _table(config: Mapping[str, object], name: str) -> list[tuple[Pattern, object]]:
    table = config.get(name)
    if table is None:
        return []
    if not isinstance(table, dict):
        raise AdapterMalformed(f"{name} is {shown(table)}; it must be an object with module names as keys.")
    _check_count(len(table), name)
    return [(Pattern(key, f"{name}[{shown(key)}]"), value) for key, value in table.items()]


def _names_or_pattern(value: object, name: str) -> NameList | Pattern:
    if isinstance(value, str):
        return Pattern(value, name)
    return NameList(_names(value, name))


def _names(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise AdapterMalformed(f"{name} is {shown(value)}; it must be a string or a list of strings.")
    _check_count(len(value), name)
    return tuple(value)


def _check_count(count: int, name: str) -> None:
    if count > MAX_ENTRIES:
        raise AdapterMalformed(f"{name} has {count} entries; at most {MAX_ENTRIES} are allowed.")


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    items = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in items):
        raise AdapterMalformed(f"layers_to_transform is {shown(value)}; it must be a layer number or a list of them.")
    _check_count(len(items), "layers_to_transform")
    return frozenset(items)


def _layers_pattern(value: object) -> tuple[Pattern, ...]:
    if value is None or value in ([], ""):
        return ()
    names = (value,) if isinstance(value, str) else _names(value, "layers_pattern")
    return tuple(Pattern(name, "layers_pattern") for name in names)


def _saved(value: object) -> tuple[str, ...]:
    """Returns the names in modules_to_save, which must be plain names to be unambiguous.

    PEFT reads them as endings of names and, for targets, as regular expressions.
    """
    if value is None:
        return ()
    names = _names(value, "modules_to_save")
    if len(names) > MAX_SAVED:
        raise AdapterMalformed(f"modules_to_save has {len(names)} entries; at most {MAX_SAVED} are allowed.")
    odd = next((name for name in names if not _MODULE_NAME.fullmatch(name)), None)
    if odd is not None:
        raise AdapterMalformed(f"modules_to_save has {shown(odd)}, which is not a valid module name.")
    return names


def _bias(value: object) -> str:
    if value is None:
        return "none"
    if not isinstance(value, str) or not (value in ("none", "all") or value.endswith("_only")):
        raise AdapterMalformed(f"bias is {shown(value)}; it must be 'none', 'all' or 'lora_only'.")
    return value


def _segment_runs(module: str) -> frozenset[str]:
    """Returns all runs of path segments. For "a.b.c" they are a, b, c, a.b, b.c and a.b.c."""
    parts = module.split(".")
    return frozenset(".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))


def _base_name(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise AdapterMalformed(f"base_model_name_or_path is {shown(value)}; it must be a string.")
