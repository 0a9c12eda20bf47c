"""Finds adapters in one folder: <directory>/<lora_name>/adapter_config.json.

Names cannot lead out of the folder, not even through symlinks. Only adapters that name the served base, or no base,
are found. Whether their weights fit is checked when they are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import AdapterFolder, read_config
from lorafleet.protocol.errors import AdapterChanged, AdapterError, AdapterMissing, ConfigError
from lorafleet.protocol.lora_request import LoRARequest, adapter_number
from lorafleet.protocol.names import check_adapter_name
from lorafleet.resolvers.trained_base import is_for_base

THREADS = 2  # Lookups at a time, so that a folder that does not answer holds up nothing but lookups.

logger = logging.getLogger(__name__)


class FilesystemResolver:
    """Finds adapters in a folder.

    Args:
        directory: Folder of adapters; it must exist.
        base_model_names: Further names of the served base, such as its path.
    """

    def __init__(self, directory: str | os.PathLike[str], base_model_names: Collection[str] = ()) -> None:
        path = Path(directory)
        if not path.is_dir():
            raise ConfigError(
                f"the LoRA resolver's directory {str(path)!r} is not a folder. Create it or name another."
            )
        self._directory = path.resolve()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lora-folder")
        self._base_model_names = frozenset(base_model_names)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        check_adapter_name(lora_name)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._find, base_model_name, lora_name)

    def _find(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        folder = self._folder(lora_name)
        if folder is None:
            return None
        try:
            config = read_config(folder)
        except AdapterMissing:
            return None  # a folder that is no adapter, such as "org" of "org/adapter"
        except AdapterError as error:
            raise type(error)(f"adapter {lora_name!r}: {error.message}", error.param) from error
        if not is_for_base(config, lora_name, base_model_name, self._base_model_names):
            return None
        return LoRARequest(
            lora_name,
            adapter_number(lora_name),
            str(folder.path),
            base_model_name=base_model_name,
            within=str(self._directory),
        )

    def _folder(self, lora_name: str) -> AdapterFolder | None:
        try:
            return AdapterFolder.at(self._directory / lora_name, str(self._directory))
        except AdapterMissing:
            return None
        except AdapterChanged:
            logger.warning(
                "adapter %r is not served: its folder is a symlink that leads out of the resolver's", lora_name
            )
            return None
