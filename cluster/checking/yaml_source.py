"""Reads a YAML file with the line of each of its values, so that a mistake can be shown at its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lorafleet.protocol.errors import ConfigError

MAX_NODES = 20_000  # Aliases of aliases can stand for more values than a machine can hold.
MAX_DEPTH = 100  # An alias inside its own value has no end.

Place = tuple[str | int, ...]  # A path to a value, such as ("applications", 0, "args").


@dataclass(frozen=True, slots=True)
class Problem:
    file: str
    line: int  # Counted from 1.
    place: str  # Such as "applications[0].args"; empty for the whole file.
    message: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.place}: {self.message}"
            if self.place
            else (f"{self.file}:{self.line}: {self.message}")
        )


@dataclass(slots=True)
class YamlSource:
    file: str
    value: Any
    lines: dict[Place, int]  # The line of a value, or of its key if it has one.
    repeated: list[tuple[Place, int]]  # Keys that occur twice in one mapping; YAML would use the last.
    texts: dict[Place, int] = field(default_factory=dict)  # First line of each block of literal text.
    within: str = ""  # Place of an embedded file in the file that contains it.

    def problem(self, place: Place, message: str) -> Problem:
        return Problem(self.file, self.line(place), self._shown(place), message)

    def line(self, place: Place) -> int:
        """Returns the line of the value or, if it is missing, of its nearest parent."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def repeated_keys(self) -> list[Problem]:
        message = "the key is repeated; YAML would use only the last one."
        return [Problem(self.file, line, self.within + spelt(place), message) for place, line in self.repeated]

    def embedded(self, place: Place) -> YamlSource:
        """Parses the YAML file that a text value of this file contains. Raises ConfigError, as parse() does."""
        line = self.texts.get(place)
        inner = parse(self.file, _text_at(self.value, place), offset=0 if line is None else line - 1)
        inner.within = f"{self._shown(place)}: "
        if line is None:  # The lines of a quoted or folded text are not the file's.
            inner.lines = {(): self.line(place)}
        return inner

    def _shown(self, place: Place) -> str:
        return self.within + spelt(self._existing(place))

    def _existing(self, place: Place) -> Place:
        """Returns the part of the place that the file has, since pydantic's places also name the alternatives of a
        union. A missing key of a mapping stays."""
        value, found = self.value, []
        for part in place:
            found.append(part)
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return place if isinstance(value, dict) and len(found) == len(place) else tuple(found[:-1])
        return tuple(found)


def spelt(place: Place) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def read(path: Path) -> YamlSource:
    """Reads and parses a file. Raises ConfigError if it cannot be read, or is not one YAML document."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Check the path.") from None
    return parse(str(path), text)


def parse(file: str, text: str, offset: int = 0) -> YamlSource:
    """Parses a text that begins after `offset` lines of its file. Raises ConfigError if it is not one YAML document."""
    loader = yaml.SafeLoader(text)
    try:
        return _Reader(file, loader, offset).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1 + offset
        raise ConfigError(f"{file}:{line}: this is not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: this is not valid YAML: {error}.") from None
    finally:
        loader.dispose()


class _Reader:
    def __init__(self, file: str, loader: yaml.SafeLoader, offset: int) -> None:
        self._loader, self._offset, self._num_nodes = loader, offset, 0
        self._source = YamlSource(file, None, {}, [])

    def read(self) -> YamlSource:
        node = self._loader.get_single_node()
        if node is None:
            raise ConfigError(f"{self._source.file} is empty.")
        self._source.lines[()] = self._line(node)
        self._source.value = self._value(node, ())
        return self._source

    def _value(self, node: yaml.Node, place: Place) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or len(place) > MAX_DEPTH:
            raise ConfigError(
                f"{self._source.file} has more than {MAX_NODES} values, or more than {MAX_DEPTH} levels of nesting."
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*place, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.style == "|":
            self._source.texts[place] = self._line(node) + 1
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self._key(key_node)
            if key in seen:
                self._source.repeated.append(((*place, key), self._line(key_node)))
            seen.add(key)
        self._loader.flatten_mapping(node)  # Resolves "<<".
        result = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            self._source.lines[(*place, key)] = self._line(key_node)
            result[key] = self._value(value_node, (*place, key))
        return result

    def _key(self, node: yaml.Node) -> str:
        if node.tag == "tag:yaml.org,2002:merge":
            return "<<"
        key = self._loader.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise ConfigError(
                f"{self._source.file}:{self._line(node)}: a key must be text, but this is {_shown(node)}."
            )
        return key

    def _item(self, node: yaml.Node, place: Place) -> Any:
        self._source.lines[place] = self._line(node)
        return self._value(node, place)

    def _line(self, node: yaml.Node) -> int:
        return int(node.start_mark.line) + 1 + self._offset


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"{node.value}, which YAML reads as another type; quote it"
    return "a list or a mapping"


def _text_at(value: Any, place: Place) -> str:
    for part in place:
        value = value[part]
    assert isinstance(value, str)
    return value
