"""Gives each targeted module the rank and the alpha that adapter_config.json says for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lorafleet.workers.adapters.base_layout import TABLES, BaseLayout
from lorafleet.workers.adapters.kinds.kind import Target
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.peft_names import NamedTensors


def give_scales(helper: PEFTHelper, targets: Sequence[Target], layout: BaseLayout, named: NamedTensors) -> None:
    """Sets the rank and the alpha of all targets. Raises AdapterMalformed for a pattern that names nothing."""
    names = {target.module: target.spelled for target in targets}
    left_out = [name.partition(".lora_")[0] for name in named.left_out.values()]
    ranks = helper.ranks().of(names, lambda: _others(layout), left_out)
    alphas = helper.alphas().of(names, lambda: _others(layout), left_out)
    for target in targets:
        target.rank, target.alpha = ranks[target.module], alphas[target.module]


def _others(layout: BaseLayout) -> Iterator[str]:
    """Yields the names of all modules of the base, which a pattern may name without effect."""
    for module in (*layout.linears, *layout.norms, *TABLES, *layout.absent, *layout.unserved):
        yield from layout.spelled(module).all
    experts = layout.experts
    if experts is None:
        return
    for module in experts.modules:
        yield from layout.spelled(module).all
        for parameter in experts.parameters:
            yield from layout.newest_names(f"{module}.{parameter}").all
        for leaf in experts.shapes:
            for number in range(experts.count):
                yield from layout.older_names(experts.expert(module, number, leaf)).own
