"""The audit log has who did what and what came of it, and no secret; a tenant's metrics have nothing of others'."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorafleet.api.access.audit import Audited
from lorafleet.api.routes.build_api import CHANGING_GETS, ROUTES
from lorafleet.api.telemetry.tenant_metrics import of_tenant
from lorafleet.client.tensor_packing import pack_tensors
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.trainer_api import trainer_routes
from lorafleet.cluster.tenancy.audit_log import MAX_REFUSALS_PER_MINUTE, AuditLog, DurableLines
from lorafleet.cluster.tenancy.line_file import LineFile
from lorafleet.protocol.errors import LogUnwritable
from tests.cluster.tenancy.house import House


async def test_every_administrator_s_call_is_logged_with_its_outcome_and_without_secrets(
    house: House, fleet: Callable[[str], Any]
) -> None:
    async with house.open():
        folder = fleet("llama3").adapters["qv"]
        calls = [
            (await house.push("acme", "sql", folder), "acme", {"name": "sql", "source": "upload"}),
            (await house.ask("acme", "POST", "/v1/adapters/sql/alias", {"version": 1, "alias": "b"}), "acme", None),
            (await house.ask("rival", "DELETE", "/v1/adapters/sql"), "rival", {}),
            (await house.ask("public", "DELETE", "/v1/adapters/sql"), "", {}),
            (await house.ask(None, "DELETE", "/v1/adapters/sql"), "", {}),
            (await house.ask("operator", "POST", "/v1/adapters/~acme/sql/pin", {"replicas": 9}), "admin-key", {}),
            (
                await house.ask("acme", "POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
                "acme",
                0,
            ),
        ]
        await house.ask("acme", "GET", "/v1/adapters")
        await house.complete("acme", "sql")
        [path] = (house.folder / "audit").iterdir()
        text = path.read_text()
    written = [json.loads(line) for line in text.splitlines()]
    lines = [line for line in written if "status" in line]
    begun = {line["call"]: number for number, line in enumerate(written) if "status" not in line}
    acted = [line for line in lines if line["call"] in begun]
    assert len(acted) == len(begun) == 5, "the keys without the scope did nothing"
    assert all(begun[line["call"]] < written.index(line) for line in acted)
    assert [line["status"] for line in lines] == [call[0].status_code for call in calls]
    assert [line["status"] for line in lines] == [200, 200, 404, 403, 401, 400, 403]
    assert [line.get("key", "") for line in lines] == [call[1] for call in calls]
    assert [line["action"].split("?")[0] for line in lines] == [
        f"{call[0].request.method} {call[0].request.url.path}" for call in calls
    ]
    assert lines[0]["what"]["name"] == "sql" and lines[1]["what"] == {"alias": "b", "version": "1"}
    assert lines[2]["error"] == "model_not_found" and lines[2]["tenant"] == "rival"
    assert lines[-1]["what"] == {"name": "x", "source": "/etc"}
    assert all(line["peer"] == "127.0.0.1" and line["at_s"] > 1.7e9 for line in lines)
    assert not any(key in text for key in house.keys.values())


async def test_every_route_that_changes_something_writes_it_down_before_and_after(
    house: House, fleet: Callable[[str], Any]
) -> None:
    """Whatever its outcome; the route's handler has said by audit.begin() what it is about to do."""
    unused: Any = None
    verbs = ("alias", "rollback", "pin", "unpin", "prefetch", "verify", "download")
    bodies: dict[tuple[str, str], Any] = {
        ("POST", "/v1/adapters"): {"name": "x", "source": "/nowhere"},
        ("POST", "/v1/load_lora_adapter"): {"lora_name": "x", "lora_path": "/nowhere"},
        ("POST", "/v1/unload_lora_adapter"): {"lora_name": "x"},
        ("POST", "/load_lora_adapter"): {"lora_name": "x", "lora_path": "/nowhere"},
        ("POST", "/unload_lora_adapter"): {"lora_name": "x"},
        ("POST", "/skyrl/v1/load_lora_adapter"): {"lora_name": "x", "lora_path": "/nowhere"},
        ("POST", "/load_lora_adapter_from_tensors"): {
            "lora_name": "x",
            "config_dict": {},
            "serialized_named_tensors": [""],
        },
        ("DELETE", "/v1/adapters/sql"): None,
        **{("POST", f"/v1/adapters/sql/{verb}"): {"version": 1} if verb == "alias" else {} for verb in verbs},
        **{("POST", path): {} for path in ("/pause", "/resume", "/pause_generation", "/continue_generation")},
        **{("POST", f"/areal_{verb}_generation"): {} for verb in ("pause", "continue")},
        **{("POST", path): {} for path in ("/flush_cache", "/reset_prefix_cache", "/sleep", "/wake_up")},
        **{("POST", path): {} for path in ("/release_memory_occupation", "/resume_memory_occupation")},
        ("GET", "/flush_cache"): None,
        ("POST", "/abort_request"): {"rid": "x"},
        ("POST", "/init_weights_update_group"): {
            "master_address": "192.0.2.1",
            "master_port": 9,
            "rank_offset": 1,
            "world_size": 2,
        },
        ("POST", "/destroy_weights_update_group"): {},
        ("POST", "/load_lora_adapter_from_distributed"): {
            "lora_name": "x",
            "config_dict": {},
            "names": ["a"],
            "dtypes": ["float32"],
            "shapes": [[1]],
        },
    }
    changing = {
        (method, path.replace("{name:path}", "sql"))
        for method, path, needed, _ in [*ROUTES, *admin_routes(unused), *trainer_routes(unused)]
        if needed in ("admin", "loading") and (method != "GET" or path in CHANGING_GETS)
    }
    tensors = ("PUT", "/v1/adapters/sql/tensors")
    assert changing - {("PUT", "/v1/adapters/sql/files"), tensors} == set(bodies)
    async with house.open():
        folder = fleet("llama3").adapters["qv"]
        assert (await house.push("operator", "sql", folder)).status_code == 200
        config = json.loads((folder / "adapter_config.json").read_text())
        body = b"".join(pack_tensors((folder / "adapter_model.safetensors").read_bytes(), config))
        assert (await house.ask("operator", *tensors, content=body)).status_code == 200
        removing = ("DELETE", "/v1/adapters/sql")
        for method, path in [*(route for route in bodies if route != removing), removing]:
            answer = await house.ask("operator", method, path, bodies[method, path])
            assert answer.status_code < 500, (path, answer.text)
        [written] = (house.folder / "audit").iterdir()
        lines = [json.loads(line) for line in written.read_text().splitlines()]
    done = {line["call"]: line["action"].split("?")[0] for line in lines if "status" in line}
    begun = {line["call"]: line["action"].split("?")[0] for line in lines if "status" not in line}
    assert begun == done and set(done.values()) == {" ".join(route) for route in changing}


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Every file of the folder that this process has open becomes /dev/full: writes fail as on a full disk."""
    files = [int(fd) for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(str(folder))]
    kept = {fd: os.dup(fd) for fd in files}
    full = os.open("/dev/full", os.O_WRONLY)
    assert files
    try:
        for fd in files:
            os.dup2(full, fd)
        yield
    finally:
        for fd, file in kept.items():
            if _target(str(fd)) == "/dev/full":  # else the log has given it up
                os.dup2(file, fd)
            os.close(file)
        os.close(full)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def text_in(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.iterdir()))


def num_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_in(folder).splitlines()]


def acting_calls(folder: Path) -> list[tuple[str, str, Any]]:
    """One of each route that changes something, none of which would be refused."""
    loaded = {"lora_name": "new", "lora_path": str(folder)}
    return [
        ("POST", "/v1/load_lora_adapter", loaded),
        ("POST", "/v1/adapters", {"name": "new", "source": str(folder)}),
        ("POST", "/v1/adapters/sql/alias", {"version": 1, "alias": "b"}),
        ("POST", "/v1/adapters/sql/rollback", {}),
        ("POST", "/v1/adapters/sql/pin", {}),
        ("POST", "/v1/adapters/sql/unpin", {}),
        ("POST", "/v1/adapters/sql/prefetch", {}),
        ("POST", "/v1/adapters/sql/verify", {}),
        ("DELETE", "/v1/adapters/sql?alias=sql", None),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}),
        ("DELETE", "/v1/adapters/sql", None),
    ]


async def test_on_a_full_disk_nothing_is_administered(house: House, fleet: Callable[[str], Any]) -> None:
    folder = fleet("llama3").adapters["qv"]
    async with house.open():
        assert (await house.push("operator", "sql", folder)).status_code == 200
        before = (await house.ask("operator", "GET", "/v1/adapters")).json()
        for call in acting_calls(folder):
            with full_disk(house.folder / "audit"):
                refused = await house.ask("operator", *call)
            assert refused.status_code == 503 and "retry-after" in refused.headers, call
            assert "The audit log cannot be written: No space left on device" in refused.json()["error"]["message"]
        with full_disk(house.folder / "audit"):
            assert (await house.push("operator", "new", folder)).status_code == 503
            assert (await house.complete("public", "sql")).status_code == 200, "only administration stops"
        assert (await house.ask("operator", "GET", "/v1/adapters")).json() == before
        for call in acting_calls(folder)[:3]:
            assert (await house.ask("operator", *call)).status_code in (200, 400), "by itself, once there is room"


async def test_an_outcome_that_cannot_be_written_is_no_success(house: House, fleet: Callable[[str], Any]) -> None:
    async with house.open():
        assert (await house.push("acme", "sql", fleet("llama3").adapters["qv"])).status_code == 200
        remove = house.administration.remove

        async def removing(name: str, wait_s: float) -> None:
            await remove(name, wait_s)
            filled.enter_context(full_disk(house.folder / "audit"))

        house.administration.remove = removing  # type: ignore[method-assign]
        with ExitStack() as filled:
            answer = await house.ask("acme", "DELETE", "/v1/adapters/sql")
        assert answer.status_code == 503
        assert "ended with status 200, but this outcome could not be written" in answer.json()["error"]["message"]
        [last] = [one for one in lines_in(house.folder / "audit") if one["action"].startswith("DELETE")]
        assert "status" not in last, "that it began is known"


class _Syncs:
    """Counts fsyncs, and says what was in the files when each ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[bytes] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        self._fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.synced.append(path.read_bytes() if path.is_file() else b"")


async def test_calls_at_one_time_are_each_on_the_disk_before_their_answer_and_share_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, syncs = DurableLines(LineFile(tmp_path, "audit")), _Syncs(monkeypatch)

    async def append(number: int) -> None:
        await lines.append(b"line %d" % number)
        assert b"line %d\n" % number in syncs.synced[-1]

    await asyncio.gather(*(append(number) for number in range(100)))
    assert len(syncs.synced) < 10
    assert sorted(text_in(tmp_path).encode().splitlines()) == sorted(b"line %d" % number for number in range(100))
    lines.close()


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: a write gets as far as there is room, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_line_that_fits_in_part_leaves_no_part_and_those_beside_it_are_refused_too(tmp_path: Path) -> None:
    lines = DurableLines(LineFile(tmp_path, "audit"))
    await lines.append(b"first")
    with room_for(12):
        failed = await asyncio.gather(*(lines.append(b"another") for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [LogUnwritable] * 3
    await lines.append(b"last")
    assert text_in(tmp_path) == "first\nlast\n"
    lines.close()


async def test_after_a_failed_fsync_the_file_is_not_trusted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = DurableLines(LineFile(tmp_path, "audit"))
    await lines.append(b"first")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", _fails)
        for _ in range(3):
            with pytest.raises(LogUnwritable, match="Input/output error"):
                await lines.append(b"lost")
    await lines.append(b"last")
    assert text_in(tmp_path) == "first\nlast\n" and num_files(tmp_path) == 2
    lines.close()


def _fails(_: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_refusals_in_a_loop_fill_no_disk_and_are_counted(tmp_path: Path) -> None:
    now_s = 0.0
    log = AuditLog(tmp_path, "r", lambda: now_s)
    for _ in range(1000):
        await log.refused(Audited(0.0, "c", "POST /v1/adapters", 401))
    await log.refused(Audited(0.0, "c", "POST /v1/adapters", 403, key="acme-app", key_mark="its mark"))
    now_s = 1.0
    await log.refused(Audited(0.0, "c", "POST /v1/adapters", 401))
    lines = lines_in(tmp_path)
    assert len(lines) == MAX_REFUSALS_PER_MINUTE + 2
    assert lines[-2]["key"] == "acme-app", "one key's loop does not hide another's"
    assert lines[-1]["unlogged"] == 1000 - MAX_REFUSALS_PER_MINUTE
    counts = {s.name: s.value for metric in log.collect() for s in metric.samples}
    assert counts["lorafleet_audit_unlogged_total"] == 1000 - MAX_REFUSALS_PER_MINUTE
    log.close()


async def test_a_line_is_short_whatever_the_call_said(house: House) -> None:
    long = "x" * 100_000
    async with house.open():
        headers = {"authorization": f"Bearer {house.keys['acme']}", "x-forwarded-for": long}
        body = {"name": long, "source": long}
        await house.http.post("/v1/adapters", headers=headers, json=body, params={"a": long[:50_000]})
    lines = lines_in(house.folder / "audit")
    assert lines and all(len(json.dumps(line)) < 6000 for line in lines)
    assert "characters)" in lines[0]["action"] and "(100000 characters)" in lines[0]["forwarded_for"]


EXPOSITION = b"""\
# HELP a_total Of models.
# TYPE a_total counter
a_total{model_name="~acme/sql",replica="r"} 1.0
a_total{model_name="~rival/sql",replica="r"} 2.0
a_total{model_name="sql",replica="r"} 3.0
a_total{model_name="~acme/sql+sql",replica="r"} 4.0
a_total{model_name="~acme/sql+~rival/sql",replica="r"} 5.0
# HELP b Of all.
# TYPE b gauge
b{replica="r"} 6.0
# HELP c Of tenants.
# TYPE c gauge
c{replica="r",tenant="acme"} 7.0
c{tenant="acme-2"} 8.0
c{tenant=""} 9.0
"""


def test_a_tenant_sees_its_own_series_only() -> None:
    assert of_tenant(EXPOSITION, "acme").decode().splitlines() == [
        "# HELP a_total Of models.",
        "# TYPE a_total counter",
        'a_total{model_name="sql",replica="r"} 1.0',
        'a_total{model_name="sql+sql",replica="r"} 4.0',
        "# HELP c Of tenants.",
        "# TYPE c gauge",
        'c{replica="r",tenant="acme"} 7.0',
    ]
    assert of_tenant(EXPOSITION, "nobody") == b""
