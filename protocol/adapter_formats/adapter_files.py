"""Opens the files of an adapter's folder and reports what is wrong with them. Other modules interpret their content.

Only regular files inside the folder are read, up to a size limit. A symlink may stay in the folder or lead to the
blobs of the Hugging Face cache entry that the folder is a snapshot of. The location is checked on the opened file
itself, so swapping a folder or a link in between has no effect.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lorafleet.protocol.errors import AdapterChanged, AdapterMalformed, AdapterMissing, AdapterUnsupported
from lorafleet.protocol.strict_json import shown

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_NAME = "adapter_model.safetensors"
BIN_NAME = "adapter_model.bin"
# Optional tokenizer and chat template files of an adapter (api/text/adapter_language.py), with their size limits.
LANGUAGE_NAMES = {
    "chat_template.jinja": 1 << 20,
    "generation_config.json": 1 << 20,
    "lorafleet.json": 2 << 20,
    "special_tokens_map.json": 1 << 20,
    "tokenizer.json": 64 << 20,
    "tokenizer_config.json": 4 << 20,
}

# Optional files of a draft LoRA, which is for the draft model of a server (workers/speculation/draft_slots.py).
DRAFT_FOLDER = "draft"
DRAFT_CONFIG_NAME = f"{DRAFT_FOLDER}/{CONFIG_NAME}"
DRAFT_WEIGHTS_NAME = f"{DRAFT_FOLDER}/{SAFETENSORS_NAME}"

MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 16 << 30  # Rank 64 on every projection of a 405B model takes 7.1 GB in float32.
MAX_BIN_BYTES = 2 << 30  # The whole file is read before its shapes are known.
MAX_DRAFT_BYTES = 512 << 20  # Rank 64 on every projection of a 3B model takes 390 MB in float32.
DRAFT_NAMES = {DRAFT_CONFIG_NAME: MAX_CONFIG_BYTES, DRAFT_WEIGHTS_NAME: MAX_DRAFT_BYTES}
OPTIONAL_NAMES = LANGUAGE_NAMES | DRAFT_NAMES  # With their size limits.
MAX_TARGETS = 1024  # of one read; the kernel's IOV_MAX
CHUNK_BYTES = 4 << 20  # Each chunk is hashed while it is still in the CPU's cache.
TICK_S = 0.02  # Two writes within one tick of the kernel's clock get the same time; a tick is 10 ms at most.
_FILES_CLOCK = 5  # CLOCK_REALTIME_COARSE, for which Python has no name. Linux takes file times from it.
_OTHER_CLOCK_NS = 10**9  # A file time that is further ahead than this comes from another machine.


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder that exists, identified by its real path.

    Every file that it opens lies below that path, even if the folder is replaced later. So a caller that has checked
    the path has checked everything that is read.
    """

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def at(cls, path: str | os.PathLike[str], within: str | None = None) -> AdapterFolder:
        """Returns the folder at the path. `within` is the real path of a folder that it must lie in.

        Raises AdapterMissing where there is no folder, and AdapterChanged where it lies outside `within`.
        """
        folder = path if isinstance(path, AdapterFolder) else cls._found(os.fspath(path))
        if within is not None and not folder.path.is_relative_to(within):
            raise AdapterChanged(f"the folder {shown(os.fspath(path))} is a symlink that leads out of {shown(within)}.")
        return folder

    @classmethod
    def _found(cls, text: str) -> AdapterFolder:
        if "\0" in text:
            raise AdapterMissing(f"the path {shown(text)} has a NUL character, so no adapter can be there.")
        try:
            real = Path(text).resolve(strict=True)
            if stat.S_ISDIR(real.stat().st_mode):
                return cls(real)
        except (OSError, RuntimeError, UnicodeError):  # RuntimeError: a loop of symlinks
            raise AdapterMissing(f"there is no folder at {shown(text)}.") from None
        raise AdapterMissing(f"{shown(text)} is not a folder; an adapter is a folder with {CONFIG_NAME}.")

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def open(self, name: str, max_bytes: int) -> OpenFile:
        # O_PATH pins the file without opening its content, so it has no effect on a device or a FIFO.
        try:
            found = os.open(self.path / name, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            raise AdapterMissing(f"the adapter's folder has no {name}.") from None
        try:
            self._check_place(name, found)
            _check_regular(name, os.fstat(found))
            fd = _opened(name, found)
        finally:
            os.close(found)
        try:
            opened = _settled(name, fd)
            _check_size(name, opened, max_bytes)
            return OpenFile(name, os.fdopen(fd, "rb", buffering=0), opened)
        except BaseException:
            os.close(fd)
            raise

    def _check_place(self, name: str, fd: int) -> None:
        real = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not any(real.is_relative_to(root) for root in (self.path, *self._blobs())):
            raise AdapterMalformed(f"{name} is a symlink that leaves the adapter's folder.")

    def _blobs(self) -> list[Path]:
        """Returns the folders that links of a Hugging Face cache entry may lead to.

        The layout is models--org--name/{snapshots/<revision>/…, blobs/}.
        """
        entries = [
            p.parent for p in self.path.parents if p.name == "snapshots" and p.parent.name.startswith("models--")
        ]
        return [entry / "blobs" for entry in entries]


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file and the state of its inode when it was opened."""

    name: str
    stream: BinaryIO
    opened: os.stat_result

    @property
    def size(self) -> int:
        return self.opened.st_size

    def read_into(self, target: memoryview, digest: hashlib._Hash) -> None:
        """Fills target from the file and adds exactly these bytes to digest."""
        for start in range(0, len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            got = 0
            while got < len(chunk):
                count = self._read_some(chunk[got:])
                if count == 0:
                    raise AdapterMalformed(f"{self.name} is truncated.")
                got += count
            digest.update(chunk)

    def read_at(self, targets: Sequence[memoryview], offset: int) -> None:
        """Fills the targets, one after another, with the file's bytes from this offset on. Threads may call it at the
        same time. There are at most MAX_TARGETS, and none is empty."""
        left = list(targets)
        while left:
            try:
                count = os.preadv(self.stream.fileno(), left, offset)
            except OSError as error:
                raise self._unreadable(error) from None
            if count == 0:
                raise AdapterMalformed(f"{self.name} is truncated.")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _read_some(self, target: memoryview) -> int:
        try:
            count: int | None = self.stream.readinto(target)  # type: ignore[attr-defined]  # raw: FileIO has it
            return count or 0
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> AdapterMalformed:
        return AdapterMalformed(f"{self.name} cannot be read: {error.strerror}.")

    def check_unchanged(self) -> None:
        """Raises AdapterChanged if the file was written since it was opened.

        Call it after the last read: a file that was written meanwhile may be half old and half new.
        """
        now = os.fstat(self.stream.fileno())
        # The ctime is compared too, because a writer can set the mtime back.
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            self.opened.st_size,
            self.opened.st_mtime_ns,
            self.opened.st_ctime_ns,
        ):
            raise AdapterChanged(f"{self.name} changed while it was read. Write adapters elsewhere, then rename them.")

    def close(self) -> None:
        self.stream.close()

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settled(name: str, fd: int) -> os.stat_result:
    """Returns the file's state, from which every later write can be detected; waits for the next clock tick if
    necessary."""
    state = os.fstat(fd)
    age_s = time.time() - state.st_ctime_ns * 1e-9
    if 0 <= age_s < TICK_S:
        time.sleep(TICK_S - age_s)
    # A tick may be late on a host that shares its processors.
    while 0 <= state.st_ctime_ns - time.clock_gettime_ns(_FILES_CLOCK) < _OTHER_CLOCK_NS:
        time.sleep(0.001)
    if os.fstat(fd).st_ctime_ns != state.st_ctime_ns:
        raise AdapterChanged(f"{name} is being written. Write adapters elsewhere, then rename them.")
    return state


def _opened(name: str, found: int) -> int:
    """Opens the same file that the O_PATH descriptor `found` refers to, without looking up its name again."""
    try:
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterMissing(f"{name} cannot be opened: {error.strerror}.") from None


def _check_regular(name: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise AdapterMalformed(f"{name} is not a regular file.")


def _check_size(name: str, opened: os.stat_result, max_bytes: int) -> None:
    if opened.st_size > max_bytes:
        raise AdapterMalformed(f"{name} has {opened.st_size} bytes; at most {max_bytes} are read.")


def read_config(folder: AdapterFolder) -> bytes:
    return _read_small(folder, CONFIG_NAME, MAX_CONFIG_BYTES)


def read_language(folder: AdapterFolder) -> dict[str, bytes]:
    """Reads the files of LANGUAGE_NAMES that exist, by name; most adapters have none."""
    return {name: _read_small(folder, name, most) for name, most in LANGUAGE_NAMES.items() if folder.has(name)}


def read_draft(folder: AdapterFolder) -> dict[str, memoryview]:
    """Reads the files of DRAFT_NAMES, by name, or none. Raises AdapterMalformed if only some of them exist."""
    _check_draft(folder)
    return {name: _read_whole(folder, name, most) for name, most in DRAFT_NAMES.items() if folder.has(name)}


def _check_draft(folder: AdapterFolder) -> None:
    missing = [name for name in DRAFT_NAMES if not folder.has(name)]
    if folder.has(DRAFT_FOLDER) and missing:
        raise AdapterMalformed(f"its folder {DRAFT_FOLDER} is not a draft LoRA, since {', '.join(missing)} is missing.")


@contextmanager
def opened_optional(folder: AdapterFolder) -> Iterator[dict[str, OpenFile]]:
    """Yields the files of OPTIONAL_NAMES that exist, by name, and checks at the end that nobody has written them.

    Raises as read_draft().
    """
    _check_draft(folder)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(folder.open(name, most))
            for name, most in OPTIONAL_NAMES.items()
            if folder.has(name)
        }
        yield files
        for file in files.values():
            file.check_unchanged()


def language_digest(language: Mapping[str, bytes]) -> str:
    """Returns the digest of the files that read_language() found, or "" if there are none."""
    digest = hashlib.sha256()
    for name, content in sorted(language.items()):
        digest.update(name.encode() + b"\0" + len(content).to_bytes(8, "little") + content)
    return digest.hexdigest() if language else ""


def _read_small(folder: AdapterFolder, name: str, max_bytes: int) -> bytes:
    return bytes(_read_whole(folder, name, max_bytes))


def _read_whole(folder: AdapterFolder, name: str, max_bytes: int) -> memoryview:
    """Reads a file into memory that nothing else holds, see read_buffer()."""
    with folder.open(name, max_bytes) as file:
        data = memoryview(read_buffer(file.size) if file.size else b"")
        if data:
            file.read_at([data], 0)
        file.check_unchanged()
        return data


def stored_files(folder: Path) -> dict[str, Path]:
    """Returns the files in a folder of our own and in its sub-folders, by their names relative to the folder."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def check_same_config(folder: AdapterFolder, config: bytes) -> None:
    """Raises AdapterChanged if the config is no longer the one given. Call it after the weights are read: a folder
    replaced meanwhile would combine one version's config with another's weights."""
    if read_config(folder) != config:
        raise AdapterChanged(
            f"{CONFIG_NAME} changed while the weights were read. Write adapters elsewhere, then rename them."
        )


def open_weights(folder: AdapterFolder) -> OpenFile:
    """Opens the weights file. As in PEFT, safetensors is preferred where both formats exist."""
    for name, max_bytes in ((SAFETENSORS_NAME, MAX_WEIGHTS_BYTES), (BIN_NAME, MAX_BIN_BYTES)):
        if folder.has(name):
            return folder.open(name, max_bytes)
    if folder.has("adapters.safetensors"):
        raise AdapterUnsupported(
            "adapters.safetensors is mlx-lm's layout, which is not supported; `lorafleet convert` converts it to "
            "PEFT's layout."
        )
    raise AdapterMissing(f"the adapter's folder has neither {SAFETENSORS_NAME} nor {BIN_NAME}.")


def new_digest(
    config: bytes,
    weights_name: str,
    weights_size: int,
    optional: Mapping[str, bytes | memoryview | OpenFile],
    target: Path | None = None,
) -> hashlib._Hash:
    """Returns a sha256 of the config and of the files of OPTIONAL_NAMES that exist; the caller adds the weights.

    Lengths separate the parts. An adapter with another tokenizer, chat template or draft LoRA has another digest.
    Without such files, the digest is that of config and weights alone. An open file is read in chunks. It is also
    copied into the folder `target`, if one is given.
    """
    digest = hashlib.sha256(b"lorafleet adapter 1\0")
    digest.update(len(config).to_bytes(8, "little") + config)
    for name, content in sorted(optional.items()):
        size = content.size if isinstance(content, OpenFile) else len(content)
        digest.update(name.encode() + b"\0" + size.to_bytes(8, "little"))
        if isinstance(content, OpenFile):
            _add_chunks(content, digest, target)
        else:
            digest.update(content)
    digest.update(weights_name.encode() + b"\0" + weights_size.to_bytes(8, "little"))
    return digest


def read_through(config: bytes, optional: Mapping[str, OpenFile], weights: OpenFile, target: Path | None = None) -> str:
    """Returns the digest of files that are not needed in memory. They are also copied into the folder `target`, if one
    is given."""
    digest = new_digest(config, weights.name, weights.size, optional, target)
    _add_chunks(weights, digest, target)
    return digest.hexdigest()


def _add_chunks(file: OpenFile, digest: hashlib._Hash, target: Path | None) -> None:
    """Adds a file to the digest and to the folder, a chunk at a time."""
    with ExitStack() as stack:
        copy: BinaryIO | None = None
        if target is not None:
            (target / file.name).parent.mkdir(exist_ok=True)
            copy = stack.enter_context((target / file.name).open("wb"))
        buffer = memoryview(read_buffer(CHUNK_BYTES))
        for start in range(0, file.size, CHUNK_BYTES):
            chunk = buffer[: file.size - start]
            file.read_into(chunk, digest)
            if copy is not None:
                copy.write(chunk)


def read_buffer(num_bytes: int) -> mmap.mmap:
    """Allocates pages that return to the system with their last reference.

    With glibc's malloc, every thread that ever read a file would retain as much memory: once one such block is freed,
    the next ones come from heaps that glibc does not give back.
    """
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def folder_digest(path: Path) -> str:
    """Returns the digest that loading the adapter computes (lora_model.py). Raises AdapterError."""
    folder = AdapterFolder.at(path)
    config = read_config(folder)
    with open_weights(folder) as weights, opened_optional(folder) as optional:
        return read_through(config, optional, weights)
