"""Lists the kinds of adapters that are served, by PEFT's name of the method.

peft_fields.py lists the other methods and why they are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

from lorafleet.workers.adapters.kinds.adalora import ADALORA
from lorafleet.workers.adapters.kinds.delora import DELORA
from lorafleet.workers.adapters.kinds.gralora import GRALORA
from lorafleet.workers.adapters.kinds.hra import HRA
from lorafleet.workers.adapters.kinds.ia3 import IA3
from lorafleet.workers.adapters.kinds.kind import Kind
from lorafleet.workers.adapters.kinds.loha import LOHA
from lorafleet.workers.adapters.kinds.lokr import LOKR
from lorafleet.workers.adapters.kinds.lora import LORA
from lorafleet.workers.adapters.kinds.miss import MISS
from lorafleet.workers.adapters.kinds.trained_tokens import TRAINED_TOKENS
from lorafleet.workers.adapters.kinds.vblora import VBLORA
from lorafleet.workers.adapters.kinds.vera import VERA

KINDS: Mapping[str, Kind] = {
    "LORA": LORA,
    "ADALORA": ADALORA,
    "LOHA": LOHA,
    "LOKR": LOKR,
    "IA3": IA3,
    "VERA": VERA,
    "VBLORA": VBLORA,
    "HRA": HRA,
    "MISS": MISS,
    "DELORA": DELORA,
    "GRALORA": GRALORA,
    "TRAINABLE_TOKENS": TRAINED_TOKENS,
}
