"""Reads JSON from untrusted sources: one object, unique keys, finite numbers, bounded depth.

Python's json keeps the last of two equal keys and accepts NaN, so another reader of the same bytes would see another
config. `shown` quotes an untrusted value in an error message without letting it fill the log.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn, cast

from lorafleet.protocol.errors import AdapterMalformed

MAX_SHOWN_CHARS = 120


def shown(value: object) -> str:
    """Returns a shortened repr. It escapes control characters and lone surrogates, so the message can always be
    sent."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def read_json_object(data: bytes, file_name: str) -> dict[str, object]:
    """Returns the object in `data`. Raises AdapterMalformed, naming `file_name` and the cause, if there is none."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise AdapterMalformed(f"{file_name} is not UTF-8 text (byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise AdapterMalformed(f"{file_name} is not valid JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise AdapterMalformed(f"{file_name} is nested too deeply.") from None
    except ValueError as error:  # raised below, or by an integer of more digits than Python converts
        raise AdapterMalformed(f"{file_name} is not acceptable JSON: {error}.") from None
    if not isinstance(value, dict):
        raise AdapterMalformed(f"{file_name} holds a JSON {type(value).__name__}; it must hold an object.")
    return cast("dict[str, object]", value)


def _unique_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} occurs twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
