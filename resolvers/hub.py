"""Adapters in repos of the Hugging Face hub that the configuration allows.

huggingface_hub finds the repo's commit and the hashes of its files. The bytes come as from any web server, so that
deadline, size limit and resumption are the same. A fetch reads one commit, whatever happens to its branch.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

from lorafleet.protocol.errors import AdapterUnavailable, Forbidden, InvalidRequest
from lorafleet.protocol.sources import HubConfig
from lorafleet.resolvers.checksum import Checksum
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.ranges import RangeReader
from lorafleet.resolvers.source import Interrupted, RemoteFile, wanted_names

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling


class HubSource:
    """Reads adapters at URIs hf://org/name and hf://org/name/folder.

    Each URI may end with @revision; otherwise the configured revision is used.
    """

    def __init__(self, config: HubConfig) -> None:
        self.timeout_s = config.timeout_s
        self.max_bytes = config.max_bytes
        self._config = config
        self._reader: RangeReader | None = None
        self._lock = threading.Lock()

    def find(self, uri: str, deadline: FetchDeadline) -> list[RemoteFile]:
        repo, folder, revision = split(uri)
        if not any(fnmatch.fnmatchcase(repo, pattern) for pattern in self._config.allow):
            raise Forbidden(f"{repo} is not a repo that lora_resolver_hub allows ({', '.join(self._config.allow)}).")
        from huggingface_hub import HfApi  # imported here, so that only users of a hub pay for it

        api = HfApi(endpoint=self._config.endpoint)
        commit, files = _list(api, repo, revision or self._config.revision, deadline)
        prefix = f"{folder}/" if folder else ""
        here = {file.rfilename.removeprefix(prefix): file for file in files if file.rfilename.startswith(prefix)}
        found = []
        for name in wanted_names(list(here), uri):
            location = f"{api.endpoint}/{repo}/resolve/{commit}/{prefix}{name}"
            size = here[name].size
            if size is None:
                raise AdapterUnavailable(f"{uri}: the hub does not report the size of {name}.")
            found.append(RemoteFile(name, location, size, f"{commit}/{prefix}{name}", _checksum(here[name])))
        return found

    def read(self, file: RemoteFile, start: int, end: int, deadline: FetchDeadline) -> Generator[bytes, None, None]:
        # A commit's file never changes, so it needs no validator.
        return self._ranges().read(
            file.location, start, end, file.size, "", in_ranges=file.in_ranges, deadline=deadline
        )

    def close(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.close()

    def _ranges(self) -> RangeReader:
        from huggingface_hub.utils._headers import build_hf_headers

        with self._lock:
            if self._reader is None:
                self._reader = RangeReader(lambda _: True, build_hf_headers())  # a hub stores its files elsewhere
            return self._reader


def _list(api: HfApi, repo: str, revision: str, deadline: FetchDeadline) -> tuple[str, list[RepoSibling]]:
    """Returns the commit and its files. There are no files if the repo does not exist, or if we may not see it."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=deadline.socket_s())
    except GatedRepoError as error:
        raise AdapterUnavailable(f"hf://{repo} is gated, and this cluster's HF_TOKEN has no access to it.") from error
    except RepositoryNotFoundError:
        return "", []
    except HFValidationError as error:  # the hub was not asked for it, and never will be
        raise InvalidRequest(f"hf://{repo} is not the name of a repo: {error}", "lora_path") from None
    except RevisionNotFoundError:
        raise AdapterUnavailable(f"hf://{repo} has no revision {revision!r}.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status >= 500 or status == 429:
            raise Interrupted(f"the hub answers HTTP {status}") from None
        raise AdapterUnavailable(f"hf://{repo}: the hub answers HTTP {status}.") from None
    except OfflineModeIsEnabled:
        raise AdapterUnavailable(f"hf://{repo}: HF_HUB_OFFLINE is set; unset it to ask the hub.") from None
    except Exception as error:  # errors of the HTTP library that huggingface_hub happens to use
        raise Interrupted(f"{type(error).__name__}: {error}") from None
    if info.id != repo:  # Hubs ignore case and know former names, but one adapter has one name.
        return "", []
    if info.sha is None:
        raise AdapterUnavailable(f"hf://{repo}: the hub does not report the commit of revision {revision!r}.")
    return info.sha, info.siblings or []


def _checksum(file: RepoSibling) -> Checksum | None:
    if file.lfs is not None:
        return Checksum("sha256", file.lfs.sha256)
    return Checksum("git", file.blob_id) if file.blob_id else None


def split(uri: str) -> tuple[str, str, str]:
    """Splits a URI into the repo, the folder in it and the revision; the last two may be empty."""
    path, _, revision = uri.removeprefix("hf://").partition("@")
    parts = path.strip("/").split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
        raise InvalidRequest(f"{uri!r} is not the URI of an adapter on a hub; write hf://org/name.", "lora_path")
    return "/".join(parts[:2]), "/".join(parts[2:]), revision
