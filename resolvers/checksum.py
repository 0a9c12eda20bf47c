"""Checksums that a source gives for a file's content, and their comparison with the bytes that came."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
COMMON_PART_BYTES = tuple(n * MIB for n in (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512, 1024))

_MD5 = re.compile(r"[0-9a-f]{32}")
_MULTIPART = re.compile(r"[0-9a-f]{32}-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum of a file's content, as its source gives it.

    There are four kinds:

    - sha256 and md5 are hashes of the content.
    - git is the sha1 of "blob <size>\\0" and the content, as git names files.
    - multipart is S3's ETag of an upload in parts: the md5 of the parts' md5s, then "-<number of parts>".
    """

    kind: Literal["sha256", "md5", "git", "multipart"]
    value: str  # in hex
    part_bytes: tuple[int, ...] = ()  # for multipart: the sizes that the parts may have


class Checker:
    """Compares a file's bytes, which are given in order, with a checksum."""

    def __init__(self, checksum: Checksum, size: int) -> None:
        self._wanted = checksum.value
        self._hashes: list[hashlib._Hash | _Multipart] = []
        match checksum.kind:
            case "sha256":
                self._hashes.append(hashlib.sha256())
            case "md5":
                self._hashes.append(hashlib.md5(usedforsecurity=False))
            case "git":
                self._hashes.append(hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False))
            case "multipart":
                self._hashes.extend(_Multipart(part_bytes) for part_bytes in checksum.part_bytes)

    def update(self, data: memoryview) -> None:
        for hasher in self._hashes:
            hasher.update(data)

    def matches(self) -> bool:
        return any(hasher.hexdigest() == self._wanted for hasher in self._hashes)


class _Multipart:
    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0
        self._parts: list[bytes] = []

    def update(self, data: memoryview) -> None:
        while data:
            taken = data[: self._part_bytes - self._in_part]
            self._part.update(taken)
            self._in_part += len(taken)
            data = data[len(taken) :]
            if self._in_part == self._part_bytes:
                self._end_part()

    def hexdigest(self) -> str:
        """Returns the ETag of the content. It can be called only once, at the end."""
        if self._in_part:
            self._end_part()
        whole = hashlib.md5(b"".join(self._parts), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(self._parts)}"

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0


def of_etag(etag: str, size: int, part_bytes: int | None) -> Checksum | None:
    """Returns the checksum that S3's ETag of an object without KMS encryption gives, or None if it cannot be compared.

    part_bytes is the size of the first part, if the server reports it. Older servers do not: then each common size
    that gives the same number of parts is tried.
    """
    if _MD5.fullmatch(etag):
        return Checksum("md5", etag)
    multipart = _MULTIPART.fullmatch(etag)
    if multipart is None:
        return None
    sizes = COMMON_PART_BYTES if part_bytes is None else (part_bytes,)
    fitting = tuple(n for n in sizes if -(-size // n) == int(multipart[1]))
    return Checksum("multipart", etag, fitting) if fitting else None
