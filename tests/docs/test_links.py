"""The documentation leads somewhere: links and their anchors, the commands of `lorafleet`, its options."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from lorafleet.api.answer.error_responses import TABLE
from lorafleet.cluster.cli.cli import app
from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.proxy import haproxy_answers
from lorafleet.cluster.tenancy.key_file import TenantLimits
from lorafleet.protocol.sources import HTTPConfig, HubConfig, S3Config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "demo/README.md", ROOT / "tests/README.md"])
BY_NAME = {str(page.relative_to(ROOT)): page for page in PAGES}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
COMMAND: Any = typer.main.get_command(app)


def text_of(page: Path) -> str:
    """Without what is fenced."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(slug)
    return found


@pytest.mark.parametrize("name", BY_NAME)
def test_links_lead_to_files_and_headings_that_are_there(name: str) -> None:
    page = BY_NAME[name]
    for link in LINK.findall(re.sub(CODE, "", text_of(page))):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name}: {link}; there are {sorted(anchors(target))}"


def test_every_page_of_docs_is_in_its_index() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall((ROOT / "docs/README.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command line of lorafleet, fenced or inline."""
    text = page.read_text()
    fenced = "\n".join(FENCE.findall(text)).replace("\\\n", " ")
    lines = [*fenced.splitlines(), *(" ".join(span.split()) for span in CODE.findall(text_of(page)))]
    for line in lines:
        for part in re.split(r"&&|\||;|\$\(", line):
            words = part.strip().removeprefix("$ ").removeprefix("exec ")
            if re.match(r"lorafleet [a-z]", words):
                yield shlex.split(words.partition(" #")[0].replace("'", "").replace('"', ""))


def options_of(command: Any) -> set[str]:
    named = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return named | {"--help"}


@pytest.mark.parametrize("name", BY_NAME)
def test_commands_and_their_options_are_there(name: str) -> None:
    for words in commands(BY_NAME[name]):
        command, rest = COMMAND, words[1:]
        while isinstance(command, TyperGroup) and rest and re.fullmatch(r"[a-z-]+", rest[0]):
            assert rest[0] in command.commands, f"{name}: {' '.join(words)}"
            command, rest = command.commands[rest[0]], rest[1:]
        given = {found[0] for word in rest if (found := OPTION.match(word))}
        assert given <= options_of(command), f"{name}: {' '.join(words)}: no {given - options_of(command)}"


def all_options(command: Any) -> set[str]:
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    return options_of(command).union(*map(all_options, inner))


def test_files_that_the_text_names_are_there() -> None:
    path = re.compile(
        r"\b(?:api|client|cluster|kernels|offline|protocol|resolvers|sandbox|tools|workers"
        r"|configs|examples|benchmarks|demo|tests)/[\w/.-]+\.\w+"
    )
    for name, page in BY_NAME.items():
        for named in path.findall(re.sub(r"https?://\S+", "", page.read_text())):
            assert (ROOT / named).exists() or (page.parent / named).exists(), f"{name}: {named}"


def test_settings_and_codes_in_the_guides_are_the_servers() -> None:
    known = {*AppArgs.model_fields, *(entry.code for entry in TABLE.values())}
    for source in (S3Config, HTTPConfig, HubConfig):
        known |= {field.name for field in dataclasses.fields(source)}
    known |= set(TenantLimits.model_fields)
    answers = (*haproxy_answers.ERRORS.values(), haproxy_answers.HEADERS_TOO_LARGE, haproxy_answers.replica_starts(1))
    known |= {answer.code for answer in answers}
    for name in ("docs/alerts.md", "docs/failures.md", "docs/tuning.md"):
        for word in re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)(?:: [^`]*)?`", text_of(BY_NAME[name])):
            assert word in known or word.startswith("lorafleet_"), f"{name}: `{word}`"


OTHERS = {  # of other programs, which the text around them names
    *("--bearer-token-file", "--no-restart", "--enable-auto-tool-choice"),
    *("--num-gpus", "--num-cpus", "--address", "--head"),
    *("--lora-target-modules", "--enable-expert-parallel", "--generation-config", "--enable-deterministic-inference"),
    *("--data-parallel-size", "--dp-size", "--speculative-algorithm"),
}


def test_an_option_that_the_text_names_is_one_of_lorafleets_or_of_a_benchmarks() -> None:
    known = all_options(COMMAND) | OTHERS
    for script in (ROOT / "benchmarks").glob("*.py"):
        known |= set(OPTION.findall(script.read_text()))
    for name, page in BY_NAME.items():
        for span in CODE.findall(text_of(page)):
            if span.startswith("--"):
                assert set(OPTION.findall(span)) <= known, f"{name}: `{span}`"
