"""Judges an adapter's draft LoRA by its config and the header of its weights, at the cost of the header.

The worker that serves it checks the rest (workers/speculation/draft_slots.py). A server without a draft model stores
drafts that nobody reads, so what is no adapter at all must be refused when it is pushed.
"""

from __future__ import annotations

import hashlib

from lorafleet.protocol.adapter_formats.adapter_files import (
    DRAFT_CONFIG_NAME,
    DRAFT_WEIGHTS_NAME,
    MAX_CONFIG_BYTES,
    MAX_DRAFT_BYTES,
    AdapterFolder,
)
from lorafleet.protocol.adapter_formats.safetensors_header import parse_header, read_header
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import read_json_object, shown


def check_draft(folder: AdapterFolder) -> None:
    """Raises AdapterMalformed if the folder's draft LoRA cannot be one. Half a draft is found when it is read."""
    if not (folder.has(DRAFT_CONFIG_NAME) and folder.has(DRAFT_WEIGHTS_NAME)):
        return
    with folder.open(DRAFT_CONFIG_NAME, MAX_CONFIG_BYTES) as file:
        content = bytearray(file.size)
        file.read_into(memoryview(content), hashlib.sha256())
    kind = read_json_object(bytes(content), DRAFT_CONFIG_NAME).get("peft_type")
    if not isinstance(kind, str):
        raise AdapterMalformed(
            f"{DRAFT_CONFIG_NAME} has the peft_type {shown(kind)}; it must be the draft's method, such as LORA."
        )
    with folder.open(DRAFT_WEIGHTS_NAME, MAX_DRAFT_BYTES) as file:
        header = read_header(file, hashlib.sha256())
        infos = parse_header(header, file.size - 8 - len(header), DRAFT_WEIGHTS_NAME)
    if not infos:
        raise AdapterMalformed(f"{DRAFT_WEIGHTS_NAME} has no tensors.")
