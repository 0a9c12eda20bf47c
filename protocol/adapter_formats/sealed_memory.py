"""Memory with an adapter's content that the processes of one node share, and that nobody can change once it is sealed.

One process fills it, seals it and sends a SealedAdapter to others, which map the same pages. Linux's seals guarantee
that the bytes neither change nor shrink. So whoever maps them needs neither a copy nor another digest, and no file can
be left behind: the memory returns to the system with its last user.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets

import msgspec

from lorafleet.protocol.lora_request import SealedAdapter

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_SEAL_ATTEMPTS = 8  # The kernel waits up to 0.15 s in each.


class AdapterMemory:
    """Shared memory while it is being filled with the content of a safetensors file and adapter_config.json.

    Raises OSError if the system has no memory left.
    """

    weights: memoryview  # Content of the safetensors file, as far as it was written.

    def __init__(self, config: bytes, weights_bytes: int) -> None:
        self._token = secrets.token_hex(16)
        self._descriptor = os.memfd_create(_name(self._token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._config_bytes, self._weights_bytes = len(config), weights_bytes
            os.ftruncate(self._descriptor, weights_bytes + len(config))
            os.pwrite(self._descriptor, config, weights_bytes)
            # A private mapping sees what is written to the memory, and does not stand in the way of the seals.
            self.weights = memoryview(_mapped(self._descriptor))[:weights_bytes]
        except BaseException:
            self.close()
            raise

    def write(self, part: bytes | memoryview, start: int) -> None:
        """Writes a part of the safetensors file, from this byte of it on. The caller checks that it ends within it."""
        view = memoryview(part)
        while len(view):
            written = os.pwrite(self._descriptor, view, start)
            view, start = view[written:], start + written

    @property
    def path(self) -> str:
        """The file by which other processes of this user on this node reach the memory until close()."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def seal(self) -> SealedAdapter:
        """Makes the content final, and returns what other processes of this node need to map it until close()."""
        for attempts_left in reversed(range(_SEAL_ATTEMPTS)):
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
                break
            except OSError as error:  # The kernel itself may still be using a page that was just written.
                if error.errno != errno.EBUSY or not attempts_left:
                    raise
        return SealedAdapter(os.getpid(), self._descriptor, self._token, self._weights_bytes, self._config_bytes)

    def close(self) -> None:
        """Gives the memory back. Processes that have mapped it keep it."""
        self.weights = memoryview(b"")
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SealedContent(msgspec.Struct, frozen=True):
    """The content of sealed memory, mapped into this process."""

    config: bytes
    weights: memoryview  # Content of a safetensors file. Writing to it changes only this process's own pages.


def map_sealed(place: SealedAdapter) -> SealedContent | None:
    """Maps sealed memory into this process. Returns None if it is not on this node, or is closed."""
    try:
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not _is_sealed(descriptor, place):
            return None
        content = memoryview(_mapped(descriptor))
    finally:
        os.close(descriptor)
    return SealedContent(bytes(content[place.weights_bytes :]), content[: place.weights_bytes])


def _is_sealed(descriptor: int, place: SealedAdapter) -> bool:
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_name(place.token)} "):
        return False
    has_size = os.fstat(descriptor).st_size == place.weights_bytes + place.config_bytes
    return has_size and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == _SEALS


def _mapped(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


def _name(token: str) -> str:
    return f"lorafleet-{token}"
