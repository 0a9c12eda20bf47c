"""Defines `lorafleet convert`, whose work is done in tools/convert.py."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafleet.cluster.cli.cli_tools import (
    FloatName,
    JSONOption,
    ModelOption,
    dtype_named,
    ending_in_words,
    opened_base,
)
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.tools.mixing_methods import MajoritySign, Method

if TYPE_CHECKING:
    from lorafleet.tools.convert import Conversion


def convert(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="[SRC] DST", help="Source (folder or URI) and new folder; with --merge, only DST."),
    ],
    model: ModelOption = None,
    dtype: Annotated[FloatName | None, typer.Option(help="Dtype of the stored values; default: as they are.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Largest rank to keep, by SVD; prints the error.")] = None,
    merge: Annotated[list[str] | None, typer.Option(help="Adapters to merge into one: --merge A B ….")] = None,
    weights: Annotated[list[float] | None, typer.Option(help="One weight per adapter; default 1.")] = None,
    method: Annotated[
        Method | None, typer.Option(help="Method of the merge, as in PEFT's add_weighted_adapter; default cat.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of values that ties, dare, magnitude_prune keep.")
    ] = None,
    majority_sign: Annotated[MajoritySign | None, typer.Option(help="Sign election of ties; default total.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of dare's random choice; default 0.")] = None,
    as_json: JSONOption = False,
) -> None:
    """Writes an adapter in today's PEFT layout.

    It reads .bin files, old configs, mlx-lm and other key layouts. LoHa, LoKr, PiSSA and others become a plain LoRA
    if that is exact. It can also store other floats, lower the rank, or combine several adapters into one.
    """
    with ending_in_words(), ExitStack() as stack:
        from lorafleet.tools.convert import convert as convert_one
        from lorafleet.tools.convert import convert_several
        from lorafleet.tools.mix_adapters import Mixing
        from lorafleet.tools.reading import adapter_folder

        sources, target = _sources(paths, merge)
        if not merge and any(option is not None for option in (weights, method, density, majority_sign, seed)):
            raise InvalidRequest("--weights, --method, --density, --majority-sign and --seed require --merge.")
        folders = [stack.enter_context(adapter_folder(source)) for source in sources]
        base = opened_base(stack, model)
        if not merge:
            done = convert_one(folders[0], target, base, dtype=dtype_named(dtype), rank=rank)
        else:
            how = Mixing(method or "cat", density, rank, seed, majority_sign)
            shares = weights or [1.0] * len(folders)
            done = convert_several(folders, shares, target, base, how, dtype=dtype_named(dtype))
        typer.echo(_json(done, target) if as_json else _text(done, target))


def _sources(paths: list[str], merge: list[str] | None) -> tuple[list[str], Path]:
    wanted = 1 if merge else 2
    if len(paths) != wanted:
        remedy = "give only DST, before --merge and its adapters" if merge else "give SRC and DST"
        raise InvalidRequest(f"{len(paths)} paths were given; {remedy}.")
    return (merge or paths[:1]), Path(paths[-1])


def _text(done: Conversion, target: Path) -> str:
    from lorafleet.tools.low_rank import total_error

    lines = [f"{done.kind} written to {target}", *(f"  {change}" for change in done.changes)]
    if done.max_rank is not None:
        lines.append(f"  rank {done.max_rank}")
    if done.reduced:
        width = max(map(len, done.reduced))
        lines.append("relative error of the deltas (Frobenius)")
        lines += [f"  {name:<{width}}  {reduction.relative_error:.3e}" for name, reduction in done.reduced.items()]
        lines.append(f"  {'total':<{width}}  {total_error([*done.reduced.values()]):.3e}")
    return "\n".join(lines)


def _json(done: Conversion, target: Path) -> str:
    from lorafleet.tools.low_rank import total_error

    errors = {name: reduction.relative_error for name, reduction in done.reduced.items()}
    return json.dumps(
        {
            "path": str(target),
            "kind": done.kind,
            "changes": done.changes,
            "rank": done.max_rank,
            "relative_errors": errors,
            "total_relative_error": total_error([*done.reduced.values()]) if errors else None,
        },
        indent=2,
    )
