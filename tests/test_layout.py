"""The layout: what packaging and transformers depend on, and what lets a reader find things."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.moved import NEW_PATHS
from tests.cluster.checking import ray_schemas  # noqa: F401  # before its module can warn

ROOT = Path(__file__).parents[1]
# Each folder of code, and those whose modules it may import besides its own.
ARROWS = {
    "protocol": set(),
    "sandbox": {"protocol"},
    "resolvers": {"protocol"},
    "kernels": set(),
    "workers": {"kernels", "protocol", "resolvers", "sandbox"},
    "api": {"protocol", "resolvers", "sandbox"},
    "client": {"protocol"},
    "offline": {"api", "protocol", "resolvers", "workers"},
    "tools": {"api", "client", "offline", "protocol", "resolvers", "workers"},
    "cluster": {"api", "client", "kernels", "offline", "protocol", "resolvers", "sandbox", "tools", "workers"},
}
MAX_FILES = 30
MAX_CLASS_LINES = 250
MAX_ATTRIBUTES = 15
# How many of our modules importing one brings along, itself not counted, and whether it may need torch.
IMPORT_BUDGETS = {
    "lorafleet": (1, False),
    "lorafleet.protocol.engine_config": (10, False),
    "lorafleet.protocol.lora_config": (10, False),
    "lorafleet.protocol.sources": (10, False),
    "lorafleet.protocol.adapter_formats.torch_archive": (10, False),
    "lorafleet.cluster.config": (19, False),
    "lorafleet.workers.schedule.scheduler": (26, True),
    "lorafleet.workers.slots.slot_policy": (5, False),
}


def code_files() -> Iterator[Path]:
    for folder in ARROWS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("folder", ARROWS)
def test_no_code_folder_is_a_top_level_package(folder: str):
    # A top-level package named kernels breaks transformers, which probes for its own package of that name.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", ARROWS)
def test_code_is_a_subpackage_through_a_relative_link(folder: str):
    link = ROOT / "src" / "lorafleet" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{folder}"


def test_ruff_looks_at_every_code_folder_once_and_lets_nobody_import_it_as_a_top_level_package():
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert set(ruff["extend-exclude"]) == {f"src/lorafleet/{folder}" for folder in ARROWS}
    assert set(ruff["lint"]["flake8-tidy-imports"]["banned-api"]) == set(ARROWS)


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_point_down(folder: str):
    up = [
        (str(path.relative_to(ROOT)), module)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in imported(path)
        if module.startswith("lorafleet.") and module.split(".")[1] not in {folder, *ARROWS[folder]}
    ]
    assert up == []


def test_only_the_cluster_knows_ray():
    knowing = {path.relative_to(ROOT).parts[0] for path in code_files() if "ray" in map(top_level, imported(path))}
    assert knowing == {"cluster"}


def top_level(module: str) -> str:
    return module.partition(".")[0]


def test_a_folder_can_be_read_at_a_glance():
    sizes = Counter(path.parent.relative_to(ROOT) for path in code_files())
    assert {str(folder): size for folder, size in sizes.items() if size > MAX_FILES} == {}


def test_classes_are_small():
    sizes = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in code_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > MAX_CLASS_LINES} == {}


def test_no_two_public_classes_have_the_same_name() -> None:
    names = Counter(
        node.name
        for path in code_files()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, number in names.items() if number > 1] == []


def test_classes_have_few_attributes():
    numbers = {
        f"{path.relative_to(ROOT)}: {node.name}": len(declared(node) | assigned(node))
        for path in code_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and not is_record(node)
    }
    assert {name: number for name, number in numbers.items() if number > MAX_ATTRIBUTES} == {}


def declared(node: ast.ClassDef) -> set[str]:
    """Returns the fields that the class's body declares."""
    return {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not ast.unparse(statement.annotation).startswith("ClassVar")
    }


def assigned(node: ast.ClassDef) -> set[str]:
    """Returns the attributes of `self` that the class's methods assign to."""
    return {
        target.attr
        for method in methods(node)
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef))


def is_record(node: ast.ClassDef) -> bool:
    """Returns whether the class only describes data, so that the number of its fields is the data's. A record declares
    all its fields, and either is frozen or has no methods but properties, validators, constructors and __post_init__.
    """
    calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
    options = [*node.keywords, *(option for call in calls for option in call.keywords)]
    is_frozen = any(option.arg == "frozen" and ast.unparse(option.value) == "True" for option in options)
    has_methods = any(not method.decorator_list and method.name != "__post_init__" for method in methods(node))
    return assigned(node) <= declared(node) and (is_frozen or not has_methods)


def test_no_two_modules_have_one_name():
    names = Counter(path.name for path in code_files() if path.name != "__init__.py")
    assert [name for name, number in names.items() if number > 1] == []


@pytest.mark.parametrize("module", IMPORT_BUDGETS)
def test_an_import_brings_few_modules_along(module: str):
    num_modules, with_torch = IMPORT_BUDGETS[module]
    code = (
        f"import sys, {module}; print(*(name for name, one in sys.modules.items() if getattr(one, '__file__', None)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", check=True)
    loaded = set(done.stdout.split()) - {module}
    assert "ray" not in loaded
    assert with_torch or "torch" not in loaded
    ours = sorted(one for one in loaded if top_level(one) == "lorafleet")
    assert len(ours) <= num_modules, ours


def test_public_names_are_importable_from_the_top():
    import lorafleet

    for name in lorafleet.__all__:
        assert getattr(lorafleet, name).__name__ == name
        assert name in dir(lorafleet)
    with pytest.raises(AttributeError, match="'NoSuchName'"):
        _ = lorafleet.NoSuchName


@pytest.mark.parametrize("old_path", NEW_PATHS)
def test_an_old_path_still_works_and_warns(old_path: str):
    sys.modules.pop(old_path, None)
    with pytest.warns(DeprecationWarning, match=f"^{old_path} is {NEW_PATHS[old_path]} now") as warned:
        module = importlib.import_module(old_path)
    assert module is importlib.import_module(NEW_PATHS[old_path])
    assert module.__name__ == NEW_PATHS[old_path]
    assert len(warned) == 1
    sys.modules.pop(old_path)


def test_the_old_path_of_the_handle_on_the_directory_still_works_and_warns():
    with pytest.warns(
        DeprecationWarning, match=r"get_directory is lorafleet\.cluster\.admin\.admin_handle\.get_directory"
    ):
        from lorafleet.cluster.admin import get_directory
    from lorafleet.cluster.admin import admin_handle

    assert get_directory is admin_handle.get_directory


def test_transformers_does_not_take_our_kernels_for_its_own():
    code = (
        "import lorafleet.kernels.lora.apply_lora; from transformers.utils import is_kernels_available as f; print(f())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", check=True)
    assert done.stdout.strip() == "False"
