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
from typing import Any, Protocol, TypeVar

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


class ForEach(Protocol):
    """Calls a function for each item, in any order, and raises the first error once all calls have ended."""

    def __call__(self, function: Callable[[T], object], items: Iterable[T], /) -> None: ...


def in_turn(function: Callable[[T], object], items: Iterable[T]) -> None:
    """Calls the function for each item on the calling thread."""
    for item in items:
        function(item)


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
        self, file: OpenFile, target: Tensor, dtype: torch.dtype | None, before: hashlib._Hash, expected: str
    ) -> ReadValues:
        """Fills `target` with the file's last bytes. Returns when they are there, and before their digest is known.

        Args:
            target: uint8.
            dtype: The dtype of all values, or None if their largest magnitude is not wanted.
            before: The digest of everything before these bytes. It is not changed.
            expected: The digest that the content should have, or "".
        """
        pieces = target.split(self._piece_bytes)
        reads = [
            self._pool.submit(_read_piece, file, piece, file.size - target.numel() + i * self._piece_bytes, dtype)
            for i, piece in enumerate(pieces)
        ]
        hashes = [
            self._pool.submit(_hash_piece, piece, [read])
            for piece, read in zip(pieces if self._hashes_pieces else (), reads, strict=False)
        ]
        content = _Content(before.copy(), b"in order", [[piece.numpy().data] for piece in pieces], reads, hashes)
        return self._found(content, expected, reads)

    def read_scattered(
        self,
        file: OpenFile,
        targets: Iterable[memoryview],
        memory: Sequence[Tensor],
        dtype: torch.dtype,
        before: hashlib._Hash,
        expected: str,
    ) -> ReadValues:
        """Fills the targets, one after another, with the file's last bytes. Returns as read() does.

        Args:
            targets: Bytes of the memory, in any order.
            memory: uint8. Everything in it that is in no target is 0.
            dtype: The dtype of all values.
            before: As for read().
            expected: As for read().
        """
        parts = _pieces(targets, self._piece_bytes)
        sizes = [sum(map(len, part)) for part in parts]
        offsets = accumulate(sizes, initial=file.size - sum(sizes))
        reads = [self._pool.submit(file.read_at, part, offset) for part, offset in zip(parts, offsets, strict=False)]
        # Few large pieces of memory, rather than many tensors: each call takes the GIL, for which the threads queue.
        pieces = [piece for block in memory for piece in block.split(self._piece_bytes)]
        checks = [self._pool.submit(_largest, piece, reads, dtype) for piece in pieces]
        hashes = [self._pool.submit(_hash_piece, piece, reads) for piece in (pieces if self._hashes_pieces else ())]
        content = _Content(before.copy(), b"scattered", parts, reads, hashes)
        return self._found(content, expected, [*reads, *checks])

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

    def _found(self, content: _Content, expected: str, calls: Sequence[Future[Any]]) -> ReadValues:
        """Waits for the calls, which return the largest magnitude of their part, or None."""
        digest = self._digests.submit(self._digest, content, expected)
        wait(calls)  # also after an error, since the caller then closes the file
        largest = [found for call in calls if (found := call.result()) is not None]
        return ReadValues(max_magnitude(torch.stack(largest)) if largest else None, digest)

    def _digest(self, content: _Content, expected: str) -> str:
        """Computes the digest in order, unless the hashes of the pieces are those of a known content."""
        hashes = content.hashes
        is_expected = bool(hashes) and expected in self._known
        if is_expected and (found := self._known.find(content.combined())) is not None:
            return found
        digest, may_be_known = content.before.copy(), bool(hashes) and not is_expected
        for part, read in zip(content.parts, content.reads, strict=True):
            read.result()
            if may_be_known and hashes[-1].done():  # the others were started before it
                if (found := self._known.find(content.combined())) is not None:
                    return found
                may_be_known = False
            for data in part:
                digest.update(data)
        computed = digest.hexdigest()
        if hashes:
            self._known.add(content.combined(), computed)
        return computed


@dataclass(frozen=True, slots=True)
class _Content:
    """A content whose digest is wanted."""

    before: hashlib._Hash  # of everything before the parts
    order: bytes  # in which the pieces that are hashed lie, since other orders of the same bytes are other contents
    parts: Sequence[Sequence[memoryview]]  # in the file's order
    reads: Sequence[Future[Any]]  # of each part
    hashes: Sequence[Future[PieceHash]]  # of the pieces

    def combined(self) -> bytes:
        """Waits for the hashes."""
        return combined(self.before, self.order, [of_piece.result() for of_piece in self.hashes])


def _pieces(targets: Iterable[memoryview], piece_bytes: int) -> list[list[memoryview]]:
    """Groups the targets into parts of about piece_bytes, each of at most MAX_TARGETS. The order stays."""
    parts: list[list[memoryview]] = [[]]
    room = piece_bytes
    for target in targets:
        for start in range(0, len(target), piece_bytes):
            if room <= 0 or len(parts[-1]) == MAX_TARGETS:
                parts.append([])
                room = piece_bytes
            parts[-1].append(target[start : start + piece_bytes])
            room -= len(parts[-1][-1])
    return parts if parts[0] else []


def _read_piece(file: OpenFile, piece: Tensor, offset: int, dtype: torch.dtype | None) -> Tensor | None:
    file.read_at([piece.numpy().data], offset)
    return None if dtype is None else max_magnitude(piece.view(dtype))


def _largest(piece: Tensor, reads: Sequence[Future[None]], dtype: torch.dtype) -> Tensor:
    for read in reads:
        read.result()
    return max_magnitude(piece.view(dtype))


def _hash_piece(piece: Tensor, reads: Sequence[Future[Any]]) -> PieceHash:
    for read in reads:
        read.result()
    return piece.numel(), hashlib.sha256(piece.numpy().data).digest()
