"""The durable log of the catalogue's changes, over any Store; two writers cannot lose each other's.

    log/<number>            one change. Numbers are consecutive: who creates the object has the number.
    runs/<start>-<end>      the changes of numbers start <= n < end, only the last one of each name.

A write creates one small object, however many adapters there are. Every MERGE numbers become a run, every FAN_OUT runs
of a size a larger one, so that a write costs log(n) copies over its life and a start reads a few dozen objects. What a
run has replaced is deleted after the run has been read back, except the last MERGE changes: another process that reads
the log every few seconds finds them one by one, and need not load everything.

A write whose answer is lost is repeated: creating the same object twice has the same outcome as once. If the store does
not answer for SETTLE_S, the outcome stays unknown until the log is read again. The change is then either wholly there
or, once another change has taken its number, wholly absent.

A writer that slept while its number was merged and deleted could take it again: so it looks for a run over its number
after it has written, and starts anew where there is one that has not taken its change in. An object that was torn, by a
disk that lied about a sync, is never overwritten: the next change names the last number that it builds upon, and so
skips it; one that is skipped by nobody and is not the last was acknowledged, and its loss is an error.
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

from lorafleet.cluster.catalogue.catalogue_records import Adapter, Entry
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.catalogue.packed import Packed, head, pack, unpack
from lorafleet.protocol.errors import CatalogueDamaged, OutcomeUnknown, StoreError, StoreRefused

MERGE = 128
FAN_OUT = 16
READ_THREADS = 16
MAX_CHANGES = 64  # How many changes are read to learn which names they are of.
LOAD_ATTEMPTS = 5  # another writer may delete what was listed a moment ago
SETTLE_S = 10.0  # How long a write whose outcome is unknown is repeated before the caller is told so.
SETTLE_PAUSE_S = 0.2  # Pause between two such attempts.

_MAGIC = b"lorafleet catalogue 1\n"

logger = logging.getLogger("lorafleet.cluster")


class Fenced(Exception):
    """Other writers have gone so far that only load() tells what there is. Nothing was written."""


class _Change(msgspec.Struct, frozen=True):
    """after: the number of the change before it. writer: of whom, and which try; tells equal changes apart."""

    after: int
    writer: str
    entry: msgspec.Raw


class _Run(msgspec.Struct, frozen=True):
    """after: the number of the change before its first. last: of its last one. writers: of each change, in runs of
    MERGE numbers: who finds one over its own number sees whether it was taken in."""

    after: int
    last: int
    entries: list[msgspec.Raw]
    writers: list[str] = []


@dataclass(frozen=True, slots=True)
class _Span:
    """An object of the log: the numbers start <= n < end."""

    start: int
    end: int
    is_run: bool

    @property
    def key(self) -> str:
        return f"runs/{self.start:016d}-{self.end:016d}" if self.is_run else _change_key(self.start)


class CatalogueLog:
    """Keeps its place in the log; what the changes add up to is the caller's. Blocking, one call at a time."""

    def __init__(self, store: Store, settle_s: float = SETTLE_S) -> None:
        self._store = store
        self._settle_s = settle_s
        self._writer = uuid.uuid4().hex
        self._next = 0
        self._last = -1  # the number of the last whole change; torn ones may lie behind it

    @property
    def length(self) -> int:
        return self._next

    def load(self) -> dict[str, Packed]:
        """Every name's last entry. Raises CatalogueDamaged where an acknowledged change is lost."""
        for attempt in range(LOAD_ATTEMPTS):
            try:
                return self._load()
            except CatalogueDamaged:
                if attempt == LOAD_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def append(self, entry: Entry) -> list[Entry]:
        """Returns [] once the entry is durable. Else nothing was written, and these changes of other writers came
        first: take them in, look whether yours still holds, and repeat.

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
        """The changes that were written behind the last one that is known here. Raises Fenced where they have been
        merged away, and StoreError; then the place in the log is what it was."""
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
        """The outcome of one step of a write, which is repeated while it is unknown. is_written: whether there may be
        an object already, so that a refusal does not mean that nothing was written."""
        deadline = time.monotonic() + self._settle_s
        while True:
            try:
                return step()
            except StoreError as error:
                if isinstance(error, StoreRefused) and not is_written:
                    raise
                if time.monotonic() >= deadline:
                    raise OutcomeUnknown(
                        f"{error.message} The change may have been made: look with `show` before you repeat it."
                    ) from error
            is_written = True
            time.sleep(SETTLE_PAUSE_S)

    def _create(self, number: int, content: bytes) -> bool:
        """Whether the number is this change's. A repeated request may find its own first try."""
        key = _change_key(number)
        if self._store.create(key, content):
            return True
        try:
            return self._store.read(key) == content
        except StoreRefused as error:  # refuses the read; what is there may be ours
            raise StoreError(error.message) from error

    def _is_fenced_off(self, number: int, writer: str) -> bool:
        """Whether the number had been merged away before it was taken again; then it is given back."""
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
                    raise CatalogueDamaged(self._damage(span.key, "is gone"))
                last = self._take(span, content, last, entries)
        self._last = last
        self._next = cover[-1].end if cover else 0
        if last + 1 < self._next:
            logger.warning("catalogue %s: %s is torn and was never acknowledged", self._store.uri, cover[-1].key)
        self._merge_if_possible()
        return entries

    def _take(self, span: _Span, content: bytes, last: int, entries: dict[str, Packed]) -> int:
        """Adds what one object says; the number of the last change then."""
        payload = _unframe(content)
        if payload is None:
            if span.is_run:
                raise CatalogueDamaged(self._damage(span.key, "has other bytes than were written"))
            return last
        if span.is_run:
            run = _run_decoder.decode(payload)
            after, now, added = run.after, run.last, run.entries
        else:
            change = _change_decoder.decode(payload)
            after, now, added = change.after, span.start, [change.entry]
        if after != last:
            raise CatalogueDamaged(self._damage(_change_key(after), "is lost, and later changes build upon it"))
        entries.update((head(entry).name, bytes(entry)) for entry in added)
        return now

    def _damage(self, key: str, what: str) -> str:
        return (
            f"catalogue {self._store.uri}: {key} {what}. Bring the object back from a backup, or name another "
            "catalog_uri to begin with an empty catalogue."
        )

    def _runs(self) -> list[_Span]:
        return [_Span(*_bounds(key), True) for key in self._store.keys("runs/")]

    def _has_taken(self, run: _Span, writer: str) -> bool:
        content = self._store.read(run.key)
        payload = None if content is None else _unframe(content)
        return payload is not None and writer in _run_decoder.decode(payload).writers

    # -- merging ------------------------------------------------------------------------------------------------------

    def _merge_if_possible(self) -> None:
        """What fails here is done at the next turn: the log is whole without it."""
        try:
            size = MERGE
            while size <= self._next:
                self._merge(size)
                size *= FAN_OUT
        except (StoreError, _Vanished) as error:
            logger.warning("catalogue %s: merging is put off: %s", self._store.uri, error)

    def _merge(self, size: int) -> None:
        """Makes one run of every block of so many numbers that is in pieces, then deletes what runs have replaced."""
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
            for span, content in zip(pieces, pool.map(lambda one: self._store.read(one.key), pieces), strict=True):
                if content is None:
                    raise _Vanished(span.key)
                payload = _unframe(content)
                if payload is None:
                    continue  # torn: load() has found that nothing builds upon it
                part = _run_decoder.decode(payload) if span.is_run else _as_run(span, payload)
                after = part.after if after is None else after
                last = part.last
                entries.update((head(entry).name, entry) for entry in part.entries)
                writers += part.writers
        if after is None:
            raise _Vanished(whole.key)
        kept = entries.values() if whole.start else (e for e in entries.values() if not _is_forgettable(e))
        told = writers if whole.end - whole.start == MERGE else []
        self._store.create(whole.key, _frame(_Run(after, last, list(kept), told)))
        written = self._store.read(whole.key)
        if written is None or _unframe(written) is None:
            raise StoreError(f"{whole.key} cannot be read back; its parts are kept.")
        return whole


class _Vanished(Exception):
    """Another writer merges too."""


def changed_names(store: Store, number: int) -> frozenset[str] | None:
    """The adapters that changes of this number or a later one are of, and the names that stand for them since.

    None where there are more than MAX_CHANGES, or the store has not each of them.
    """
    names = set[str]()
    for one in range(number, number + MAX_CHANGES + 1):
        content = store.read(_change_key(one))
        if content is None:
            return None if any(_bounds(key)[1] > one for key in store.keys("runs/")) else frozenset(names)
        payload = _unframe(content)
        if payload is None:
            return None
        entry = unpack(_change_decoder.decode(payload).entry)
        names |= {entry.name, *(entry.aliases if isinstance(entry, Adapter) else ())}
    return None


def _as_run(span: _Span, payload: memoryview) -> _Run:
    change = _change_decoder.decode(payload)
    return _Run(change.after, span.start, [change.entry], [change.writer])


def _is_forgettable(entry: msgspec.Raw) -> bool:
    """In the first run of all nothing is left that a removal would remove."""
    one = head(entry)
    return one.type == "removed" and one.seeded_by is None


def _cover(runs: Iterable[_Span], changes: dict[int, _Span]) -> list[_Span]:
    """The fewest objects that hold every number, in order. Gaps stay: whether one matters, the next change says."""
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
    """None where it is torn. Not a copy: a run may have hundreds of megabytes."""
    view = memoryview(content)
    magic, digest, payload = view[: len(_MAGIC)], view[len(_MAGIC) :][:32], view[len(_MAGIC) + 32 :]
    return payload if magic == _MAGIC and hashlib.sha256(payload).digest() == digest else None
