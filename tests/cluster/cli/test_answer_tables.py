"""Answers about adapters as people see them on the command line."""

from __future__ import annotations

import msgspec
import pytest

from lorafleet.client.places import AdapterPlaces, VersionPlaces
from lorafleet.client.results import Adapter, AdapterPage, Alias, Move, Prefetched, Removed, Verified, Version
from lorafleet.cluster.cli.answer_tables import Answer, LocatedAdapter, LocatedPage, in_words

NOW_S = 1_000_000.0
SQL = Adapter(
    id="sql",
    object="adapter",
    tenant="acme",
    pinned_replicas=2,
    removing=False,
    versions=[
        Version(1, "a" * 64, "./sql-v1", 8, 84 << 20, NOW_S - 3 * 86_400),
        Version(2, "b" * 64, "./sql-v2", 16, 168 << 20, NOW_S - 90),
    ],
    aliases={
        "sql": Alias(
            {"1": 9.0, "2": 1.0}, [Move(NOW_S - 3 * 86_400, {"1": 1.0}), Move(NOW_S - 30, {"1": 9.0, "2": 1.0})]
        ),
        "sql-next": Alias({"2": 1.0}, [Move(NOW_S - 7200, {"2": 1.0})]),
    },
)


def test_an_adapter_is_shown_with_its_versions_and_aliases() -> None:
    assert in_words(SQL, NOW_S).splitlines() == [
        "sql, of tenant acme, pinned on 2 replicas",
        "",
        "VERSION  DIGEST        RANK  SIZE       AGE  SOURCE",
        "1        aaaaaaaaaaaa  8     84.0 MiB   3d   ./sql-v1",
        "2        bbbbbbbbbbbb  16    168.0 MiB  1m   ./sql-v2",
        "",
        "ALIAS     SERVED          SINCE  MOVES",
        "sql       v1 90%, v2 10%  30s    2",
        "sql-next  v2              2h     1",
    ]


def test_parts_that_are_left_out_are_named() -> None:
    version = msgspec.structs.replace(SQL.versions[1], left_out=("multi_modal_projector", "vision_tower"))
    adapter = msgspec.structs.replace(SQL, versions=[SQL.versions[0], version])
    line = "Version 2: multi_modal_projector, vision_tower left out, since only texts are served"
    assert line in in_words(adapter, NOW_S).splitlines()


def test_an_adapter_is_shown_with_the_replicas_where_it_is() -> None:
    places = AdapterPlaces([VersionPlaces(1, {}), VersionPlaces(2, {"r1": "cpu", "r0": "gpu"})])
    shown = in_words(LocatedAdapter(SQL, places), NOW_S)
    assert shown.removeprefix(in_words(SQL, NOW_S)).splitlines()[2:] == [
        "REPLICA  VERSION  RESIDENT IN",
        "r0       2        GPU",
        "r1       2        host memory",
    ]
    assert "No replica has it" in in_words(LocatedAdapter(SQL, AdapterPlaces([])), NOW_S)
    assert in_words(LocatedAdapter(SQL, None), NOW_S) == in_words(SQL, NOW_S)


def test_a_list_has_a_line_for_each_adapter_and_says_how_to_go_on() -> None:
    page = AdapterPage("list", [SQL], True, "sql")
    tiers = {"r0": "gpu", "r1": "gpu", "r2": "cpu"}
    places = {"sql": AdapterPlaces([VersionPlaces(1, {}), VersionPlaces(2, tiers)])}
    assert in_words(LocatedPage(page, places), NOW_S).splitlines() == [
        "NAME  SERVED          VERSIONS  RANK  SIZE       RESIDENT       PINNED  AGE",
        "sql   v1 90%, v2 10%  2         16    168.0 MiB  2 GPU, 1 host  2       1m",
        "",
        "More adapters follow: --after sql",
    ]
    for known, shown in (({}, "168.0 MiB  -  "), (None, "168.0 MiB  ?  ")):
        assert shown in in_words(LocatedPage(page, known), NOW_S)
    assert in_words(LocatedPage(AdapterPage("list", [], False, None), {})).splitlines() == [
        "NAME  SERVED  VERSIONS  RANK  SIZE  RESIDENT  PINNED  AGE"
    ]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Removed("adapter", "sql", True), "sql is removed."),
        (Prefetched("sql", ["r0", "r1"]), "sql is loaded by 2 replicas: r0, r1"),
        (Verified("sql", [1, 2]), "sql: the files of versions 1, 2 are intact."),
    ],
)
def test_what_was_done_is_said_in_a_sentence(answer: Answer, words: str) -> None:
    assert in_words(answer) == words
