"""The file of keys: what is accepted, what is refused and how, and that a change takes effect without a restart."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lorafleet.api.access.gate import Gate
from lorafleet.api.access.work_threads import CHECKS, FILES, UPKEEP, in_turn
from lorafleet.cluster.cli.cli import app
from lorafleet.cluster.tenancy import key_file
from lorafleet.cluster.tenancy.key_file import parse, read
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.key_text import check_key, digest_of, make_key
from lorafleet.cluster.tenancy.usage_log import UsageLog
from lorafleet.protocol.errors import ConfigError, Forbidden, InvalidAdapterName, InvalidRequest, Unauthorized
from lorafleet.protocol.names import check_full_name

HASH = "sha256:" + "0" * 64


def lorafleet(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(app, ["keys", *arguments], input=text)
    assert result.exit_code == 0, result.output
    return result.output.strip()


def refused(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(app, ["keys", *arguments], input=text)
    assert result.exit_code == 1 and not isinstance(result.exception, ValueError)
    return result.output


def gate_of(ring: KeyRing, now_s: float = 0.0) -> Gate:
    return Gate("the operator's own", lambda: ring.keys, lambda: now_s)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_key_opens_what_its_scopes_say_and_nothing_else(file: Path) -> None:
    key = lorafleet("create", str(file), "--id", "app", "--tenant", "acme", "--scope", "infer", "--scope", "metrics")
    gate = gate_of(KeyRing(str(file)))
    assert gate.caller(key, "infer").tenant == gate.caller(key, "metrics").tenant == "acme"
    for needed in ("admin", "loading"):
        with pytest.raises(Forbidden, match="'app' has the scopes infer, metrics; this request needs the scope admin"):
            gate.caller(key, needed)
    for wrong in (None, "", "lf-" + "a" * 46, key[:-1], key + " "):
        for needed in ("infer", "metrics", "admin", "loading"):
            with pytest.raises(Unauthorized):
                gate.caller(wrong, needed)
        assert gate.caller(wrong, "open").scopes
    assert gate.caller("the operator's own", "admin").is_operator


def test_no_secret_is_in_the_file_and_only_its_owner_reads_it(file: Path) -> None:
    key = lorafleet("create", str(file), "--id", "app")
    assert key not in file.read_text() and digest_of(key) in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert lorafleet("hash", text=key) == "sha256:" + digest_of(key)


def test_keys_differ_and_a_mistyped_one_is_told_from_a_wrong_one() -> None:
    made = {make_key() for _ in range(100)}
    assert len(made) == 100
    for key in made:
        check_key(key)
        typo = key[:10] + ("a" if key[10] != "a" else "b") + key[11:]
        with pytest.raises(InvalidRequest) as error:
            check_key(typo)
        assert typo not in error.value.message
    assert "not a lorafleet key" in refused("hash", text="hunter2")


def test_a_key_expires_by_itself(file: Path) -> None:
    key = lorafleet("create", str(file), "--id", "app", "--expires", "2027-01-31")
    ring = KeyRing(str(file))
    expires_s = 1801353600.0  # midnight, UTC
    assert gate_of(ring, expires_s - 1).caller(key, "infer").key_id == "app"
    with pytest.raises(Unauthorized, match="'app' has expired"):
        gate_of(ring, expires_s).caller(key, "infer")
    assert "expires=2027-01-31T00:00:00+00:00" in lorafleet("list", str(file))
    assert "expires" in refused("create", str(file), "--id", "b", "--expires", "tomorrow")


def test_making_and_revoking_keys_takes_effect_without_a_restart(file: Path) -> None:
    first = lorafleet("create", str(file), "--id", "first")
    ring = KeyRing(str(file))
    gate = gate_of(ring)
    second = lorafleet("create", str(file), "--id", "second")
    with pytest.raises(Unauthorized):
        gate.caller(second, "infer")
    ring.look()
    ring.look()
    assert gate.caller(second, "infer").key_id == "second"
    lorafleet("revoke", str(file), "first")
    ring.look()
    assert gate.caller(first, "infer").key_id == "first", "it may still be being written"
    ring.look()
    with pytest.raises(Unauthorized, match="revoked"):
        gate.caller(first, "infer")
    assert "has no key 'first'; it has second" in refused("revoke", str(file), "first")


async def test_a_revoked_key_is_refused_and_use_is_written_while_a_tenant_occupies_all_threads(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = lorafleet("create", str(file), "--id", "app")
    ring, usage, synced = KeyRing(str(file)), UsageLog(tmp_path / "usage", "r"), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: synced.set())
    usage.lines.add(b"{}")
    go, loop = threading.Event(), asyncio.get_running_loop()
    held = [loop.run_in_executor(None, go.wait) for _ in range(64)]
    held += [asyncio.ensure_future(in_turn(kind, go.wait)) for kind in (CHECKS, FILES, UPKEEP) for _ in range(20)]
    duties = [asyncio.create_task(ring.follow()), asyncio.create_task(usage.lines.keep_syncing())]
    lorafleet("revoke", str(file), "app")
    try:
        async with asyncio.timeout(60):
            while digest_of(key) in ring.keys or not synced.is_set():  # noqa: ASYNC110  # Threads change both.
                await asyncio.sleep(0.05)
    finally:
        go.set()
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*held, *duties, return_exceptions=True)
    usage.lines.close()


@pytest.mark.parametrize("wrong", ["keys: [", "[]", "keys: [{id: a}]", "", None, b"\xff\xfe"])
def test_a_broken_file_keeps_the_keys_and_says_so(file: Path, wrong: str | bytes | None, caplog) -> None:
    key = lorafleet("create", str(file), "--id", "app")
    good = file.read_bytes()
    ring = KeyRing(str(file))

    def metrics() -> dict[str, float]:
        return {f"{s.name}{s.labels.get('outcome', '')}": s.value for metric in ring.collect() for s in metric.samples}

    if wrong is None:
        file.unlink()
    else:
        file.write_bytes(wrong if isinstance(wrong, bytes) else wrong.encode())
    for _ in range(4):
        ring.look()
    assert gate_of(ring).caller(key, "infer").key_id == "app"
    assert ring.broken and "the API keys were not reloaded" in caplog.text
    assert metrics()["lorafleet_api_keys_broken"] == metrics()["lorafleet_api_keys_reloads_totalfailed"] == 1
    file.write_bytes(good)
    ring.look()
    ring.look()
    assert not ring.broken and metrics()["lorafleet_api_keys_broken"] == 0
    assert metrics()["lorafleet_api_keys"] == 1


def test_a_key_that_gets_the_id_of_another_is_another_key(file: Path) -> None:
    first = lorafleet("create", str(file), "--id", "app")
    ring = KeyRing(str(file))
    gate = gate_of(ring)
    former = gate.caller(first, "infer")
    assert gate.caller_with(former.key_mark) == former and former.key_mark in lorafleet("list", str(file))
    lorafleet("revoke", str(file), "app")
    second = lorafleet("create", str(file), "--id", "app")
    ring.look()
    ring.look()
    present = gate.caller(second, "infer")
    assert gate.caller_with(former.key_mark) is None and gate.caller_with(present.key_mark) == present
    assert (present.key_id, present.owner == former.owner) == (former.key_id, False)


def test_no_key_of_the_file_is_taken_for_the_operators(file: Path) -> None:
    key = lorafleet("create", str(file), "--id", "admin-key", "--tenant", "acme")
    gate = gate_of(KeyRing(str(file)))
    alike, operator = gate.caller(key, "infer"), gate.caller("the operator's own", "infer")
    assert alike.key_id == operator.key_id and alike.owner != operator.owner
    assert gate.caller_with(alike.key_mark) == alike


def test_a_tenant_that_changes_its_keys_stays_the_same(file: Path) -> None:
    owners = set()
    for number in range(2):
        key = lorafleet("create", str(file), "--id", f"acme-{number}", "--tenant", "acme")
        owners.add(gate_of(KeyRing(str(file))).caller(key, "infer").owner)
    for number in range(2):
        lorafleet("revoke", str(file), f"acme-{number}")
    key = lorafleet("create", str(file), "--id", "acme-0", "--tenant", "acme", "--same-tenant")
    owners.add(gate_of(KeyRing(str(file))).caller(key, "infer").owner)
    assert len(owners) == 1 and read(file).tenants["acme"].without_keys_since is None


def test_a_tenants_name_is_never_given_to_another_unnoticed(file: Path) -> None:
    settings = {"name_prefixes": ["acme-"], "sources": ["/data/acme"], "limits": {"adapters": 3}}
    file.write_text(json.dumps({"tenants": {"acme": settings}}))
    key = lorafleet("create", str(file), "--id", "app", "--tenant", "acme")
    former = gate_of(KeyRing(str(file))).caller(key, "infer")
    lorafleet("revoke", str(file), "app")
    create = ("create", str(file), "--id", "app", "--tenant", "acme")
    assert "has had no key since" in refused(*create) and "--same-tenant" in refused(*create)
    key = lorafleet(*create, "--new-tenant")
    ring = KeyRing(str(file))
    present = gate_of(ring).caller(key, "infer")
    assert (former.tenant, present.tenant) == ("acme", "acme@2") and former.owner != present.owner
    assert ring.id_of_tenant("acme") == "acme@2" and ring.owner_of_name("acme-x") is None
    assert ring.place_of("acme@2", "/data/acme/x") is None and ring.storage_limits("acme@2").adapters is None
    assert "tenant=acme@2" in lorafleet("list", str(file))
    assert "nothing to decide" in refused("create", str(file), "--id", "b", "--tenant", "acme", "--same-tenant")
    check_full_name("~acme@2/sql")
    for wrong in ("acme@1", "acme@0", "acme@02", "acme@", "acme@2@3"):
        with pytest.raises(InvalidAdapterName):
            check_full_name(f"~{wrong}/sql")


def test_a_tenant_that_left_the_file_and_is_back_is_told_to_the_operator(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def replace(content: dict[str, Any]) -> None:
        file.write_text(json.dumps(content))
        ring.look()
        ring.look()

    key = {"id": "app", "hash": HASH, "scopes": ["infer"], "tenant": "acme"}
    file.write_text(json.dumps({"keys": [key]}))
    ring = KeyRing(str(file))
    replace({"keys": []})
    assert "is in it again" not in caplog.text
    replace({"keys": [key]})
    assert "tenant 'acme' had left the file, and is in it again" in caplog.text and "such as 2" in caplog.text
    caplog.clear()
    replace({"keys": []})
    replace({"keys": [key], "tenants": {"acme": {"holder": 2}}})
    assert "is in it again" not in caplog.text, "the file says that it is another one"


def test_a_file_that_is_replaced_within_one_tick_of_the_clock_is_seen(file: Path) -> None:
    lorafleet("create", str(file), "--id", "app")
    ring, times = KeyRing(str(file)), file.stat()
    lorafleet("revoke", str(file), "app")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    ring.look()
    ring.look()
    assert not ring.keys


def test_keys_may_come_from_the_environment() -> None:
    ring = KeyRing(f"keys: [{{id: a, hash: '{HASH}', scopes: [infer]}}]")
    assert [key.id for key in ring.entries.values()] == ["a"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (f"keys: [{{id: a, hash: '{HASH}', scopes: [infr]}}]", "keys.0.scopes"),
        (f"keys: [{{id: a, hash: '{HASH}', scopes: []}}]", "keys.0.scopes"),
        ("keys: [{id: a, hash: secret, scopes: [infer]}]", "64 hexadecimal digits"),
        (f"keys: [{{id: a, hash: '{HASH}', scopes: [infer], expire: 2027-01-01}}]", "keys.0.expire"),
        (f"keys: [{{id: a, hash: '{HASH}', scopes: [infer], tenant: ../x}}]", "tenant's name"),
        (f"keys: [{{id: 'a b', hash: '{HASH}', scopes: [infer]}}]", "'a b' is not a valid id"),
        (
            f"keys: [{{id: a, hash: '{HASH}', scopes: [infer]}}, {{id: b, hash: '{HASH}', scopes: [infer]}}]",
            "'a' and 'b'",
        ),
        ("tenants: {acme: {limits: {requests_per_minute: 0}}}", "greater than or equal to 1"),
        ("tenants: {a: {name_prefixes: [x-]}, b: {name_prefixes: [x-y]}}", "lies within"),
        ("tenants: {a: {name_prefixes: [x-]}, b: {name_prefixes: [y-, X-Y]}}", "'x-y' of tenant 'b' lies within 'x-'"),
        ("tenants: {a: {name_prefixes: [x-]}, b: {name_prefixes: [x-]}}", "lies within"),
        ("tenants: {a: {name_prefixes: ['../']}}", "name_prefixes"),
        ("tenants: {acme: {limits: {requests_per_minute: -1}}}", "greater than or equal to 1"),
        ("tenants: {acme: {limits: {requests_per_minute: 1e400}}}", "valid integer"),
        ("tenants: {acme: {limits: {requests_per_minute: 1.0e+400}}}", "finite"),
        ("tenants: {acme: {limits: {requests_per_minute: .nan}}}", "finite"),
        (f"tenants: {{acme: {{limits: {{tokens_per_minute: 1{'0' * 400}}}}}}}", "tokens_per_minute"),
        (f"tenants: {{acme: {{limits: {{adapter_bytes: 1{'0' * 30}}}}}}}", "less than or equal to"),
        ('{"tenants": {"acme": {"limits": {"max_concurrent": 1e400}}}}', "max_concurrent"),
        (f"keys: [{{id: a, hash: '{HASH}', scopes: [infer], expires: 1.0e+300}}]", "keys.0.expires"),
        (f"tenants: {{acme: {{sources: [{'/a, ' * 1001}]}}}}", "at most 1000"),
        ("keys: " + "[" * 200_000, "neither YAML nor JSON"),
        ("- " * 200_000, "neither YAML nor JSON"),
    ],
)
def test_what_is_wrong_is_refused_by_name(content: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\.yaml") as error:
        parse(content, "keys.yaml")
    assert complaint in error.value.message
    assert "secret" not in error.value.message and HASH not in error.value.message


def test_a_large_file_is_read_with_work_in_proportion_to_its_size() -> None:
    """Counts how often a key or a prefix is compared with another, rather than the time."""
    num_compared = 0

    class Counted(str):
        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

        def startswith(self, *arguments: Any) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.startswith(self, *arguments)

        def lower(self) -> str:
            return Counted(str.lower(self))

    key_file._check_ids([Counted(f"key-{number}") for number in range(20_000)])
    assert num_compared < 100_000
    key_file.outermost_prefixes((Counted(f"tenant-{number}/"), str(number)) for number in range(20_000))
    assert num_compared < 200_000
    entries = [{"id": f"k{n}", "hash": f"sha256:{n:064x}", "scopes": ["infer"]} for n in range(20_000)]
    tenants = {f"t{n}": {"name_prefixes": [f"t{n}/"]} for n in range(20_000)}
    assert len(parse(json.dumps({"keys": entries, "tenants": tenants}), "keys.json").keys) == 20_000


def test_a_file_beyond_the_largest_size_or_number_of_keys_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "MAX_FILE_BYTES", 100)
    file.write_text("keys: []" + " " * 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read(file)
    keys = [{"id": f"k{n}", "hash": f"sha256:{n:064x}", "scopes": ["infer"]} for n in range(key_file.MAX_KEYS + 1)]
    with pytest.raises(ConfigError, match="at most 100000 items"):
        parse(json.dumps({"keys": keys}), "keys.json")


def test_whose_a_name_is_does_not_depend_on_its_case_nor_on_how_many_tenants_there_are() -> None:
    """A hub takes Acme/sql for acme/sql: another tenant would get what is behind it by writing it so."""
    tenants = {f"t{n}": {"name_prefixes": [f"t{n}-", f"t{n}-x"]} for n in range(1000)}
    tenants["acme"] = {"name_prefixes": ["Acme/", "acme-"]}
    ring = KeyRing(json.dumps({"tenants": tenants}))
    owned = {"acme/sql": "acme", "ACME/sql": "acme", "aCme-1": "acme", "t7-x": "t7", "T999-": "t999", "t1-": "t1"}
    for name, owner in owned.items():
        assert ring.owner_of_name(name) == owner
    for name in ("acme", "acm", "t1", "t1000-", "", "zzz", "a"):
        assert ring.owner_of_name(name) is None


def test_what_is_written_reads_the_same(file: Path) -> None:
    file.write_text("tenants: {acme: {limits: {requests_per_minute: 5, adapters: 2}, name_prefixes: [acme-]}}")
    before = read(file).tenants
    lorafleet("create", str(file), "--id", "app", "--tenant", "acme")
    assert read(file).tenants == before


def test_keys_may_come_from_another_place_while_the_server_runs_and_mistakes_change_nothing(file: Path) -> None:
    of_file = lorafleet("create", str(file), "--id", "app")
    ring = KeyRing(f"keys: [{{id: a, hash: '{HASH}', scopes: [infer]}}]")
    gate = gate_of(ring)
    for wrong in ("keys: [{id: a}]", str(file.with_name("missing.yaml"))):
        with pytest.raises(ConfigError):
            ring.change_source(wrong)
        assert [key.id for key in ring.entries.values()] == ["a"]
    ring.change_source(str(file))
    assert gate.caller(of_file, "infer").key_id == "app"
    later = lorafleet("create", str(file), "--id", "later")
    ring.look()
    ring.look()
    assert gate.caller(later, "infer").key_id == "later", "the new file is followed"


def test_the_operators_key_may_change_while_the_server_runs() -> None:
    gate = Gate("the-former-key")
    gate.set_admin_key("the-later-key")
    assert gate.caller("the-later-key", "admin").is_operator
    with pytest.raises(Unauthorized):
        gate.caller("the-former-key", "admin")
