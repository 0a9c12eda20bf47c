"""Configures the HTTP front of one replica, and reads the sampling defaults that a base model brings along."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from lorafleet.api.access.origins import Origins
from lorafleet.protocol import limits
from lorafleet.protocol.errors import ConfigError, InvalidRequest
from lorafleet.protocol.limits import MAX_BODY_BYTES, RESPONSE_STORE_BYTES
from lorafleet.protocol.messages import Pooling
from lorafleet.protocol.tool_call_formats import ReasoningFormat, ToolCallFormat

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class FrontConfig:
    served_model_names: tuple[str, ...]  # The first is the ID of the base model, the others are aliases.
    model_path: str  # Shown as `root` of the base model.
    allow_runtime_lora_updating: bool = False  # Opens /v1/load_lora_adapter and /v1/unload_lora_adapter.
    chat_template: str | None = None  # Jinja source; None uses the tokenizer's template.
    tool_call_parser: ToolCallFormat = "auto"  # How models write calls; auto detects it from the template.
    reasoning_parser: ReasoningFormat = "auto"  # How models mark reasoning; auto detects it from the template.
    pooling: Pooling = "last"  # Default for embeddings.
    queue_timeout_s: float | None = None  # Default time that a request may wait to start; None: no limit.
    origins: Origins = field(default_factory=Origins)  # Web pages that may use a server without API keys.
    max_body_bytes: int = MAX_BODY_BYTES  # Larger requests are rejected with 413.
    response_store_bytes: int = RESPONSE_STORE_BYTES  # Bytes of stored responses in memory; 0 stores none.
    # Default sampling parameters, see read_generation_defaults().
    generation_defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    replica_id: str = ""  # Label of this replica in metrics.
    created: int = field(default_factory=lambda: int(time.time()))  # Seconds since 1970, shown by /v1/models.

    @property
    def base_id(self) -> str:
        return self.served_model_names[0]


def read_generation_defaults(model_path: str | Path) -> Mapping[str, float]:
    """Reads the sampling defaults that the model's authors chose, as vLLM's `--generation-config auto` does."""
    path = Path(model_path) / "generation_config.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return MappingProxyType({})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object.")
    found = {name: content[name] for name in _DEFAULTED if content.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: {name} is {value!r}; it must be a number.")
        try:
            limits.SAMPLING[name].check(name, value)
        except InvalidRequest as error:
            raise ConfigError(f"{path}: {error.message} Correct the file, or remove the field.") from None
    return MappingProxyType(found)
