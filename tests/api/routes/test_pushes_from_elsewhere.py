"""Pushes whose tensors come by a process group or out of shared memory, with a real engine and real receivers."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save

import real_server
from lorafleet.client.admin import AdminClient, AsyncAdminClient
from lorafleet.client.client_errors import APIStatusError
from lorafleet.client.process_group import join_group, open_store
from lorafleet.client.shared_memory import shared_tensors
from lorafleet.client.tensor_packing import pack_shared
from lorafleet.client.weights_group import WeightsGroup
from lorafleet.protocol.weights_group_place import WeightsGroupPlace
from real_server import ADMIN_KEY

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
TENSORS = "/v1/adapters/elsewhere/tensors"


@pytest.fixture(scope="module")
def made(fleet: Callable[[str], Any]) -> Any:
    return fleet("llama3")


@pytest.fixture(scope="module")
def url(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("elsewhere")
    with real_server.running(folder, made.base, {}, {}, max_model_len=64, kv_cache_tokens=1024) as server:
        yield server.url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=ADMIN, timeout=120) as client:
        yield client


@pytest.fixture
def admin(url: str) -> Iterator[AdminClient]:
    with AdminClient(url, ADMIN_KEY) as client:
        yield client


@pytest.fixture
def group(admin: AdminClient) -> Iterator[WeightsGroup]:
    with WeightsGroup(admin, "127.0.0.1", backend="gloo") as group:
        yield group


def tensors_of(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def greedy(http: httpx.Client, name: str) -> list[int]:
    body = {"model": name, "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    tokens: list[int] = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    return tokens


def push_all_ways(admin: AdminClient, group: WeightsGroup, folder: Path) -> dict[str, str]:
    """Pushes the same tensors under three names, and returns their digests."""
    tensors, config = tensors_of(folder)
    return {
        "body": admin.push_tensors("body", save(tensors), config).digest,
        "group": admin.push_from_distributed("group", tensors, config, group).digest,
        "device": admin.push_from_device("device", tensors, config).digest,
    }


def test_the_same_tensors_are_one_content_whichever_way_they_come(
    http: httpx.Client, admin: AdminClient, group: WeightsGroup, made: Any
) -> None:
    for number, adapter in enumerate(("all", "qv"), 1):
        digests = push_all_ways(admin, group, made.adapters[adapter])
        assert len(set(digests.values())) == 1
        expected = made.reference.greedy([7, 8, 9], 5, made.adapters[adapter]).tokens
        for name in digests:
            assert greedy(http, name) == expected
            shown = admin.show(name)
            assert len(shown.versions) == number
            admin.verify(name)
    assert admin.show("group").versions[-1].source == "distributed"


async def test_the_awaited_client_pushes_from_elsewhere(url: str, group: WeightsGroup, made: Any) -> None:
    tensors, config = tensors_of(made.adapters["qv"])
    async with AsyncAdminClient(url, ADMIN_KEY) as client:
        by_group = await client.push_from_distributed("awaited", tensors, config, group, metadata={"step": "7"})
        by_device = await client.push_from_device("awaited", tensors, config)
        assert by_group == by_device
        assert (await client.show("awaited")).versions[0].metadata == {"step": "7"}


# -- trainers of SGLang's ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_trainer_of_sglangs_broadcasts_in_its_own_order(http: httpx.Client, admin: AdminClient, made: Any) -> None:
    """Miles sends the names, dtypes and shapes, and broadcasts at once, without waiting for the server."""
    tensors, config = tensors_of(made.adapters["all"])
    port = free_port()
    place = WeightsGroupPlace("miles", "127.0.0.1", port, 2, 0, "gloo", 60.0)
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    names = {"group_name": "miles"}
    answers: list[httpx.Response] = []
    joining = in_background(
        lambda: answers.append(http.post("/init_weights_update_group", json=body | names | {"backend": "gloo"}))
    )
    member = join_group(place, open_store(place)[0])
    joining.join()
    assert answers[0].json() == {"success": True, "message": "Joined the process group miles."}
    in_order = dict(reversed(list(tensors.items())))
    load = {
        "lora_name": "from-miles",
        "config_dict": config,
        "names": list(in_order),
        "dtypes": [str(tensor.dtype) for tensor in in_order.values()],
        "shapes": [list(tensor.shape) for tensor in in_order.values()],
        "pinned": False,
    }
    for _ in range(2):
        loading = in_background(
            lambda: answers.append(http.post("/load_lora_adapter_from_distributed", json=load | names))
        )
        member.broadcast([tensor.contiguous() for tensor in in_order.values()])
        loading.join()
        assert answers[-1].json()["loaded_adapters"] == {"from-miles": "__tensor__"}, answers[-1].text
    assert greedy(http, "from-miles") == made.reference.greedy([7, 8, 9], 5, made.adapters["all"]).tokens
    digest = admin.push_tensors("from-miles", save(tensors), config).digest
    assert [version.digest for version in admin.show("from-miles").versions] == [digest]
    refused = http.post("/load_lora_adapter_from_distributed", json=load | names | {"shapes": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "names")
    assert http.post("/destroy_weights_update_group", json=names).json()["success"]
    member.destroy()
    gone = http.post("/load_lora_adapter_from_distributed", json=load | names)
    assert gone.status_code == 400 and "no process group 'miles'" in gone.json()["error"]["message"]


# -- what is refused, and what that leaves behind ----------------------------------------------------------------------


def test_a_push_that_is_refused_before_its_tensors_leaves_the_group_as_it_is(
    admin: AdminClient, group: WeightsGroup, made: Any
) -> None:
    tensors, config = tensors_of(made.adapters["qv"])
    with pytest.raises(APIStatusError, match="in_flight"):
        admin.push_from_distributed("elsewhere", tensors, config, group, activate=False, in_flight="abort")
    with pytest.raises(APIStatusError, match="the base model's own"):
        admin.push_from_distributed(real_server.BASE, tensors, config, group)
    assert admin.push_from_distributed("intact", tensors, config, group).version == 1


def test_an_adapter_that_does_not_fit_is_refused_as_every_push_is(
    admin: AdminClient, group: WeightsGroup, made: Any
) -> None:
    tensors, config = tensors_of(made.adapters["qv"])
    name, tensor = next(iter(tensors.items()))
    wrong = tensors | {name: torch.zeros(*tensor.shape, 2)}
    errors = []
    for push in (
        lambda: admin.push_tensors("wrong", save(wrong), config),
        lambda: admin.push_from_distributed("wrong", wrong, config, group),
        lambda: admin.push_from_device("wrong", wrong, config),
    ):
        with pytest.raises(APIStatusError) as refused:
            push()
        errors.append((refused.value.status_code, refused.value.code, refused.value.message))
    assert errors[0] == errors[1] == errors[2]
    assert admin.push_from_distributed("fitting", tensors, config, group).version == 1


def test_a_broadcast_that_does_not_come_fails_only_its_push(
    http: httpx.Client, admin: AdminClient, group: WeightsGroup, made: Any
) -> None:
    tensors, config = tensors_of(made.adapters["qv"])
    before = admin.push_from_distributed("late", tensors, config, group)
    fields: dict[str, object] = {"tensors": [{"name": "a", "dtype": "float32", "shape": [2]}]}
    query = {"group": group.name, "timeout_s": "0.5"}
    answer = http.put("/v1/adapters/late/tensors", params=query, content=pack_shared(fields, config))
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "body_timeout")
    assert "the group has ended" in answer.json()["error"]["message"]
    assert not [process for process in psutil.Process().children() if "group_program" in " ".join(process.cmdline())]
    gone = http.put("/v1/adapters/late/tensors", params=query, content=pack_shared(fields, config))
    assert gone.status_code == 400 and "no process group" in gone.json()["error"]["message"]
    assert admin.show("late").versions[-1].digest == before.digest
    with WeightsGroup(admin, "localhost", name="again", backend="gloo") as again:
        assert admin.push_from_distributed("late", tensors, config, again) == before


def test_a_trainer_that_leaves_ends_the_group(http: httpx.Client, admin: AdminClient, made: Any) -> None:
    _, config = tensors_of(made.adapters["qv"])
    left = WeightsGroup(admin, "127.0.0.1", name="left", backend="gloo")
    left._member.destroy()
    fields: dict[str, object] = {"tensors": [{"name": "a", "dtype": "float32", "shape": [2]}]}
    body = pack_shared(fields, config)
    answer = http.put("/v1/adapters/left/tensors", params={"group": "left", "timeout_s": "2"}, content=body)
    assert answer.status_code == 408, answer.text


def test_a_server_meets_a_group_only_at_hosts_that_are_allowed(http: httpx.Client) -> None:
    body = {"master_address": "192.0.2.7", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    answer = http.post("/init_weights_update_group", json=body)
    assert answer.status_code == 403 and "--push-hosts 192.0.2.7" in answer.json()["error"]["message"]
    local = body | {"master_address": "127.0.0.1"}
    for wrong, param in (({"rank_offset": 2}, "rank_offset"), ({"backend": "nccl"}, "backend"), ({"x": 1}, "x")):
        answer = http.post("/init_weights_update_group", json=local | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    nobody = http.post("/init_weights_update_group", json=local | {"master_port": free_port(), "timeout_s": 1})
    assert nobody.status_code == 400 and "was not formed" in nobody.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tensors": []}, "one entry per tensor"),
        ({"tensors": [{"name": "a", "dtype": "object", "shape": [1]}]}, "dtype"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [-1]}]}, "wrongly"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [1 << 47, 1 << 47]}]}, "wrongly"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [1 << 40]}]}, "at most"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [1]}] * 2}, "two entries"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [4096]}]}, "end at byte"),
        ({"handle": "../../etc/passwd"}, "hexadecimal"),
        ({"handle": b"/etc/passwd".hex()}, "does not name"),
        ({"handle": f"lorafleet-{'0' * 32}".encode().hex()}, "cannot be opened"),
        ({"handle": "00" * 65}, "hexadecimal"),
        ({"offset": -1}, "nothing else"),
        ({"offset": True}, "nothing else"),
        ({"pickle": "gASV"}, "nothing else"),
    ],
)
def test_a_wrong_head_is_refused_by_what_is_wrong(http: httpx.Client, wrong: dict[str, object], said: str) -> None:
    _, shared = shared_tensors({"a": torch.ones(4)})
    with shared as fields:
        body = pack_shared(fields | wrong, {"r": 1})
        answer = http.put(TENSORS, params={"device": "cpu"}, content=body)
    assert answer.status_code in (400, 413) and said in answer.json()["error"]["message"], answer.text
    assert http.get("/v1/adapters/elsewhere").status_code == 404


def test_memory_is_opened_only_on_the_servers_own_kind_of_device(http: httpx.Client) -> None:
    _, shared = shared_tensors({"a": torch.ones(4)})
    with shared as fields:
        body = pack_shared(fields, {"r": 1})
        for device in ("GPU-12345678-1234-1234-1234-123456789abc", "cuda:0", ""):
            answer = http.put(TENSORS, params={"device": device}, content=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "device")
        both = http.put(TENSORS, params={"device": "cpu", "group": "g"}, content=body)
        assert (both.status_code, both.json()["error"]["param"]) == (400, "group")
        more = http.put(TENSORS, params={"device": "cpu"}, content=body + b"\0")
        assert more.status_code == 400 and "end with its head" in more.json()["error"]["message"]
    assert not [name for name in os.listdir("/dev/shm") if fields["handle"] == name.encode().hex()]


def test_only_an_administrator_may_have_the_server_receive(url: str) -> None:
    for path in ("/init_weights_update_group", "/destroy_weights_update_group", "/load_lora_adapter_from_distributed"):
        assert httpx.post(f"{url}{path}", json={}).status_code in (401, 403)
    assert httpx.put(f"{url}{TENSORS}?group=g", content=b"x").status_code == 401
