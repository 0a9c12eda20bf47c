from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from lorafleet.cluster.config import parse_args
from lorafleet.cluster.serve.replica_front import make_resolver
from lorafleet.resolvers import registry
from lorafleet.resolvers.registry import ENTRY_POINT_GROUP, LoRAResolverRegistry
from lorafleet.resolvers.resolver_metrics import ResolverMetrics
from lorafleet.resolvers.store import AdapterStore


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([], ["filesystem", "s3", "http", "hub"]),
        (["plugin"], ["filesystem", "s3", "http", "hub", "plugin"]),
        (["hub", "plugin", "s3"], ["filesystem", "http", "hub", "plugin", "s3"]),
    ],
)
def test_resolvers_are_made_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str], expected: list[str]
) -> None:
    point = EntryPoint("plugin", "lorafleet.resolvers.registry:LoRAResolverRegistry", ENTRY_POINT_GROUP)

    def installed(**wanted: Any) -> EntryPoints:
        return EntryPoints([point]).select(**wanted)

    monkeypatch.setattr(registry, "entry_points", installed)
    args = parse_args(
        {
            "model": "m",
            "lora_resolver_dir": str(tmp_path),
            "lora_resolver_s3": "s3://b/{lora_name}",
            "lora_resolver_http": "https://host/{lora_name}",
            "lora_resolver_hub": "org/*",
            "lora_resolvers": order,
        }
    )
    made = make_resolver(args, AdapterStore(args.sources), ResolverMetrics())
    assert isinstance(made, LoRAResolverRegistry)
    assert made.supported() == expected


def test_without_sources_there_is_no_resolver() -> None:
    args = parse_args({"model": "m", "lora_resolver_http": '{"allow": ["https://host/"]}'})
    assert make_resolver(args, AdapterStore(args.sources), ResolverMetrics()) is None
