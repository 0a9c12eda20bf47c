"""The declarations of the directory's calls."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from lorafleet.cluster.directory import directory, directory_calls
from lorafleet.cluster.directory.directory_calls import AnySocketCall, DirectoryCall, SocketCall

CALLS = [call for call in (*DirectoryCall.__subclasses__(), *SocketCall.__subclasses__()) if call is not SocketCall]


def test_every_call_of_the_socket_may_come_over_it() -> None:
    assert set(get_args(AnySocketCall)) == set(SocketCall.__subclasses__())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_is_answered_with_what_it_declares(call: type[DirectoryCall[object]]) -> None:
    (declared,) = get_args(vars(call)["__orig_bases__"][0])
    hints = get_type_hints(call.answered_by, vars(directory_calls) | vars(directory))
    assert hints["return"] == declared
