"""Which test files pytest's processes run, and in which order."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared_processes import GROUP_MARK, RAY_GROUPS, FilesTogether

TESTS = Path(__file__).parent
STARTS_RAY = re.compile(r" (serving\(arguments|running_server\(arguments|serve_run\(file|running_nodes\(|ray\.init\()")


class Process:
    """Stands for one of pytest's processes, as xdist's controller knows it."""

    shutting_down = False

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class Run:
    """Runs four tests of each file, which all take equally long."""

    def __init__(self, folder: Path, groups: dict[str, str | None], num_processes: int) -> None:
        for file, group in groups.items():
            mark = f'pytestmark = pytest.mark.xdist_group("{group}")\n' if group else ""
            (folder / file).write_text(f"import pytest\n{mark}")
        option = SimpleNamespace(loadscopereorder=False)
        config = SimpleNamespace(rootpath=folder, option=option, getvalue=lambda _: [f"{num_processes}*popen"])
        self.tests = [f"{file}::test_{number}" for file in groups for number in range(4)]
        self.scheduler = FilesTogether(cast(Any, config))
        self.processes = [Process() for _ in range(num_processes)]
        for process in self.processes:
            self.scheduler.add_node(cast(Any, process))
            self.scheduler.add_node_collection(cast(Any, process), self.tests)
        self.scheduler.schedule()

    def to_the_end(self) -> list[list[str]]:
        """Returns the files that each process has run, in their order."""
        num_done = 0
        while self.scheduler.has_pending:
            for process in self.processes:
                if num_done < len(process.given):
                    self.scheduler.mark_test_complete(cast(Any, process), process.given[num_done])
            num_done += 1
        names = [[self.tests[index].partition("::")[0] for index in process.given] for process in self.processes]
        return [list(dict.fromkeys(files)) for files in names]


def test_one_process_starts_servers_from_the_beginning_while_others_compute(tmp_path: Path) -> None:
    groups = dict.fromkeys(("a", "b", "c", "d", "e", "f"), None) | {"t": "tenants", "s": "shared_server"}
    assert Run(tmp_path, groups, 2).to_the_end() == [["s", "t", "c", "e"], ["a", "b", "d", "f"]]


def test_a_second_process_starts_servers_when_nothing_else_is_left(tmp_path: Path) -> None:
    groups = {"a": None, "t": "tenants", "s": "shared_server", "o": "own_server", "n": "three_nodes"}
    ran = Run(tmp_path, groups, 2).to_the_end()
    assert ran[0][0] == "s"
    assert ran[1][0] == "a"
    assert len(ran[1]) > 1
    assert sorted(ran[0] + ran[1]) == sorted(groups)


def test_files_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    groups = {"a": "pair", "b": None, "c": "pair", "d": None}
    ran = Run(tmp_path, groups, 2).to_the_end()
    assert ran == [["a", "c"], ["b", "d"]]


@pytest.mark.parametrize(
    "file",
    [path for path in sorted(TESTS.rglob("test_*.py")) if STARTS_RAY.search(path.read_text())],
    ids=lambda path: path.name,
)
def test_a_file_that_starts_a_ray_is_in_a_group_for_it(file: Path) -> None:
    """The group is said in the test's file, also where a fixture of a conftest.py starts the server."""
    found = re.search(GROUP_MARK, file.read_text(), re.MULTILINE)
    assert found is not None, f'add pytestmark = pytest.mark.xdist_group("own_server") to {file}'
    assert found[1] in RAY_GROUPS
