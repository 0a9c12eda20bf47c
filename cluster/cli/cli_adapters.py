"""Defines `lorafleet adapters …`, which administers a running server through client/admin.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from lorafleet.client.admin import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, AdminClient, PushArguments
from lorafleet.client.client_errors import APIConnectionError, APIError, APIStatusError, DownloadError
from lorafleet.client.places import AdapterPlaces
from lorafleet.cluster.cli.answer_tables import LocatedAdapter, LocatedPage, in_words
from lorafleet.cluster.cli.cli_tools import fail
from lorafleet.cluster.cli.transfer_progress import DOWNLOAD, UPLOAD, transfer_progress
from lorafleet.protocol.admin_verbs import REMOVE_S

adapters = typer.Typer(help="Administer the adapters of a running server.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The adapter's public name.")]
Replicas = Annotated[int, typer.Option(min=1, help="Number of replicas.")]
Alias = Annotated[str | None, typer.Option(help="An alias other than the adapter's own name.")]
Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="URL of the server.")]
Key = Annotated[
    str, typer.Option(envvar=KEY_VARIABLE, help="The server's --admin-key, or an API key of the scope admin.")
]
Output = Annotated[
    Literal["table", "json"], typer.Option("--output", "-o", help="A table for people, or JSON for programs.")
]


@adapters.command("push")
def push(
    name: Name,
    source: Annotated[str, typer.Argument(help="A folder on this machine, which is uploaded, or a URI.")],
    replicas: Annotated[int, typer.Option(min=1, help="Replicas that must load it before the command returns.")] = 1,
    activate: Annotated[bool, typer.Option(help="Send the name's requests to this version from now on.")] = True,
    pin: Annotated[int | None, typer.Option(min=1, help="Number of replicas that keep it in a slot.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant that will own it, if you are the operator.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE to store with the version; may be repeated.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
    output: Output = "table",
) -> None:
    """Registers a new adapter, or a new version of one."""
    options = PushArguments(replicas=replicas, activate=activate, pin=pin, tenant=tenant, metadata=_pairs(metadata))
    if "://" in source:
        print_answer(url, admin_key, output, lambda client: client.push_from(name, source, **options))
    else:
        print_answer(url, admin_key, output, lambda client: client.push(name, source, **options))


@adapters.command("download")
def download(
    name: Name,
    to: Annotated[
        Path | None, typer.Option(help="Folder for the files. Default: the last part of the name, in this folder.")
    ] = None,
    version: Annotated[int | None, typer.Option(min=1, help="A version, if not the one that is served.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an adapter's files in a folder.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
    output: Output = "table",
) -> None:
    """Copies an adapter's files to a folder on this machine, which PEFT and `push` can read."""
    print_answer(url, admin_key, output, lambda client: client.download(name, to, version=version, force=force))


@adapters.command("list")
def list_adapters(
    after: Annotated[str, typer.Option(help="Begin after this name.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
    output: Output = "table",
) -> None:
    """Shows adapters in the order of their names, and where each is resident."""
    if output == "json":
        print_answer(url, admin_key, output, lambda client: client.page(after, limit))
    else:
        print_answer(url, admin_key, output, lambda client: _located_page(client, after, limit))


def _located_page(client: AdminClient, after: str, limit: int) -> LocatedPage:
    page = client.page(after, limit)
    places: dict[str, AdapterPlaces] = {}
    try:
        while page.last_id is not None and page.last_id not in places:
            found = client.list_places(after)
            places |= {adapter.name: adapter for adapter in found.adapters}
            if not found.has_more or found.after is None or found.after >= page.last_id:
                break
            after = found.after
    except APIError:  # The server does not say it, as to a key without the scope infer.
        return LocatedPage(page, None)
    return LocatedPage(page, places)


@adapters.command("show")
def show(name: Name, url: Url = DEFAULT_URL, admin_key: Key = "", output: Output = "table") -> None:
    """Shows an adapter's versions, its aliases with their history, its pins, and the replicas where it is resident."""
    if output == "json":
        print_answer(url, admin_key, output, lambda client: client.show(name))
    else:
        print_answer(url, admin_key, output, lambda client: LocatedAdapter(client.show(name), _places(client, name)))


def _places(client: AdminClient, name: str) -> AdapterPlaces | None:
    """Returns where the adapter is, or None if the server does not say it, as for a key without the scope infer."""
    try:
        return client.places(name)
    except APIError:
        return None


@adapters.command("alias")
def alias(
    name: Name,
    versions: Annotated[list[str], typer.Argument(help="A version, or several as VERSION=WEIGHT.")],
    as_: Annotated[str | None, typer.Option("--alias", help="An alias other than the adapter's own name.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
    output: Output = "table",
) -> None:
    """Makes a name stand for one version, or for a weighted split of several."""
    is_single = len(versions) == 1 and versions[0].isdecimal()
    to = int(versions[0]) if is_single else {_version(text): _weight(text, of) for text, of in _pairs(versions).items()}
    print_answer(url, admin_key, output, lambda client: client.alias(name, to, as_))


@adapters.command("rollback")
def rollback(
    name: Name, alias: Alias = None, url: Url = DEFAULT_URL, admin_key: Key = "", output: Output = "table"
) -> None:
    """Makes a name stand for what it stood for before its last move."""
    print_answer(url, admin_key, output, lambda client: client.rollback(name, alias))


@adapters.command("pin")
def pin(
    name: Name, replicas: Replicas = 1, url: Url = DEFAULT_URL, admin_key: Key = "", output: Output = "table"
) -> None:
    """Pins an adapter in GPU slots."""
    print_answer(url, admin_key, output, lambda client: client.pin(name, replicas))


@adapters.command("unpin")
def unpin(name: Name, url: Url = DEFAULT_URL, admin_key: Key = "", output: Output = "table") -> None:
    """Unpins an adapter, so that others may take its slots."""
    print_answer(url, admin_key, output, lambda client: client.unpin(name))


@adapters.command("prefetch")
def prefetch(
    name: Name, replicas: Replicas = 1, url: Url = DEFAULT_URL, admin_key: Key = "", output: Output = "table"
) -> None:
    """Loads an adapter before its first request."""
    print_answer(url, admin_key, output, lambda client: client.prefetch(name, replicas))


@adapters.command("remove")
def remove(
    name: Name,
    alias: Annotated[str | None, typer.Option(help="Remove this alias only.")] = None,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for requests in flight.")] = REMOVE_S,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
    output: Output = "table",
) -> None:
    """Removes an adapter with all its versions from every replica and from the catalogue."""
    if alias is None:
        print_answer(url, admin_key, output, lambda client: client.remove(name, wait_s))
    else:
        print_answer(url, admin_key, output, lambda client: client.unalias(name, alias))


@adapters.command("verify")
def verify(name: Name, url: Url = DEFAULT_URL, admin_key: Key = "", output: Output = "table") -> None:
    """Reads an adapter's files again and compares their digests."""
    print_answer(url, admin_key, output, lambda client: client.verify(name))


def _pairs(texts: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            fail(f"{text!r} is not NAME=VALUE.")
        pairs[name] = value
    return pairs


def _version(text: str) -> int:
    if not text.isdecimal():
        fail(f"{text!r} is not a version; versions are numbers, such as 1.")
    return int(text)


def _weight(number: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        fail(f"the weight of version {number} is {text!r}; give a number.")


def print_answer(url: str, key: str, output: str, call: Callable[[AdminClient], Any]) -> None:
    """Prints the answer, or prints the server's error message and exits with status 1.

    output: "table" for the text of answer_tables, "json" for all fields.
    """
    try:
        with (
            transfer_progress(output, UPLOAD) as on_upload,
            transfer_progress(output, DOWNLOAD) as on_download,
            AdminClient(url, key, on_upload=on_upload, on_download=on_download) as client,
        ):
            answer = call(client)
    except APIStatusError as error:
        fail(f"{error.status_code}: {error.message}")
    except DownloadError as error:
        fail(error.message)
    except APIConnectionError as error:
        fail(f"{error.message} Give the server's URL with --url.")
    except (APIError, OSError) as error:
        fail(str(error))
    typer.echo(json.dumps(msgspec.to_builtins(answer), indent=2) if output == "json" else in_words(answer))
