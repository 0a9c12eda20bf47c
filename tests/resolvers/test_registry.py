from __future__ import annotations

import contextlib
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from lorafleet.protocol.errors import AdapterUnavailable, ConfigError
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.resolvers import registry as registry_module
from lorafleet.resolvers.registry import ENTRY_POINT_GROUP, LoRAResolverRegistry


class Fixed:
    """Knows one adapter."""

    def __init__(self, name: str = "sql", path: str = "/a") -> None:
        self.name, self.path = name, path

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if lora_name != self.name:
            return None
        return LoRARequest(lora_name, 1, self.path, base_model_name=base_model_name)


def broken() -> Fixed:
    raise RuntimeError("no credentials")


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"fixed": "Fixed", "broken": "broken", "wrong": "Any", "gone": "gone", "twice": "Fixed"}
    points = [EntryPoint(name, f"{__name__}:{value}", ENTRY_POINT_GROUP) for name, value in values.items()]
    points.append(EntryPoint("twice", f"{__name__}:broken", ENTRY_POINT_GROUP))
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(**globals()))

    def installed(**wanted: Any) -> EntryPoints:
        return EntryPoints(points).select(**wanted)

    monkeypatch.setattr(registry_module, "entry_points", installed)


async def test_the_first_hit_wins() -> None:
    registry = LoRAResolverRegistry()
    registry.register("none", Fixed("other"))
    registry.register("first", Fixed(path="/first"))
    registry.register("second", Fixed(path="/second"))
    found = await registry.resolve_lora("base", "sql")
    assert found is not None
    assert found.lora_path == "/first"
    assert await registry.resolve_lora("base", "missing") is None
    assert registry.supported() == ["none", "first", "second"]
    assert isinstance(registry.get("first"), Fixed)


class Failing:
    async def resolve_lora(self, _: str, lora_name: str) -> LoRARequest | None:
        raise AdapterUnavailable(f"{lora_name}: the source is down")


async def test_what_each_resolver_answered_is_counted_also_before_it_was_asked() -> None:
    registry = LoRAResolverRegistry()
    registry.register("first", Fixed())
    registry.register("failing", Failing())
    for name in ("sql", "sql", "missing"):
        with contextlib.suppress(AdapterUnavailable):
            await registry.resolve_lora("base", name)
    samples = [sample for metric in registry.metrics.collect() for sample in metric.samples]
    lookups = [one for one in samples if one.name == "lorafleet_resolver_lookups_total"]
    assert {(one.labels["resolver"], one.labels["outcome"]): one.value for one in lookups} == {
        ("first", "found"): 2,
        ("first", "absent"): 1,
        ("first", "failed"): 0,
        ("failing", "found"): 0,
        ("failing", "absent"): 0,
        ("failing", "failed"): 1,
    }
    seconds = {one.labels["resolver"]: one.value for one in samples if one.name == "lorafleet_resolver_seconds_count"}
    assert seconds == {"first": 3, "failing": 1}


def test_names_are_unique_and_known() -> None:
    registry = LoRAResolverRegistry()
    registry.register("a", Fixed())
    with pytest.raises(ConfigError, match="two LoRA resolvers are called 'a'"):
        registry.register("a", Fixed())
    with pytest.raises(ConfigError, match="no LoRA resolver 'b'; the registered ones are: a"):
        registry.get("b")


@pytest.mark.usefixtures("plugins")
def test_plugins_are_loaded_by_name() -> None:
    registry = LoRAResolverRegistry()
    registry.load_plugins(["fixed"])
    assert registry.supported() == ["fixed"]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "no LoRA resolver 'absent' is installed"),
        ("broken", "'broken' .*no credentials"),
        ("gone", "'gone' .*cannot be loaded"),
        ("wrong", "'wrong'"),
        ("twice", "more than one package installs the LoRA resolver 'twice'"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoRAResolverRegistry().load_plugins([name])
