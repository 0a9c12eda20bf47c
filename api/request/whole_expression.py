"""Checks that a regular expression is one by itself, before it becomes a part of another.

An expression that is not, such as `a)|(b`, can be valid within the other one, and then both mean something else.
"""

from __future__ import annotations

import re

_PART = re.compile(r"\\.|\[\^?\]?|[\]()#]|[^\\\[\]()#]+|.", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[A-Za-z]*x")


def fault_of_expression(expression: str, flags: str = "") -> str | None:
    """Returns what an expression has that ends or begins outside of it, or None if there is nothing.

    Args:
        flags: Letters of the flags that are set for the whole expression.
    """
    is_verbose = "x" in flags or _VERBOSE.search(expression) is not None
    groups = classes = 0
    for found in _PART.finditer(expression):
        part = found[0]
        if part == "\\":
            return "a backslash at the end"
        if part[0] == "[":
            classes += 1
        elif part == "]" and classes:
            classes -= 1
        elif part == "(" and not classes:
            groups += 1
        elif part == ")" and not classes:
            groups -= 1
        elif part == "#" and not classes and is_verbose:
            return "a comment"
        if groups < 0:
            return "a closing ')' without an opening one"
    if classes:
        return "a '[' without a closing ']'"
    return "an opening '(' without a closing one" if groups else None
