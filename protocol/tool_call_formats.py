"""The names of the formats of tool calls and of reasoning.

They are separate from the parsers in api/tool_calls/, so that reading a configuration does not import these.
"""

from __future__ import annotations

from typing import Literal

ToolCallFormat = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "gemma4",
    "glm45",
    "granite",
    "harmony",
    "hermes",
    "hunyuan",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "olmo3",
    "phi4_mini_json",
    "qwen3_coder",
    "seed_oss",
]
ReasoningFormat = Literal[
    "auto",
    "none",
    "think",
    "think_response",
    "think_answer",
    "gemma4",
    "granite",
    "mistral",
    "seed_oss",
    "command_a",
]
