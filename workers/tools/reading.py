"""Reads an adapter through the server's own reader, with or without a base model to hold it against.

Without one the base's shapes are taken from the adapter, so that all but its fit is checked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from lorafleet.resolvers.config import HTTPConfig, HubConfig, SourcesConfig
from lorafleet.resolvers.source import is_uri
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.lora.base_layout import BaseLayout
from lorafleet.workers.lora.base_weights import FileWeights
from lorafleet.workers.lora.config import MAX_RANK_BOUND
from lorafleet.workers.lora.files import AdapterFolder, open_weights
from lorafleet.workers.lora.forms import AdapterForms
from lorafleet.workers.lora.kinds.kind import Base
from lorafleet.workers.lora.reader import ReadAdapter, read_adapter
from lorafleet.workers.lora.weight_files import TensorInfo, read_weights
from lorafleet.workers.tools.base_model import BaseModel
from lorafleet.workers.tools.layouts import peft_name
from lorafleet.workers.weights import stored_dtype

_LINEAR = re.compile(r"base_model\.model\.model\.(?P<module>layers\.\d+\.[\w.]+?)\.(?P<leaf>[\w]+?)(?:\.weight)?")


@contextmanager
def adapter_folder(path_or_uri: str) -> Iterator[Path]:
    """The folder; a URI is fetched into the node's cache first. Whoever runs a tool may fetch from where they say."""
    if not is_uri(path_or_uri):
        yield Path(path_or_uri)
        return
    scheme, _, rest = path_or_uri.partition("://")
    http = HTTPConfig(allow=(path_or_uri.rstrip("/") + "/",)) if scheme in ("http", "https") else None
    repo = "/".join(rest.partition("@")[0].split("/")[:2])
    store = AdapterStore(SourcesConfig(http=http, hub=HubConfig(allow=(repo,)) if scheme == "hf" else None))
    try:
        with store.open(path_or_uri) as folder:
            yield folder
    finally:
        store.stop()


def read_forms(folder: Path, base: BaseModel | None, name: str) -> ReadAdapter:
    """Raises an AdapterError: what serving would say. Any rank is taken."""
    return read_adapter(
        folder,
        base=Base(inferred_layout(folder)) if base is None else served_base(base),
        max_rank=MAX_RANK_BOUND,
        dtype=torch.float32,
        name=name,
    )


def served_base(base: BaseModel) -> Base:
    """As a server has it, in the checkpoint's dtype."""
    dtype = base.config.dtype or stored_dtype(base.folder)
    weights = FileWeights(base.folder, dtype, base.config.tie_word_embeddings)
    return Base(BaseLayout.of(base.config), weights, base.folder.name)


def largest_rank(forms: AdapterForms) -> int:
    """Of its low-rank pairs; 1 where it has none."""
    pairs = [form.low_rank for form in forms.linears.values()]
    pairs += [form.low_rank for form in (forms.embedding, forms.head) if form is not None]
    return max((pair.rank for pair in pairs if pair is not None), default=1)


def tensor_infos(folder: Path) -> Mapping[str, TensorInfo]:
    """By the names in the file."""
    with open_weights(AdapterFolder.at(folder)) as file:
        return read_weights(file, hashlib.sha256()).infos


def inferred_layout(folder: Path) -> BaseLayout:
    """The modules that the adapter's own tensors fit."""
    leaves: dict[str, dict[str, tuple[int, ...]]] = {}
    tables = [(0, 0)]
    norms = {}
    for name, info in tensor_infos(folder).items():
        own = peft_name(name)
        match = _LINEAR.fullmatch(own)
        if own.endswith(("embed_tokens.weight", "lm_head.weight", ".base_layer.weight")) and len(info.shape) == 2:
            tables.append((info.shape[0], info.shape[1]))
        elif own.endswith("norm.weight") and len(info.shape) == 1:
            norms[own.removeprefix("base_model.model.model.").removesuffix(".weight")] = info.shape[0]
        elif match is not None:
            leaves.setdefault(match["module"].removesuffix(".base_layer"), {})[match["leaf"]] = info.shape
    shapes = {module: _shape_of(found) for module, found in leaves.items()}
    return BaseLayout(
        linears={module: shape for module, shape in shapes.items() if shape is not None},
        vocab_size=tables[-1][0],
        hidden_size=tables[-1][1],
        attention_heads=(1, 1),
        biased=frozenset(module for module, found in leaves.items() if "bias" in found),
        norms=norms,
    )


def _shape_of(leaves: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """None where the tensors do not tell, or are no matrices: the reader says what is wrong with them."""
    for out, into in (("lora_B", "lora_A"), ("hada_w1_a", "hada_w1_b")):
        if _is_matrix(leaves.get(out)) and _is_matrix(leaves.get(into)):
            return leaves[into][1], leaves[out][0]
    factors = [_factor_shape(leaves, name) for name in ("lokr_w1", "lokr_w2")]
    if factors[0] is None or factors[1] is None:
        return None
    return factors[0][1] * factors[1][1], factors[0][0] * factors[1][0]


def _factor_shape(leaves: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...] | None:
    if _is_matrix(leaves.get(name)):
        return leaves[name]
    a, b = leaves.get(f"{name}_a"), leaves.get(f"{name}_b")
    return (a[0], b[1]) if a is not None and b is not None and _is_matrix(a) and _is_matrix(b) else None


def _is_matrix(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) == 2 and 0 not in shape
