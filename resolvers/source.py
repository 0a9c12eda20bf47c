"""What a remote source of adapters is: something that lists an adapter's files, and reads them in ranges.

s3.py, http.py and hub.py are the sources; download.py does with any of them what a download needs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lorafleet.protocol.adapter_files import BIN_NAME, CONFIG_NAME, LANGUAGE_NAMES, SAFETENSORS_NAME
from lorafleet.protocol.errors import AdapterMissing
from lorafleet.resolvers.checksum import Checksum
from lorafleet.resolvers.deadline import Deadline

SCHEMES = ("s3://", "https://", "http://", "hf://")


def is_uri(path: str) -> bool:
    return path.startswith(SCHEMES)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One version of one file.

    name: in the adapter's folder. location: the source's own word for where it is. version: equal only where the bytes
    are (an ETag, a commit); "" where the source has no such thing. in_ranges: whether a part can be asked for, so that
    parts come side by side and an interrupted one goes on where it stopped.
    """

    name: str
    location: str
    size: int
    version: str
    checksum: Checksum | None
    in_ranges: bool = True


class Interrupted(Exception):
    """The source stopped answering, or is too busy: the same request may succeed later."""


class Source(Protocol):
    """Its errors are LorafleetErrors, or Interrupted for what is worth another try."""

    timeout_s: float
    max_bytes: int

    def find(self, uri: str, deadline: Deadline) -> list[RemoteFile]:
        """As wanted_names has them; [] where the folder has no adapter_config.json. Forbidden where the
        configuration does not allow the URI."""
        ...

    def read(self, file: RemoteFile, start: int, end: int, deadline: Deadline) -> Generator[bytes, None, None]:
        """Bytes [start, end) of that very version; AdapterChanged where it is gone. It may end early: the caller
        counts. Without in_ranges, start is 0 and end the file's size."""
        ...

    def close(self) -> None:
        """Its connections."""
        ...


def wanted_names(names: Sequence[str], uri: str) -> list[str]:
    """The config, the weights that the loader would take, and what the adapter's requests are written in, of the names
    in a folder; [] where it is no adapter's."""
    if CONFIG_NAME not in names:
        return []
    for weights in (SAFETENSORS_NAME, BIN_NAME):
        if weights in names:
            return [CONFIG_NAME, weights, *(name for name in LANGUAGE_NAMES if name in names)]
    raise AdapterMissing(f"{uri} has a {CONFIG_NAME}, but neither {SAFETENSORS_NAME} nor {BIN_NAME}.")
