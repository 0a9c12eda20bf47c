"""Work leaves the event loop by one module alone, which gives the server's duties and each kind of work its threads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# client/ runs in the process of whoever administers a server, and tools/ in a command of its own.
FOLDERS = ("api", "cluster", "offline", "protocol", "resolvers", "sandbox", "workers")
# asyncio's default threads, and those of anyio, which Starlette uses.
SHARED_THREADS = {
    "to_thread",
    "run_sync",
    "run_in_threadpool",
    "iterate_in_threadpool",
    "set_default_executor",
    "FileResponse",
    "StaticFiles",
    "BackgroundTask",
    "BackgroundTasks",
}


def shared_threads_in(tree: ast.AST) -> list[int]:
    """Returns the lines that use threads that everybody shares."""
    found: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names} | {getattr(node, "module", None) or ""}
            used = bool(names & (SHARED_THREADS | {"anyio"}))
        elif isinstance(node, ast.Attribute):
            used = node.attr in SHARED_THREADS
        elif isinstance(node, ast.Call) and "run_in_executor" in ast.unparse(node.func):
            used = not node.args or (isinstance(node.args[0], ast.Constant) and node.args[0].value is None)
        else:
            used = False
        if used:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_runs_in_threads_that_everybody_shares(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / folder).rglob("*.py")
        for line in shared_threads_in(ast.parse(path.read_text()))
    }
    assert not found, "use in_turn() or on_duty() of api/access/work_threads.py"


@pytest.mark.parametrize(
    "code",
    [
        "await asyncio.to_thread(work)",
        "from asyncio import to_thread",
        "loop.run_in_executor(None, work)",
        "asyncio.get_running_loop().run_in_executor(executor=None, func=work)",
        "from starlette.concurrency import run_in_threadpool",
        "import anyio.to_thread",
        "from starlette.responses import FileResponse",
    ],
)
def test_each_way_to_such_threads_is_found(code: str) -> None:
    tree = ast.parse(f"async def f():\n    {code}")
    assert shared_threads_in(tree)


def test_threads_of_a_module_s_own_are_allowed() -> None:
    assert not shared_threads_in(ast.parse("loop.run_in_executor(self._pool, work)"))
