"""Converts the catalogue's records of adapters to the answers that administrators get."""

from __future__ import annotations

import msgspec

from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, AliasMove
from lorafleet.protocol.admin_answers import Adapter, AdapterPage, Alias, Move, Split, Version


def shown(adapter: AdapterRecord) -> Adapter:
    return Adapter(
        id=adapter.name,
        object="adapter",
        tenant=adapter.tenant,
        pinned_replicas=adapter.pinned_replicas,
        removing=adapter.removing,
        versions=msgspec.convert(adapter.versions, list[Version], from_attributes=True),
        aliases={
            alias: Alias(_split(moves[-1]), [Move(move.at_s, _split(move)) for move in moves])
            for alias, moves in adapter.aliases.items()
        },
    )


def shown_page(adapters: list[AdapterRecord], limit: int) -> AdapterPage:
    last = adapters[-1].name if adapters else None
    return AdapterPage("list", [shown(adapter) for adapter in adapters], len(adapters) == limit, last)


def _split(move: AliasMove) -> Split:
    return {str(share.version): share.weight for share in move.shares}
