"""Defines `lorafleet run-batch`, whose work is done in offline/batch/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafleet.cluster.cli.cli_tools import ending_in_words
from lorafleet.protocol.errors import ConfigError

if TYPE_CHECKING:
    from lorafleet.offline.batch.answering import BatchProgress, OnProgress

INTERRUPTED = 130


def run_batch(
    input_file: Annotated[str, typer.Option("--input", "-i", help="File or s3://bucket/key of requests.")],
    output_file: Annotated[str, typer.Option("--output", "-o", help="File or s3://bucket/key for the answers.")],
    error_file: Annotated[
        str | None, typer.Option(help="File or s3://bucket/key for the lines that fail; default: the output.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a running server; default: a server of this command, for --model.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Largest number of requests at a time.")] = 256,
    retry_s: Annotated[
        float, typer.Option(min=0, help="Seconds in which a line is sent again while the server is busy or away.")
    ] = 600.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Seconds that the server may take for one answer.")] = 3600.0,
    work_dir: Annotated[
        Path, typer.Option(help="Folder of the journals of outputs in S3; must be the same when the batch goes on.")
    ] = Path(),
    **options: Any,
) -> None:
    """Answers a file of requests in OpenAI's batch format. If it is stopped, the same command goes on where it was."""
    from lorafleet.offline.batch import batch_places
    from lorafleet.offline.batch.line_sender import LineSender, SenderOptions
    from lorafleet.offline.batch.run_batch import BatchRun

    given = {name: value for name, value in options.items() if value not in (None, [])}
    with ending_in_words(), ExitStack() as stack:
        _check(url, given, [place for place in (input_file, output_file, error_file) if place is not None])
        answers = batch_places.output_at(output_file, work_dir, batch_places.make_client)
        errors = None
        if error_file is not None:
            errors = batch_places.output_at(error_file, work_dir, batch_places.make_client)
            if errors.journal == answers.journal:
                raise ConfigError("--error-file and --output need different file names, since their journals do.")
        copy = answers.journal.with_name(answers.journal.name + ".input")
        file = stack.enter_context(batch_places.opened_input(input_file, copy, batch_places.make_client))
        run = BatchRun(file, answers, errors, concurrency)
        if run.was_completed():
            typer.echo(f"{output_file} is complete already", err=True)
            return

        def make_sender() -> LineSender:
            place, check = _server(stack, url, given)
            return LineSender(SenderOptions(place, api_key, concurrency, retry_s, timeout_s), check)

        try:
            with batch_progress() as on_progress:
                done = run.run(make_sender, on_progress)
        except KeyboardInterrupt:
            typer.echo("lorafleet: stopped; run the same command again to go on", err=True)
            raise typer.Exit(INTERRUPTED) from None
        typer.echo(_in_words(done), err=True)


def _check(url: str | None, given: dict[str, Any], places: list[str]) -> None:
    if len({str(Path(place).absolute()) if "://" not in place else place for place in places}) < len(places):
        raise ConfigError("--input, --output and --error-file must be different files.")
    if url is None and "model" not in given:
        raise ConfigError("give --model, to start a server for this batch, or the --url of a running one.")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}; it must begin with http:// or https://.")
    if url is not None and given:
        name = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(f"{name} does not apply to a running server; leave it out with --url.")


def _server(stack: ExitStack, url: str | None, given: dict[str, Any]) -> tuple[str, Callable[[], None]]:
    """Returns the server's URL, and a function that raises if it has ended. Starts one if there is no URL."""
    if url is not None:
        return url, lambda: None
    from lorafleet.cluster.cli.batch_server import BatchServer

    server = stack.enter_context(BatchServer(given))
    return server.url, server.check


@contextmanager
def batch_progress() -> Iterator[OnProgress]:
    """Yields a function that draws a bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None, failed=0)

        def draw(now: BatchProgress) -> None:
            progress.update(task, total=now.num_lines, completed=now.num_answered, failed=now.num_failed)

        yield draw


def _in_words(done: BatchProgress) -> str:
    return f"{done.num_answered} lines answered, {done.num_failed} of them with errors"
