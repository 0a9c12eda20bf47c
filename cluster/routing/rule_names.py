"""Names the rules by which requests find a replica; simple_rules.py and routing.py implement them."""

from __future__ import annotations

from typing import Literal

RoutingRule = Literal["affinity", "sticky", "power-of-two", "round-robin"]
