"""The package of lorafleet, which serves many LoRA adapters on a cluster of GPUs. The code is in the subpackages that
this folder links to.

The names that programs need can be imported from here. They are imported when they are first used, so the package
itself loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lorafleet import moved as _moved

if TYPE_CHECKING:
    from lorafleet.client.admin import AdminClient, AsyncAdminClient
    from lorafleet.offline.llm import LLM
    from lorafleet.protocol.lora_request import LoRARequest
    from lorafleet.protocol.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AdminClient", "AsyncAdminClient", "LoRARequest", "SamplingParams"]

_MODULES = {
    "LLM": "lorafleet.offline.llm",
    "AdminClient": "lorafleet.client.admin",
    "AsyncAdminClient": "lorafleet.client.admin",
    "LoRARequest": "lorafleet.protocol.lora_request",
    "SamplingParams": "lorafleet.protocol.sampling_params",
}

_moved.install()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lorafleet' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
