"""Defines `lorafleet compare`, whose work is done in tools/compare.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lorafleet.cluster.cli.cli_tools import FloatName, JSONOption, ending_in_words, named_adapters
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.tools.comparison_runner import BASE

if TYPE_CHECKING:
    from lorafleet.tools.comparison_runner import Runner
    from lorafleet.workers.adapters.forms import AdapterForms


def compare(
    model: Annotated[str, typer.Option(help="Folder of the base model; with --url, its name on the server.")],
    adapters: Annotated[
        list[str], typer.Option(help="NAME=PATH (folder or URI) …; with --url, NAME=its name on the server.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts, as JSON lines; default: a small bundled set.")
    ] = None,
    retention: Annotated[
        Path | None, typer.Option(help="File of prompts that should not get worse, as JSON lines; default: bundled.")
    ] = None,
    baseline: Annotated[str, typer.Option(help="Model to compare with: base, or the name of an adapter.")] = BASE,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer in tokens.")] = 64,
    url: Annotated[
        str | None, typer.Option(help="URL of a running server; default: an engine in this process.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key for --url.")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device of the engine in this process.")
    ] = "auto",
    dtype: Annotated[FloatName | None, typer.Option(help="Dtype of the weights; default: the checkpoint's.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for an HTML report.")] = None,
    as_json: JSONOption = False,
) -> None:
    """Runs prompts through a base and its adapters. Reports agreement, perplexity, KL, drift between versions of an
    adapter, and what the base knew and an adapter lost."""
    with ending_in_words():
        from lorafleet.tools.compare import Questions
        from lorafleet.tools.compare import compare as run
        from lorafleet.tools.comparison_report import text_table, to_html
        from lorafleet.tools.examples import DEMO_PROMPTS, DEMO_RETENTION, read_examples

        named = named_adapters(adapters)
        if baseline != BASE and baseline not in named:
            raise InvalidRequest(f"--baseline is {baseline!r}; it must be one of base, {', '.join(named)}.")
        if url is not None and (device != "auto" or dtype is not None):
            raise InvalidRequest("--device and --dtype do not apply to a running server; leave them out with --url.")
        kept = retention or (DEMO_RETENTION if prompts is None else None)
        questions = Questions(read_examples(prompts or DEMO_PROMPTS), [] if kept is None else read_examples(kept))
        if out is not None and not out.parent.is_dir():
            raise InvalidRequest(f"--out: there is no folder {out.parent}. Create it first.")
        with ExitStack() as stack:
            changes: Mapping[str, float] = {}
            if url is None:
                folders = _folders(stack, named)
                forms = _forms(Path(model), folders)
                changes = _weight_changes(forms, baseline)
                runner = stack.enter_context(_engine(model, folders, forms, device, dtype))
            else:
                runner = stack.enter_context(_server(url, {BASE: model, **named}, api_key))
            done = run(runner, [*named], questions, baseline=baseline, max_tokens=max_tokens, weight_changes=changes)
        if out is not None:
            out.write_text(to_html(done, f"{Path(model).name}: {', '.join(named)}"), encoding="utf-8")
        typer.echo(json.dumps(done.to_json(), indent=2) if as_json else text_table(done))


def _folders(stack: ExitStack, named: Mapping[str, str]) -> dict[str, Path]:
    from lorafleet.tools.reading import adapter_folder

    return {name: stack.enter_context(adapter_folder(path)) for name, path in named.items()}


def _forms(model: Path, folders: Mapping[str, Path]) -> dict[str, AdapterForms]:
    from lorafleet.tools.base_checkpoint import BaseModel
    from lorafleet.tools.reading import read_forms

    with BaseModel.opened(model) as base:
        return {name: read_forms(folder, base, name).forms for name, folder in folders.items()}


@contextmanager
def _engine(
    model: str,
    folders: Mapping[str, Path],
    forms: Mapping[str, AdapterForms],
    device: Literal["auto", "cpu", "cuda"],
    dtype: FloatName | None,
) -> Iterator[Runner]:
    from lorafleet.tools.engine_runner import EngineRunner
    from lorafleet.tools.reading import largest_rank

    rank = max(largest_rank(form) for form in forms.values())
    runner = EngineRunner(Path(model), folders, max_lora_rank=rank, device=device, dtype=dtype or "auto")
    try:
        yield runner
    finally:
        runner.close()


@contextmanager
def _server(url: str, models: Mapping[str, str], api_key: str | None) -> Iterator[Runner]:
    from lorafleet.tools.server_runner import ServerRunner

    runner = ServerRunner(url, models, api_key)
    try:
        yield runner
    finally:
        runner.close()


def _weight_changes(forms: Mapping[str, AdapterForms], baseline: str) -> dict[str, float]:
    """Returns how far each adapter's weights are from the baseline adapter's. The result is empty if the baseline is
    the base, or if any adapter has no exact plain LoRA."""
    from lorafleet.protocol.errors import AdapterUnsupported
    from lorafleet.tools.drift import relative_change
    from lorafleet.tools.plain_lora import PlainLoRA

    if baseline == BASE:
        return {}
    try:
        plain = {name: PlainLoRA.from_forms(form) for name, form in forms.items()}
    except AdapterUnsupported:  # Only the weights cannot be compared; the answers still are.
        return {}
    return {name: relative_change(plain[baseline], other) for name, other in plain.items() if name != baseline}
