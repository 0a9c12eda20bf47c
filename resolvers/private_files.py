"""Creates files and folders that only the server's user can read, whatever the umask is, since they may have prompts,
answers and private weights.

A process of a server calls keep_private() first, which covers what libraries write. Code that also runs in a user's own
program, whose umask is the user's, creates what it writes with the functions here.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileModes:
    file: int = 0o600
    folder: int = 0o700

    @classmethod
    def below(cls, root: Path) -> FileModes:
        """Returns the modes for what is written below a folder.

        An operator asks for sharing by the set-group-ID bit of the folder (chmod 2770 or 2750): what is written in it
        then has the folder's permissions for its group. Other users never have any.
        """
        try:
            mode = root.stat().st_mode
        except FileNotFoundError:
            return PRIVATE
        if not mode & stat.S_ISGID:
            return PRIVATE
        return cls(0o600 | mode & 0o060, stat.S_ISGID | 0o700 | mode & 0o070)


PRIVATE = FileModes()


def keep_private() -> None:
    """Makes all files that this process and its children create private, unless code asks for other modes."""
    os.umask(0o077)


def make_folder(path: Path, modes: FileModes = PRIVATE, *, parents: bool = True) -> None:
    """Creates a folder, and those above it that are missing if `parents` is set. Folders that exist keep their modes.
    Raises OSError."""
    if path.is_dir():
        return
    if parents and path.parent != path:
        make_folder(path.parent, modes)
    with contextlib.suppress(FileExistsError):  # Another process has just created it.
        path.mkdir(0o700)
        if modes != PRIVATE:
            path.chmod(modes.folder)
    if not path.is_dir():
        raise NotADirectoryError(20, "a file has the name of the folder", str(path))


def create_file(path: Path, modes: FileModes = PRIVATE, flags: int = os.O_EXCL | os.O_WRONLY) -> int:
    """Creates a file, and returns its descriptor. With the default flags no file may exist. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    if modes != PRIVATE:
        os.fchmod(descriptor, modes.file)
    return descriptor
