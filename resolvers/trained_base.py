"""Checks whether an adapter's config names the base that is served."""

from __future__ import annotations

import logging
from collections.abc import Collection

from lorafleet.protocol.errors import AdapterError, AdapterMalformed
from lorafleet.protocol.strict_json import read_json_object, shown

logger = logging.getLogger(__name__)


def is_for_base(config: bytes, lora_name: str, base_model_name: str, base_model_names: Collection[str]) -> bool:
    """Returns whether the adapter fits the served base. An adapter that names no base fits every one.

    base_model_names are further names of the served base, such as its path. Raises AdapterError, naming the adapter,
    if the config cannot be read.
    """
    try:
        trained_on = _trained_on(config)
    except AdapterError as error:
        raise type(error)(f"adapter {lora_name!r}: {error.message}", error.param) from error
    if trained_on is None or _is_same_base(trained_on, {base_model_name, *base_model_names}):
        return True
    logger.warning(
        "adapter %r is not served: it was trained on %s, but the served base is %s",
        lora_name,
        shown(trained_on),
        base_model_name,
    )
    return False


def _trained_on(config: bytes) -> str | None:
    value = read_json_object(config, "adapter_config.json").get("base_model_name_or_path")
    if value is None or isinstance(value, str):
        return value or None
    raise AdapterMalformed(f"base_model_name_or_path is {shown(value)}; it must be a string.")


def _is_same_base(trained_on: str, served: Collection[str]) -> bool:
    """Compares whole names, or their last parts: "meta-llama/Llama-3.1-8B" trained, "/models/Llama-3.1-8B" served."""
    return trained_on in served or _last_part(trained_on) in {_last_part(name) for name in served}


def _last_part(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]
