"""Reads an adapter through the server's own reader, with or without a base model.

Without one, the base's shapes are inferred from the adapter, so everything except its fit is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lorafleet.protocol.errors import AdapterUnsupported, RankTooLarge
from lorafleet.protocol.lora_config import MAX_RANK_BOUND, LoRAConfig
from lorafleet.protocol.sources import HTTPConfig, HubConfig, SourcesConfig
from lorafleet.resolvers.source import is_uri
from lorafleet.resolvers.store import AdapterStore
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.inferred_base import inferred_base
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.adapters.reader import ReadAdapter, read_adapter


@contextmanager
def adapter_folder(path_or_uri: str) -> Iterator[Path]:
    """Yields the adapter's folder. A URI is first fetched into the node's cache: whoever runs a tool may fetch from
    any source."""
    if not is_uri(path_or_uri):
        yield Path(path_or_uri)
        return
    scheme, _, rest = path_or_uri.partition("://")
    http = HTTPConfig(allow=(path_or_uri.rstrip("/") + "/",)) if scheme in ("http", "https") else None
    repo = "/".join(rest.partition("@")[0].split("/")[:2])
    store = AdapterStore(SourcesConfig(http=http, hub=HubConfig(allow=(repo,)) if scheme == "hf" else None))
    try:
        with store.open(path_or_uri) as folder:
            yield folder
    finally:
        store.stop()


def read_forms(folder: Path, base: BaseModel | None, name: str) -> ReadAdapter:
    """Reads an adapter of any rank. A Kronecker product that would need a high rank keeps its own form, as in a
    server.

    Raises the AdapterError that serving would raise. Raises ConfigError if the adapter has a meaning only with a
    base, and none is given.
    """
    served_on = inferred_base(folder) if base is None else base.for_reader(torch.float32)
    for max_rank in (LoRAConfig().max_lora_rank, MAX_RANK_BOUND):
        with contextlib.suppress(RankTooLarge):
            return read_adapter(folder, base=served_on, max_rank=max_rank, dtype=torch.float32, name=name)
    raise AdapterUnsupported(f"adapter {name!r} has a rank over {MAX_RANK_BOUND}, the largest that can be read.")


def largest_rank(forms: AdapterForms) -> int:
    """Returns the largest rank of the low-rank pairs, or 1 if there are none."""
    pairs = [form.low_rank for form in forms.linears.values()]
    pairs += [form.low_rank for form in (forms.embedding, forms.head) if form is not None]
    ranks = [pair.rank for pair in pairs if pair is not None]
    ranks += [stack.rank for form in forms.experts.values() for stack in form.stacks]
    return max(ranks, default=1)
