"""Gives `lorafleet inspect` its options and its text for a base. tools/checkpoint_inspection.py does the work."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from lorafleet.cluster.json_text import parse_json
from lorafleet.protocol.engine_config import EngineConfig, KVCacheDType, SpeculativeConfig
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.quantization_methods import Method

if TYPE_CHECKING:
    from lorafleet.tools.checkpoint_inspection import CheckpointInspection, GPUShare
    from lorafleet.workers.memory_estimate import Card

T = TypeVar("T")
CardName = Literal[
    "a100-40", "a100-80", "h100-80", "h200-141", "l4-24", "l40s-48", "rtx3090-24", "rtx4090-24"
]  # The cards of tools/checkpoint_inspection.py.
PANEL = "Of a base"
BaseOption = Annotated[T | None, typer.Option(help="The server's option of this name.", rich_help_panel=PANEL)]
GPUOption = Annotated[
    CardName | None,
    typer.Option(help="GPU for which the KV tokens are computed; default: none.", rich_help_panel=PANEL),
]
GPUMemoryOption = Annotated[
    float | None,
    typer.Option(min=0.1, max=100_000, help="Memory of the GPU in GiB, in place of --gpu.", rich_help_panel=PANEL),
]


@dataclass(frozen=True, slots=True)
class BaseOptions:
    """The options that only a base has. None stands for the server's default."""

    gpu: CardName | None
    gpu_memory_gib: float | None
    gpu_memory_utilization: float | None
    max_loras: int | None  # 0: without adapters.
    lora_memory_gib: float | None
    max_model_len: int | None
    kv_cache_dtype: KVCacheDType | None
    quantization: Method | None
    speculative_config: str | None  # JSON.

    def check_unset(self, path: str) -> None:
        """Raises InvalidRequest if one of them is given for an adapter."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                option = "--" + field.name.replace("_", "-")
                raise InvalidRequest(f"{option} is for bases, and {path} is not the folder of one. Leave it out.")

    def engine_config(self, path: str, lora: LoRAConfig) -> EngineConfig:
        adapters = None
        if self.max_loras != 0:
            max_loras, memory_gib = self.max_loras or lora.max_loras, self.lora_memory_gib
            adapters = dataclasses.replace(lora, max_loras=max_loras, lora_memory_gib=memory_gib)
        given: dict[str, Any] = {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
            "kv_cache_dtype": self.kv_cache_dtype,
            "quantization": self.quantization,
        }
        if self.speculative_config is not None:
            given["speculative_config"] = _speculative_config(self.speculative_config)
        return EngineConfig(path, lora=adapters, **{name: value for name, value in given.items() if value is not None})

    def card(self) -> Card | None:
        from lorafleet.tools.checkpoint_inspection import CARDS
        from lorafleet.workers.memory_estimate import Card

        if self.gpu is not None and self.gpu_memory_gib is not None:
            raise InvalidRequest("--gpu and --gpu-memory-gib both say how large the GPU is. Leave one of them out.")
        if self.gpu_memory_gib is not None:
            return Card(f"{self.gpu_memory_gib:g} GiB", int(self.gpu_memory_gib * 2**30))
        return None if self.gpu is None else CARDS[self.gpu]


def _speculative_config(text: str) -> SpeculativeConfig | None:
    """Raises InvalidRequest if the text is no JSON, and ConfigError as SpeculativeConfig does."""
    try:
        return SpeculativeConfig.of(parse_json(text))
    except ValueError as error:
        raise InvalidRequest(f"--speculative-config must be a JSON object: {error}") from None


def is_base(path: str) -> bool:
    """Returns whether the path is the folder of a base rather than an adapter."""
    folder = Path(path)
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").exists()


def inspect_base(
    path: str, lora: LoRAConfig, options: BaseOptions, tp: int | None, *, as_json: bool
) -> tuple[str, bool]:
    """Returns the text about a base, and whether the server would refuse it."""
    from lorafleet.tools.checkpoint_inspection import SIZES, inspect_checkpoint

    config, card = options.engine_config(path, lora), options.card()
    found = inspect_checkpoint(config, card, SIZES if tp is None else (tp,))
    shown = json.dumps(dataclasses.asdict(found), indent=2) if as_json else _text(found, config, card)
    return shown, found.is_refused


def _counted(forms: dict[str, int]) -> str:
    return ", ".join(f"{form} ({count})" for form, count in forms.items())


def _text(found: CheckpointInspection, config: EngineConfig, card: Card | None) -> str:
    rows = [("base", found.path), ("architecture", found.architecture or "unknown")]
    if found.is_generic:
        rows += [
            ("runs as", f"transformers' own module in {found.dtype}; what it takes on a GPU is not computed"),
            ("linears", _counted(found.linears)),
            ("context", f"{found.context_limit:,} tokens at most; KV cache in {found.kv_dtype}"),
        ]
    elif found.refusal is None:
        rows += [
            ("parameters", f"{found.num_parameters:,}, served in {found.dtype}"),
            ("linears", _counted(found.linears)),
            *([("experts", _counted(found.experts))] if found.experts else []),
            ("context", f"{found.context_limit:,} tokens at most; KV cache in {found.kv_dtype}"),
        ]
    rows += [
        (
            "files" if group is found.tensors[0] else "",
            f"{_size(group.num_bytes):>11}  {group.kind} in {group.dtype}, {group.num_tensors} tensors",
        )
        for group in found.tensors
    ]
    if found.drafts_itself:
        option = """--speculative-config '{"method": "mtp"}'"""
        rows.append(
            ("drafts", f"with its own layer for several tokens (MTP) and {option}, which this command takes too")
        )
    if found.refusal is not None:
        rows.append(("refused", f"{found.refusal} [{found.error}]"))
    lines = [f"{name:<14}{text}" for name, text in rows]
    return "\n".join([*lines, *(line for share in found.shares for line in _share_lines(share, config, card))])


def _share_lines(share: GPUShare, config: EngineConfig, card: Card | None) -> list[str]:
    size = share.tensor_parallel_size
    where = f"{size} x {'CPU worker' if card is None else card.name}"
    if share.needs is None or share.room is None:
        return [f"{where}: refused: {share.refusal}"]
    needs, room = share.needs, share.room
    lines = [f"{where}: {_size(needs.weights)} of weights, {needs.kv_token:,} bytes for a token in the KV cache"]
    if needs.states:
        lines.append(
            f"  {_size(needs.states)} for the recurrent states of max_num_seqs={config.max_num_seqs} sequences"
        )
    if needs.state_snapshots:
        lines.append(f"  {_size(needs.state_snapshots)} for snapshots of recurrent states, for the prefix cache")
    if config.lora is not None:
        lora = config.lora
        lines.append(
            f"  {_size(needs.adapters)} for adapters in slots, each {_size(needs.adapter)} if it has "
            f"max_lora_rank={lora.max_lora_rank} on every module, less otherwise"
        )
    if needs.drafts is not None:
        drafts = needs.drafts
        steps = "" if card is None else f", {_size(drafts.steps)} for its steps and graphs"
        lines.append(
            f"  {_size(drafts.weights)} for the model that drafts, {_size(drafts.adapters)} for draft LoRAs in slots, "
            f"{drafts.kv_token:,} bytes for a token{steps}"
        )
    if card is not None:
        lines.append(
            f"  about {_size(needs.activations)} for activations, {_size(needs.others)} for sampling, graphs and a "
            f"reserve, {_size(card.other_bytes)} for the driver and libraries"
        )
    if room.refusal is not None:
        return [*lines, f"  would not start: {room.refusal}"]
    about = "" if card is None else "about "
    lines.append(f"  {about}{room.kv_cache_tokens:,} KV tokens remain; max_model_len is at most {room.max_model_len:,}")
    if room.most_loras is not None:
        lines.append(f"  max_loras could be {room.most_loras} beside one sequence of {room.beside_tokens:,} tokens")
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
