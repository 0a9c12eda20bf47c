"""Measures how far one adapter's weights are from another's. It needs neither a base nor a dense matrix."""

from __future__ import annotations

import math

from lorafleet.tools.low_rank import difference, frobenius
from lorafleet.tools.plain_lora import PlainLoRA


def relative_change(before: PlainLoRA, after: PlainLoRA) -> float:
    """Returns |after - before| / |before|, where the Frobenius norm covers the deltas of all modules together."""
    names = before.modules.keys() | after.modules.keys()
    changes = [frobenius(difference(after.modules.get(name), before.modules.get(name))) for name in names]
    whole = math.hypot(*(frobenius(pair) for pair in before.modules.values()))
    return math.hypot(*changes) / whole if whole else math.inf
