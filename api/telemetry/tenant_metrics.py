"""Filters /metrics for a tenant: only series with its own label or its adapters' labels pass."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lorafleet.protocol.names import OWNED, in_the_words_of

_TENANT = re.compile(r'[{,]tenant="([^"]*)"')
_MODEL = re.compile(r'[{,](?:model_name|adapter|adapter_name)="([^"]*)"')
_OWNER = re.compile(rf"{OWNED}([a-z0-9_-]+)/")


def of_tenant(text: bytes, tenant: str) -> bytes:
    """Returns the tenant's part of `text`, which is in Prometheus' format. Its adapters get their bare names."""
    return "".join(f"{line}\n" for line in _lines(text.decode(), tenant)).encode()


def _lines(text: str, tenant: str) -> Iterator[str]:
    head: list[str] = []  # comment lines of the current metric, until one of its samples is shown
    for line in text.splitlines():
        if line.startswith("#"):
            head = [line] if line.startswith("# HELP") else [*head, line]
        elif _is_of(tenant, line):
            yield from head
            head = []
            yield in_the_words_of(tenant, line)


def _is_of(tenant: str, line: str) -> bool:
    labeled = _TENANT.search(line)
    if labeled is not None:
        return labeled[1] == tenant
    model = _MODEL.search(line)
    return model is not None and set(_OWNER.findall(model[1])) == {tenant}
