"""docs/api.md names every route of a replica, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from starlette.routing import Route

from lorafleet.api.routes.build_api import build_api
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.quality.routes import QualityApi
from lorafleet.cluster.serve.api_routes import routes_beside

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
NOTHING = cast(Any, None)  # routes are only listed here


def served() -> set[str]:
    more = routes_beside(NOTHING, StateApi(NOTHING, NOTHING, NOTHING), QualityApi(NOTHING), batch_routes())
    routes = [route for route in build_api(lambda: None, more).routes if isinstance(route, Route)]
    paths = [(method, re.sub(r"\{[^}]*\}", "*", route.path)) for route in routes for method in route.methods or ()]
    return {f"{method} {path}" for method, path in paths if method != "HEAD"}  # a GET has one by itself


def written() -> set[str]:
    """A path without a method has that of the one before it."""
    found: set[str] = set()
    for cell in re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.MULTILINE):
        method = ""
        for words in re.findall(r"`([^`]+)`", cell):
            method = words.rpartition(" ")[0] or method
            found.add(f"{method} {re.sub('[A-Z]+', '*', words.rpartition(' ')[2])}")
    return found


def test_every_route_is_in_the_table_and_no_other() -> None:
    assert written() == served()
