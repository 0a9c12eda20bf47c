"""Memory that processes share: what others see of it, and what nobody can do to it."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys

import msgspec
import pytest

from lorafleet.protocol.adapter_formats.sealed_memory import AdapterMemory, map_sealed

CHILD = """
import sys, msgspec
from lorafleet.protocol.adapter_formats.sealed_memory import map_sealed
from lorafleet.protocol.lora_request import SealedAdapter
content = map_sealed(msgspec.json.decode(sys.argv[1], type=SealedAdapter))
print(content and (bytes(content.weights), content.config))
"""


@pytest.fixture
def memory() -> AdapterMemory:
    made = AdapterMemory(b"{}", 6)
    made.write(b"abc", 0)
    made.write(memoryview(b"def"), 3)
    return made


def test_another_process_maps_the_content(memory: AdapterMemory) -> None:
    place = msgspec.json.encode(memory.seal()).decode()
    for is_open, expected in ((True, "(b'abcdef', b'{}')"), (False, "None")):
        if not is_open:
            memory.close()
        seen = subprocess.run([sys.executable, "-c", CHILD, place], capture_output=True, text=True, check=True)
        assert seen.stdout.strip() == expected


def test_sealed_memory_cannot_change(memory: AdapterMemory) -> None:
    place = memory.seal()
    content = map_sealed(place)
    assert content is not None
    descriptor = os.open(f"/proc/self/fd/{place.descriptor}", os.O_RDWR)
    try:
        for change in (
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, 1),
            lambda: os.ftruncate(descriptor, 100),
            lambda: mmap.mmap(descriptor, 0),  # shared and writable
            lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(descriptor)
    content.weights[:3] = b"own"  # Only in these pages of this mapping.
    again = map_sealed(place)
    assert again is not None and bytes(again.weights) == b"abcdef"
    memory.close()
    assert bytes(again.weights) == b"abcdef"


def test_other_memory_is_not_mapped(memory: AdapterMemory) -> None:
    place = memory.seal()
    open_ended = AdapterMemory(b"{}", 6)
    with open(os.devnull) as other:
        for wrong in (
            msgspec.structs.replace(place, descriptor=other.fileno()),
            msgspec.structs.replace(place, descriptor=10_000),
            msgspec.structs.replace(place, token="0" * 32),
            msgspec.structs.replace(place, weights_bytes=7),
        ):
            assert map_sealed(wrong) is None
    unsealed = msgspec.structs.replace(open_ended.seal(), pid=2**22 + 1)
    assert map_sealed(unsealed) is None
    for each in (memory, open_ended):
        each.close()


def test_memory_that_is_still_being_filled_is_not_mapped(
    memory: AdapterMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl
    monkeypatch.setattr(
        fcntl, "fcntl", lambda fd, order, *rest: 0 if order == fcntl.F_ADD_SEALS else real(fd, order, *rest)
    )
    assert map_sealed(memory.seal()) is None
    memory.close()
