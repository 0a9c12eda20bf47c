from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet.protocol.errors import AdapterTooLarge, AdapterUnavailable, ConfigError
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.cache import AdapterCache
from lorafleet.resolvers.deadline import FetchDeadline
from stores import kept

Make = Callable[..., dict[str, bytes]]


def soon(seconds: float = 5.0) -> FetchDeadline:
    return FetchDeadline(seconds, "the test", threading.Event())


def put(cache: AdapterCache, files: dict[str, bytes], key: str | None = None) -> str:
    with cache.draft({name: len(data) for name, data in files.items()}, soon()) as draft:
        for name, data in files.items():
            (draft / name).write_bytes(data)
        return cache.publish(draft, key)


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_a_store_forgets_what_any_process_of_the_node_fetched_and_makes_no_cache_for_it(
    tmp_path: Path, make_files: Make
) -> None:
    store = kept(SourcesConfig(cache_dir=str(tmp_path / "cache")))
    store.forget("a" * 64)
    assert not (tmp_path / "cache").exists()
    another = AdapterCache(tmp_path / "cache", 10_000)
    digest = put(another, make_files())
    store.forget(digest)
    assert not another.holds(digest)


def test_what_is_published_is_found_by_its_digest_and_by_its_source(tmp_path: Path, make_files: Make) -> None:
    cache = AdapterCache(tmp_path, 10_000)
    digest = put(cache, make_files(), "k1")
    assert put(cache, make_files(), "k2") == digest
    assert cache.counts().num_adapters == 1
    assert cache.digest_of("k1") == cache.digest_of("k2") == digest
    assert cache.digest_of("k3") is None
    with cache.reading(digest) as folder:
        assert folder is not None
        assert (folder / "adapter_model.safetensors").read_bytes() == make_files()["adapter_model.safetensors"]
    assert names_in(tmp_path / "drafts") == []


def test_what_is_removed_is_gone(tmp_path: Path, make_files: Make) -> None:
    cache = AdapterCache(tmp_path, 10_000)
    digest = put(cache, make_files(), "k1")
    cache.remove(digest)
    cache.remove(digest)
    assert not cache.holds(digest)
    assert cache.digest_of("k1") is None
    assert names_in(tmp_path / "adapters") == names_in(tmp_path / "drafts") == []


def test_what_was_not_published_is_nowhere(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, 10_000)
    with cache.draft({"adapter_config.json": 10}, soon()) as draft:
        (draft / "adapter_config.json").write_bytes(b"{}")
    assert names_in(tmp_path / "drafts") == names_in(tmp_path / "adapters") == []


def test_the_least_recently_read_adapter_gives_way(tmp_path: Path, make_files: Make) -> None:
    cache = AdapterCache(tmp_path, 3500)
    digests = [put(cache, make_files(i), f"k{i}") for i in range(3)]
    for age, digest in enumerate(digests):
        os.utime(tmp_path / "adapters" / digest, (age, age))
    with cache.reading(digests[0]):
        pass
    digests.append(put(cache, make_files(3)))
    assert [cache.holds(digest) for digest in digests] == [True, False, True, True]
    assert cache.counts().num_bytes <= 3500
    assert cache.evictions == 1
    assert names_in(tmp_path / "sources") == ["k0", "k2"]


def test_what_is_being_read_is_never_evicted(tmp_path: Path, make_files: Make) -> None:
    cache, other = AdapterCache(tmp_path, 2500), AdapterCache(tmp_path, 2500)
    first, second = put(cache, make_files(0)), put(cache, make_files(1))
    with cache.reading(first), cache.reading(second):
        with pytest.raises(AdapterUnavailable, match="lora_cache_bytes"):
            put(other, make_files(2))
        assert cache.holds(first)
        assert cache.holds(second)
    put(other, make_files(2))
    assert not (cache.holds(first) and cache.holds(second))


def test_a_download_has_its_room_before_its_bytes_come(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, 2500)
    with cache.draft({"adapter_config.json": 10, "adapter_model.safetensors": 2000}, soon()):
        assert cache.counts().num_bytes == 2010
        with pytest.raises(AdapterUnavailable), cache.draft({"adapter_config.json": 600}, soon()):
            pass
    with pytest.raises(AdapterTooLarge, match="2501 bytes"), cache.draft({"adapter_config.json": 2501}, soon()):
        pass


def test_what_a_crash_left_is_cleared_away(tmp_path: Path, make_files: Make) -> None:
    cache = AdapterCache(tmp_path, 2500)
    left = tmp_path / "drafts" / "crashed"
    left.mkdir()
    (left / "adapter_model.safetensors").write_bytes(bytes(2400))
    assert cache.holds(put(cache, make_files()))
    assert not left.exists()


def test_bytes_that_rotted_are_discarded(tmp_path: Path, make_files: Make) -> None:
    cache = AdapterCache(tmp_path, 10_000)
    sound, rotten = put(cache, make_files(0)), put(cache, make_files(1))
    with (tmp_path / "adapters" / rotten / "adapter_model.safetensors").open("r+b") as file:
        file.write(b"XX")
    with cache.reading(rotten):
        assert not cache.discard_if_rotten(rotten)
        assert cache.holds(rotten), "it stays while it is read"
    assert cache.discard_if_rotten(sound) and cache.discard_if_rotten(rotten)
    assert [cache.holds(sound), cache.holds(rotten)] == [True, False]
    assert cache.discard_if_rotten(rotten), "it is gone already"


def test_one_fetches_a_source_while_others_wait(tmp_path: Path) -> None:
    cache, other = AdapterCache(tmp_path, 100), AdapterCache(tmp_path, 100)
    with cache.alone("s3://b/a", soon()):
        with other.alone("s3://b/b", soon()):
            pass
        with pytest.raises(AdapterUnavailable, match=r"0\.2 s"), other.alone("s3://b/a", soon(0.2)):
            pass
    with other.alone("s3://b/a", soon(0.2)):
        pass
    assert names_in(tmp_path / "locks") == []


@pytest.mark.parametrize("digest", ["", "..", "../sources", "x" * 64])
def test_what_is_no_digest_is_not_there(tmp_path: Path, digest: str) -> None:
    cache = AdapterCache(tmp_path, 100)
    with cache.reading(digest) as folder:
        assert folder is None


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        AdapterCache(tmp_path / "file" / "cache", 100)
