"""Names the folder for state that must survive a restart. It imports nothing of lorafleet, so that the command line
can use it."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Returns LORAFLEET_STATE_DIR, or lorafleet's folder in the XDG base directory for state."""
    own = os.environ.get("LORAFLEET_STATE_DIR")
    xdg = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(own).expanduser() if own else Path(xdg).expanduser() / "lorafleet"
