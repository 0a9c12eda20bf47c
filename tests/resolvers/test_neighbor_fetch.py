"""Fetches from another node's cache, over real connections to a neighbor that is away, slow, busy, empty or lying."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from file_server import FileServer
from ipv6 import needs_ipv6
from lorafleet.cluster.directory.directory_socket import listen
from lorafleet.protocol.errors import AdapterUnavailable
from lorafleet.protocol.framing import receive, send
from lorafleet.protocol.sources import HTTPConfig, SourcesConfig
from lorafleet.resolvers.neighbor_fetch import NeighborFetcher, NeighborLimits
from lorafleet.resolvers.neighbor_server import NeighborServer
from lorafleet.resolvers.neighbor_wire import NeighborAddress, NeighborOffer, NeighborRequest, encoder, offer_decoder
from lorafleet.resolvers.store import AdapterStore
from tcp_proxy import TCPProxy

Make = Callable[..., dict[str, bytes]]
Read = Callable[[Path], dict[str, bytes]]
WEIGHTS = "adapter_model.safetensors"
LARGE = 20_000_000
SECRET = "the secret"
WAIT_S = 60.0


class Node:
    """A node with a cache of its own, which answers neighbors."""

    def __init__(self, folder: Path, source: FileServer, neighbors: Sequence[NeighborAddress] = (), **limits: int):
        self.folder = folder / "adapters"
        self.found = list(neighbors)
        self.asked: list[str] = []
        http = HTTPConfig(allow=(source.url + "/",), **limits)
        self.store = AdapterStore(SourcesConfig(http=http, cache_dir=str(folder)), self._find)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = NeighborAddress("127.0.0.1", listener.getsockname()[1], SECRET)
        self.server = NeighborServer(listener, SECRET, self.store.cached)

    def _find(self, digest: str) -> Sequence[NeighborAddress]:
        self.asked.append(digest)
        return self.found

    def limit(self, limits: NeighborLimits) -> None:
        self.store._neighbors = NeighborFetcher(self._find, self.store.metrics, limits)

    def outcomes(self) -> dict[tuple[str, str], float]:
        return {
            (sample.labels["source"], sample.labels["outcome"]): sample.value
            for metric in self.store.metrics.collect()
            for sample in metric.samples
            if sample.name == "lorafleet_adapter_fetches_total" and sample.value
        }

    def sends(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for metric in self.server.collect()
            for sample in metric.samples
            if sample.name == "lorafleet_neighbor_sends_total" and sample.value
        }

    def close(self) -> None:
        self.store.stop()
        self.server.close()


@pytest.fixture
def source() -> Iterator[FileServer]:
    made = FileServer()
    yield made
    made.close()


@pytest.fixture
def node(source: FileServer, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(*neighbors: NeighborAddress, **limits: int) -> Node:
        nodes.append(Node(tmp_path / f"node{len(nodes)}", source, neighbors, **limits))
        return nodes[-1]

    yield make
    for made in nodes:
        made.close()


@contextmanager
def answering(*answers: bytes, keeps_open: bool = False) -> Iterator[NeighborAddress]:
    """A neighbor that answers every request with these bytes."""
    listener, held = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            receive(connection)
            for answer in answers:
                connection.sendall(answer)
            if keeps_open:
                held.append(connection)
            else:
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield NeighborAddress("127.0.0.1", listener.getsockname()[1], SECRET)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in held:
        connection.close()


def offered(files: dict[str, bytes]) -> bytes:
    message = encoder.encode(NeighborOffer({name: len(data) for name, data in files.items()}))
    return len(message).to_bytes(4, "little") + message


def test_an_adapter_comes_from_the_neighbor_though_its_source_is_gone(
    source: FileServer, node: Callable[..., Node], make_files: Make, read_files: Read
) -> None:
    files = make_files(1, LARGE) | {"tokenizer_config.json": b"{}"}
    files |= {f"draft/{name}": content for name, content in make_files(7).items()}
    uri, first = source.put("/a", files), node()
    digest = first.store.fetch(uri)
    num_asked = len(source.requests)
    source.files.clear()
    second = node(first.address)
    with second.store.open(uri, digest) as folder:
        assert read_files(folder) == files
    assert second.store.metrics.fetched_since(digest, 0.0)
    assert len(source.requests) == num_asked, "the source was not asked"
    assert second.outcomes() == {("neighbor", "fetched"): 1}
    assert second.store.metrics.totals.fetched == 1
    assert second.store.metrics.totals.num_bytes == sum(map(len, files.values()))
    assert dict(second.store.metrics.totals.from_neighbors) == {"fetched": 1}
    assert first.sends() == {"sent": 1}
    third = node(second.address)
    assert third.store.fetch(uri, digest) == digest, "what came from a neighbor is passed on"


def test_without_a_digest_the_source_is_asked(source: FileServer, node: Callable[..., Node], make_files: Make) -> None:
    uri, first = source.put("/a", make_files(1)), node()
    first.store.fetch(uri)
    second = node(first.address)
    second.store.fetch(uri)
    assert second.asked == [] and second.outcomes() == {("http", "fetched"): 1}


def test_bytes_with_another_digest_are_refused_and_the_source_is_used(
    source: FileServer, node: Callable[..., Node], make_files: Make, read_files: Read
) -> None:
    files, other = make_files(1), make_files(2)
    uri, first = source.put("/a", files), node()
    digest = first.store.fetch(uri)
    (first.folder / digest / WEIGHTS).write_bytes(other[WEIGHTS])
    second = node(first.address)
    with second.store.open(uri, digest) as folder:
        assert read_files(folder) == files
    assert second.outcomes() == {("neighbor", "damaged"): 1, ("http", "fetched"): 1}
    assert [entry.name for entry in second.folder.iterdir()] == [digest], "nothing of the lie is left"
    assert not any((second.folder.parent / "drafts").iterdir())


def test_a_slow_neighbor_is_left_for_the_source(
    source: FileServer, node: Callable[..., Node], make_files: Make, read_files: Read
) -> None:
    files = make_files(1, LARGE)
    uri, first = source.put("/a", files), node()
    digest = first.store.fetch(uri)
    proxy = TCPProxy(first.address.port)
    proxy.bytes_per_s = 1e5
    try:
        second = node(NeighborAddress("127.0.0.1", proxy.port, SECRET))
        second.limit(NeighborLimits(offer_s=0.5, least_bytes_s=50e6))
        with second.store.open(uri, digest) as folder:
            assert read_files(folder) == files
        assert proxy.num_bytes < LARGE
        assert second.outcomes() == {("neighbor", "slow"): 1, ("http", "fetched"): 1}
    finally:
        proxy.close()


def test_a_neighbor_that_never_answers_is_left_for_the_source(
    source: FileServer, node: Callable[..., Node], make_files: Make
) -> None:
    uri = source.put("/a", make_files(1))
    digest = node().store.fetch(uri)
    with answering(keeps_open=True) as silent:
        second = node(silent)
        second.limit(NeighborLimits(offer_s=0.3))
        assert second.store.fetch(uri, digest) == digest
        assert second.outcomes() == {("neighbor", "slow"): 1, ("http", "fetched"): 1}


def test_neighbors_leave_time_for_the_source(source: FileServer, node: Callable[..., Node], make_files: Make) -> None:
    uri = source.put("/a", make_files(1))
    digest = node().store.fetch(uri)
    with answering(keeps_open=True) as silent:
        second = node(silent, silent, timeout_s=int(WAIT_S))
        second.limit(NeighborLimits(offer_s=10 * WAIT_S, share=0.01))
        assert second.store.fetch(uri, digest) == digest
        assert second.outcomes() == {("neighbor", "slow"): 2, ("http", "fetched"): 1}


FILES = {"adapter_config.json": b"{}", WEIGHTS: b"x" * 1000}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"", "broken"),
        (offered(FILES) + b"short", "broken"),
        (b"\xff\xff\xff\xff", "damaged"),
        (b"\x03\x00\x00\x00abc", "damaged"),
        (offered(FILES | {"../../x": b""}), "damaged"),
        (offered({WEIGHTS: b"x"}), "damaged"),
        (offered({"adapter_config.json": bytes(2 << 20), WEIGHTS: b"x"}), "too_large"),
        (offered({"adapter_config.json": b"{}", WEIGHTS: bytes(3000)}), "too_large"),
    ],
    ids=["nothing", "half", "endless frame", "no message", "other file", "no config", "config", "size"],
)
def test_a_hostile_answer_leads_to_the_source(
    source: FileServer, node: Callable[..., Node], make_files: Make, answer: bytes, outcome: str
) -> None:
    uri = source.put("/a", make_files(1))
    digest = node().store.fetch(uri)
    with answering(answer) as hostile:
        second = node(hostile, max_bytes=2000)
        assert second.store.fetch(uri, digest) == digest
    assert second.outcomes() == {("neighbor", outcome): 1, ("http", "fetched"): 1}


def test_the_next_neighbor_is_tried_and_no_more_than_two(
    source: FileServer, node: Callable[..., Node], make_files: Make
) -> None:
    uri, first, empty = source.put("/a", make_files(1)), node(), node()
    digest = first.store.fetch(uri)
    closed = socket.create_server(("127.0.0.1", 0))
    away = NeighborAddress("127.0.0.1", closed.getsockname()[1], SECRET)
    closed.close()
    second = node(empty.address, first.address)
    assert second.store.fetch(uri, digest) == digest
    assert second.outcomes() == {("neighbor", "absent"): 1, ("neighbor", "fetched"): 1}
    third = node(away, empty.address, first.address)
    assert third.store.fetch(uri, digest) == digest
    assert third.outcomes() == {("neighbor", "broken"): 1, ("neighbor", "absent"): 1, ("http", "fetched"): 1}


def test_a_directory_that_fails_leads_to_the_source(
    source: FileServer, node: Callable[..., Node], make_files: Make, caplog: pytest.LogCaptureFixture
) -> None:
    uri = source.put("/a", make_files(1))
    digest = node().store.fetch(uri)
    second = node()

    def fail(_: str) -> Sequence[NeighborAddress]:
        raise TimeoutError("no answer")

    second._find = fail  # type: ignore[method-assign]  # The directory's process is away.
    second.limit(NeighborLimits())
    with caplog.at_level(logging.WARNING, "lorafleet.resolvers"):
        assert second.store.fetch(uri, digest) == digest
    assert "the directory failed" in caplog.text
    assert second.outcomes() == {("neighbor", "unknown"): 1, ("http", "fetched"): 1}
    third = node()
    assert third.store.fetch(uri, digest) == digest
    assert third.outcomes() == {("neighbor", "nobody"): 1, ("http", "fetched"): 1}


def test_a_stranger_gets_nothing(source: FileServer, node: Callable[..., Node], make_files: Make) -> None:
    uri, first = source.put("/a", make_files(1)), node()
    digest = first.store.fetch(uri)
    with socket.create_connection(("127.0.0.1", first.address.port), timeout=WAIT_S) as stranger:
        send(stranger, encoder.encode(NeighborRequest("sécret", digest)))
        assert receive(stranger) is None
    with socket.create_connection(("127.0.0.1", first.address.port), timeout=WAIT_S) as stranger:
        stranger.sendall(b"\xff\xff\xff\xff")
        assert receive(stranger) is None
    until(lambda: first.sends() == {"rejected": 1, "broken": 1})


def test_a_neighbor_sends_a_bounded_number_of_adapters_at_a_time(
    source: FileServer, node: Callable[..., Node], make_files: Make
) -> None:
    uri, first = source.put("/a", make_files(1, 40 * LARGE // 10)), node()
    digest = first.store.fetch(uri)
    listener = socket.create_server(("127.0.0.1", 0))
    server = NeighborServer(listener, SECRET, first.store.cached, sends=1)
    address = listener.getsockname()
    try:
        with socket.create_connection(address, timeout=WAIT_S) as one:
            send(one, encoder.encode(NeighborRequest(SECRET, digest)))
            offer = receive(one)
            assert offer is not None and offer_decoder.decode(offer).sizes  # It is being sent, and not received.
            with socket.create_connection(address, timeout=WAIT_S) as other:
                send(other, encoder.encode(NeighborRequest(SECRET, digest)))
                refused = receive(other)
                assert refused is not None and offer_decoder.decode(refused).refusal == "busy"
    finally:
        server.close()


def test_a_neighbor_that_trickles_is_cut_off_and_others_are_served(
    source: FileServer, node: Callable[..., Node], make_files: Make
) -> None:
    uri, first = source.put("/a", make_files(1, LARGE)), node()
    digest = first.store.fetch(uri)
    listener = socket.create_server(("127.0.0.1", 0))
    server = NeighborServer(listener, SECRET, first.store.cached, sends=1, send_s=0.5)
    try:
        with socket.socket() as trickling:
            trickling.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            trickling.settimeout(WAIT_S)
            trickling.connect(listener.getsockname())
            send(trickling, encoder.encode(NeighborRequest(SECRET, digest)))
            num_received = 0
            with contextlib.suppress(ConnectionResetError):
                while received := trickling.recv(4096):
                    num_received += len(received)
                    time.sleep(0.1)
        assert num_received < 1 << 20
        second = node(NeighborAddress(*listener.getsockname(), SECRET))
        second.limit(NeighborLimits(offer_s=WAIT_S))
        assert second.store.fetch(uri, digest) == digest
        assert second.outcomes() == {("neighbor", "fetched"): 1}
    finally:
        server.close()


@needs_ipv6
def test_nodes_with_addresses_of_ipv6_fetch_from_each_other(
    source: FileServer, node: Callable[..., Node], make_files: Make
) -> None:
    uri, first = source.put("/a", make_files(1)), node()
    digest = first.store.fetch(uri)
    listener = listen("::1", "neighbor:r1")
    server = NeighborServer(listener, SECRET, first.store.cached)
    try:
        second = node(NeighborAddress("::1", listener.getsockname()[1], SECRET))
        second.limit(NeighborLimits(offer_s=WAIT_S))
        assert second.store.fetch(uri, digest) == digest
        assert second.outcomes() == {("neighbor", "fetched"): 1}
    finally:
        server.close()


class Exhausted(socket.socket):
    """A listener of a process that has no file descriptor left at first."""

    num_failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_connection_that_cannot_be_accepted_does_not_end_the_server(
    source: FileServer, node: Callable[..., Node], make_files: Make
) -> None:
    uri, first = source.put("/a", make_files(1)), node()
    digest = first.store.fetch(uri)
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = NeighborServer(listener, SECRET, first.store.cached)
    try:
        second = node(NeighborAddress("127.0.0.1", listener.getsockname()[1], SECRET))
        second.limit(NeighborLimits(offer_s=WAIT_S))
        assert second.store.fetch(uri, digest) == digest
        assert second.outcomes() == {("neighbor", "fetched"): 1}
    finally:
        server.close()


def test_a_stop_ends_a_fetch_from_a_neighbor(source: FileServer, node: Callable[..., Node], make_files: Make) -> None:
    uri = source.put("/a", make_files(1))
    digest = node().store.fetch(uri)
    with answering(offered({"adapter_config.json": b"{}", WEIGHTS: bytes(1000)}), keeps_open=True) as silent:
        second = node(silent)
        second.limit(NeighborLimits(offer_s=WAIT_S))
        threading.Timer(0.3, second.store.stop).start()
        with pytest.raises(AdapterUnavailable, match="was stopped"):
            second.store.fetch(uri, digest)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
