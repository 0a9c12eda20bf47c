"""Handles initializations that change the base's weights and that PEFT runs again when it loads the adapter.

- PiSSA removes the r largest singular directions from W.
- OLoRA removes the span of W's first r columns.
- KaSA removes the r smallest singular directions.

The adapter's B A was trained beside the rest of W. Each removed part is a low rank to subtract, so the adapter
becomes one of rank 2r over the unchanged base. PEFT rounds the rest of W to the base's dtype; here it is not rounded.
"""

# R rank · D in features · O out features

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.forms import LowRank
from lorafleet.workers.adapters.kinds.kind import Target, row_chunks
from lorafleet.workers.adapters.peft_helper import PEFTHelper

# Names that do not matter once the weights are loaded. lora_ga changes the base only in training.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
_CONVERT = (
    "Convert it where it was trained: save_pretrained(…, path_initial_model_for_weight_conversion=<initial adapter>) "
    "writes a plain LoRA."
)


def check_init(helper: PEFTHelper) -> None:
    """Raises an AdapterError for initializations that cannot be repeated from the files."""
    init = helper.fields.get("init_lora_weights", True)
    if init is None or isinstance(init, bool):
        return
    if not isinstance(init, str):
        raise AdapterMalformed(f"init_lora_weights is {shown(init)}; it must be true, false or a name.")
    if init.startswith("pissa_niter_"):
        raise AdapterUnsupported(
            f"unconverted PiSSA with a randomized decomposition (init_lora_weights={shown(init)}) cannot be served: "
            f"the part that it removed from the base is not in its files. {_CONVERT}"
        )
    if init.startswith("corda"):
        raise AdapterUnsupported(
            f"unconverted CorDA (init_lora_weights={shown(init)}) cannot be served: the changed base that it was "
            f"trained on is not in its files. {_CONVERT}"
        )
    if init == "loftq":
        raise AdapterUnsupported(
            "LoftQ (init_lora_weights='loftq') cannot be served: the quantized base that it was trained on is not in "
            "its files. Serve the quantized base that LoftQ wrote, and set init_lora_weights to true."
        )
    if init != "pissa" and init.lower() not in _PLAIN_INITS | {"olora"}:
        raise AdapterUnsupported(f"init_lora_weights={shown(init)} is unknown; PEFT 0.21 has no such initialization.")


def _init(helper: PEFTHelper) -> str:
    init = helper.fields.get("init_lora_weights")
    return init.lower() if isinstance(init, str) else ""


def is_named(helper: PEFTHelper) -> bool:
    return _init(helper) in ("pissa", "olora")


def mutates(helper: PEFTHelper) -> bool:
    return is_named(helper) or helper.has_object("kasa_config")


def check_rank(target: Target) -> None:
    largest = min(target.shape)
    if target.rank > largest or (target.rank == largest and not is_named(target.helper)):
        raise AdapterMalformed(
            f"{target.module} has rank {target.rank}; it must be {'at most' if is_named(target.helper) else 'below'} "
            f"{largest}, the number of directions of the base's weight there."
        )


def removed(target: Target, scaling: float) -> list[LowRank]:
    """Returns what PEFT removes from W, as pairs to add.

    If the file has the head's weight, nothing is removed: that weight is what was left, and PEFT loads it last.
    """
    if target.saved_weight is not None:
        return []
    pairs = []
    init = _init(target.helper)
    if init == "pissa":
        if scaling <= 0:
            raise AdapterMalformed(f"{target.module} has the scaling {scaling}; PiSSA's must be greater than 0.")
        pairs.append(_span(target.base_weight(), target.rank, largest=True))
    elif init == "olora":
        pairs.append(_first_columns(target.base_weight(), target.rank, scaling))
    if target.helper.has_object("kasa_config"):
        pairs.append(_span(target.base_weight(), target.rank, largest=False))
    return pairs


def _span(weight_OD: Tensor, rank: int, largest: bool) -> LowRank:
    """Returns minus W's part in its `rank` largest or smallest singular directions.

    The eigenvectors of the smaller Gram matrix are the singular vectors, at a fraction of a full decomposition's
    cost. float64 makes up for the squaring.
    """
    wide = weight_OD.shape[0] < weight_OD.shape[1]
    tall = weight_OD.T if wide else weight_OD
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
    for rows in row_chunks(tall):
        chunk = tall[rows].double()
        gram.addmm_(chunk.T, chunk)
    vectors = torch.linalg.eigh(gram).eigenvectors  # ascending
    chosen = vectors[:, -rank:] if largest else vectors[:, :rank]
    along = torch.cat([tall[rows].double() @ chosen for rows in row_chunks(tall)])
    if wide:
        return LowRank(along.T.cpu(), chosen.cpu(), -1.0)
    return LowRank(chosen.T.cpu(), along.cpu(), -1.0)


def _first_columns(weight_OD: Tensor, rank: int, scaling: float) -> LowRank:
    """Returns minus s Q_r R_r of W = Q R. Q_r spans W's first r columns, and R_r is Q_r^T W."""
    q_OR = torch.linalg.qr(weight_OD[:, :rank].double()).Q
    r_RD = sum(q_OR[rows].T @ weight_OD[rows].double() for rows in row_chunks(weight_OD))
    assert isinstance(r_RD, Tensor)
    return LowRank(r_RD.cpu(), q_OR.cpu(), -scaling)
