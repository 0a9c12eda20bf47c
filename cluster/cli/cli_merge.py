"""Defines `lorafleet merge`, whose work is done in tools/merging.py."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cluster.cli.cli_tools import FloatName, JSONOption, dtype_named, ending_in_words


def merge(
    base: Annotated[Path, typer.Argument(help="Folder of the base model.")],
    adapter: Annotated[str, typer.Argument(help="Folder or URI of the adapter.")],
    out: Annotated[Path, typer.Argument(help="New folder for the merged model.")],
    dtype: Annotated[FloatName | None, typer.Option(help="Dtype of the weights; default: each tensor's own.")] = None,
    as_json: JSONOption = False,
) -> None:
    """Writes a checkpoint of the base with an adapter merged into its weights."""
    with ending_in_words(), ExitStack() as stack:
        from lorafleet.tools.base_checkpoint import BaseModel
        from lorafleet.tools.merging import merge as merge_into
        from lorafleet.tools.reading import adapter_folder, read_forms

        folder = stack.enter_context(adapter_folder(adapter))
        opened = stack.enter_context(BaseModel.opened(base))
        read = read_forms(folder, opened, adapter)
        done = merge_into(opened, folder, read.forms, out, dtype=dtype_named(dtype))
    if as_json:
        numbers = {"path": str(out), "changed": done.changed, "bytes": done.num_bytes, "untied": done.untied}
        typer.echo(json.dumps(numbers | {"vocab_size": done.vocab_size}, indent=2))
        return
    lines = [f"merged checkpoint written to {out}: {len(done.changed)} tensors changed, {done.num_bytes:,} bytes"]
    if done.untied:
        lines.append("  the head is no longer the embedding (tie_word_embeddings: false)")
    if done.vocab_size is not None:
        lines.append(f"  vocab_size is {done.vocab_size}")
    typer.echo("\n".join(lines))
