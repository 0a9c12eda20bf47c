"""Makes adapters of every form of linears and norms by hand, and the transformers model that each is equivalent to."""

# R rank · D in · O out · O1, O2 and D1, D2 their factors

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.forms import AdapterForms, Kronecker, LinearForm, LowRank
from lorafleet.workers.adapters.reader import ReadAdapter
from lorafleet.workers.slots import lora_model as lora_model
from tiny_models import load_base

Shapes = Mapping[str, tuple[int, int]]  # Maps a module to (in, out), as BaseLayout.linears does.
STD = 0.12


class Maker:
    """Makes random forms for linears of these shapes."""

    def __init__(
        self, shapes: Shapes, norms: Mapping[str, int], biases: Mapping[str, Tensor], seed: int, std: float = STD
    ) -> None:
        self.std = std  # The standard deviation of A and B.
        self.shapes = shapes
        self.norms = norms
        self.biases = biases  # The base's own biases.
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, mean: float = 0.0, std: float = STD) -> Tensor:
        return mean + std * torch.randn(*shape, generator=self._generator)

    def low_rank(self, module: str, rank: int = 8) -> LowRank:
        inputs, outputs = self.shapes[module]
        a_RD, b_OR = self.normal(rank, inputs, std=self.std), self.normal(outputs, rank, std=self.std)
        return LowRank(a_RD, b_OR, 1.5)

    def kronecker(self, module: str, factor: int) -> Kronecker:
        """Returns w1 of about [factor, factor], which does not divide a rank's part of an output or input evenly."""
        inputs, outputs = self.shapes[module]
        o1, d1 = (next(f for f in range(factor, 0, -1) if size % f == 0) for size in (outputs, inputs))
        return Kronecker(self.normal(o1, d1, std=0.4), self.normal(outputs // o1, inputs // d1, std=0.2), 0.7)

    def scale(self, module: str) -> Tensor:
        return self.normal(self.shapes[module][1], mean=1.0, std=0.4)

    def bias(self, module: str) -> Tensor:
        return self.normal(self.shapes[module][1], std=0.5)


def plain(make: Maker) -> AdapterForms:
    return AdapterForms({module: LinearForm(make.low_rank(module)) for module in make.shapes})


def dora(make: Maker) -> AdapterForms:
    """Keeps the base's bias, which is not scaled."""
    return AdapterForms({m: LinearForm(make.low_rank(m, 5), out_scale_O=make.scale(m)) for m in make.shapes})


def ia3(make: Maker) -> AdapterForms:
    """Has no rank at all, and also scales the base's bias."""
    forms = {}
    for m in make.shapes:
        if m.endswith(("k_proj", "v_proj", "qkv_proj", "down_proj")):
            scale_O = make.scale(m)
            base_O = make.biases.get(m)
            forms[m] = LinearForm(out_scale_O=scale_O, bias_O=None if base_O is None else scale_O * base_O)
    return AdapterForms(forms)


def biases(make: Maker) -> AdapterForms:
    """Has lora_bias on some modules, and a bias without LoRA on others."""
    return AdapterForms(
        {
            m: LinearForm(make.low_rank(m, 3) if m.endswith(("q_proj", "up_proj")) else None, bias_O=make.bias(m))
            for m in make.shapes
            if not m.endswith("v_proj")
        }
    )


def lokr(make: Maker) -> AdapterForms:
    return AdapterForms({m: LinearForm(kronecker=make.kronecker(m, 4)) for m in make.shapes})


def norms(make: Maker) -> AdapterForms:
    return AdapterForms(norms={name: make.normal(size, mean=1.0, std=0.3) for name, size in make.norms.items()})


def everything(make: Maker) -> AdapterForms:
    """Combines all forms on half of the layers."""
    linears = {
        m: LinearForm(
            make.low_rank(m, 16),
            make.kronecker(m, 6) if m.endswith(("o_proj", "gate_proj")) else None,
            make.scale(m),
            make.bias(m),
        )
        for m in make.shapes
        if int(m.split(".")[1]) % 2
    }
    some = {name: make.normal(size, mean=1.0) for i, (name, size) in enumerate(make.norms.items()) if i % 3}
    return AdapterForms(linears, norms=some)


KINDS: dict[str, Callable[[Maker], AdapterForms]] = {
    kind.__name__: kind for kind in (plain, dora, ia3, biases, lokr, norms, everything)
}


def make_forms(
    folder: Path, kinds: Mapping[str, Callable[[Maker], AdapterForms]] = KINDS, std: float = STD
) -> dict[str, AdapterForms]:
    """Returns the forms for the checkpoint in the folder, by kind."""
    modules = {name.removeprefix("model."): module for name, module in load_base(folder).named_modules()}
    linears = {n: m for n, m in modules.items() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    shapes = {n: (m.in_features, m.out_features) for n, m in linears.items()}
    own_biases = {n: m.bias.detach() for n, m in linears.items() if m.bias is not None}
    sizes = {n: len(m.weight) for n, m in modules.items() if n.endswith("norm")}
    return {
        kind: make(Maker(shapes, sizes, own_biases, seed, std))
        for seed, (kind, make) in enumerate(kinds.items(), start=1)
    }


@torch.no_grad()
def applied(folder: Path, forms: AdapterForms) -> Any:
    """Returns the transformers model with the adapter merged into its weights."""
    base = load_base(folder)
    for name, form in forms.linears.items():
        module = base.get_submodule(f"model.{name}")
        weight_OD = module.weight.double()
        if form.low_rank is not None:
            weight_OD += form.low_rank.scaling * (form.low_rank.b_OR.double() @ form.low_rank.a_RD.double())
        if form.kronecker is not None:
            w1, w2 = form.kronecker.w1.double(), form.kronecker.w2.double()
            weight_OD += form.kronecker.scaling * torch.kron(w1, w2)
        if form.out_scale_O is not None:
            weight_OD *= form.out_scale_O.double().unsqueeze(1)
        module.weight.copy_(weight_OD)
        if form.bias_O is not None:
            module.bias = torch.nn.Parameter(form.bias_O.clone())
    for name, weight_D in forms.norms.items():
        base.get_submodule(f"model.{name}").weight.copy_(weight_D)
    return base


def served_from(root: Path, forms: Mapping[str, AdapterForms], monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Returns folders from which the engine reads these forms, by kind."""
    paths = {kind: root / kind for kind in forms}
    for path in paths.values():
        path.mkdir()

    def read(path: str, **_: object) -> ReadAdapter:
        kind = Path(path).name
        return ReadAdapter(forms[kind], ContentDigest.known(f"digest of {kind}"), 0.0)

    monkeypatch.setattr(lora_model, "read_adapter", read)
    return paths
