"""Combines several adapters into one, as PEFT's add_weighted_adapter does. The methods are:

linear, ties, dare_linear, dare_ties, magnitude_prune
    These combine all A and all B separately, so all adapters must have the same rank. They are cheap. For
    linear, only the crossed terms B_i A_j make the result differ from the sum of the deltas.
cat
    This stacks the ranks, so it is exact.
svd, ties_svd, dare_linear_svd, dare_ties_svd, magnitude_prune_svd
    These combine the deltas and then compute the best pair of one rank.

Two differences correct faults of PEFT:

- The result has scaling 1 even if the first adapter is rsLoRA. PEFT leaves it multiplied by sqrt(r).
- dare draws for each module from the seed and the module's name, so the result does not depend on earlier draws.

Sources: TIES, arXiv 2306.01708; DARE, arXiv 2311.03099.
"""

# M adapters · R rank · D in features · O out features

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMismatch, InvalidRequest
from lorafleet.tools.low_rank import Reduced, reduce_rank, stacked
from lorafleet.tools.mixing_methods import MajoritySign, Method
from lorafleet.tools.plain_lora import PlainLoRA, module_order
from lorafleet.workers.adapters.forms import LowRank


@dataclass(frozen=True, slots=True)
class Mixing:
    """A method and its parameters. A parameter that has no effect on the method is rejected with InvalidRequest."""

    method: Method
    density: float | None = None  # Share of values that pruning keeps, in (0, 1].
    rank: int | None = None  # Rank of the result of the svd methods; None is the largest of the adapters' ranks.
    seed: int | None = None  # Seed of dare; None is 0.
    # The sign that ties elects: that of the sum (total, also None) or that of most adapters (frequency).
    majority_sign: MajoritySign | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise InvalidRequest(f"method is {self.method!r}; it must be one of {', '.join(get_args(Method))}.")
        if self.prunes and (self.density is None or not 0 < self.density <= 1):
            raise InvalidRequest(
                f"density is {self.density}; {self.method} needs the share of values to keep, in (0, 1]."
            )
        if not self.prunes and self.density is not None:
            raise InvalidRequest(f"density has no effect on {self.method}; leave it out.")
        if self.seed is not None and not self.method.startswith("dare"):
            raise InvalidRequest(f"seed has no effect on {self.method}, which uses no random numbers; leave it out.")
        if self.majority_sign is not None and "ties" not in self.method:
            raise InvalidRequest(f"majority_sign has no effect on {self.method}; leave it out.")
        if self.rank is not None and not self.on_deltas:
            raise InvalidRequest(
                f"rank has no effect on {self.method}; leave it out, or use a method that ends in svd."
            )

    @property
    def prunes(self) -> bool:
        return self.method not in ("linear", "cat", "svd")

    @property
    def on_deltas(self) -> bool:
        return self.method.endswith("svd")


def mix(adapters: Sequence[PlainLoRA], weights: Sequence[float], how: Mixing) -> tuple[PlainLoRA, dict[str, Reduced]]:
    """Returns the mixture and, for the svd methods, what each module lost.

    An adapter that lacks a module is left out of that module's mixture, as in PEFT. Raises InvalidRequest and
    AdapterMismatch.
    """
    if len(adapters) < 2 or len(weights) != len(adapters):
        raise InvalidRequest(
            f"there are {len(adapters)} adapters and {len(weights)} weights; give at least two adapters, "
            "and as many weights."
        )
    names = sorted({name for adapter in adapters for name in adapter.modules}, key=module_order)
    rank = how.rank or max(adapter.max_rank for adapter in adapters)
    modules: dict[str, LowRank] = {}
    reduced: dict[str, Reduced] = {}
    for name in names:
        there = [(a.modules[name], w) for a, w in zip(adapters, weights, strict=True) if name in a.modules]
        pairs, shares = [pair for pair, _ in there], [weight for _, weight in there]
        _check_shapes(name, pairs)
        if how.method == "cat":
            modules[name] = _cat(pairs, shares)
        elif how.on_deltas:
            reduced[name] = _on_deltas(name, pairs, shares, how, rank)
            modules[name] = reduced[name].pair
        else:
            modules[name] = _on_factors(name, pairs, shares, how)
    return PlainLoRA(modules, adapters[0].base_name), reduced


def _check_shapes(name: str, pairs: Sequence[LowRank]) -> None:
    shapes = {(pair.a_RD.shape[1], pair.b_OR.shape[0]) for pair in pairs}
    if len(shapes) > 1:
        raise AdapterMismatch(
            f"{name} has the shapes {sorted(shapes)} (inputs, outputs): the adapters are for different bases."
        )


def _cat(pairs: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    a = torch.cat([pair.a_RD.float() * weight * pair.scaling for pair, weight in zip(pairs, weights, strict=True)])
    return LowRank(a, torch.cat([pair.b_OR.float() for pair in pairs], 1))


def _on_factors(name: str, pairs: Sequence[LowRank], weights: Sequence[float], how: Mixing) -> LowRank:
    ranks = [pair.rank for pair in pairs]
    if len(set(ranks)) > 1:
        raise InvalidRequest(
            f"{name} has the ranks {ranks}; {how.method} adds A to A and B to B, which needs equal ranks. "
            f"Use cat or {'svd' if how.method == 'linear' else f'{how.method}_svd'}."
        )
    scaled = [weight * pair.scaling for pair, weight in zip(pairs, weights, strict=True)]
    roots = torch.tensor([math.sqrt(abs(weight)) for weight in scaled])
    # On A only, since two signs would cancel.
    signs = torch.tensor([1.0 if weight >= 0 else -1.0 for weight in scaled])
    draw = _generator(how.seed, name)
    a_RD = _combine([pair.a_RD.float() for pair in pairs], roots * signs, how, draw)
    b_OR = _combine([pair.b_OR.float() for pair in pairs], roots, how, draw)
    return LowRank(a_RD, b_OR)


def _on_deltas(name: str, pairs: Sequence[LowRank], weights: Sequence[float], how: Mixing, rank: int) -> Reduced:
    """Mixes the deltas of one module. It computes whole [O, D] matrices only if pruning needs them."""
    if how.method == "svd":
        weighted = [LowRank(p.a_RD, p.b_OR, w * p.scaling) for p, w in zip(pairs, weights, strict=True)]
        done = reduce_rank(stacked(weighted), rank)
        return replace(done, pair=LowRank(done.pair.a_RD.float(), done.pair.b_OR.float()))
    deltas = [pair.scaling * (pair.b_OR.float() @ pair.a_RD.float()) for pair in pairs]
    mixed_OD = _combine(deltas, torch.tensor(weights), how, _generator(how.seed, name))
    u, s, v = torch.linalg.svd(mixed_OD, full_matrices=False)
    root = s[:rank].sqrt()
    pair = LowRank(root[:, None] * v[:rank], u[:, :rank] * root)
    return Reduced(pair, s.norm().item(), s[rank:].norm().item())


def _combine(tensors: Sequence[Tensor], weights: Tensor, how: Mixing, draw: torch.Generator) -> Tensor:
    method = how.method.removesuffix("_svd")
    stack_M = torch.stack([_prune(tensor, how, method, draw) for tensor in tensors])
    weighted_M = stack_M * weights.view(-1, 1, 1)
    if not method.endswith("ties"):
        return weighted_M.sum(0)
    agrees_M = _agrees_with_majority(stack_M, how.majority_sign)
    return (weighted_M * agrees_M).sum(0) / agrees_M.sum(0).clamp(min=1)


def _prune(tensor: Tensor, how: Mixing, method: str, draw: torch.Generator) -> Tensor:
    if how.density is None or how.density >= 1:
        return tensor
    if method.startswith("dare"):
        kept = torch.bernoulli(torch.full_like(tensor, how.density), generator=draw)
        return tensor * kept / how.density
    largest = tensor.abs().flatten().topk(int(how.density * tensor.numel())).indices
    mask = torch.zeros(tensor.numel())
    mask[largest] = 1
    return tensor * mask.view_as(tensor)


def _agrees_with_majority(stack_M: Tensor, how: MajoritySign | None) -> Tensor:
    sign_M = stack_M.sign()
    balance = sign_M.sum(0) if how == "frequency" else stack_M.sum(0)
    return sign_M == torch.where(balance >= 0, 1, -1)


def _generator(seed: int | None, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(seed or 0, name))


def seed_of(seed: int, module: str) -> int:
    return zlib.crc32(f"{seed} {module}".encode())
