"""Lists every attack by the part of the server that it targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from noisy import adapters, admin, connections, expanding, fields, helpers, processes, reading, stored, uploads, work
from noisy.hostile import Attack, name_of

BY_AREA: Mapping[str, Sequence[Attack]] = {
    "fields": fields.ATTACKS,
    "work": work.ATTACKS,
    "reading": reading.ATTACKS,
    "expanding": expanding.ATTACKS,
    "stored": stored.ATTACKS,
    "helpers": helpers.ATTACKS,
    "adapters": adapters.ATTACKS,
    "uploads": uploads.ATTACKS,
    "connections": connections.ATTACKS,
    "administration": admin.ATTACKS,
    "processes": processes.ATTACKS,
}
ALL: Mapping[str, Attack] = {name_of(attack): attack for attacks in BY_AREA.values() for attack in attacks}


def chosen(names: Sequence[str]) -> list[Attack]:
    """Returns the attacks with these names or in these areas, or all without names. Exits if a name is unknown."""
    found = [attack for name in names for attack in BY_AREA.get(name) or ([ALL[name]] if name in ALL else [])]
    unknown = [name for name in names if name not in ALL and name not in BY_AREA]
    if unknown:
        raise SystemExit(f"there is no attack {unknown[0]!r}; --list shows all")
    return found or list(ALL.values())
