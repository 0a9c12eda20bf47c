"""Receives a download into a temporary folder, and moves it to its place once the files are complete and have the
adapter's digest. If anything fails before that, the target stays as it was."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from lorafleet.client.client_errors import APIConnectionError, APIError, DownloadError
from lorafleet.client.unpacking import ADAPTER_FILES, Unpacker
from lorafleet.protocol.adapter_formats.adapter_files import (
    BIN_NAME,
    CONFIG_NAME,
    DRAFT_FOLDER,
    OPTIONAL_NAMES,
    SAFETENSORS_NAME,
    OpenFile,
    read_through,
    stored_files,
)
from lorafleet.protocol.admin_answers import Downloaded
from lorafleet.protocol.admin_verbs import DIGEST_HEADER, VERSION_HEADER


class DownloadTarget:
    """The folder where the files of a download should be.

    Args:
        name: Name of the adapter.
        folder: None stands for a folder in the current one, with the last part of the adapter's name.
        force: Replaces an adapter's files that are already in the folder. Other files in it stay.

    Raises FileExistsError if something is there, unless it is an empty folder, or a folder and `force` is set.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str] | None, force: bool) -> None:
        last_part = name.rpartition("/")[2]
        if folder is None and last_part in ("", ".", ".."):
            raise APIError(f"{name!r} does not end in the name of a folder. Give the folder for the adapter's files.")
        self.path = Path(last_part if folder is None else folder).resolve()
        self._force = force
        self._is_there = self.path.is_dir()
        if self.path.exists() and not self._is_there:
            raise FileExistsError(f"{self.path} is not a folder. Choose another place for the adapter.")
        self._check_free()

    @contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Yields a new folder, which is gone after the block. It is beside a target that does not exist, and in one
        that exists, which may be a file system of its own."""
        parent = self.path if self._is_there else self.path.parent
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent / f".lorafleet-{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def take(self, folder: Path) -> int:
        """Moves the files of the temporary folder to the target, in one step if the target does not exist. Returns
        their number of bytes. Raises OSError, as FileExistsError if the target was filled meanwhile."""
        files = stored_files(folder)
        num_bytes = sum(file.stat().st_size for file in files.values())
        if not self._is_there:
            folder.rename(self.path)
            return num_bytes
        self._check_free(besides=folder)
        # The config goes first and comes last. A folder without it is no adapter, so that nobody takes one for an
        # adapter whose files are half replaced.
        for name in (CONFIG_NAME, *(name for name in ADAPTER_FILES if not (folder / name).exists())):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # An empty folder would be taken for a draft LoRA without files.
            (self.path / DRAFT_FOLDER).rmdir()
        for name in sorted(files, key=lambda name: name == CONFIG_NAME):
            (self.path / name).parent.mkdir(exist_ok=True)
            files[name].replace(self.path / name)
        return num_bytes

    def _check_free(self, besides: Path | None = None) -> None:
        if self._is_there and not self._force and any(entry != besides for entry in self.path.iterdir()):
            raise FileExistsError(
                f"{self.path} is not empty. Choose another folder, or use --force (in Python: force=True) to replace "
                "an adapter's files in it."
            )


class AdapterReceiver:
    """The answer to one download. `folder` is where its files are written."""

    def __init__(self, name: str, response: httpx.Response, folder: Path) -> None:
        version = response.headers.get(VERSION_HEADER, "")
        self._name = name
        self._version = int(version) if version.isdecimal() else None
        self._digest = response.headers.get(DIGEST_HEADER, "")
        if not self._digest:
            raise APIConnectionError(
                f"{response.url} did not answer as a lorafleet server does: it sent no {DIGEST_HEADER} header."
            )
        size = response.headers.get("content-length", "")
        self.num_bytes = int(size) if size.isdecimal() else 0  # Bytes that are to come; 0: unknown.
        self.num_received = 0
        self._folder = folder
        self._unpacker = Unpacker(folder)

    def write(self, data: bytes) -> None:
        """Takes the next bytes. Raises DownloadError, and OSError if a file cannot be written."""
        self._unpacker.write(data)
        self.num_received += len(data)

    def finish(self, target: DownloadTarget) -> Downloaded:
        """Checks the files and moves them to the target. Raises DownloadError if they are not the adapter's."""
        self._unpacker.finish()
        digest = _digest(self._folder)
        if digest != self._digest:
            raise DownloadError(
                f"the files of {self._name!r} have digest {digest[:12]}…, but the server promised "
                f"{self._digest[:12]}…. They were damaged on the way; repeat the download."
            )
        num_bytes = target.take(self._folder)
        return Downloaded(self._name, self._version, digest, num_bytes, str(target.path))

    def close(self) -> None:
        self._unpacker.close()


@contextmanager
def receiving(name: str, response: httpx.Response, folder: Path) -> Iterator[AdapterReceiver]:
    """Yields a download, whose errors say that nothing was written to the target."""
    download = AdapterReceiver(name, response, folder)
    try:
        yield download
    except httpx.TransportError as error:
        raise DownloadError(
            f"the download of {name!r} broke off after {download.num_received} of {download.num_bytes or '?'} bytes: "
            f"{error or type(error).__name__}. Nothing was written; repeat it."
        ) from error
    finally:
        download.close()


def _digest(folder: Path) -> str:
    """Returns the digest of the adapter in a folder that nobody else writes. AdapterFolder would need Linux."""
    weights = next((name for name in (SAFETENSORS_NAME, BIN_NAME) if (folder / name).exists()), None)
    if weights is None or not (folder / CONFIG_NAME).exists():
        raise DownloadError(f"the server's tar has no {CONFIG_NAME} or no weights, so it is not an adapter.")
    with ExitStack() as stack:

        def opened(name: str) -> OpenFile:
            stream = stack.enter_context((folder / name).open("rb", buffering=0))
            return OpenFile(name, stream, os.fstat(stream.fileno()))

        optional = {name: opened(name) for name in OPTIONAL_NAMES if (folder / name).exists()}
        return read_through((folder / CONFIG_NAME).read_bytes(), optional, opened(weights))
