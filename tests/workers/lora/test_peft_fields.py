from __future__ import annotations

import dataclasses

from peft import LoraConfig

from lorafleet.workers.lora.peft_fields import FEATURES, HARMLESS, USED


def test_every_field_that_peft_knows_is_sorted_once() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields <= USED | HARMLESS | FEATURES.keys()
    assert not USED & HARMLESS
    assert not (USED | HARMLESS) & FEATURES.keys()
