"""Defines `lorafleet quality …`, which shows and runs a server's quality probes through client/admin.py."""

from __future__ import annotations

from typing import Annotated

import typer

from lorafleet.client.admin import DEFAULT_URL
from lorafleet.cluster.cli.cli_adapters import Key, Url, print_answer

quality = typer.Typer(help="Compare a running server's models with their baselines.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="Model, as the file of --quality-probes names it.")]


@quality.command("show")
def show(url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Shows the last run of every set of probes."""
    print_answer(url, admin_key, "json", lambda client: client.quality())


@quality.command("run")
def run(model: Model, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Runs a model's probes now."""
    print_answer(url, admin_key, "json", lambda client: client.run_quality(model))


@quality.command("accept")
def accept(model: Model, url: Url = DEFAULT_URL, admin_key: Key = "") -> None:
    """Runs a model's probes now and makes the result its new baseline."""
    print_answer(url, admin_key, "json", lambda client: client.accept_quality(model))
