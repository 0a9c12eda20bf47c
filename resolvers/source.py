"""The interface of a remote source of adapters, which lists an adapter's files and reads them in ranges.

s3.py, http.py and hub.py are the sources. download.py does the rest of a download with any of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lorafleet.protocol.adapter_formats.adapter_files import BIN_NAME, CONFIG_NAME, OPTIONAL_NAMES, SAFETENSORS_NAME
from lorafleet.protocol.errors import AdapterMissing
from lorafleet.resolvers.checksum import Checksum
from lorafleet.resolvers.deadline import FetchDeadline

SCHEMES = ("s3://", "https://", "http://", "hf://")


def is_uri(path: str) -> bool:
    return path.startswith(SCHEMES)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One version of one file of an adapter."""

    name: str  # name in the adapter's folder
    location: str  # the place of the file, as the source writes it
    size: int
    version: str  # an ETag or a commit, equal only if the bytes are equal; "" if the source has no such thing
    checksum: Checksum | None
    # Whether a part can be requested. Then parts come in parallel, and an interrupted one continues where it stopped.
    in_ranges: bool = True


class Interrupted(Exception):
    """The source stopped answering, or is too busy: the same request may succeed later."""


class Source(Protocol):
    """A remote source of adapters. It raises LorafleetErrors, or Interrupted if another attempt may succeed."""

    timeout_s: float
    max_bytes: int

    def find(self, uri: str, deadline: FetchDeadline) -> list[RemoteFile]:
        """Returns the files that wanted_names selects, or [] if the folder has no adapter_config.json.

        Raises Forbidden if the configuration does not allow the URI.
        """
        ...

    def read(self, file: RemoteFile, start: int, end: int, deadline: FetchDeadline) -> Generator[bytes, None, None]:
        """Yields the bytes [start, end) of exactly that version; raises AdapterChanged if it is gone.

        The bytes may end early, so the caller counts them. Without in_ranges, start is 0 and end is the file's size.
        """
        ...

    def close(self) -> None:
        """Closes the source's connections."""
        ...


def wanted_names(names: Sequence[str], uri: str) -> list[str]:
    """Selects from the names in a folder the config, the weights that the loader would choose, and OPTIONAL_NAMES.

    Returns [] if the folder is not an adapter's. Raises AdapterMissing if it has a config but no weights.
    """
    if CONFIG_NAME not in names:
        return []
    for weights in (SAFETENSORS_NAME, BIN_NAME):
        if weights in names:
            return [CONFIG_NAME, weights, *(name for name in OPTIONAL_NAMES if name in names)]
    raise AdapterMissing(f"{uri} has a {CONFIG_NAME}, but neither {SAFETENSORS_NAME} nor {BIN_NAME}.")
