"""Reads an adapter's values in several threads, and computes their digest beside the work that follows.

The values are read into memory of our own, exactly once: the bytes that are hashed are the bytes that are served. A
mapped file would be neither safe nor faster. It could change after it was hashed, and one that shrinks under its
reader kills the process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_files import CHUNK_BYTES, MAX_TARGETS, OpenFile
from lorafleet.workers.adapters.casting import max_magnitude
from lorafleet.workers.adapters.content_digest import KnownDigests, combined

MAX_THREADS = 8
# Hashing pieces takes as much time of the processors as the digest. With fewer threads it would delay the digest.
MIN_THREADS_FOR_PIECES = 4
MIN_PIECES = 3  # contents of fewer are read on the calling thread

T = TypeVar("T")
Piece = list[Tensor]  # uint8; bytes that follow one another in the file
PieceHash = tuple[int, bytes]  # number of bytes, sha256


@dataclass(frozen=True, slots=True)
class ReadValues:
    """Values that have all been read."""

    largest: Tensor | None  # largest magnitude, as max_magnitude() returns it; None if no dtype was given
    digest: Future[str]


class ParallelReader:
    """Threads that all loads of a process share.

    Args:
        num_threads: Default: half of the processor's cores, at most MAX_THREADS.
        piece_bytes: A multiple of 8.
        known: Contents that are recognized by the hashes of their pieces.
    """

    def __init__(
        self, num_threads: int | None = None, piece_bytes: int = CHUNK_BYTES, known: KnownDigests | None = None
    ) -> None:
        num_cores = len(os.sched_getaffinity(0))
        num_threads = num_threads or max(1, min(MAX_THREADS, num_cores // 2))
        self._piece_bytes = piece_bytes
        self._known = known or KnownDigests()
        self._hashes_pieces = num_threads >= MIN_THREADS_FOR_PIECES
        # Tasks of the first pool wait only for tasks that it has started earlier. Those of the second wait for the
        # first pool's. So neither can come to a standstill.
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="lora-read")
        self._digests = ThreadPoolExecutor(min(MAX_THREADS, num_cores), thread_name_prefix="lora-digest")

    def takes(self, num_bytes: int) -> bool:
        """Returns whether so many bytes are worth several threads."""
        return num_bytes > (MIN_PIECES - 1) * self._piece_bytes

    def read(
        self,
        file: OpenFile,
        targets: Iterable[Tensor],
        dtype: torch.dtype | None,
        before: hashlib._Hash,
        expected: str,
    ) -> ReadValues:
        """Fills the targets, one after another, with the file's last bytes. Returns when they are there, and before
        their digest is known.

        Args:
            targets: uint8. They may lie anywhere.
            dtype: The dtype of all values, or None if their largest magnitude is not wanted.
            before: The digest of everything before these bytes. It is not changed.
            expected: The digest that the content should have, or "".
        """
        pieces = _pieces(targets, self._piece_bytes)
        offsets = accumulate(map(_size, pieces), initial=file.size - sum(map(_size, pieces)))
        reads = [
            self._pool.submit(_read_piece, file, piece, offset, dtype)
            for piece, offset in zip(pieces, offsets, strict=False)
        ]
        hashes = [
            self._pool.submit(_hash_piece, piece, read)
            for piece, read in zip(pieces if self._hashes_pieces else (), reads, strict=False)
        ]
        digest = self._digests.submit(self._digest, before.copy(), pieces, reads, hashes, expected)
        wait(reads)  # also after an error, since the caller then closes the file
        largest = [found for read in reads if (found := read.result()) is not None]
        return ReadValues(max_magnitude(torch.stack(largest)) if largest else None, digest)

    def largest(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the largest magnitude of values that are in memory, as max_magnitude() does. `values` is uint8."""
        calls = [self._pool.submit(max_magnitude, piece.view(dtype)) for piece in values.split(self._piece_bytes)]
        return max_magnitude(torch.stack([call.result() for call in calls]))

    def for_each(self, function: Callable[[T], object], items: Iterable[T]) -> None:
        """Calls the function for each item, in the threads. Raises the first error once all calls have ended."""
        calls = [self._pool.submit(function, item) for item in items]
        wait(calls)
        for call in calls:
            call.result()

    def stop(self) -> None:
        """Ends the threads of this reader. Call it once nothing is read."""
        self._digests.shutdown()
        self._pool.shutdown()

    def _digest(
        self,
        before: hashlib._Hash,
        pieces: Sequence[Piece],
        reads: Sequence[Future[Tensor | None]],
        hashes: Sequence[Future[PieceHash]],
        expected: str,
    ) -> str:
        """Computes the digest in order, unless the hashes of the pieces are those of a known content."""
        is_expected = bool(hashes) and expected in self._known
        if is_expected and (found := self._find(before, hashes)) is not None:
            return found
        digest, may_be_known = before.copy(), bool(hashes) and not is_expected
        for piece, read in zip(pieces, reads, strict=True):
            read.result()
            if may_be_known and hashes[-1].done():  # the others were started before it
                if (found := self._find(before, hashes)) is not None:
                    return found
                may_be_known = False
            _update(digest, piece)
        computed = digest.hexdigest()
        if hashes:
            self._known.add(combined(before, [of_piece.result() for of_piece in hashes]), computed)
        return computed

    def _find(self, before: hashlib._Hash, hashes: Sequence[Future[PieceHash]]) -> str | None:
        return self._known.find(combined(before, [of_piece.result() for of_piece in hashes]))


def _pieces(targets: Iterable[Tensor], piece_bytes: int) -> list[Piece]:
    """Divides the targets into pieces of at most piece_bytes, each of at most MAX_TARGETS parts. The order stays."""
    pieces: list[Piece] = []
    room = 0  # in the last piece
    for part in (part for target in targets if len(target) for part in target.split(piece_bytes)):
        if len(part) > room or len(pieces[-1]) == MAX_TARGETS:
            pieces.append([])
            room = piece_bytes
        pieces[-1].append(part)
        room -= len(part)
    return pieces


def _size(piece: Piece) -> int:
    return sum(map(len, piece))


def _read_piece(file: OpenFile, piece: Piece, offset: int, dtype: torch.dtype | None) -> Tensor | None:
    file.read_at([part.numpy().data for part in piece], offset)
    if dtype is None:
        return None
    largest = [max_magnitude(part.view(dtype)) for part in piece]
    return largest[0] if len(largest) == 1 else max_magnitude(torch.stack(largest))


def _hash_piece(piece: Piece, read: Future[Tensor | None]) -> PieceHash:
    read.result()
    digest = hashlib.sha256()
    _update(digest, piece)
    return _size(piece), digest.digest()


def _update(digest: hashlib._Hash, piece: Piece) -> None:
    for part in piece:
        digest.update(part.numpy().data)
