"""Every method that PEFT knows is served or refused by name, and every field of a served one is sorted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from lorafleet.protocol.errors import AdapterUnsupported
from lorafleet.workers.adapters.kinds.table import KINDS
from lorafleet.workers.adapters.peft_fields import FIELDS, REFUSED_METHODS, check_fields


def test_every_method_of_peft_is_served_or_refused_with_its_reason() -> None:
    methods = {method.value for method in PeftType}
    assert methods <= FIELDS.keys() | REFUSED_METHODS.keys()
    assert not FIELDS.keys() & REFUSED_METHODS.keys()
    assert KINDS.keys() == FIELDS.keys()


@pytest.mark.parametrize("method", FIELDS)
def test_every_field_that_peft_knows_is_sorted(method: str) -> None:
    config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method)]
    fields = FIELDS[method]
    assert {
        field.name for field in dataclasses.fields(config)
    } <= fields.used | fields.harmless | fields.features.keys()


@pytest.mark.parametrize("method", FIELDS)
def test_a_field_that_no_peft_has_is_refused_for_every_method(method: str) -> None:
    with pytest.raises(AdapterUnsupported, match="'use_wonders'"):
        check_fields({"peft_type": method, "use_wonders": True})


@pytest.mark.parametrize("method", REFUSED_METHODS)
def test_a_method_without_a_serving_form_is_refused_by_name(method: str) -> None:
    with pytest.raises(AdapterUnsupported, match=f"'{method}'.*is not supported: .*Supported methods: LORA, ADALORA"):
        check_fields({"peft_type": method})


@pytest.mark.parametrize("method", FIELDS)
def test_a_context_of_the_adapters_own_is_allowed_for_every_method(method: str) -> None:
    assert check_fields({"peft_type": method, "context_length": 32768}) == method
