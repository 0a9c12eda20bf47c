"""Writes the server's answers about adapters as tables for people. Programs take the JSON of `-o json`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lorafleet.client.places import AdapterPlaces
from lorafleet.client.results import Adapter, AdapterPage, Downloaded, Prefetched, Removed, Split, Verified

_TIERS = {"gpu": "GPU", "cpu": "host memory", "coming": "on its way to the GPU"}
_AGES = ((86_400, "d"), (3_600, "h"), (60, "m"))  # Seconds in a unit, and its letter.
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class LocatedAdapter:
    """An adapter with the replicas where it is resident."""

    adapter: Adapter
    places: AdapterPlaces | None  # None: unknown.


@dataclass(frozen=True, slots=True)
class LocatedPage:
    """A page of adapters, with the replicas where each is resident."""

    page: AdapterPage
    places: Mapping[str, AdapterPlaces] | None  # By name; None: unknown.


Answer = Adapter | Downloaded | LocatedAdapter | LocatedPage | Prefetched | Removed | Verified


def in_words(answer: Answer, now_s: float | None = None) -> str:
    """Returns the answer as text, without a line end. now_s: seconds since 1970, from which ages are counted."""
    now_s = time.time() if now_s is None else now_s
    match answer:
        case Adapter():
            return _one_adapter(answer, now_s)
        case LocatedAdapter():
            return _one_adapter(answer.adapter, now_s) + ("" if answer.places is None else _resident(answer.places))
        case LocatedPage():
            return _page(answer.page, answer.places, now_s)
        case Downloaded(id=name, version=version, digest=digest, num_bytes=num_bytes, folder=folder):
            number = "" if version is None else f"version {version}, "
            return f"{name}: {number}digest {digest[:12]}, {_size(num_bytes)}, is in {folder}"
        case Removed():
            return f"{answer.id} is removed."
        case Prefetched():
            return f"{answer.id} is loaded by {len(answer.replicas)} replicas: {', '.join(answer.replicas)}"
        case Verified():
            return f"{answer.id}: the files of versions {', '.join(map(str, answer.verified))} are intact."


def _page(page: AdapterPage, places: Mapping[str, AdapterPlaces] | None, now_s: float) -> str:
    heads = ("NAME", "SERVED", "VERSIONS", "RANK", "SIZE", "RESIDENT", "PINNED", "AGE")
    rows = []
    for adapter in page.data:
        newest = adapter.versions[-1] if adapter.versions else None
        own = adapter.aliases.get(adapter.id)
        rows.append(
            (
                adapter.id,
                "removing" if adapter.removing else _split(own.split) if own is not None else "-",
                str(len(adapter.versions)),
                "-" if newest is None else str(newest.rank),
                "-" if newest is None else _size(newest.num_bytes),
                "?" if places is None else _counted(places.get(adapter.id)),
                str(adapter.pinned_replicas or "-"),
                "-" if newest is None else _age(now_s - newest.created_s),
            )
        )
    more = f"\n\nMore adapters follow: --after {page.last_id}" if page.has_more else ""
    return _table(heads, rows) + more


def _one_adapter(adapter: Adapter, now_s: float) -> str:
    owner = "" if adapter.tenant is None else f", of tenant {adapter.tenant}"
    pinned = f", pinned on {adapter.pinned_replicas} replicas" if adapter.pinned_replicas else ""
    removing = ", being removed" if adapter.removing else ""
    versions = _table(
        ("VERSION", "DIGEST", "RANK", "SIZE", "AGE", "SOURCE"),
        (
            (
                str(version.number),
                version.digest[:12],
                str(version.rank),
                _size(version.num_bytes),
                _age(now_s - version.created_s),
                version.source,
            )
            for version in adapter.versions
        ),
    )
    aliases = _table(
        ("ALIAS", "SERVED", "SINCE", "MOVES"),
        (
            (name, _split(alias.split), _age(now_s - alias.history[-1].at_s), str(len(alias.history)))
            for name, alias in adapter.aliases.items()
        ),
    )
    left_out = "".join(
        f"\nVersion {version.number}: {', '.join(version.left_out)} left out, since only texts are served"
        for version in adapter.versions
        if version.left_out
    )
    return f"{adapter.id}{owner}{pinned}{removing}\n\n{versions}{left_out}\n\n{aliases}"


def _counted(places: AdapterPlaces | None) -> str:
    """Returns "2 GPU, 1 host": in how many replicas' slots, and in how many replicas' host memory only, it is."""
    tiers = Counter(tier for version in (places.versions if places else ()) for tier in version.tiers.values())
    counts = (
        f"{tiers[tier]} {word}" for tier, word in (("gpu", "GPU"), ("coming", "coming"), ("cpu", "host")) if tiers[tier]
    )
    return ", ".join(counts) or "-"


def _resident(places: AdapterPlaces) -> str:
    rows = [
        (replica, str(version.number), _TIERS.get(tier, tier))
        for version in places.versions
        for replica, tier in sorted(version.tiers.items())
    ]
    if not rows:
        return "\n\nNo replica has it in memory; its next request loads it."
    return "\n\n" + _table(("REPLICA", "VERSION", "RESIDENT IN"), rows)


def _split(split: Split) -> str:
    """Returns "v2", or "v1 90%, v2 10%" where versions share an alias."""
    if len(split) == 1:
        return f"v{next(iter(split))}"
    total = sum(split.values())
    return ", ".join(f"v{version} {100 * weight / total:.3g}%" for version, weight in split.items())


def _size(num_bytes: int) -> str:
    for unit, name in _SIZES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def _age(seconds: float) -> str:
    for unit, letter in _AGES:
        if seconds >= unit:
            return f"{int(seconds // unit)}{letter}"
    return f"{max(0, int(seconds))}s"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns left-aligned columns, two spaces apart. They keep their width in a pipe, so no value is ever cut."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
