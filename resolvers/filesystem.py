"""Finds adapters in one folder: <directory>/<lora_name>/adapter_config.json.

Names stay inside the folder, also through symlinks. Only adapters that name the served base, or none, are found;
whether their weights fit is checked when they are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Collection
from pathlib import Path

from lorafleet.workers.errors import AdapterError, AdapterMalformed, AdapterMissing, ConfigError
from lorafleet.workers.lora.files import AdapterFolder, read_config
from lorafleet.workers.lora.names import check_adapter_name
from lorafleet.workers.lora.request import LoRARequest
from lorafleet.workers.lora.strict_json import read_json_object, shown

logger = logging.getLogger(__name__)


class FilesystemResolver:
    """directory: of adapters; it must exist. base_model_names: further names of the served base, such as its path."""

    def __init__(self, directory: str | os.PathLike[str], base_model_names: Collection[str] = ()) -> None:
        path = Path(directory)
        if not path.is_dir():
            raise ConfigError(
                f"the LoRA resolver's directory {str(path)!r} is not a folder. Create it or name another."
            )
        self._directory = path.resolve()
        self._base_model_names = frozenset(base_model_names)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        check_adapter_name(lora_name)
        return await asyncio.to_thread(self._find, base_model_name, lora_name)

    def _find(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        folder = self._folder(lora_name)
        if folder is None:
            return None
        try:
            trained_on = _trained_on(folder)
        except AdapterMissing:
            return None  # a folder, such as "org" of "org/adapter", but no adapter
        except AdapterError as error:
            raise type(error)(f"adapter {lora_name!r}: {error.message}", error.param) from error
        served = {base_model_name, *self._base_model_names}
        if trained_on is not None and not _is_same_base(trained_on, served):
            logger.warning(
                "adapter %r is not served: it was trained on %s, and the base here is %s",
                lora_name,
                shown(trained_on),
                base_model_name,
            )
            return None
        return LoRARequest(lora_name, _int_id(lora_name), str(folder.path), base_model_name=base_model_name)

    def _folder(self, lora_name: str) -> AdapterFolder | None:
        try:
            folder = AdapterFolder.at(self._directory / lora_name)
        except AdapterMissing:
            return None
        if not folder.path.is_relative_to(self._directory):
            logger.warning("adapter %r is not served: its folder is a symlink out of the resolver's", lora_name)
            return None
        return folder


def _trained_on(folder: AdapterFolder) -> str | None:
    value = read_json_object(read_config(folder), "adapter_config.json").get("base_model_name_or_path")
    if value is None or isinstance(value, str):
        return value or None
    raise AdapterMalformed(f"base_model_name_or_path is {shown(value)}; it must be a string.")


def _is_same_base(trained_on: str, served: Collection[str]) -> bool:
    """By whole name, or by last part: "meta-llama/Llama-3.1-8B" trained, "/models/Llama-3.1-8B" served."""
    return trained_on in served or _last_part(trained_on) in {_last_part(name) for name in served}


def _last_part(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _int_id(lora_name: str) -> int:
    """Positive and the same in every process; identity is the digest, so a collision does no harm."""
    return zlib.crc32(lora_name.encode()) or 1
