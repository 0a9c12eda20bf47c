"""The names of the formats of tool calls. They are separate from the parsers in api/tool_calls/, so that reading a
configuration does not import these."""

from __future__ import annotations

from typing import Literal

ToolCallFormat = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
