"""Lets the tests import the demo's scripts, which lie in a folder of their own and are no part of the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "demo"))
