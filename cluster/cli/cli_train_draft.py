"""Defines `lorafleet train-draft`, whose work is done in tools/drafts/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lorafleet.cluster.cli.cli_tools import FloatName, JSONOption, ending_in_words, named_adapters
from lorafleet.protocol.adapter_formats.adapter_files import DRAFT_FOLDER
from lorafleet.protocol.errors import ConfigError

if TYPE_CHECKING:
    from lorafleet.tools.drafts.draft_job import DraftJob, DraftResult


LEARNING_RATES = {"target": 3e-4, "random": 3e-3}  # By the start of a new draft.
LORA_LEARNING_RATE = 2e-3
MAX_SEED = 2**32 - 1  # Each sampled answer adds its number; torch and the engine take 64 bits.


def train_draft(
    model: Annotated[Path, typer.Option(help="Folder of the base model.")],
    prompts: Annotated[Path, typer.Option(help="File of prompts or of recorded requests, as JSON lines.")],
    adapters: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER … of adapters; each gets a LoRA of the draft in FOLDER/draft.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for a draft model that is trained for the base.")] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Folder of a draft model that exists: only the adapters' LoRAs are trained.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="File of prompts to measure on; default: every tenth of the prompts.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The base's name in recorded requests.")] = None,
    init: Annotated[
        Literal["target", "random"] | None,
        typer.Option(help="Start of a new draft: the base's first layers (default), or a Llama with random weights."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=64, help="Layers of a new draft; default: 1.")] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=64, max=8192, help="Hidden size with --init random, a multiple of 64.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, max=256, help="Rank of the LoRAs; default: 16.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=32768, help="Longest answer in tokens.")] = 256,
    max_length: Annotated[
        int, typer.Option(min=2, max=131072, help="Longest prompt with its answer in tokens; others are left out.")
    ] = 2048,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Answers to each prompt that are trained on.")] = 1,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Temperature of answers that are trained on; 0: greedy.")
    ] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Passes over the answers.")] = 3,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=1e-7, max=1, help="Highest learning rate of a new draft; default: 3e-4, or 3e-3 with --init random."
        ),
    ] = None,
    lora_learning_rate: Annotated[
        float | None, typer.Option(min=1e-7, max=1, help="Highest learning rate of the LoRAs; default: 2e-3.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of a training step.")] = 1024,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, max=8, help="Draft tokens in a step, for the reported tokens per step.")
    ] = 4,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the training and of sampled answers.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device of the base and the draft.")] = "auto",
    dtype: Annotated[FloatName | None, typer.Option(help="Dtype of the base; default: the checkpoint's.")] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Share of the GPU's memory for the base; the draft has the rest.")
    ] = 0.7,
    as_json: JSONOption = False,
) -> None:
    """Trains a draft model for speculative decoding on a base's own answers, and a LoRA of it for each adapter. Reports
    how many tokens the drafts predict on prompts that were held out."""
    with ending_in_words():
        from lorafleet.tools.drafts.distillation import TrainingPlan
        from lorafleet.tools.drafts.draft_checkpoint import DraftModelShape
        from lorafleet.tools.drafts.draft_job import AnswerOptions, DraftJob
        from lorafleet.tools.drafts.draft_traffic import read_traffic
        from lorafleet.tools.drafts.train_draft import train_draft as train

        new_only = {"--init": init, "--layers": layers, "--hidden-size": hidden_size, "--learning-rate": learning_rate}
        if out is None:
            _refuse(new_only, "without --out, since no draft model is trained")
        if not adapters:
            _refuse({"--rank": rank, "--lora-learning-rate": lora_learning_rate}, "without --adapters")
        start = init or "target"
        job = DraftJob(
            model=model,
            adapters={name: Path(folder) for name, folder in named_adapters(adapters or []).items()},
            draft=_place(out, draft),
            is_new=out is not None,
            lines=read_traffic(prompts),
            held_out=None if held_out is None else read_traffic(held_out),
            base_names=() if served_model_name is None else (served_model_name,),
            shape=DraftModelShape(layers or 1, start, hidden_size),
            rank=rank or 16,
            answers=AnswerOptions(max_tokens, max_length, samples, temperature, seed),
            plan=TrainingPlan(epochs, learning_rate or LEARNING_RATES[start], batch_tokens, seed),
            lora_plan=TrainingPlan(epochs, lora_learning_rate or LORA_LEARNING_RATE, batch_tokens, seed),
            num_drafted=num_speculative_tokens,
            device=device,
            dtype=dtype or "auto",
            gpu_memory_utilization=gpu_memory_utilization,
        )
        results = train(job, lambda line: typer.echo(line, err=True))
        typer.echo(json.dumps(_as_json(results), indent=2) if as_json else _as_text(job, results))


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raises ConfigError for the first option that was given."""
    for flag, value in options.items():
        if value is not None:
            raise ConfigError(f"{flag} has no effect {why}; leave it out.")


def _place(out: Path | None, draft: Path | None) -> Path:
    """Returns the folder of the draft model, which either is made or exists."""
    place = out or draft
    if place is None or (out is not None and draft is not None):
        raise ConfigError("give either --out, a new folder for a draft model, or --draft, the folder of one.")
    return place


def _as_json(results: Sequence[DraftResult]) -> list[Mapping[str, object]]:
    return [
        {
            "model": result.name,
            "answers": result.num_answers,
            "held_out": result.num_held_out,
            "left_out": result.num_left_out,
            **{
                f"{name}_{when}": getattr(acceptance, name)
                for when, acceptance in (("before", result.before), ("after", result.after))
                for name in ("share", "length")
            },
        }
        for result in results
    ]


def _as_text(job: DraftJob, results: Sequence[DraftResult]) -> str:
    length = f"tokens per step at k={job.num_drafted}"
    head = ("model", "trained on", "held out", "left out", "predicted tokens", length)
    rows = [
        (
            result.name,
            *(f"{number:,}" for number in (result.num_answers, result.num_held_out, result.num_left_out)),
            f"{result.before.share:.1%} -> {result.after.share:.1%}",
            f"{result.before.length:.2f} -> {result.after.length:.2f}",
        )
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    places = [
        *([str(job.draft)] if job.is_new else []),
        *(str(folder / DRAFT_FOLDER) for folder in job.adapters.values()),
    ]
    return "\n".join((*(line.rstrip() for line in lines), f"written: {', '.join(places)}"))
