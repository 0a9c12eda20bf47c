"""`lorafleet adapters …`: administration of a running server over its /v1/adapters (admin_api.py)."""

from __future__ import annotations

import json
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn
from urllib.parse import quote, urlencode

import typer

from lorafleet.cluster.config import ADMIN_KEY_VARIABLE
from lorafleet.workers.lora.files import BIN_NAME, CONFIG_NAME, SAFETENSORS_NAME

TIMEOUT_S = 600.0  # a push waits until replicas have loaded the adapter

adapters = typer.Typer(help="Administer the adapters of a running server.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The adapter's public name.")]
Replicas = Annotated[int, typer.Option(min=1, help="On so many replicas.")]
Alias = Annotated[str | None, typer.Option(help="Another alias than the adapter's own name.")]
Url = Annotated[str, typer.Option(envvar="LORAFLEET_URL", help="Of the server.")]
Key = Annotated[
    str, typer.Option(envvar=ADMIN_KEY_VARIABLE, help="The server's --admin-key, or an API key of the scope admin.")
]

DEFAULT_URL = "http://127.0.0.1:8000"


@adapters.command("push")
def push(
    name: Name,
    source: Annotated[str, typer.Argument(help="A folder on this machine, which is uploaded, or a URI.")],
    replicas: Annotated[int, typer.Option(min=1, help="That must have loaded it before this returns.")] = 1,
    activate: Annotated[bool, typer.Option(help="The name's requests go to this version from now on.")] = True,
    pin: Annotated[int | None, typer.Option(min=1, help="Keep it in slots of so many replicas.")] = None,
    tenant: Annotated[str | None, typer.Option(help="That will own it; the operator may name any.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, noted with the version; several times.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
) -> None:
    """Register a new adapter, or a new version of one."""
    options = {"replicas": replicas, "activate": activate, "pin": pin, "tenant": tenant, "metadata": _pairs(metadata)}
    if "://" in source:
        _call("POST", "", url, admin_key, {"name": name, "source": source, **options})
        return
    query = {"options": json.dumps(options), "source": str(Path(source).absolute())}
    with tempfile.TemporaryFile() as packed:
        _pack(Path(source), packed)
        _call("PUT", f"{quote(name)}/files", url, admin_key, packed, query)


@adapters.command("list")
def list_adapters(
    after: Annotated[str, typer.Option(help="Begin behind this name.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
) -> None:
    """Show adapters, in the order of their names."""
    _call("GET", "", url, admin_key, query={"after": after, "limit": str(limit)})


@adapters.command("show")
def show(name: Name, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Show an adapter's versions, aliases with their history, and pins."""
    _call("GET", quote(name), url, admin_key)


@adapters.command("alias")
def alias(
    name: Name,
    versions: Annotated[list[str], typer.Argument(help="A version, or several as VERSION=WEIGHT.")],
    as_: Annotated[str | None, typer.Option("--alias", help="Another alias than the adapter's own name.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
) -> None:
    """Let a name stand for one version, or for a weighted split of several."""
    body: dict[str, Any] = {"alias": as_}
    if len(versions) == 1 and versions[0].isdecimal():
        body["version"] = int(versions[0])
    else:
        body["split"] = {number: _weight(number, weight) for number, weight in _pairs(versions).items()}
    _call("POST", f"{quote(name)}/alias", url, admin_key, body)


@adapters.command("rollback")
def rollback(name: Name, alias: Alias = None, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Let a name stand for what it stood for before its last move."""
    _call("POST", f"{quote(name)}/rollback", url, admin_key, {"alias": alias})


@adapters.command("pin")
def pin(name: Name, replicas: Replicas = 1, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Keep an adapter in GPU slots."""
    _call("POST", f"{quote(name)}/pin", url, admin_key, {"replicas": replicas})


@adapters.command("unpin")
def unpin(name: Name, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Let an adapter's slots go to others again."""
    _call("POST", f"{quote(name)}/unpin", url, admin_key, {})


@adapters.command("prefetch")
def prefetch(name: Name, replicas: Replicas = 1, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Load an adapter before its first request."""
    _call("POST", f"{quote(name)}/prefetch", url, admin_key, {"replicas": replicas})


@adapters.command("remove")
def remove(
    name: Name,
    alias: Annotated[str | None, typer.Option(help="Remove this alias only.")] = None,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for requests in flight.")] = 60.0,
    url: Url = DEFAULT_URL,
    admin_key: Key = "",
) -> None:
    """Remove an adapter with all its versions, from every replica and from the catalogue."""
    query = {"wait_s": str(wait_s)} if alias is None else {"alias": alias}
    _call("DELETE", quote(name), url, admin_key, query=query)


@adapters.command("verify")
def verify(name: Name, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Read an adapter's files again and compare their digests."""
    _call("POST", f"{quote(name)}/verify", url, admin_key, {})


def _pairs(texts: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            _end(f"{text!r} is not NAME=VALUE.")
        pairs[name] = value
    return pairs


def _weight(number: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        _end(f"the weight of version {number} is {text!r}; give a number.")


def _pack(folder: Path, packed: IO[bytes]) -> None:
    """Config and weights as a tar."""
    names = [CONFIG_NAME, next((name for name in (SAFETENSORS_NAME, BIN_NAME) if (folder / name).exists()), None)]
    if names[1] is None or not (folder / CONFIG_NAME).exists():
        _end(f"{folder} is no adapter: it needs {CONFIG_NAME} and {SAFETENSORS_NAME} (or {BIN_NAME}).")
    with tarfile.open(fileobj=packed, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            tar.add((folder / str(name)).resolve(), arcname=str(name))


def _call(
    method: str,
    path: str,
    url: str,
    key: str,
    body: dict[str, Any] | IO[bytes] | None = None,
    query: dict[str, str] | None = None,
) -> None:
    """Prints the answer, or the server's own words and ends with status 1."""
    address = f"{url.rstrip('/')}/v1/adapters{f'/{path}' if path else ''}{f'?{urlencode(query)}' if query else ''}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    data: Any = None
    if isinstance(body, dict):
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        headers["content-type"] = "application/json"
    elif body is not None:
        headers |= {"content-type": "application/x-tar", "content-length": str(body.seek(0, 2))}
        body.seek(0)
        data = body
    request = urllib.request.Request(address, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            typer.echo(json.dumps(json.load(answer), indent=2))
    except urllib.error.HTTPError as error:
        _end(_words(error))
    except OSError as error:
        _end(f"{url} does not answer: {getattr(error, 'reason', error)}. Name the server with --url.")


def _words(error: urllib.error.HTTPError) -> str:
    raw = error.read().decode(errors="replace")
    try:
        return f"{error.code}: {json.loads(raw)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code}: {raw[:500]}"


def _end(message: str) -> NoReturn:
    typer.echo(f"lorafleet: {message}", err=True)
    raise typer.Exit(1)
