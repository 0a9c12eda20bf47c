from __future__ import annotations

import hashlib

import pytest

from lorafleet.resolvers.checksum import MIB, Checker, Checksum, of_etag

DATA = b"adapter" * 1000


def matches(checksum: Checksum, data: bytes = DATA, step: int = 999) -> bool:
    check = Checker(checksum, len(data))
    for start in range(0, len(data), step):
        check.update(memoryview(data)[start : start + step])
    return check.matches()


@pytest.mark.parametrize(
    "checksum",
    [
        Checksum("sha256", hashlib.sha256(DATA).hexdigest()),
        Checksum("md5", hashlib.md5(DATA).hexdigest()),
        Checksum("git", hashlib.sha1(b"blob 7000\0" + DATA).hexdigest()),
    ],
    ids=lambda checksum: checksum.kind,
)
def test_other_bytes_do_not_match(checksum: Checksum) -> None:
    assert matches(checksum)
    assert not matches(checksum, DATA[:-1] + b"X")


@pytest.mark.parametrize("part_bytes", [1000, 3500, 7000, 9000])
def test_a_multipart_etag_matches_for_the_right_size_of_parts_only(part_bytes: int) -> None:
    parts = [hashlib.md5(DATA[i : i + part_bytes]).digest() for i in range(0, len(DATA), part_bytes)]
    etag = f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}"
    assert matches(Checksum("multipart", etag, (part_bytes,)))
    assert matches(Checksum("multipart", etag, (500, part_bytes)))
    assert not matches(Checksum("multipart", etag, (500,)))


def test_of_an_etag_only_what_it_says_is_believed() -> None:
    md5 = "0" * 32
    assert of_etag(md5, 10, None) == Checksum("md5", md5)
    assert of_etag(f"{md5}-3", 20 * MIB, None) == Checksum("multipart", f"{md5}-3", (8 * MIB,))
    assert of_etag(f"{md5}-3", 20 * MIB, 7 * MIB) == Checksum("multipart", f"{md5}-3", (7 * MIB,))
    assert of_etag(f"{md5}-3", 2 * MIB, None) is None
    assert of_etag("opaque", 10, None) is None
