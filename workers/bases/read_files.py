"""Remembers a checkpoint's files as they were when the base was read, so that later ones are not mixed in."""

from __future__ import annotations

from pathlib import Path

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.stored_tensors import checkpoint_files

_Stamp = tuple[str, int, int, int, int, int]


class ReadFiles:
    """The safetensors files in a folder. Create it before the base is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_reads = 1  # How often the base has been read.
        self._stamps = self._read_stamps()

    def renew(self) -> None:
        """Remembers the files as they are now. Call it before the base is read again."""
        self.num_reads += 1
        self._stamps = self._read_stamps()

    def are_unchanged(self) -> bool:
        """Returns whether no file has been written, moved or replaced. The time of a file's last change of any kind
        counts (ctime), which programs cannot set as they can the time of its last write."""
        return self._stamps == self._read_stamps()

    def _read_stamps(self) -> tuple[_Stamp, ...]:
        try:
            paths = checkpoint_files(self._folder)
            stats = [(path.name, path.stat()) for path in paths]
        except (OSError, ConfigError):  # Whoever reads the files says what is wrong with them.
            return ()
        return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)
