"""adapter_config.json: no JSON, numbers and types that no field has, expressions that never end."""

from __future__ import annotations

import json
from typing import Any

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from tests.workers.adapters.bad_adapters.damage import SLOW_REGEX, Case, Damage, config_has


def config_is(text: str | bytes) -> Damage:
    data = text.encode() if isinstance(text, str) else text
    return lambda a: (a.path / "adapter_config.json").write_bytes(data)


def raw_config(key: str, text: str) -> Damage:
    """A value that json.dumps would not write."""

    def damage(a: Any) -> None:
        config = {k: v for k, v in a.config.items() if k != key}
        (a.path / "adapter_config.json").write_text(json.dumps(config)[:-1] + f', "{key}": {text}}}')

    return damage


CASES: dict[str, Case] = {
    "empty config": (config_is(""), AdapterMalformed, "not valid JSON"),
    "config is a list": (config_is("[1]"), AdapterMalformed, "must hold an object"),
    "config is not UTF-8": (config_is(b'{"r": "\xff"}'), AdapterMalformed, "UTF-8"),
    "config is nested deeply": (config_is("[" * 100_000), AdapterMalformed, "nested too deeply"),
    "config is huge": (config_is(" " * (2 << 20)), AdapterMalformed, "at most"),
    "key twice": (config_is('{"peft_type": "LORA", "r": 4, "r": 8}'), AdapterMalformed, "'r' occurs twice"),
    "NaN in config": (raw_config("lora_alpha", "NaN"), AdapterMalformed, "NaN"),
    "infinity by exponent": (raw_config("lora_alpha", "1e999"), AdapterMalformed, "lora_alpha is inf"),
    "number of 10^5 digits": (raw_config("r", "1" * 100_000), AdapterMalformed, "not acceptable JSON"),
    "no peft_type": (config_has(peft_type=None), AdapterMalformed, "peft_type"),
    "r 0": (config_has(r=0), AdapterMalformed, "r is 0"),
    "r -1": (config_has(r=-1), AdapterMalformed, "r is -1"),
    "r true": (config_has(r=True), AdapterMalformed, "r is True"),
    "r text": (config_has(r="4"), AdapterMalformed, "r is '4'"),
    "r 4.0": (config_has(r=4.0), AdapterMalformed, "r is 4.0"),
    "r null": (config_has(r=None), AdapterMalformed, "r is None"),
    "r 10^9": (config_has(r=10**9), AdapterMalformed, "rank 4 in the weights, but 1000000000"),
    "r disagrees": (config_has(r=8), AdapterMalformed, "rank 4 in the weights, but 8"),
    "alpha text": (config_has(lora_alpha="16"), AdapterMalformed, "lora_alpha is '16'"),
    "alpha null": (config_has(lora_alpha=None), AdapterMalformed, "lora_alpha is None"),
    "alpha over every float": (config_has(lora_alpha=10**400), AdapterMalformed, "finite"),
    "rsLoRA is text": (config_has(use_rslora="yes"), AdapterMalformed, "use_rslora"),
    "rank_pattern is a list": (config_has(rank_pattern=["q_proj"]), AdapterMalformed, "rank_pattern"),
    "rank_pattern value": (config_has(rank_pattern={"q_proj": [True]}), AdapterMalformed, "rank_pattern['q_proj']"),
    "rank_pattern is no regex": (
        config_has(rank_pattern={"q_proj(": 4}),
        AdapterMalformed,
        "not a valid regular",
    ),
    "rank_pattern disagrees": (config_has(rank_pattern={"q_proj": 2}), AdapterMalformed, "but 2 in"),
    "targets are numbers": (config_has(target_modules=[1]), AdapterMalformed, "target_modules"),
    "no targets": (config_has(target_modules=[]), AdapterMalformed, "does not target"),
    "regex with flags": (config_has(target_modules="(?i).*Q_PROJ"), AdapterUnsupported, "target_modules"),
    "regex of escapes": (config_has(target_modules=r"\u0071_proj"), AdapterUnsupported, "target_modules"),
    "catastrophic regex": (config_has(target_modules=r"(?:a|.|..|...)*Z?(?<!oj)"), AdapterMalformed, "backtracking"),
    "regex nested deeply": (config_has(target_modules="(" * 4000 + ")" * 4000), AdapterMalformed, "regular expression"),
    "layers are text": (config_has(layers_to_transform=["0"]), AdapterMalformed, "layers_to_transform"),
    "layers with a regex": (
        config_has(layers_to_transform=[0], target_modules=".*q_proj"),
        AdapterMalformed,
        "layers_to_transform",
    ),
    "layers_pattern alone": (config_has(layers_pattern="layers"), AdapterMalformed, "layers_pattern"),
    "config of 10 MB": (config_is(json.dumps({"peft_type": "LORA", "x": "a" * 10**7})), AdapterMalformed, "at most"),
    "a value nested deeply": (
        config_is('{"peft_type": "LORA", "rank_pattern": ' + '{"a":' * 100_000),
        AdapterMalformed,
        "nested too deeply",
    ),
    "key twice, within": (
        raw_config("rank_pattern", '{"q_proj": 4, "q_proj": 8}'),
        AdapterMalformed,
        "'q_proj' occurs twice",
    ),
    "infinity in config": (raw_config("lora_alpha", "-Infinity"), AdapterMalformed, "Infinity"),
    "alpha 1e308": (config_has(lora_alpha=1e308), AdapterMalformed, "finite"),
    "alpha is a list": (config_has(lora_alpha=[1]), AdapterMalformed, "lora_alpha is [1]"),
    "r 2^63": (config_has(r=2**63), AdapterMalformed, "rank 4 in the weights"),
    "r is an object": (config_has(r={"a": 1}), AdapterMalformed, "r is {'a': 1}"),
    "catastrophic rank_pattern": (config_has(rank_pattern={SLOW_REGEX: 4}), AdapterMalformed, "backtracking"),
    "catastrophic alpha_pattern": (config_has(alpha_pattern={SLOW_REGEX: 4}), AdapterMalformed, "backtracking"),
    "catastrophic exclude_modules": (config_has(exclude_modules=SLOW_REGEX), AdapterMalformed, "backtracking"),
    "catastrophic layers_pattern": (
        config_has(layers_pattern=["(?:a|.|..|...)*Z?(?<!.)"], layers_to_transform=[0]),
        AdapterMalformed,
        "backtracking",
    ),
    "many slow patterns": (
        config_has(rank_pattern={f"(?:a|.|..|...)*Z{i}": 4 for i in range(10_000)}),
        AdapterMalformed,
        "backtracking",
    ),
    "too many patterns": (
        config_has(rank_pattern={f"layer{i}": 4 for i in range(20_000)}),
        AdapterMalformed,
        "20000 entries",
    ),
    "repeats of repeats": (config_has(target_modules="(((a{1,99}){1,99}){1,99}){1,99}"), AdapterMalformed, ""),
    "regex of 20 000 characters": (config_has(target_modules="q_proj|" * 3000), AdapterMalformed, "at most 16384"),
    "targets with control characters": (config_has(target_modules=["\x1b[31m\r\n"]), AdapterMalformed, ""),
    "a key that is half a character": (
        config_is('{"peft_type": "LORA", "\\ud800": 1}'),
        AdapterUnsupported,
        "\\ud800",
    ),
    "a method of 10 kB": (config_has(peft_type="X" * 10_000), AdapterUnsupported, "XXX…"),
    "a method that is a list": (config_has(peft_type=["LORA"]), AdapterUnsupported, "['LORA']"),
    "the base's name is a number": (config_has(base_model_name_or_path=7), AdapterMalformed, "base_model_name_or_path"),
    "unknown task": (config_has(task_type="DANCE"), AdapterMalformed, "task_type"),
}
