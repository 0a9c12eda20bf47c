"""The durable log of the catalogue's changes, over any Store. Two writers cannot lose each other's changes.

    log/<number>            one change. Numbers are consecutive; whoever creates the object owns the number.
    runs/<start>-<end>      the changes with start <= number < end, but only the last one of each name.

A write creates one small object, however many adapters there are. Every MERGE changes are merged into a run, and every
FAN_OUT runs of one size into a larger run. Thus a write costs log(n) copies over its life, and a start reads a few
dozen objects. Objects that a run has replaced are deleted after the run has been read back, except the last MERGE
changes. Another process that reads the log every few seconds finds these one by one, and need not load everything.

A write whose answer is lost is repeated, since creating the same object twice has the same outcome as creating it once.
If the store does not answer for SETTLE_S, the outcome stays unknown until the log is read again. The change is then
either wholly present or, once another change has taken its number, wholly absent.

A writer that was suspended while its number was merged and deleted could take the number again. So after each write it
looks for a run over its number. If there is one that does not contain its change, it loads the log again.

A disk that falsely reports a sync can leave a torn object, which is never overwritten. The next change names the last
number that it builds upon, and so skips the torn object. If no change skips it and it is not the last object, it was
acknowledged, and its loss is an error.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Entry
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.catalogue.packed import Packed, head, pack, unpack
from lorafleet.protocol.errors import CatalogueDamaged, OutcomeUnknown, StoreError, StoreRefused

MERGE = 128
FAN_OUT = 16
READ_THREADS = 16
MAX_CHANGES = 64  # Largest number of changes that changed_names() reads.
LOAD_ATTEMPTS = 5  # Another writer may delete an object that was listed a moment ago.
SETTLE_S = 10.0  # Seconds for which a write with an unknown outcome is repeated before it raises OutcomeUnknown.
SETTLE_PAUSE_S = 0.2  # Seconds between two such attempts.

_MAGIC = b"lorafleet catalogue 1\n"

logger = logging.getLogger("lorafleet.cluster")


class Fenced(Exception):
    """Raised when other writers are so far ahead that only load() can find the present state. Nothing was written."""


class _Change(msgspec.Struct, frozen=True):
    """A change in the form that the log stores."""

    after: int  # Number of the change before it.
    writer: str  # Identifies the writer and the attempt, which distinguishes equal changes.
    entry: msgspec.Raw


class _Run(msgspec.Struct, frozen=True):
    """A run of merged changes in the form that the log stores."""

    after: int  # Number of the change before its first one.
    last: int  # Number of its last change.
    entries: list[msgspec.Raw]
    # The writer of each change, only in runs of MERGE numbers. A writer that finds a run over its own number can see
    # whether the run contains its change.
    writers: list[str] = []


@dataclass(frozen=True, slots=True)
class _Span:
    """An object of the log, which covers the numbers start <= n < end."""

    start: int
    end: int
    is_run: bool

    @property
    def key(self) -> str:
        return f"runs/{self.start:016d}-{self.end:016d}" if self.is_run else _change_key(self.start)


class CatalogueLog:
    """The log, with the position up to which it was read. The caller keeps the state that the changes add up to. Calls
    block, and only one may run at a time."""

    def __init__(self, store: Store, settle_s: float = SETTLE_S) -> None:
        self._store = store
        self._settle_s = settle_s
        self._writer = uuid.uuid4().hex
        self._next = 0
        self._last = -1  # Number of the last whole change; torn ones may follow it.

    @property
    def length(self) -> int:
        return self._next

    def load(self) -> dict[str, Packed]:
        """Returns the last entry of every name. Raises CatalogueDamaged if an acknowledged change is lost."""
        for attempt in range(LOAD_ATTEMPTS):
            try:
                return self._load()
            except CatalogueDamaged:
                if attempt == LOAD_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def append(self, entry: Entry) -> list[Entry]:
        """Writes the entry, and returns [] once it is durable.

        If other writers were first, writes nothing and returns their changes. The caller applies them, checks whether
        its own change still holds, and repeats the call.

        Raises Fenced or StoreError if nothing was written, and OutcomeUnknown if only a later read can tell.
        """
        number = self._next
        writer = f"{self._writer}:{uuid.uuid4().hex}"
        content = _frame(_Change(self._last, writer, msgspec.Raw(pack(entry))))
        if not self._settled(lambda: self._create(number, content), is_written=False):
            others = self.read_on()
            if not others:
                raise Fenced
            return others
        if self._settled(lambda: self._is_fenced_off(number, writer), is_written=True):
            raise Fenced
        self._last, self._next = number, number + 1
        if self._next % MERGE == 0:
            self._merge_if_possible()
        return []

    def read_on(self) -> list[Entry]:
        """Returns the changes that were written after the last known one. Raises Fenced if they have been merged away,
        and StoreError; in both cases the position in the log is unchanged."""
        found: list[Entry] = []
        last, number = self._last, self._next
        while (content := self._store.read(_change_key(number))) is not None:
            payload = _unframe(content)
            if payload is not None:
                change = _change_decoder.decode(payload)
                if change.after != last:
                    raise Fenced
                found.append(unpack(change.entry))
                last = number
            number += 1
        if not found and any(run.end > number for run in self._runs()):
            raise Fenced
        self._last, self._next = last, number
        return found

    def _settled(self, step: Callable[[], bool], *, is_written: bool) -> bool:
        """Repeats one step of a write until its outcome is known, and returns the outcome. `is_written` says whether
        the object may exist already; then a rejection does not mean that nothing was written. Raises OutcomeUnknown."""
        deadline = time.monotonic() + self._settle_s
        while True:
            try:
                return step()
            except StoreError as error:
                if isinstance(error, StoreRefused) and not is_written:
                    raise
                if time.monotonic() >= deadline:
                    raise OutcomeUnknown(
                        f"{error.message} The change may have been made: check with `show` before you repeat it."
                    ) from error
            is_written = True
            time.sleep(SETTLE_PAUSE_S)

    def _create(self, number: int, content: bytes) -> bool:
        """Returns whether the number belongs to this change. A repeated request may find the object of its own first
        attempt."""
        key = _change_key(number)
        if self._store.create(key, content):
            return True
        try:
            return self._store.read(key) == content
        except StoreRefused as error:  # The read was rejected, but the object may be ours.
            raise StoreError(error.message) from error

    def _is_fenced_off(self, number: int, writer: str) -> bool:
        """Returns whether the number had been merged away before it was taken again. If so, deletes the new object."""
        merged = [span for span in self._runs() if span.end > number]
        if not merged or any(self._has_taken(span, writer) for span in merged):
            return False
        self._store.delete(_change_key(number))
        return True

    def _load(self) -> dict[str, Packed]:
        changes = {_number(key): _Span(_number(key), _number(key) + 1, False) for key in self._store.keys("log/")}
        cover = _cover(self._runs(), changes)
        last, entries = -1, dict[str, Packed]()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            contents = pool.map(lambda span: self._store.read(span.key), cover)
            for span, content in zip(cover, contents, strict=True):
                if content is None:
                    raise CatalogueDamaged(self._damage(span.key, "is missing"))
                last = self._take(span, content, last, entries)
        self._last = last
        self._next = cover[-1].end if cover else 0
        if last + 1 < self._next:
            logger.warning("catalogue %s: %s is torn and was never acknowledged", self._store.uri, cover[-1].key)
        self._merge_if_possible()
        return entries

    def _take(self, span: _Span, content: bytes, last: int, entries: dict[str, Packed]) -> int:
        """Adds the entries of one object, and returns the number of the last change so far."""
        payload = _unframe(content)
        if payload is None:
            if span.is_run:
                raise CatalogueDamaged(self._damage(span.key, "does not contain the bytes that were written"))
            return last
        if span.is_run:
            run = _run_decoder.decode(payload)
            after, now, added = run.after, run.last, run.entries
        else:
            change = _change_decoder.decode(payload)
            after, now, added = change.after, span.start, [change.entry]
        if after != last:
            raise CatalogueDamaged(self._damage(_change_key(after), "is lost, but later changes build upon it"))
        entries.update((head(entry).name, bytes(entry)) for entry in added)
        return now

    def _damage(self, key: str, what: str) -> str:
        return (
            f"catalogue {self._store.uri}: {key} {what}. Restore the object from a backup, or set another "
            "catalog_uri to start with an empty catalogue."
        )

    def _runs(self) -> list[_Span]:
        return [_Span(*_bounds(key), True) for key in self._store.keys("runs/")]

    def _has_taken(self, run: _Span, writer: str) -> bool:
        content = self._store.read(run.key)
        payload = None if content is None else _unframe(content)
        return payload is not None and writer in _run_decoder.decode(payload).writers

    # -- merging ------------------------------------------------------------------------------------------------------

    def _merge_if_possible(self) -> None:
        """Merges changes and runs. What fails here is merged by a later call, and the log is whole without it."""
        try:
            size = MERGE
            while size <= self._next:
                self._merge(size)
                size *= FAN_OUT
        except (StoreError, _Vanished) as error:
            logger.warning("catalogue %s: merging is postponed: %s", self._store.uri, error)

    def _merge(self, size: int) -> None:
        """Makes one run of every block of `size` numbers that is in pieces, then deletes what runs have replaced."""
        changes = {_number(key): _Span(_number(key), _number(key) + 1, False) for key in self._store.keys("log/")}
        runs = self._runs()
        blocks: dict[int, list[_Span]] = {}
        for span in _cover(runs, changes):
            if span.end - span.start < size and (span.start // size + 1) * size <= self._next:
                blocks.setdefault(span.start // size, []).append(span)
        for block, pieces in blocks.items():
            runs.append(self._join(_Span(block * size, (block + 1) * size, True), pieces))
        old = [change for change in changes.values() if change.start < self._next - MERGE]
        for span in (*old, *runs):
            if any(run.start <= span.start and span.end <= run.end and run != span for run in runs):
                self._store.delete(span.key)

    def _join(self, whole: _Span, pieces: list[_Span]) -> _Span:
        after: int | None = None
        last, entries, writers = -1, dict[str, msgspec.Raw](), list[str]()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for span, content in zip(pieces, pool.map(lambda span: self._store.read(span.key), pieces), strict=True):
                if content is None:
                    raise _Vanished(span.key)
                payload = _unframe(content)
                if payload is None:
                    continue  # It is torn, and load() has found that nothing builds upon it.
                part = _run_decoder.decode(payload) if span.is_run else _as_run(span, payload)
                after = part.after if after is None else after
                last = part.last
                entries.update((head(entry).name, entry) for entry in part.entries)
                writers += part.writers
        if after is None:
            raise _Vanished(whole.key)
        kept = entries.values() if whole.start else (e for e in entries.values() if not _is_forgettable(e))
        named_writers = writers if whole.end - whole.start == MERGE else []
        self._store.create(whole.key, _frame(_Run(after, last, list(kept), named_writers)))
        written = self._store.read(whole.key)
        if written is None or _unframe(written) is None:
            raise StoreError(f"{whole.key} cannot be read back; its parts are kept.")
        return whole


class _Vanished(Exception):
    """Raised when an object is gone because another writer merges too."""


def changed_names(store: Store, number: int) -> frozenset[str] | None:
    """Returns the adapters that changes of this number or a later one affect, and the names that stand for them since.

    Returns None if there are more than MAX_CHANGES, or if the store lacks one of them.
    """
    names = set[str]()
    for position in range(number, number + MAX_CHANGES + 1):
        content = store.read(_change_key(position))
        if content is None:
            return None if any(_bounds(key)[1] > position for key in store.keys("runs/")) else frozenset(names)
        payload = _unframe(content)
        if payload is None:
            return None
        entry = unpack(_change_decoder.decode(payload).entry)
        names |= {entry.name, *(entry.aliases if isinstance(entry, AdapterRecord) else ())}
    return None


def _as_run(span: _Span, payload: memoryview) -> _Run:
    change = _change_decoder.decode(payload)
    return _Run(change.after, span.start, [change.entry], [change.writer])


def _is_forgettable(entry: msgspec.Raw) -> bool:
    """Returns whether the first run can omit the entry, since nothing is left before it that a removal would remove."""
    entry_head = head(entry)
    return entry_head.type == "removed" and entry_head.seeded_by is None


def _cover(runs: Iterable[_Span], changes: dict[int, _Span]) -> list[_Span]:
    """Returns the fewest objects that cover every number, in order. Gaps stay; the next change says whether a gap
    matters."""
    longest: dict[int, _Span] = {}
    for run in runs:
        if run.start not in longest or run.end > longest[run.start].end:
            longest[run.start] = run
    found: list[_Span] = []
    position = 0
    for start in sorted({*longest, *changes}):
        if start >= position:
            found.append(longest.get(start) or changes[start])
            position = found[-1].end
    return found


def _change_key(number: int) -> str:
    return f"log/{number:016d}"


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


def _bounds(key: str) -> tuple[int, int]:
    start, _, end = key.rpartition("/")[2].partition("-")
    return int(start), int(end)


_encoder = msgspec.msgpack.Encoder()
_change_decoder = msgspec.msgpack.Decoder(_Change)
_run_decoder = msgspec.msgpack.Decoder(_Run)


def _frame(content: _Change | _Run) -> bytes:
    payload = _encoder.encode(content)
    return b"".join((_MAGIC, hashlib.sha256(payload).digest(), payload))


def _unframe(content: bytes) -> memoryview | None:
    """Returns the payload, or None if it is torn. It is not copied, since a run may have hundreds of megabytes."""
    view = memoryview(content)
    magic, digest, payload = view[: len(_MAGIC)], view[len(_MAGIC) :][:32], view[len(_MAGIC) + 32 :]
    return payload if magic == _MAGIC and hashlib.sha256(payload).digest() == digest else None
