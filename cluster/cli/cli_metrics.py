"""Defines `lorafleet metrics …`, which runs Prometheus and Grafana for a server, or writes the files for ones that
run elsewhere. The work is done in cluster/monitoring/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cluster.cli.cli_tools import ending_in_words
from lorafleet.cluster.monitoring import scrape_config, shipped_files
from lorafleet.cluster.monitoring.scrape_config import ScrapeTarget
from lorafleet.cluster.serve.state_folder import state_folder

metrics = typer.Typer(help="Prometheus and Grafana for a running server.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder to write to; it is created if it is missing.")]
Server = Annotated[str, typer.Option(envvar="LORAFLEET_URL", help="The server's address.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with a key of the scope metrics, if the server requires keys.")
]
CAFile = Annotated[Path | None, typer.Option(help="Certificate authority of an https server, in PEM.")]
Interval = Annotated[int, typer.Option(min=1, help="Seconds between two scrapes.")]

DEFAULT_SERVER = "http://127.0.0.1:8000"


@metrics.command("up")
def up(
    server: Server = DEFAULT_SERVER,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Prometheus on 127.0.0.1.")] = 9090,
    grafana_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Grafana on 127.0.0.1.")] = 3000,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of their files and data; default: metrics in lorafleet's state directory."),
    ] = None,
    bearer_token_file: TokenFile = None,
    ca_file: CAFile = None,
    scrape_interval: Interval = 15,
    retention: Annotated[str, typer.Option(help="How long Prometheus keeps data, such as 12h or 15d.")] = "15d",
    grafana_home: Annotated[
        Path | None, typer.Option(help="Grafana's homepath, if it is not where packages put it.")
    ] = None,
) -> None:
    """Starts Prometheus for a running server, and Grafana if it is installed. Ctrl-C stops them."""
    from lorafleet.cluster.monitoring.up import Options, run

    with ending_in_words():
        target = ScrapeTarget(server, bearer_token_file, ca_file, scrape_interval)
        run(Options(target, data or state_folder() / "metrics", port, grafana_port, grafana_home, retention))


@metrics.command("config")
def config(
    folder: Folder,
    server: Server = DEFAULT_SERVER,
    bearer_token_file: TokenFile = None,
    ca_file: CAFile = None,
    scrape_interval: Interval = 15,
) -> None:
    """Writes prometheus.yml and the rules for a Prometheus that is started elsewhere."""
    with ending_in_words():
        target = ScrapeTarget(server, bearer_token_file, ca_file, scrape_interval)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "prometheus.yml"
        path.write_text(scrape_config.to_yaml(target))
        typer.echo(path)
        typer.echo(shipped_files.write_rules(folder))


@metrics.command("dashboards")
def write_dashboards(folder: Folder) -> None:
    """Writes Grafana's dashboards as JSON, to import or to provision."""
    for path in shipped_files.write_dashboards(folder):
        typer.echo(path)
