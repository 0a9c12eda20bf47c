"""Reads linears of integers that AutoRound stored. It packs them as GPTQ or AWQ, and `packing_format` says which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.formats.awq_format import AWQFormat
from lorafleet.workers.bases.formats.changed_settings import is_plain
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, CheckpointFormat, StoredLinears
from lorafleet.workers.bases.formats.gptq_format import GPTQFormat

# By packing_format, the checkpoint_format of GPTQ.
GPTQ_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}
AWQ_PACKING = "auto_round:auto_awq"
SERVED: dict[str, tuple[object, ...]] = {
    "data_type": (None, "int"),
    "act_bits": (None, 16, 32),
    "rotation_config": (None,),
}


def auto_round_format(config: Mapping[str, Any], linears: StoredLinears) -> CheckpointFormat:
    """Returns the linears of the checkpoint. Raises UnsupportedModel for other numbers and packings."""
    packing = config.get("packing_format")
    if packing != AWQ_PACKING and packing not in GPTQ_PACKINGS:
        raise UnsupportedModel(
            f"quantization_config: packing_format={packing!r} of AutoRound is not supported; {AWQ_PACKING} and "
            f"{', '.join(GPTQ_PACKINGS)} are. {REMEDY}"
        )
    changed = [one for one in (config.get("extra_config") or {}).values() if not is_plain(one)]
    for settings in (config, *changed):
        for name, served in SERVED.items():
            if settings.get(name) not in served:
                raise UnsupportedModel(
                    f"quantization_config: {name}={settings[name]!r} of AutoRound is not supported. {REMEDY}"
                )
    if packing == AWQ_PACKING:
        return AWQFormat({**config, "zero_point": not config.get("sym", True), "version": "gemm"}, linears)
    return GPTQFormat({**config, "checkpoint_format": GPTQ_PACKINGS[packing]}, linears)
