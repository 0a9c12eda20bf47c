"""Where what must outlive a restart is kept. Imports nothing, so that the command line may ask."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """LORAFLEET_STATE_DIR, or lorafleet's in the XDG base directory for state."""
    own = os.environ.get("LORAFLEET_STATE_DIR")
    xdg = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(own).expanduser() if own else Path(xdg).expanduser() / "lorafleet"
