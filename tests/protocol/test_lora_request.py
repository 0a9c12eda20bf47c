"""The number that vLLM's clients know an adapter by."""

from __future__ import annotations

from pathlib import Path

from lorafleet.cluster.catalogue.catalogue_records import VersionRecord
from lorafleet.cluster.catalogue.catalogue_state import CatalogueState
from lorafleet.protocol.lora_request import adapter_number
from lorafleet.resolvers.filesystem import FilesystemResolver


async def test_an_adapter_has_one_number_whoever_found_it(tmp_path: Path) -> None:
    for name in ("sql", "support", "org/tool"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "base_model_name_or_path": "base"}')
        found = await FilesystemResolver(str(tmp_path), ["base"]).resolve_lora("base", name)
        assert found is not None
        registered = CatalogueState(lambda digest: digest).request(name, VersionRecord(1, "digest", "", 8, 1, 0.0))
        assert found.lora_int_id == registered.lora_int_id == adapter_number(name)


def test_numbers_are_positive_int32() -> None:
    numbers = [adapter_number(f"adapter-{number}") for number in range(10_000)]
    assert min(numbers) > 0 and max(numbers) < 2**31
