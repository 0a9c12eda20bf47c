"""Who administered what, when, from where and with what outcome: a line of JSON for each call, refused ones too.

Has names, never keys or bodies. Written as the usage log is, but on the disk before the answer is sent.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from lorafleet.cluster.tenancy.usage_log import AppendedLines
from lorafleet.workers.openai.audit import Audited


class AuditLog:
    def __init__(self, folder: Path, replica_id: str) -> None:
        self.lines = AppendedLines(folder, f"audit-{replica_id}")

    async def __call__(self, audited: Audited) -> None:
        self.lines.add(msgspec.json.encode(audited))
        await asyncio.to_thread(self.lines.sync)
