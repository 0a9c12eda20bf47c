"""The patterns of adapter_config.json count under every name that transformers and PEFT have had for a module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.other import get_pattern_key

from lorafleet.protocol.errors import AdapterError, AdapterMalformed, AdapterUnsupported
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.adapters.spellings import ROOTS
from tests.workers.conftest import AdapterDir, base_of, make_base

TEXT, PICTURES, OLD, *_ = ROOTS
Q0, Q1, V0 = "layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.0.self_attn.v_proj"
Make = Callable[..., AdapterDir]


@pytest.fixture(params=["text", "wrapper"])
def base(request: pytest.FixtureRequest) -> Base:
    """A text model, or a model with a part for pictures, which names its modules otherwise."""
    return base_like(request.param)


def base_like(kind: str) -> Base:
    made = base_of(make_base("llama"))
    return replace(made, layout=replace(made.layout, is_text_part=kind == "wrapper"))


def renamed(adapter: AdapterDir, root: str) -> AdapterDir:
    """The file as a class with this root would have written it."""
    return adapter.map(lambda name, tensor: (name.replace(f"{TEXT}layers.", f"{root}layers."), tensor))


def read(adapter: AdapterDir, base: Base) -> AdapterForms:
    return read_adapter(adapter.path, base=base, max_rank=16, dtype=torch.float32, name="a").forms


def alphas(adapter: AdapterDir, base: Base) -> dict[str, float]:
    pairs = {module: form.low_rank for module, form in read(adapter, base).linears.items()}
    return {module: pair.scaling * pair.rank for module, pair in pairs.items() if pair is not None}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize(
    "pattern",
    [
        r"^{root}layers\.0\.self_attn\.q_proj",
        r"{root}layers\.0\..*",
        r"{root}layers.0.self_attn.q_proj",
        "q_proj",
        r"layers\.[01]\..*v_proj",
    ],
)
def test_alphas_are_those_of_the_class_that_the_file_names(adapter: Any, base: Base, root: str, pattern: str) -> None:
    pattern = pattern.format(root=re.escape(root) if "\\" in pattern else root)
    found = alphas(renamed(adapter, root).set(alpha_pattern={pattern: 64}), base)
    names = {module: f"{root}{module}" for module in found}
    wanted = {m: 64.0 if get_pattern_key([pattern], name) == pattern else 8.0 for m, name in names.items()}
    assert found == pytest.approx(wanted)
    assert set(wanted.values()) == {8.0, 64.0}


def test_the_first_entry_counts_that_the_files_class_matches(adapter: Any) -> None:
    patterns = {rf"^{PICTURES}layers\.0.*": 64, f"{OLD}{Q0}": 64, "q_proj": 4}
    found = alphas(renamed(adapter, PICTURES).set(alpha_pattern=patterns), base_like("wrapper"))
    assert (found[Q0], found[V0], found[Q1]) == pytest.approx((64, 64, 4))


def test_names_that_peft_converts_match_after_the_conversion_too(adapter: Any) -> None:
    """PEFT loads the file of an old class into the newest one, and matches that one's names."""
    old = renamed(adapter, OLD).set(alpha_pattern={rf"^{re.escape(PICTURES)}layers\.0\..*": 64})
    found = alphas(old, base_like("wrapper"))
    assert (found[Q0], found[Q1]) == pytest.approx((64, 8))


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize(
    "entry",
    [
        "no_proj",
        r".*\.no_proj",
        "layers.7.self_attn.q_proj",
        "base_model.model.model.layers.0.self_attn.q_proj",
        r"^base_model\.model\.model\.layers\..*",
        "q_proj.lora_A",
        "Q_PROJ",
        r"model\.decoder\.layers\..*",
        r".*language_model.*vision_no_proj",
    ],
)
def test_an_entry_that_names_nothing_is_refused_by_name(adapter: Any, base: Base, key: str, entry: str) -> None:
    adapter.set(**{key: {entry: 4}})
    with pytest.raises(
        AdapterMalformed, match=rf"{key} names {re.escape(repr(entry))}, which matches none of the 6 mod"
    ):
        read(adapter, base)


@pytest.mark.parametrize(
    ("kind", "root", "pattern"),
    [
        ("text", TEXT, rf"^{re.escape(PICTURES)}layers\.0.*"),
        ("text", TEXT, r"^layers\.0.*"),
        ("text", PICTURES, rf"^{re.escape(TEXT)}layers\.0.*"),
        ("wrapper", PICTURES, rf"^{re.escape(TEXT)}layers\.0.*"),
        ("wrapper", PICTURES, f"{OLD}{Q0}"),
    ],
)
def test_an_entry_that_only_another_class_would_match_is_refused(
    adapter: Any, kind: str, root: str, pattern: str
) -> None:
    """PEFT ignores it in the class that the file names."""
    renamed(adapter, root).set(alpha_pattern={pattern: 64})
    with pytest.raises(AdapterMalformed, match="by the names of another class of transformers"):
        read(adapter, base_like(kind))
    same = alphas(adapter.set(alpha_pattern={pattern: 8}), base_like(kind))
    assert set(same.values()) == {8.0}, "an entry that changes nothing in any class"


@pytest.mark.parametrize(
    "entry",
    [
        "k_proj",
        "lm_head",
        "model.norm",
        r".*mlp\.(up|down)_proj",
        "model.language_model.layers.2.mlp.gate_proj",
        "vision_tower.encoder.layers.0.self_attn.out_proj",
        r"model\.visual\.blocks\..*",
    ],
)
def test_an_entry_for_another_module_of_the_base_does_no_harm(adapter: Any, base: Base, entry: str) -> None:
    adapter.set(alpha_pattern={entry: 64, "q_proj": 16}, rank_pattern={entry: 2})
    assert sorted(set(alphas(adapter, base).values())) == pytest.approx([8.0, 16.0])


@pytest.mark.parametrize("root", ROOTS)
def test_targets_exclusions_and_ranks_count_under_the_files_names(make_adapter: Make, base: Base, root: str) -> None:
    names = re.escape(root)
    adapter = make_adapter(
        target_modules=r"model\.layers\.[01]\.self_attn\.(q|k)_proj",
        exclude_modules=r"model\.layers\.1\..*k_proj",
        rank_pattern={r"model\.layers\.0\.self_attn\.k_proj": 2},
    )
    renamed(adapter, root).set(
        target_modules=rf"{names}layers\.[01]\.self_attn\.(q|k)_proj",
        exclude_modules=rf"{names}layers\.1\..*k_proj",
        rank_pattern={rf"^{names}layers\.0\.self_attn\.k_proj": 2},
    )
    linears = read(adapter, base).linears
    ranks = {module: form.low_rank.rank for module, form in linears.items() if form.low_rank is not None}
    assert ranks == {Q0: 4, Q1: 4, "layers.0.self_attn.k_proj": 2}


@pytest.mark.parametrize("root", ROOTS[:-1])  # "norm" alone would mean every norm
def test_full_names_in_lists_count_under_the_files_names(make_adapter: Make, base: Base, root: str) -> None:
    options: dict[str, Any] = {
        "target_modules": [f"model.{Q0}", f"model.{Q1}"],
        "modules_to_save": ["model.norm"],
        "trainable_token_indices": {"model.embed_tokens": [1, 5]},
    }
    adapter = make_adapter(**options)
    renamed(adapter.map(lambda k, v: (k.replace(f"{TEXT}norm", f"{root}norm"), v)), root)
    adapter.map(lambda k, v: (k.replace(f"{TEXT}embed_tokens", f"{root}embed_tokens"), v))
    adapter.set(
        target_modules=[f"{root}{Q0}", f"{root}{Q1}"],
        modules_to_save=[f"{root}norm"],
        trainable_token_indices={f"{root}embed_tokens": [1, 5]},
    )
    forms = read(adapter, base)
    assert (forms.linears.keys(), forms.norms.keys()) == ({Q0, Q1}, {"norm"})
    assert forms.embedding is not None and forms.embedding.rows is not None


def test_a_target_that_only_another_name_excludes_is_missed_by_name(adapter: Any, base: Base) -> None:
    adapter.set(exclude_modules=rf"^{re.escape(PICTURES)}layers\.1\..*q_proj")
    assert Q1 in read(adapter, base).linears
    adapter.write({name: tensor for name, tensor in adapter.tensors.items() if Q1 not in name})
    assert Q1 not in read(adapter, base).linears
    adapter.set(exclude_modules=None)
    with pytest.raises(AdapterMalformed, match=f"targets {Q1}"):
        read(adapter, base)


LEFT_OUT = [
    "model.vision_tower.encoder.layers.0.mlp.fc1.lora_A.weight",
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1.lora_B.weight",
    "model.visual.merger.mlp.0.lora_A.weight",
    "visual.blocks.0.attn.qkv.base_layer.bias",
    "model.multi_modal_projector.mm_input_projection_weight",
    "model.audio_tower.conformer.0.ffw.weight",
]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_tensors_of_the_parts_for_pictures_and_sound_are_left_out(adapter: Any, base: Base, name: str) -> None:
    plain = alphas(adapter, base)
    adapter.write(adapter.tensors | {f"base_model.model.{name}": torch.ones(4, 3)})
    assert alphas(adapter, base) == plain
    alone = adapter.write({f"base_model.model.{name}": torch.ones(4, 3)})
    with pytest.raises(AdapterMalformed, match=r"no tensors but those of .* would do nothing"):
        read(alone, base)


@pytest.mark.parametrize("name", ["model.visions.0.fc1.lora_A.weight", "model.layers.0.vision_tower.fc1.lora_A.weight"])
def test_other_tensors_are_not(adapter: Any, base: Base, name: str) -> None:
    adapter.write(adapter.tensors | {f"base_model.model.{name}": torch.ones(4, 3)})
    with pytest.raises(AdapterError, match=r"(visions|vision_tower).*does not have"):
        read(adapter, base)


def test_random_projections_whose_size_the_left_out_modules_decide_are_refused(tmp_path: Path, base: Base) -> None:
    vera = {"vera_lambda_b": torch.ones(32), "vera_lambda_d": torch.ones(4)}
    folder = AdapterDir(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "VERA"}')
    folder.set(r=4, target_modules=["q_proj"], save_projection=False, layers_to_transform=[0])
    tensors = {f"base_model.model.model.{Q0}.{leaf}": tensor for leaf, tensor in vera.items()}
    assert read(folder.write(tensors), base).linears.keys() == {Q0}
    folder.write(tensors | {"base_model.model.model.visual.q_proj.vera_lambda_b": torch.ones(64)})
    with pytest.raises(AdapterUnsupported, match=r"visual\.q_proj.*save_projection=True"):
        read(folder, base)


WRAPPERS: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "torch.compile inside": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    "DDP": lambda name: f"module.{name}",
    "DDP inside": lambda name: name.replace("base_model.model.", "base_model.model.module."),
    "DDP of a compiled model": lambda name: f"module._orig_mod.{name}",
    "Lightning": lambda name: f"_forward_module.module.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}".replace(".lora_", "._fsdp_wrapped_module.lora_"),
    "FSDP of A and B": lambda name: name.replace(".weight", "._fsdp_wrapped_module.weight"),
    "checkpointing": lambda name: re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name),
    "the base tensor's name": lambda name: name.replace(".lora_", ".weight.lora_"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_wrappers_put_into_names_does_not_matter(adapter: Any, base: Base, wrapper: str) -> None:
    adapter.set(alpha_pattern={r"^model\.layers\.0\..*q_proj": 64})
    plain = alphas(adapter, base)
    adapter.map(lambda name, tensor: (WRAPPERS[wrapper](name), tensor))
    assert alphas(adapter, base) == plain
    name = next(iter(adapter.tensors))
    other = f"module.{name}" if name.startswith("_orig_mod.") else f"_orig_mod.{name}"
    with pytest.raises(AdapterMalformed, match="are both lora_A"):
        read(adapter.write(adapter.tensors | {other: adapter.tensors[name]}), base)


@pytest.mark.parametrize("processes", [2, 4])
def test_one_process_s_slices_are_refused_by_their_cause(adapter: Any, base: Base, processes: int) -> None:
    adapter.map(lambda name, tensor: (name, tensor.chunk(processes)[0]))
    with pytest.raises(AdapterMalformed, match=r"one process of a sharded training \(FSDP2\).*Gather the whole state"):
        read(adapter, base)
