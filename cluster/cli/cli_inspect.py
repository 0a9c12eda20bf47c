"""Defines `lorafleet inspect`, whose work is done in tools/inspection.py, and for bases in cli_inspect_base.py."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafleet.cluster.cli.cli_inspect_base import (
    PANEL,
    BaseOption,
    BaseOptions,
    GPUMemoryOption,
    GPUOption,
    inspect_base,
    is_base,
)
from lorafleet.cluster.cli.cli_tools import JSONOption, ending_in_words
from lorafleet.protocol.engine_config import KVCacheDType
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.lora_config import LoRAConfig, LoRADType
from lorafleet.protocol.quantization_methods import Method

if TYPE_CHECKING:
    from lorafleet.tools.inspection import Fit, Inspection


def inspect(
    path: Annotated[str, typer.Argument(help="Folder of an adapter or of a base, or an adapter's URI.")],
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a base, to check whether it would load the adapter. May be repeated."),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            "--tensor-parallel-size",
            min=1,
            help="Number of GPUs that share a base. Default: 1; of a base: each of 1, 2, 4 and 8.",
        ),
    ] = None,
    fully_sharded_loras: Annotated[bool, typer.Option(help="The server's option of this name.")] = True,
    lora_dtype: Annotated[
        LoRADType, typer.Option(help="The server's option of this name; auto: the base's, else bfloat16.")
    ] = "auto",
    max_lora_rank: Annotated[
        int, typer.Option(min=1, help="The server's option of this name.")
    ] = LoRAConfig().max_lora_rank,
    gpu: GPUOption = None,
    gpu_memory_gib: GPUMemoryOption = None,
    gpu_memory_utilization: BaseOption[float] = None,
    max_loras: Annotated[
        int | None,
        typer.Option(min=0, help="The server's option of this name; 0: without adapters.", rich_help_panel=PANEL),
    ] = None,
    lora_memory_gib: BaseOption[float] = None,
    max_model_len: BaseOption[int] = None,
    kv_cache_dtype: BaseOption[KVCacheDType] = None,
    quantization: BaseOption[Method] = None,
    speculative_config: BaseOption[str] = None,
    as_json: JSONOption = False,
) -> None:
    """Shows what an adapter or a base is, what it costs on a GPU, and what serving would reject and why.

    The exit status is 2 if a base of --model would reject the adapter, if without --model its files alone are a reason
    to reject it, or if a base would not start.
    """
    config = LoRAConfig(max_lora_rank=max_lora_rank, lora_dtype=lora_dtype, fully_sharded_loras=fully_sharded_loras)
    options = BaseOptions(
        gpu,
        gpu_memory_gib,
        gpu_memory_utilization,
        max_loras,
        lora_memory_gib,
        max_model_len,
        kv_cache_dtype,
        quantization,
        speculative_config,
    )
    if is_base(path):
        with ending_in_words():
            if model:
                raise InvalidRequest(f"--model is for adapters, and {path} is a base. Leave it out.")
            text, refused = inspect_base(path, config, options, tp, as_json=as_json)
        typer.echo(text)
    else:
        with ending_in_words():
            options.check_unset(path)
        refused = _inspect_adapter(path, model or [], tp or 1, config, as_json=as_json)
    if refused:
        raise typer.Exit(2)


def _inspect_adapter(path: str, models: list[Path], tp: int, config: LoRAConfig, *, as_json: bool) -> bool:
    """Prints what an adapter is, and returns whether it would be rejected."""
    with ending_in_words(), ExitStack() as stack:
        import torch

        from lorafleet.tools.base_checkpoint import BaseModel
        from lorafleet.tools.inspection import fit, inspect_folder
        from lorafleet.tools.reading import adapter_folder

        folder = stack.enter_context(adapter_folder(path))
        found = inspect_folder(folder, path, config.serving_dtype(torch.bfloat16))
        if tp > 1 and not models:
            raise InvalidRequest("--tp needs --model: how an adapter is divided depends on the base's heads.")
        sharded = bool(config.fully_sharded_loras)
        fits = [fit(folder, path, BaseModel.of_config(base), config, tp, fully_sharded=sharded) for base in models]
        found = dataclasses.replace(found, fits=fits)
    typer.echo(json.dumps(dataclasses.asdict(found), indent=2) if as_json else _text(found))
    refused = [fit.refusal for fit in found.fits] if found.fits else [found.refusal]
    return any(refusal is not None for refusal in refused)


def _text(found: Inspection) -> str:
    rows = [
        ("adapter", found.path),
        ("kind", found.kind or "unknown"),
        ("digest", found.digest or "–"),
        ("made for", found.base_name or "not stated"),
        ("rank", _counted(found.ranks)),
        ("targets", _counted(found.targets)),
        ("layers", str(found.num_layers) if found.num_layers else "–"),
        ("needs", ", ".join(_shapes(found))),
        ("left out", f"{', '.join(found.left_out)} (only texts are served)" if found.left_out else ""),
        ("values", f"{found.num_values:,} ({_counted(found.dtypes)} tensors)"),
        *[("vocabulary", f"{rows:,} rows of {table}") for table, rows in found.vocabulary.items()],
        ("tokenizer", ", ".join(found.tokenizer) or "the base's"),
        ("files", ", ".join(f"{name} ({size:,} bytes)" for name, size in found.files.items())),
    ]
    if found.bytes_on_one_gpu is not None:
        rows.append(("one GPU", f"{found.bytes_on_one_gpu:,} bytes in {found.dtype}"))
    if found.needs_base is not None:
        rows.append(("unknown", found.needs_base))
    if found.refusal is not None:
        rows.append(("refused", f"{found.refusal} [{found.error}]"))
    lines = [f"{name:<12}{text}" for name, text in rows if text]
    return "\n".join([*lines, *(_fit_line(fit) for fit in found.fits)])


def _counted(counts: dict[int, int] | dict[str, int]) -> str:
    return ", ".join(f"{what} ({count})" for what, count in counts.items()) or "–"


def _shapes(found: Inspection) -> list[str]:
    return [f"{leaf} {into}->{out}" for leaf, shapes in found.shapes.items() for into, out in shapes]


def _fit_line(fit: Fit) -> str:
    if fit.refusal is not None:
        return f"on {fit.base}: refused: {fit.refusal} [{fit.error}]"
    sizes = sorted(set(fit.bytes_per_gpu))
    shown = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"on {fit.base}: loads; {shown} bytes on each of {len(fit.bytes_per_gpu)} GPUs in {fit.dtype}"
