"""Defines the interface between the reader and the kinds of adapters: a Kind, and a Target for each module.

A kind checks a module by the shapes of its tensors, before any value is read, and says with which rank it is served.
Later it turns the values into a form. The other parts of an adapter (targets, biases, vocabulary, norms) are the same
for all kinds and are handled elsewhere.
"""

# R rank · D in features · O out features

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.base_source import BaseWeights
from lorafleet.workers.adapters.forms import AdapterForms, LinearForm
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.spellings import Spelled
from lorafleet.workers.adapters.weight_files import FLOAT_DTYPES

GATHER = "Gather the whole state dict before saving, such as by Accelerate's get_state_dict()."
CHUNK_VALUES = 1 << 24  # values of a base weight processed at once; bounds the GPU memory that a load takes


@dataclass(frozen=True, slots=True)
class Base:
    """The base model that adapters are checked against and computed from."""

    layout: BaseLayout
    weights: BaseWeights | None = None  # None: adapters computed from the base's weights are rejected
    name: str = ""  # for messages

    @property
    def named(self) -> str:
        return f"the base model {self.name!r}" if self.name else "the base model"

    def as_named_in(self, root: str | None) -> Base:
        """Returns the same with the names that an adapter has for the modules, see BaseLayout.as_named_in."""
        return replace(self, layout=self.layout.as_named_in(root))


@dataclass(slots=True)
class Target:
    """A module that the adapter targets, as the adapter's kind sees it."""

    module: str
    shape: tuple[int, int]  # (in, out)
    tensors: Mapping[str, str]  # the file's names of the module's own tensors, by leaf
    shared: Mapping[str, str]  # the file's names of the tensors that all modules share, by leaf
    infos: Mapping[str, TensorInfo]
    helper: PEFTHelper
    base: Base
    max_rank: int  # largest rank that is served
    values: Mapping[str, Tensor] = field(default_factory=dict)  # by the file's names; empty until they are read
    saved_bias: str | None = None  # tensor that replaces the base's bias
    saved_weight: str | None = None  # tensor that replaces the base's weight
    spelled: Spelled = field(kw_only=True)  # names in PEFT's patterns
    rank: int = field(kw_only=True, default=0)  # that the config gives the module; set by give_scales()
    alpha: float = field(kw_only=True, default=0.0)  # that the config gives the module; set by give_scales()

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.helper.scaling(self.alpha, self.rank)

    def has(self, leaf: str) -> bool:
        return leaf in self.tensors

    def expect_leaves(self, *leaves: str) -> None:
        """Raises AdapterMalformed unless the file has exactly these tensors for the module."""
        for leaf in leaves:
            if leaf not in self.tensors:
                others = ", ".join(other.removesuffix(".weight") for other in sorted(self.tensors))
                raise AdapterMalformed(
                    f"{self.module} has {others} ({shown(next(iter(self.tensors.values())))}) without "
                    f"{leaf.removesuffix('.weight')}, which adapter_config.json asks for."
                )
        stray = next((leaf for leaf in self.tensors if leaf not in leaves), None)
        if stray is not None:
            raise AdapterMalformed(
                f"the tensor {shown(self.tensors[stray])} does not belong to what adapter_config.json describes."
            )

    def shape_of(self, leaf: str) -> tuple[int, ...]:
        return tensor_shape(self._name(leaf), self.infos)

    def expect(self, leaf: str, *shape: int) -> None:
        """Raises AdapterMismatch unless the tensor has this shape."""
        found = self.shape_of(leaf)
        if found != shape:
            raise AdapterMismatch(
                f"{self.module} has {leaf} {list(found)}; adapter_config.json and {self.base.named}, which has "
                f"{self.shape[0]} inputs and {self.shape[1]} outputs there, require {list(shape)}."
                f"{_slice_hint(found, shape)}"
            )

    def value(self, leaf: str) -> Tensor:
        return self.values[self._name(leaf)]

    def float32(self, leaf: str) -> Tensor:
        return self.value(leaf).float()

    def _name(self, leaf: str) -> str:
        return self.tensors[leaf] if leaf in self.tensors else self.shared[leaf]

    # -- the base -------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> BaseWeights:
        if self.base.weights is None:
            raise AdapterUnsupported(
                f"{self.module} is computed from the base's weights, which this server does not have in full "
                "(load_format=dummy under tensor parallelism). Serve a real checkpoint."
            )
        return self.base.weights

    def base_weight(self) -> Tensor:
        """Returns the weight [O, D] as it is served, on the device where it lies."""
        if self.saved_weight is not None:
            return self.values[self.saved_weight]
        return self.weights.weight(self.module)

    def bias(self) -> Tensor | None:
        """Returns the adapter's bias, else the base's, as float32 on the CPU, or None if there is neither."""
        if self.saved_bias is not None:
            return self.values[self.saved_bias].float()
        if self.module not in self.base.layout.biased:
            return None
        with self.weights.beside_the_steps():
            return self.weights.bias(self.module).float().cpu()


def _slice_hint(found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Returns a remedy if the tensor looks like one process's slice of the wanted one."""
    if not found or found[1:] != wanted[1:] or not 0 < found[0] < wanted[0] or wanted[0] % found[0]:
        return ""
    return f" It may be one process's slice of a sharded training (FSDP2). {GATHER}"


def tensor_shape(name: str, infos: Mapping[str, TensorInfo]) -> tuple[int, ...]:
    """Returns the tensor's shape. Raises an AdapterError for tensors that no kind can take.

    Those are tensors of integers, and the empty ones that ZeRO-3 writes for tensors that it did not gather.
    """
    info = infos[name]
    if info.shape == (0,):
        raise AdapterMalformed(
            f"the tensor {shown(name)} is empty: a DeepSpeed ZeRO-3 run saved it without gathering it first."
        )
    if info.dtype not in FLOAT_DTYPES:
        raise AdapterUnsupported(
            f"the tensor {shown(name)} has dtype {shown(info.dtype)}; F32, BF16, F16 and F64 are supported."
        )
    return info.shape


Check = Callable[[Target], int]
Forms = Callable[[Sequence[Target]], AdapterForms]


@dataclass(frozen=True, slots=True)
class Kind:
    """One PEFT method, as the reader uses it."""

    label: str  # for messages
    leaves: tuple[str, ...]  # tensors that a module can have
    check: Check  # returns the rank with which a module is served
    forms: Forms  # makes the forms of all modules, "lm_head" among them
    shared: tuple[str, ...] = ()  # tensors that belong to no module
    check_config: Callable[[PEFTHelper], None] = lambda _: None  # checks what is special to this method
    # Checks whether the rest can be served without the tensors that are left out, given these and the shared ones.
    check_left_out: Callable[[Collection[str], Collection[str]], None] = lambda _, __: None


def each(form: Callable[[Target], LinearForm]) -> Forms:
    """Returns `forms` for kinds whose modules are independent of each other."""

    def forms(targets: Sequence[Target]) -> AdapterForms:
        return AdapterForms({target.module: form(target) for target in yielding_gil(targets)})

    return forms


def row_chunks(weight_OD: Tensor) -> Iterator[slice]:
    """Yields slices of rows that are small enough to be widened to float64 at once."""
    rows = max(1, CHUNK_VALUES // weight_OD.shape[1])
    for start in range(0, weight_OD.shape[0], rows):
        yield slice(start, start + rows)


def on(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, torch.float32)
