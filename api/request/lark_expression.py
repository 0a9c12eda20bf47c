"""Turns a Lark grammar without recursion into one regular expression.

The input of a custom tool is a JSON text within a call, and a regular expression is what can constrain such a text.
Terminals are matched as parts of the whole, without a lexer that would read each of them as far as it can.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lorafleet.api.request.whole_expression import fault_of_expression
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_SOURCE_BYTES
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil

_MAX_DEPTH = 100  # Most brackets within brackets, and rules within rules.
_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?!/)(?:\\.|[^/\\\n])+/[imsx]*)
    |(?P<statement>%[a-z]+[^\n]*)
    |(?P<name>(?:(?:!\??|\?!?)(?=[_a-z]))?[A-Za-z_][A-Za-z0-9_]*)(?P<priority>\.-?[0-9]+)?
    |(?P<number>[0-9]+)
    |(?P<sign>->|\.\.|[:|()\[\]?*+~])""",
    re.VERBOSE,
)
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"',
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_IMPORT = re.compile(
    r"%import\s+common\s*(?:\.\s*(\w+)\s*(?:->\s*(\w+)\s*)?|\(\s*(\w+(?:\s*,\s*\w+)*)\s*\)\s*)(?://.*)?"
)


class _Token(NamedTuple):
    kind: str
    text: str


def expression_of(grammar: str, param: str) -> str:
    """Returns the expression that the whole of a text must match. Raises InvalidRequest, naming `param`.

    The caller bounds the grammar's size. No part of the expression becomes larger than MAX_SOURCE_BYTES characters.
    """
    return _Grammar(grammar, param).expression("start", 0)


class _Grammar:
    def __init__(self, text: str, param: str) -> None:
        self._param = param
        self._found: dict[str, str] = {}  # Expressions of rules and terminals, by their names.
        self._open: set[str] = set()  # Rules whose expressions are being made.
        self._bodies = self._read_rules(self._read_tokens(text))

    def expression(self, name: str, depth: int) -> str:
        if name in self._found:
            return self._found[name]
        if name not in self._bodies:
            raise self._fault(f"has no rule {shown(name)}")
        if name in self._open or depth > _MAX_DEPTH:
            raise self._fault(
                f"uses {shown(name)} within itself, or nests rules too deeply. Only a grammar without recursion can "
                "constrain the input of a tool; unroll it"
            )
        self._open.add(name)
        body = _Body(self._bodies[name])
        made = self._alternatives(body, depth + 1)
        if body.next is not None:
            raise self._fault(f"has {shown(body.next.text)} where a rule should end")
        self._open.remove(name)
        self._found[name] = made
        return made

    def _read_tokens(self, text: str) -> list[_Token]:
        tokens = list[_Token]()
        for found in yielding_gil(self._matches(text)):
            kind = found.lastgroup if found["name"] is None else "name"
            assert kind is not None
            if kind == "statement":
                self._read_statement(found[0])
            elif kind != "blank":
                tokens.append(_Token(kind, found[kind]))
        return tokens

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        position = 0
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise self._fault(f"cannot be read at {shown(text[position : position + 20])}")
            position = found.end()
            yield found

    def _read_statement(self, statement: str) -> None:
        found = _IMPORT.fullmatch(statement.strip())
        if found is None:
            raise self._fault(f"has {statement.strip()[:60]!r}; only imports from `common` are read")
        names = [found[1]] if found[1] else re.split(r"\s*,\s*", found[3])
        for name in names:
            if name not in _COMMON:
                raise self._fault(f"imports {shown(name)}, which is none of {', '.join(_COMMON)}")
            self._found[found[2] or name] = _COMMON[name]

    def _read_rules(self, tokens: list[_Token]) -> dict[str, list[_Token]]:
        bodies: dict[str, list[_Token]] = {}
        body: list[_Token] | None = None
        for index, token in enumerate(tokens):
            if token.kind == "name" and tokens[index + 1 : index + 2] == [_Token("sign", ":")]:
                name = token.text.lstrip("?!")
                if name in bodies or name in self._found:
                    raise self._fault(f"has two rules {shown(name)}")
                body = bodies[name] = []
            elif body is None:
                raise self._fault(f"begins with {shown(token.text)} instead of a rule")
            elif body or token.text != ":":
                body.append(token)
        return bodies

    def _alternatives(self, body: _Body, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise self._fault("nests brackets too deeply")
        found = [self._sequence(body, depth)]
        num_chars = len(found[0])
        while body.takes("|"):
            found.append(self._sequence(body, depth))
            num_chars = self._bounded(num_chars + len(found[-1]) + 1)
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _sequence(self, body: _Body, depth: int) -> str:
        found, num_chars = list[str](), 0
        while body.next is not None and body.next.text not in ("|", ")", "]"):
            if body.takes("->"):
                self._skip_alias(body)
                continue
            found.append(self._repeated(body, self._item(body, depth)))
            num_chars = self._bounded(num_chars + len(found[-1]))
        return "".join(found)

    def _skip_alias(self, body: _Body) -> None:
        token = body.take()
        if token.kind != "name":
            raise self._fault(f"has {shown(token.text)} where the name of an alternative should be")

    def _item(self, body: _Body, depth: int) -> str:
        token = body.take()
        if token.text == "(":
            return self._closed(body, ")", depth)
        if token.text == "[":
            return f"(?:{self._closed(body, ']', depth)})?"
        if token.kind == "name" and token.text[0] not in "?!":
            return self.expression(token.text, depth + 1)
        if token.kind == "pattern":
            return self._pattern(token.text)
        if token.kind == "text" and body.takes(".."):
            return self._range(token, body.take())
        if token.kind == "text":
            flag = "(?i:" if token.text.endswith("i") else "(?:"
            return f"{flag}{_escaped(self._text(token))})"
        raise self._fault(f"has {shown(token.text)} where something should be repeated or begin")

    def _range(self, first: _Token, last: _Token) -> str:
        low, high = self._text(first), self._text(last)
        if len(low) != 1 or len(high) != 1 or low > high or first.text.endswith("i") or last.text.endswith("i"):
            raise self._fault(
                f"has the range {shown(first.text)}..{shown(last.text)}; it must go from one character up to another, "
                "without flags"
            )
        return f"[{_escaped(low)}-{_escaped(high)}]"

    def _closed(self, body: _Body, sign: str, depth: int) -> str:
        inner = self._alternatives(body, depth + 1)
        if not body.takes(sign):
            raise self._fault(f"lacks a closing {sign!r}")
        return inner

    def _repeated(self, body: _Body, item: str) -> str:
        for sign in ("?", "*", "+"):
            if body.takes(sign):
                return f"(?:{item}){sign}"
        if not body.takes("~"):
            return item
        least = most = self._number(body)
        if body.takes(".."):
            most = self._number(body)
        if least > most:
            raise self._fault(f"repeats something {least} to {most} times; the smaller number must come first")
        return f"(?:{item}){{{least},{most}}}"

    def _number(self, body: _Body) -> int:
        token = body.take()
        if token.kind != "number" or len(token.text) > 4:
            raise self._fault(f"has {shown(token.text)} where a number of at most four digits should be")
        return int(token.text)

    def _pattern(self, text: str) -> str:
        inner, _, flags = text[1:].rpartition("/")
        fault = fault_of_expression(inner, flags)
        if fault is not None:
            raise self._fault(f"has the pattern {shown(text)}, which has {fault}")
        return f"(?{flags}:{inner})".replace("\\/", "/")

    def _text(self, token: _Token) -> str:
        literal = token.text.removesuffix("i")
        if token.kind == "text" and "\\" not in literal:
            return literal[1:-1]  # Most texts have no escapes, and literal_eval() takes 20 us.
        try:
            value = ast.literal_eval(literal)
            str(value).encode()  # Half of a surrogate pair is no text.
        except (SyntaxError, ValueError):
            value = None
        if token.kind != "text" or not isinstance(value, str):
            raise self._fault(f"has {shown(token.text)}, which is no text")
        return value

    def _bounded(self, num_chars: int) -> int:
        if num_chars > MAX_SOURCE_BYTES:
            raise self._fault(
                f"has more than {MAX_SOURCE_BYTES} characters as one expression, in which each use of a rule counts; "
                "use long rules less often"
            )
        return num_chars

    def _fault(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"`{self._param}` {what}.", self._param)


class _Body:
    """The tokens of one rule while they are read."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> _Token | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def takes(self, sign: str) -> bool:
        """Takes this sign if it is next."""
        found = self.next == _Token("sign", sign)
        self._position += found
        return found

    def take(self) -> _Token:
        """Returns the next token, or one without text at the end."""
        token = self.next or _Token("end", "")
        self._position += 1
        return token


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$-&~#/" else char for char in text)
