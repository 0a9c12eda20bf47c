"""Adapters on web servers, under URLs that the configuration allows: folder/adapter_config.json and its weights."""

from __future__ import annotations

from collections.abc import Generator
from urllib.parse import unquote, urlsplit

from lorafleet.protocol.adapter_formats.adapter_files import BIN_NAME, CONFIG_NAME, OPTIONAL_NAMES, SAFETENSORS_NAME
from lorafleet.protocol.errors import Forbidden
from lorafleet.protocol.sources import HTTPConfig
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.ranges import Described, RangeReader
from lorafleet.resolvers.source import RemoteFile, wanted_names


class HTTPSource:
    def __init__(self, config: HTTPConfig) -> None:
        self.timeout_s = config.timeout_s
        self.max_bytes = config.max_bytes
        self._allowed_prefixes = config.allowed
        self._reader = RangeReader(self._is_allowed)

    def find(self, uri: str, deadline: FetchDeadline) -> list[RemoteFile]:
        """Finds the adapter's files by asking for each name, since a folder on a web server cannot be listed."""
        folder = uri.rstrip("/") + "/"
        if not self._is_allowed(folder):
            raise Forbidden(
                f"{uri} is not under a URL that lora_resolver_http allows ({', '.join(self._allowed_prefixes)})."
            )
        found: dict[str, Described] = {}
        for name in (CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, *OPTIONAL_NAMES):
            if name == BIN_NAME and SAFETENSORS_NAME in found:
                continue
            described = self._reader.describe(folder + name, deadline)
            if described is not None:
                found[name] = described
            if CONFIG_NAME not in found or (name == BIN_NAME and BIN_NAME not in found):
                break
        return [self._file(folder + name, name, found[name]) for name in wanted_names(list(found), uri)]

    def read(self, file: RemoteFile, start: int, end: int, deadline: FetchDeadline) -> Generator[bytes, None, None]:
        return self._reader.read(
            file.location, start, end, file.size, file.version, in_ranges=file.in_ranges, deadline=deadline
        )

    def close(self) -> None:
        self._reader.close()

    def _file(self, url: str, name: str, described: Described) -> RemoteFile:
        # Without a validator, two parts might come from two versions without notice.
        in_ranges = described.in_ranges and bool(described.validator)
        return RemoteFile(name, url, described.size, described.validator, described.checksum, in_ranges)

    def _is_allowed(self, url: str) -> bool:
        """Returns whether the URL begins, as it is written, with an allowed prefix.

        A URL that a server might read differently is therefore not allowed.
        """
        try:
            parts = urlsplit(url)
        except ValueError:  # such as a bracket that is not closed
            return False
        path = unquote(parts.path)
        if parts.username is not None or parts.query or parts.fragment or "\\" in path or "%" in path:
            return False
        if any(segment in (".", "..") for segment in path.split("/")) or "//" in path:
            return False
        return url.startswith(self._allowed_prefixes)
