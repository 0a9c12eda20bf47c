"""Lines of values, and what is no YAML for us."""

from __future__ import annotations

import pytest

from lorafleet.cluster.checking.yaml_source import parse
from lorafleet.protocol.errors import ConfigError

TEXT = """\
a: 1
list:
  - x: 1
    y: [2,
        3]
base: &base {k: 1}
copy:
  <<: *base
  l: 2
"""


def test_every_value_has_the_line_of_its_key():
    source = parse("f.yaml", TEXT)
    assert source.value["list"] == [{"x": 1, "y": [2, 3]}]
    places = [("a",), ("list", 0, "y"), ("list", 0, "y", 1), ("copy", "k"), ("copy", "l")]
    assert [source.line(place) for place in places] == [1, 4, 5, 6, 9]


def test_what_is_not_there_has_the_line_of_what_should_hold_it():
    source = parse("f.yaml", TEXT)
    assert source.line(("list", 0, "z", "deeper")) == 3


def test_a_problem_names_file_line_and_place():
    source = parse("f.yaml", TEXT)
    assert str(source.problem(("list", 0, "y", 1), "is odd")) == "f.yaml:5: list[0].y[1]: is odd"
    assert str(source.problem(("list", 0, "x", "int"), "is odd")) == "f.yaml:3: list[0].x: is odd"


def test_a_key_that_stands_twice_is_told():
    (problem,) = parse("f.yaml", "a: 1\nb: {c: 1, c: 2}\n").repeated_keys()
    assert (problem.line, problem.place) == (2, "b.c")


@pytest.mark.parametrize("style", ["|", "|-", ">", "'a: 1'"])
def test_lines_of_an_embedded_file_are_those_of_the_file_around_it(style: str):
    text = f"spec:\n  inner: {style}\n" + ("" if style.startswith("'") else "    a: 1\n    b: 2\n")
    source = parse("f.yaml", text)
    inner = source.embedded(("spec", "inner")) if style != ">" else None
    if inner is None:  # folded into one line, which is no YAML
        with pytest.raises(ConfigError, match="not valid YAML"):
            source.embedded(("spec", "inner"))
    elif style.startswith("|"):
        assert str(inner.problem(("b",), "is odd")) == "f.yaml:4: spec.inner: b: is odd"
    else:
        assert inner.line(("a",)) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [1", r"f\.yaml:\d+: this is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML: but found another document"),
        ("", "is empty"),
        ("? [1, 2]\n: x\n", "f.yaml:1: a key must be text, but this is a list or a mapping"),
        ("a: 1\non: 2\n", "f.yaml:2: a key must be text, but this is on, which YAML reads as another type; quote it"),
        ("a: &a [*a]\n", "more than 100 levels of nesting"),
        (
            "a: &a [x, x]\n"
            + "".join(f"b{n}: &b{n} [*{p}, *{p}]\n" for n, p in enumerate(["a", *(f"b{n}" for n in range(30))])),
            "more than",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(text: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        parse("f.yaml", text)
