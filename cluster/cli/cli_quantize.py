"""Defines `lorafleet quantize`, whose work is done in tools/quantized/."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cluster.cli.cli_tools import JSONOption, ending_in_words
from lorafleet.cluster.cli.transfer_progress import TransferWords, transfer_progress
from lorafleet.protocol.engine_config import Device
from lorafleet.protocol.quantization_methods import Method

WORDS = TransferWords("Quantizing", "Quantized")


def quantize(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint that is not quantized.")],
    quantization: Annotated[Method, typer.Option(help="The server's option of this name.")] = "nf4",
    out: Annotated[
        Path | None, typer.Option(help="New folder; default: beside the checkpoint, such as MODEL-nf4.")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="Where to quantize. auto: a GPU if there is one. The result is the same.")
    ] = "auto",
    as_json: JSONOption = False,
) -> None:
    """Writes a checkpoint of the values that a server with --quantization serves, so that starts read less.

    The formats are those of bitsandbytes (nf4) and compressed-tensors (fp8, int4).
    """
    with ending_in_words():
        from lorafleet.tools.quantized.quantized_checkpoint import default_folder, quantize_checkpoint

        target = out or default_folder(model, quantization)
        with transfer_progress("json" if as_json else "text", WORDS) as progress:
            done = quantize_checkpoint(model, quantization, target, device=device, progress=progress)
    if as_json:
        typer.echo(json.dumps({"path": str(target)} | dataclasses.asdict(done), indent=2))
        return
    typer.echo(
        f"checkpoint in {quantization} written to {target}: {done.num_linears:,} linears quantized from {done.dtype}, "
        f"{done.num_bytes:,} bytes in {done.num_files} files, of {done.read_bytes:,} bytes"
    )
