"""Defines `lorafleet config`, whose checks are done in cluster/checking/."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from lorafleet.cluster.cli.cli_tools import ending_in_words
from lorafleet.cluster.serve import cluster_environment

config = typer.Typer(help="Check the files that a cluster is started from.", no_args_is_help=True)


@config.command()
def check(
    file: Annotated[Path, typer.Argument(help="File for `serve run` or `ray up`, or a KubeRay RayService.")],
) -> None:
    """Checks a file and prints all its mistakes at once, or what would run where. It starts nothing.

    The exit status is 1 if anything is wrong.
    """
    from lorafleet.cluster.checking.check import RAY_SERVICE, check_file  # Ray takes two seconds to import.
    from lorafleet.cluster.checking.check_report import describe
    from lorafleet.cluster.checking.ray_service_schema import unchecked

    with ending_in_words():
        checked = check_file(file)
    for problem in checked.problems:
        typer.echo(str(problem), err=True)
    if checked.problems:
        count = len(checked.problems)
        typer.echo(f"{file}: {count} mistake{'s' if count > 1 else ''} in this {checked.kind}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{file}: {checked.kind}, no mistakes")
    for line in describe(checked.serving, checked.cluster):
        typer.echo(f"  {line}")
    if checked.kind == RAY_SERVICE:
        typer.echo(f"  not checked  {unchecked()}: kubectl apply --dry-run=server --validate=strict -f {file}")


@config.command()
def environment() -> None:
    """Prints what a node of a cluster needs in its environment before `ray start`, for a shell to read:

    eval "$(lorafleet config environment)"
    """
    with ending_in_words():
        variables = cluster_environment.environment()
    for name, value in variables.items():
        typer.echo(f"export {name}={quote(value)}")
