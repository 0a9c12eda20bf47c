"""Lark grammars as regular expressions: the texts that they match, and the grammars that are refused."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from lorafleet.api.request.lark_expression import expression_of
from lorafleet.protocol.errors import InvalidRequest

MATH = """
start: expr
expr: term (SP ADD SP term)* -> add
    | term
?term: factor (SP MUL SP factor)*
factor: INT
SP: " "
ADD.2: "+"  // higher
MUL: "*"
%import common.INT
"""
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
EVERYTHING = r"""
start: "SELECT"i [DISTINCT] column ("," column)~0..2 /a\/b/i DIGITS~2 "x".."z" "\t\"."
column: /[a-z]+/ | ESCAPED_STRING
DISTINCT: " distinct"
DIGITS: DIGIT
%import common (DIGIT, ESCAPED_STRING)
"""


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (MATH, ["1", "1 + 2", "12 * 3 + 4"], ["", "1+2", "1 +", "a", "1 + 2 "]),
        (
            PATCH,
            ["*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** Delete File: b\n*** End Patch"],
            ["*** Begin Patch\n*** End Patch\n", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch"],
        ),
        ('start: "a"?B WORD\nB: "b"\n!?word: "w"\nWORD: word', ["abw", "bw"], ["a", "aw"]),
        (
            EVERYTHING,
            ['SELECT distinctab,"c"A/b12y\t".', 'selecta,b,ca/B99z\t".'],
            ["SELECT", 'selecta,b,c,da/b12x\t".', 'selectaa/b1x\t".', 'selectaa/b12w\t".'],
        ),
    ],
)
def test_an_expression_matches_what_the_grammar_does(grammar: str, matching: list[str], others: list[str]) -> None:
    expression = expression_of(grammar, "grammar")
    assert all(re.fullmatch(expression, text) for text in matching)
    assert not any(re.fullmatch(expression, text) for text in others)


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ('start: "(" start ")" | "x"', "'start' within itself"),
        ("start: a\na: b\nb: a", "within itself"),
        ("start: other", "no rule 'other'"),
        ('first: "x"', "no rule 'start'"),
        ('start: "x"\nstart: "y"', "two rules"),
        ('start: "x" )', "should end"),
        ('start: ("x"', "lacks a closing"),
        ('start: "x" ~ many', "number"),
        ('start: "x" ~ 5..2', "smaller number"),
        ('start: "x"?y\ny: "y"', "'\\?y'"),
        ('start: "ab".."z"', "one character"),
        ('start: "z".."a"', "one character"),
        ('start: "a"i.."z"', "one character"),
        ('start: "x" ->', "name of an alternative"),
        ('start: INT\nINT: "x"\n%import common.INT', "two rules 'INT'"),
        ('start: "x"\n%ignore " "', "only imports"),
        ("start: A\n%import common.NOTHING -> A", "NOTHING"),
        ("start: A\n%import python.NAME", "only imports"),
        ('"x"', "instead of a rule"),
        ("start: 'x'", "cannot be read"),
        (r'start: "\x"', "no text"),
        (r'start: "\ud800"', "no text"),
        ('start: "x" /a)|(b/ "y"', "a closing '\\)'"),
        ('start: /a #b/x ")"', "a comment"),
        ('start: /[/ "]"', "a '\\['"),
        ("start: " + "(" * 200 + '"x"' + ")" * 200, "too deeply"),
        ("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30: "x"', "as one expression"),
    ],
)
def test_a_grammar_that_is_no_expression_is_refused_by_what_is_in_the_way(grammar: str, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault) as refused:
        expression_of(grammar, "tools.0")
    assert refused.value.param == "tools.0"


def test_a_grammar_that_is_refused_for_its_size_takes_little_memory() -> None:
    """Written out, the alternatives have 150 million characters."""
    grammar = "start: " + "|".join(["LONG"] * 5000) + f'\nLONG: "{"x" * 30_000}"'
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="as one expression"):
            expression_of(grammar, "tools.0")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_name_that_is_long_is_shortened_in_the_error() -> None:
    with pytest.raises(InvalidRequest) as refused:
        expression_of("start: " + "a" * 50_000, "tools.0")
    assert len(refused.value.message) < 1000
