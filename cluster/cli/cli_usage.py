"""Defines `lorafleet usage DIR`, which adds up what servers metered (--usage-dir)."""

from __future__ import annotations

import csv
import re
import sys
import time
from dataclasses import astuple, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cluster.cli.cli_tools import ending_in_words
from lorafleet.cluster.tenancy.usage_sums import FIELDS, Sum, summed
from lorafleet.protocol.errors import InvalidRequest


def usage(
    folder: Annotated[Path, typer.Argument(help="The servers' --usage-dir.")],
    by: Annotated[str, typer.Option(help=f"Fields to group by, separated by commas: {', '.join(FIELDS)}.")] = "tenant",
    since: Annotated[
        str | None, typer.Option(help="A date or time (UTC if it has no time zone), or an age such as 7d or 12h.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="The same; requests that ended at this time or later are left out.")
    ] = None,
) -> None:
    """Prints sequences and tokens as CSV, with one line for each tenant, or for each combination of the fields in
    --by."""
    names = [name for name in by.split(",") if name]
    with ending_in_words():
        sums = summed(
            folder, names, 0.0 if since is None else _time_s(since), float("inf") if until is None else _time_s(until)
        )
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*names, *(field.name for field in fields(Sum))])
    for values, total in sums.items():
        out.writerow([*values, *astuple(total)])


def _time_s(given: str) -> float:
    """Parses a date, a time or an age such as 7d, and returns seconds since 1970. Raises InvalidRequest."""
    ago = re.fullmatch(r"(\d+)([dh])", given)
    if ago is not None:
        return time.time() - int(ago[1]) * {"d": 86400, "h": 3600}[ago[2]]
    try:
        when = datetime.fromisoformat(given)
    except ValueError:
        raise InvalidRequest(
            f"{given!r} is not a time; give a date such as 2026-11-01, or an age such as 7d.", "since"
        ) from None
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
