"""Regular expressions that may, or may not, become parts of others."""

from __future__ import annotations

import re

import pytest

from lorafleet.api.request.whole_expression import fault_of_expression


@pytest.mark.parametrize(
    ("expression", "flags"),
    [
        ("", ""),
        ("a|b", ""),
        (r"(a(?:b)[)(\]#]){2}\)\(\[", "i"),
        ("[]a)]|[^]a(]", ""),
        ("[[:alpha:](]", ""),
        ("a#b", "ims"),
        (r"a \# [#]", "x"),
        ("(?i)a(?P<x>b)#", ""),
    ],
)
def test_an_expression_that_is_whole_has_no_fault(expression: str, flags: str) -> None:
    assert fault_of_expression(expression, flags) is None


@pytest.mark.parametrize(
    ("expression", "flags", "fault"),
    [
        ("a)|(b", "", "a closing ')'"),
        ("(a", "", "an opening '('"),
        ("[a", "", "a '['"),
        ("[]", "", "a '['"),
        ("[[a]", "", "a '['"),
        ("a\\", "", "a backslash"),
        ("a #b", "x", "a comment"),
        ("(?ix)a #b", "", "a comment"),
        ("(?x:a #b)", "", "a comment"),
    ],
)
def test_what_ends_or_begins_outside_is_named(expression: str, flags: str, fault: str) -> None:
    assert re.match(re.escape(fault), fault_of_expression(expression, flags) or "")


def test_a_long_expression_takes_linear_time() -> None:
    assert fault_of_expression("(" * 30_000 + ")" * 30_000) is None
    assert fault_of_expression("(?" * 30_000) is not None
