"""Finds out what attention a module of transformers needs, by running an empty copy of it on the meta device.

The module calls the attention function that is registered here, which records the arguments. It also asks for masks.
The rule of each mask is evaluated for chosen queries, and must be that of causal attention with or without a window.
Anything that the attention backends cannot do is refused by name.
"""

# T tokens · H query heads · G KV heads · D head size

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lorafleet.protocol.errors import UnsupportedModel

PROBE = "lorafleet_probe"
PROBE_TOKENS = 7  # a number that no size of a model is likely to be
# Arguments of the attention function that change nothing here, or are read by name.
_KNOWN = frozenset(
    (
        *("dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "cache_position"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    )
)
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query and key index -> visible


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """The attention of all layers of a model."""

    modules: tuple[str, ...]  # paths of the modules that attend, by layer
    windows: tuple[int | None, ...]  # by layer, tokens that a query sees, including its own; None means all
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class ProbedLinear:
    """Describes a linear that every token passes once."""

    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of the run."""

    attention: AttentionTraits
    linears: dict[str, ProbedLinear]  # those that see every token once and in order, by path


@dataclass(slots=True)
class _Run:
    """The records of the run in progress."""

    context: int
    windows: dict[int, int | None] = field(default_factory=dict)  # by id() of the mask that stands for them
    masks: list[Tensor] = field(default_factory=list)  # kept, so that no id() is given twice
    layers: list[tuple[nn.Module, int | None, tuple[Any, ...]]] = field(default_factory=list)
    rows: dict[nn.Module, list[int]] = field(default_factory=dict)  # tokens of each call of a linear


_run: _Run | None = None  # transformers' registry takes functions, which have no other way to their run


def probe(model: Any, architecture: str, context: int) -> Probed:
    """Runs `model`, which must be on the meta device, without a head. Raises UnsupportedModel naming what it needs.

    Args:
        context: The longest sequence, up to which windows are found.
    """
    global _run
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # an import of seconds, and only for this
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PROBE, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _mask)
    path_of = {module: path for path, module in model.named_modules()}
    linears = {module: path for module, path in path_of.items() if type(module) is nn.Linear}
    _run = _Run(context)
    hooks = [module.register_forward_hook(_record) for module in linears]
    token_1T = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        model.set_attn_implementation(PROBE)
        with torch.inference_mode():
            model.base_model(
                input_ids=token_1T, attention_mask=torch.ones_like(token_1T), position_ids=token_1T, use_cache=False
            )
        run = _run
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{architecture} cannot be served by model_impl=transformers: {error}") from None
    except Exception as error:
        raise UnsupportedModel(
            f"{architecture} cannot be served by model_impl=transformers: its module does not run with an attention "
            f"function of ours ({type(error).__name__}: {error})."
        ) from error
    finally:
        _run = None
        for hook in hooks:
            hook.remove()
    try:
        attention = _traits(run, path_of, model.config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{architecture} cannot be served by model_impl=transformers: {error}") from None
    return Probed(
        attention,
        {
            path: ProbedLinear(linear.in_features, linear.out_features, linear.bias is not None)
            for linear, path in linears.items()
            if run.rows.get(linear) == [PROBE_TOKENS] and ".experts." not in path
        },
    )


def _record(linear: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
    assert _run is not None
    _run.rows.setdefault(linear, []).append(inputs[0].numel() // linear.in_features)


def _mask(*_positional: object, mask_function: MaskRule, **_others: object) -> Tensor:
    """Returns a tensor that stands for the mask's window."""
    assert _run is not None
    mask = torch.empty(0)
    _run.masks.append(mask)
    _run.windows[id(mask)] = window_of(mask_function, _run.context)
    return mask


def window_of(rule: MaskRule, context: int) -> int | None:
    """Returns the window of a causal mask for sequences of `context` tokens, or None if it has none.

    Raises UnsupportedModel if the mask is another one.
    """
    zero, last = torch.zeros(1, dtype=torch.int64), context - 1
    key_K = torch.arange(context)

    def seen(query: int) -> Tensor:
        shown: Tensor = rule(zero, zero, torch.full((1,), query), key_K)
        return shown.expand(context)

    window = int(seen(last).sum())
    for query in {last, max(last - 1, 0), last // 2, last // 3, min(5, last)}:
        if not torch.equal(seen(query), (key_K <= query) & (key_K > query - window)):
            raise UnsupportedModel(
                "a layer's mask is not that of causal attention, with or without a sliding window (chunked, "
                "bidirectional and other masks are not supported)."
            )
    return None if window == context else window


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    assert _run is not None
    strange = sorted(
        name for name, value in options.items() if name not in _KNOWN and value is not None and value is not False
    )
    if strange:
        raise UnsupportedModel(f"its attention needs {', '.join(strange)}, which the attention backends do not have.")
    if id(attention_mask) not in _run.windows:
        raise UnsupportedModel("a layer attends with a mask that it makes itself.")
    if query.shape[0] != 1 or query.shape[2] != PROBE_TOKENS or key.shape[2] != PROBE_TOKENS:
        raise UnsupportedModel(f"a layer attends over {key.shape[2]} keys for {PROBE_TOKENS} tokens.")
    if key.shape != value.shape or query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1]:
        shapes = ", ".join(str(list(x.shape[1::2])) for x in (query, key, value))
        raise UnsupportedModel(f"a layer has heads of different sizes: (heads, size) of q, k and v are {shapes}.")
    scale = options.get("scaling")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    softcap = options.get("softcap")
    if isinstance(scale, Tensor):
        raise UnsupportedModel("a layer computes the scale of its scores, which must be a constant.")
    traits = (query.shape[1], key.shape[1], query.shape[3], float(scale), None if softcap is None else float(softcap))
    _run.layers.append((module, _run.windows[id(attention_mask)], traits))
    return query.transpose(1, 2).contiguous(), None


def _traits(run: _Run, path_of: dict[nn.Module, str], config: Any) -> AttentionTraits:
    layers = [module for module, _, _ in run.layers]
    wanted = int(config.num_hidden_layers)
    if len(layers) != wanted or len(set(layers)) != wanted:
        raise UnsupportedModel(
            f"{len(set(layers))} modules attend {len(layers)} times in {wanted} layers; each layer must do so once, "
            "through transformers' attention interface. State-space, convolutional and linear-attention layers are not "
            "supported."
        )
    kinds = {traits for _, _, traits in run.layers}
    if len(kinds) > 1:
        raise UnsupportedModel(
            "its layers differ in (query heads, KV heads, head size, scale, softcap): "
            f"{', '.join(map(str, sorted(kinds, key=str)))}; all layers must be alike."
        )
    return AttentionTraits(
        tuple(path_of[module] for module in layers), tuple(window for _, window, _ in run.layers), *kinds.pop()
    )
