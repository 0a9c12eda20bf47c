"""Turns AdaLoRA adapters into low-rank forms. The update is s B (A o E), where E scales the rows of A.

Training prunes ranks, and the file holds only the remaining ones. PEFT divides alpha by init_r + 1e-5, however few
ranks remain. If alpha is not positive, PEFT uses the number of ranks instead.
"""

from __future__ import annotations

from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each

A, B, E = "lora_A", "lora_B", "lora_E"
_EPSILON = 1e-5
_DEFAULT_INIT_R = 12


def check(target: Target) -> int:
    target.expect_leaves(A, B, E)
    rank = _rank_left(target)
    inputs, outputs = target.shape
    target.expect(A, rank, inputs)
    target.expect(E, rank, 1)
    target.expect(B, outputs, rank)
    return rank


def _init_r(target: Target) -> int:
    init_r = target.helper.integer("init_r", _DEFAULT_INIT_R)
    if init_r < 1:
        raise AdapterMalformed(f"init_r is {init_r}; a rank must be an integer of at least 1.")
    return init_r


def _rank_left(target: Target) -> int:
    """Returns the number of ranks that remain after pruning.

    rank_pattern maps "<module>.lora_E" to a mask of the init_r ranks, [true, false, …]. Without one all remain.
    """
    patterns = target.helper.fields.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise AdapterMalformed(f"rank_pattern is {shown(patterns)}; it must be an object with module names as keys.")
    init_r = _init_r(target)
    names = [f"{name}.{E}{ending}" for name in target.spelled.all for ending in ("", ".default")]
    mask = next((patterns[name] for name in names if name in patterns), None)
    if mask is None:
        return init_r
    if not isinstance(mask, list) or len(mask) != init_r or not all(isinstance(kept, bool) for kept in mask):
        raise AdapterMalformed(
            f"rank_pattern has {shown(mask)} for {target.module}; it must be a list of {init_r} booleans."
        )
    return sum(mask)


def form(target: Target) -> LinearForm:
    rank = target.shape_of(A)[0]
    if rank == 0:
        return LinearForm()
    alpha = target.helper.alpha if target.helper.alpha > 0 else float(rank)
    a_RD = target.float32(A) * target.float32(E)
    return LinearForm(LowRank(a_RD, target.value(B), alpha / (_init_r(target) + _EPSILON)))


ADALORA = Kind("AdaLoRA", (A, B, E), check, each(form))
