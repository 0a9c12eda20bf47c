"""Makes the demo's scripts importable; they are in a folder of their own outside the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "demo"))
