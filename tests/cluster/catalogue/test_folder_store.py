"""What the store in a folder does with files that a crash has left."""

from __future__ import annotations

import os
from pathlib import Path

from lorafleet.cluster.catalogue.folder_store import ABANDONED_S, FolderStore


def test_a_start_deletes_what_a_crash_left_aside_long_ago_and_nothing_that_may_be_written_now(tmp_path: Path) -> None:
    FolderStore(tmp_path)
    aside = tmp_path / "aside"
    for name in ("old", "new"):
        (aside / f"{name} files").mkdir()
        (aside / f"{name} files" / "weights").write_bytes(b"x")
        (aside / f"{name} object").write_bytes(b"x")
    for old in (aside / "old files", aside / "old object"):
        long_ago_s = old.stat().st_mtime - ABANDONED_S - 60
        os.utime(old, (long_ago_s, long_ago_s))
    FolderStore(tmp_path)
    assert sorted(one.name for one in aside.iterdir()) == ["new files", "new object"]
