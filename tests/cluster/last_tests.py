"""Ends what a session's fixture holds after the last test that uses the fixture: an idle server
takes a seventh of a core from all tests that come after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_ENDS = pytest.StashKey[dict[str, ExitStack]]()  # by the fixture's name


@contextmanager
def until_last_test(request: pytest.FixtureRequest) -> Iterator[ExitStack]:
    """For a fixture of the session: what is entered into the stack ends after the last test that uses the fixture."""
    assert request.fixturename is not None
    with ExitStack() as stack:
        request.session.stash.setdefault(_ENDS, {})[request.fixturename] = stack
        yield stack


def end_unused(item: pytest.Item) -> None:
    """To be called after each test. An `xdist_group` runs in one process in the order in which it was collected, so the
    last one of all collected tests is the last one here too."""
    names = set(getattr(item, "fixturenames", ()))
    for name, stack in item.session.stash.get(_ENDS, {}).items():
        if name in names and item is _last_user(item.session, name):
            stack.close()


def _last_user(session: pytest.Session, fixture: str) -> pytest.Item:
    return next(item for item in reversed(session.items) if fixture in getattr(item, "fixturenames", ()))
