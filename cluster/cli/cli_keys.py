"""Defines `lorafleet keys …`, which creates and revokes keys in a file that servers read (--api-keys). Servers notice
a change by themselves; nothing here connects to them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from lorafleet.cluster.cli.cli_tools import fail
from lorafleet.cluster.tenancy import key_file
from lorafleet.cluster.tenancy.key_file import HASH_PREFIX, KeyFile
from lorafleet.cluster.tenancy.key_text import check_key, digest_of, make_key
from lorafleet.cluster.tenancy.tenant_changes import with_tenant, without_key
from lorafleet.protocol.errors import LorafleetError

keys = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="The file that servers read as --api-keys.")]


@keys.command("create")
def create(
    file: File,
    id_: Annotated[str, typer.Option("--id", help="The key's public name, for logs and for revoking it.")],
    # A mutable default is safe, since typer copies it.
    scope: Annotated[list[str], typer.Option(help="Scope: infer, admin or metrics. May be repeated.")] = ["infer"],  # noqa: B006
    tenant: Annotated[
        str | None, typer.Option(help="Tenant that owns the key; without one, the key sees public adapters.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="A date such as 2027-01-31, or a time from now: 90d, 12h.")
    ] = None,
    same_tenant: Annotated[
        bool | None,
        typer.Option(
            "--same-tenant/--new-tenant",
            help="Whether a tenant whose last key was revoked is the one that gets this key.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Adds a key to the file and prints it. The key is never shown again."""
    key = make_key()
    entry = {"id": id_, "hash": HASH_PREFIX + digest_of(key), "scopes": scope, "tenant": tenant}
    with _complaints():
        before = key_file.read(file) if file.exists() else KeyFile()
        if tenant is not None:
            before = with_tenant(before, tenant, same_tenant)
        present = before.model_dump()
        after = KeyFile.model_validate(present | {"keys": [*present["keys"], entry | {"expires": _time(expires)}]})
        key_file.write(file, after)
    typer.echo(key)


@keys.command("list")
def list_keys(file: File) -> None:
    """Shows the keys of the file, one per line."""
    with _complaints():
        found = key_file.read(file)
    for key in found.keys:
        over = " (expired)" if key.expires is not None and key.expires <= datetime.now(UTC) else ""
        until = "never" if key.expires is None else key.expires.isoformat()
        typer.echo(
            f"{key.id}\ttenant={found.caller_of(key).tenant or '-'}\tscopes={','.join(sorted(key.scopes))}"
            f"\texpires={until}{over}\tkey_mark={key.mark}"
        )


@keys.command("revoke")
def revoke(file: File, id_: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Removes a key from the file. Servers reject it within a second or two. Requests that it has started continue."""
    with _complaints():
        before = key_file.read(file)
        found = next((key for key in before.keys if key.id == id_), None)
        if found is None:
            fail(f"{file} has no key {id_!r}; it has {', '.join(key.id for key in before.keys) or 'none'}.")
        key_file.write(file, without_key(before, found, datetime.now(UTC).replace(microsecond=0)))


@keys.command("hash")
def hash_key() -> None:
    """Reads a key from standard input and prints the hash that a file has in its place."""
    key = sys.stdin.readline().strip()
    with _complaints():
        check_key(key)
    typer.echo(HASH_PREFIX + digest_of(key))


@contextmanager
def _complaints() -> Iterator[None]:
    """Reports every fault as one line, without a traceback."""
    try:
        yield
    except LorafleetError as error:
        fail(error.message)
    except ValidationError as error:
        fail(
            "; ".join(
                f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors(include_input=False)
            )
        )
    except OSError as error:
        fail(str(error))


def _time(given: str | None) -> datetime | str | None:
    match = re.fullmatch(r"(\d+)([dh])", given or "")
    if match is None:
        return given
    return datetime.now(UTC).replace(microsecond=0) + timedelta(
        **{{"d": "days", "h": "hours"}[match[2]]: int(match[1])}
    )
