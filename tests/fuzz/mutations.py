"""Adapters as hypothesis makes them: one that PEFT wrote, of any kind, with a few things changed in its config, its
tensors, its header or its bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from lorafleet.workers.adapters.peft_fields import FIELDS

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_DTYPE_NAMES = ["F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "f32", "", "C64", "F4"]
_NUMBERS = [0, 1, -1, 2, 3, 4, 7, 8, 16, 64, 255, 2**16, 10**6, 10**9, 2**31, 2**48, 2**63, 2**64, 10**30]
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
_KEYS = sorted({key for fields in FIELDS.values() for key in (*fields.used, *fields.harmless, *fields.features)})
_PIECES = [
    *_MODULES,
    *("model", "layers", "0", "1", "self_attn", "mlp", "norm", "a", "é", "\x00"),
    *(".", ".*", "(", ")", "|", "[", "]", "\\", "d", "w", "+", "*", "?", "{2}", "{1,}", "^", "$"),
    *("(?:", "(?=", "(?i)", "(a|a)*"),
]
_RENAMINGS = [
    ("q_proj", "k_proj"),
    ("lora_A", "lora_B"),
    ("base_model.model.", ""),
    ("model.", "model.model."),
    (".weight", ""),
    (".weight", ".default.weight"),
    ("layers.0", "layers.1"),
    ("layers.", "layers.9"),
    (".", ".."),
    ("lora_", "hada_"),
    ("self_attn", "mlp"),
    ("_a", "_b"),
    ("weight", "bias"),
    ("base_model", "language_model"),
    ("model", "lm_head"),
]

patterns = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join)
numbers = st.one_of(
    st.sampled_from(_NUMBERS),
    st.integers(-3, 70),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), 1e308, 1e-320, 0.5, 1e29]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, patterns, st.text(max_size=12))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(patterns, inner, max_size=4)),
    max_leaves=8,
)


@dataclass(repr=False)
class Draft:
    """An adapter that is being changed. tensors: name -> (dtype, shape, bytes). late: changes of the files' bytes."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, list[Any], bytes]]
    config_text: bytes | None = None  # in the place of config
    header_edits: list[Callable[[dict[str, Any]], object]] = field(default_factory=list)
    as_bin: bool = False
    late: list[tuple[str, Callable[[bytes], bytes]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{' '.join(self.notes)}: {str(self.config_text or self.config)[:1500]}>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(repr(self))

    def files(self) -> dict[str, bytes]:
        config = self.config_text if self.config_text is not None else json.dumps(self.config).encode()
        weights = self._bin() if self.as_bin else self._safetensors()
        name = "adapter_model.bin" if self.as_bin else "adapter_model.safetensors"
        files = {"adapter_config.json": config, name: weights}
        for which, change in self.late:
            target = "adapter_config.json" if which == "config" else name
            files[target] = change(files[target])
        return files

    def _safetensors(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name, (dtype, shape, raw) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        for edit in self.header_edits:
            edit(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def _bin(self) -> bytes:
        by_name = {short: dtype for dtype, short in _DTYPES.items()}
        loaded = {}
        for name, (dtype, shape, raw) in self.tensors.items():
            tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            if dtype in by_name and len(raw) % by_name[dtype].itemsize == 0:
                tensor = tensor.view(by_name[dtype])
            with contextlib.suppress(RuntimeError, TypeError, OverflowError):
                tensor = tensor.view(shape)
            loaded[name] = tensor
        buffer = io.BytesIO()
        torch.save(loaded, buffer)
        return buffer.getvalue()


def draft_of(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Draft:
    return Draft(
        dict(config),
        {
            name: (_DTYPES[tensor.dtype], list(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
            for name, tensor in tensors.items()
        },
    )


# -- the config ---------------------------------------------------------------------------------------------------


def set_key(draw: st.DrawFn, draft: Draft) -> None:
    present = sorted(draft.config)
    key = draw(
        st.one_of(st.sampled_from(present) if present else st.text(), st.sampled_from(_KEYS), st.text(max_size=8))
    )
    draft.config[key] = draw(values)


def nudge_key(draw: st.DrawFn, draft: Draft) -> None:
    """A number a little off, a list or an object a little changed: past the first checks."""
    changeable = sorted(k for k, v in draft.config.items() if isinstance(v, int | float | list | dict | str))
    if not changeable:
        return
    key = draw(st.sampled_from(changeable))
    value = draft.config[key]
    if isinstance(value, bool):
        draft.config[key] = not value
    elif isinstance(value, int | float):
        draft.config[key] = value + draw(st.sampled_from([-2, -1, 1, 2, 0.5]))
    elif isinstance(value, str):
        draft.config[key] = draw(patterns)
    elif isinstance(value, list):
        changed = list(value)
        if changed and draw(st.booleans()):
            changed.pop(draw(st.integers(0, len(changed) - 1)))
        else:
            changed.append(draw(st.one_of(scalars, st.sampled_from(_MODULES))))
        draft.config[key] = changed
    else:
        draft.config[key] = {**value, draw(patterns): draw(st.one_of(scalars, st.lists(st.booleans(), max_size=8)))}


def delete_key(draw: st.DrawFn, draft: Draft) -> None:
    if draft.config:
        del draft.config[draw(st.sampled_from(sorted(draft.config)))]


def patterns_of_ranks(draw: st.DrawFn, draft: Draft) -> None:
    key = draw(st.sampled_from(["rank_pattern", "alpha_pattern", "lambda_pattern"]))
    draft.config[key] = draw(st.dictionaries(patterns, st.one_of(numbers, st.integers(1, 9)), max_size=6))


def targets(draw: st.DrawFn, draft: Draft) -> None:
    key = draw(st.sampled_from(["target_modules", "exclude_modules", "modules_to_save", "layers_to_transform",
                                "layers_pattern", "trainable_token_indices", "alora_invocation_tokens",
                                "feedforward_modules", "token_indices"]))  # fmt: skip
    ids = st.lists(st.one_of(st.integers(-2, 70), st.sampled_from(_NUMBERS)), max_size=6)
    names = st.lists(st.one_of(st.sampled_from(_MODULES), patterns), max_size=6)
    draft.config[key] = draw(
        st.one_of(names, patterns, ids, st.dictionaries(st.sampled_from(_MODULES), ids, max_size=2))
    )


def another_method(draw: st.DrawFn, draft: Draft) -> None:
    draft.config["peft_type"] = draw(st.sampled_from(sorted(FIELDS)))


def config_bytes(draw: st.DrawFn, draft: Draft) -> None:
    text = json.dumps(draft.config).encode()
    how = draw(st.integers(0, 4))
    if how == 0:
        draft.config_text = draw(st.binary(max_size=64))
    elif how == 1:
        key = draw(st.sampled_from(sorted(draft.config) or ["r"]))
        draft.config_text = text[:-1] + f", {json.dumps(key)}: {json.dumps(draw(values))}}}".encode()
    elif how == 2:
        draft.config_text = draw(st.sampled_from([b"[", b'{"a":', b'[{"b":'])) * draw(
            st.sampled_from([10, 2000, 50000])
        )
    else:
        draft.late.append(("config", _flips(draw)))


# -- the tensors --------------------------------------------------------------------------------------------------


def _pick(draw: st.DrawFn, draft: Draft) -> str | None:
    return draw(st.sampled_from(sorted(draft.tensors))) if draft.tensors else None


def drop_tensor(draw: st.DrawFn, draft: Draft) -> None:
    name = _pick(draw, draft)
    if name is not None:
        del draft.tensors[name]


def rename_tensor(draw: st.DrawFn, draft: Draft) -> None:
    name = _pick(draw, draft)
    if name is None:
        return
    old, new = draw(st.sampled_from(_RENAMINGS))
    renamed = draw(st.one_of(st.just(name.replace(old, new)), st.just(name + draw(patterns)), st.text(max_size=30)))
    content = draft.tensors[name]
    if draw(st.booleans()):
        del draft.tensors[name]
    draft.tensors[renamed] = content


def reshape_tensor(draw: st.DrawFn, draft: Draft) -> None:
    name = _pick(draw, draft)
    if name is None:
        return
    dtype, shape, raw = draft.tensors[name]
    size = 4
    how = draw(st.integers(0, 4))
    if how == 0:
        shape = shape[::-1]
    elif how == 1:
        shape = [*shape, 1]
    elif how == 2:
        shape = draw(st.lists(st.integers(0, 40), max_size=4))
        count = 1
        for n in shape:
            count *= n
        dtype, raw = "F32", bytes(size * count) if count < 100_000 else raw
    elif how == 3 and len(shape) == 2 and shape[0] > 1:
        row = len(raw) // shape[0]
        keep = draw(st.integers(1, shape[0] - 1))
        shape, raw = [keep, shape[1]], raw[: row * keep]
    else:
        shape, raw = [0], b""
    draft.tensors[name] = (dtype, shape, raw)


def fill_tensor(draw: st.DrawFn, draft: Draft) -> None:
    name = _pick(draw, draft)
    if name is None:
        return
    dtype, shape, raw = draft.tensors[name]
    number = draw(st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 3e38, 1e-45, 70000.0, 1e30]))
    if dtype == "F32" and len(raw) >= 4:
        count = len(raw) // 4
        if draw(st.booleans()):
            draft.tensors[name] = (dtype, shape, struct.pack("<f", number) * count)
        else:
            at = 4 * draw(st.integers(0, count - 1))
            draft.tensors[name] = (dtype, shape, raw[:at] + struct.pack("<f", number) + raw[at + 4 :])


def convert_tensors(draw: st.DrawFn, draft: Draft) -> None:
    dtype = draw(st.sampled_from([torch.float64, torch.float16, torch.bfloat16, torch.int64]))
    chosen = sorted(draft.tensors) if draw(st.booleans()) else [_pick(draw, draft)]
    for name in chosen:
        if name is None or draft.tensors[name][0] != "F32":
            continue
        _, shape, raw = draft.tensors[name]
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.float32) if raw else torch.empty(0)
        cast = tensor.nan_to_num().clamp(-1e4, 1e4).to(dtype)
        draft.tensors[name] = (_DTYPES[dtype], shape, cast.view(torch.uint8).numpy().tobytes() if raw else b"")


def lie_of_dtype(draw: st.DrawFn, draft: Draft) -> None:
    name = _pick(draw, draft)
    if name is not None:
        draft.tensors[name] = (draw(st.sampled_from(_DTYPE_NAMES)), *draft.tensors[name][1:])


def add_tensor(draw: st.DrawFn, draft: Draft) -> None:
    name = draw(st.one_of(st.text(max_size=20), st.sampled_from([
        "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight", "base_model.vera_A",
        "base_model.model.model.norm.weight", "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "base_model.model.lm_head.bias",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    ])))  # fmt: skip
    shape = draw(st.sampled_from([[], [1], [32], [64], [64, 32], [32, 32], [70, 32], [2, 32], [4, 64], [0, 32]]))
    count = 1
    for n in shape:
        count *= n
    draft.tensors[name] = ("F32", shape, struct.pack("<f", 0.25) * count)


# -- the header and the bytes -------------------------------------------------------------------------------------


def edit_header(draw: st.DrawFn, draft: Draft) -> None:
    name, key = _pick(draw, draft), draw(st.sampled_from(["dtype", "shape", "data_offsets", "stride", "__metadata__"]))
    value = draw(st.one_of(values, st.lists(st.sampled_from([*_NUMBERS, -8]), max_size=3)))

    def edit(header: dict[str, Any]) -> None:
        if key == "__metadata__" or name is None:
            header[key] = value
        elif isinstance(header.get(name), dict):
            header[name][key] = value

    draft.header_edits.append(edit)


def shift_offsets(draw: st.DrawFn, draft: Draft) -> None:
    name, by = _pick(draw, draft), draw(st.sampled_from([-512, -8, -4, -1, 1, 4, 8, 512, 2**40]))
    end = draw(st.integers(0, 2))

    def edit(header: dict[str, Any]) -> None:
        entry = header.get(name) if name is not None else None
        match entry:
            case {"data_offsets": [int(start), int(stop)]}:
                entry["data_offsets"] = [start + by * (end != 1), stop + by * (end != 0)]

    draft.header_edits.append(edit)


def weights_bytes(draw: st.DrawFn, draft: Draft) -> None:
    how = draw(st.integers(0, 5))
    if how == 0:
        junk = draw(st.binary(max_size=64))
        draft.late.append(("weights", lambda _: junk))
    elif how == 1:
        cut = draw(st.floats(0, 1))
        draft.late.append(("weights", lambda data: data[: int(cut * len(data))]))
    elif how == 2:
        size = draw(st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 4000)))
        draft.late.append(("weights", lambda data: struct.pack("<Q", size) + data[8:]))
    elif how == 3:
        tail = draw(st.binary(min_size=1, max_size=16))
        draft.late.append(("weights", lambda data: data + tail))
    else:
        draft.late.append(("weights", _flips(draw)))


def as_torch_file(draw: st.DrawFn, draft: Draft) -> None:  # noqa: ARG001  # as its siblings
    draft.as_bin = True


def _flips(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A few bytes changed, mostly near the beginning, where structure is."""
    seed, count = draw(st.integers(0, 2**32)), draw(st.sampled_from([1, 2, 5, 40]))

    def flip(data: bytes) -> bytes:
        changed, dice = bytearray(data), random.Random(seed)
        for _ in range(count if changed else 0):
            at = int(len(changed) * dice.random() ** 4)
            changed[at] = dice.choice([0, 255, 34, 91, 123, 125, 44, 58, changed[at] ^ (1 << dice.randrange(8))])
        return bytes(changed)

    return flip


MUTATIONS = (
    set_key, nudge_key, nudge_key, delete_key, patterns_of_ranks, targets, another_method, config_bytes, drop_tensor,
    rename_tensor, reshape_tensor, fill_tensor, convert_tensors, lie_of_dtype, add_tensor, edit_header, shift_offsets,
    weights_bytes, as_torch_file,
)  # fmt: skip


@st.composite
def drafts(draw: st.DrawFn, seed_of: Callable[[str], Draft], kinds: list[str]) -> Draft:
    draft = seed_of(draw(st.sampled_from(kinds)))
    for mutation in draw(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=4)):
        draft.notes.append(mutation.__name__)
        mutation(draw, draft)
    return draft
