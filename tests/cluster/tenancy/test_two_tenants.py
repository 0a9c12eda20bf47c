"""Two tenants of a running server, as openai-python and the command line see it: two replicas behind HAProxy."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import openai
import pytest

from lorafleet.cluster.tenancy.usage_sums import summed
from tests.cluster.tenancy.tenants import Tenants

pytestmark = pytest.mark.xdist_group("tenants")
PROMPT = list(range(40, 80))


def complete(client: openai.OpenAI, model: str, **fields: object) -> openai.types.Completion:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    return client.completions.create(**body, **fields, extra_body={"ignore_eos": True, "return_token_ids": True})


def until_refused(client: openai.OpenAI) -> openai.RateLimitError:
    """One request comes back every 7.5 s: a machine that is slower than that is not tested on."""
    for _ in range(100):
        try:
            complete(client, "base")
        except openai.RateLimitError as error:
            return error
    raise AssertionError("nothing was refused")


def test_one_tenant_s_adapter_prefixes_and_limits_are_nothing_to_the_other(tenants: Tenants, tiny_model: Path) -> None:
    adapters = tiny_model.parent
    tenants.lorafleet("adapters", "push", "sql", str(adapters / "a0"), "--replicas", "2", key="acme")
    tokens = 0
    with tenants.client("acme") as acme, tenants.client("rival") as rival:
        for model in ("base", "sql"):
            num_cached = []
            for _ in range(3):
                usage = complete(acme, model).usage
                assert usage is not None and usage.prompt_tokens_details is not None
                tokens += usage.total_tokens
                num_cached.append(usage.prompt_tokens_details.cached_tokens)
            assert any(num_cached), "of three requests to two replicas, two went to the same one"
        secret = complete(acme, "sql").choices[0].model_dump()["token_ids"]
        tokens += len(PROMPT) + len(secret)
        with pytest.raises(openai.NotFoundError) as hidden:
            complete(rival, "sql")
        with pytest.raises(openai.NotFoundError) as absent:
            complete(rival, "abc")
        assert hidden.value.response.text.replace("sql", "abc") == absent.value.response.text
        assert "sql" in {one.id for one in acme.models.list()} and "sql" not in {one.id for one in rival.models.list()}
        usage = complete(rival, "base").usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 0
        tenants.lorafleet("adapters", "push", "sql", str(adapters / "a1"), "--replicas", "2", key="rival")
        own = complete(rival, "sql")
        assert own.choices[0].model_dump()["token_ids"] != secret and own.model == "sql"
        refusal = until_refused(rival)
        assert "requests_per_minute=8" in refusal.message
        assert refusal.response.headers["x-ratelimit-remaining-requests"] == "0"
    sums = summed(tenants.folder / "usage", ["tenant"])
    acme_s = sums["acme",]
    assert acme_s.prompt_tokens + acme_s.completion_tokens == tokens
    shown = tenants.lorafleet("usage", str(tenants.folder / "usage"), "--by", "tenant,adapter").splitlines()
    assert any(line.startswith("acme,~acme/sql,4,160,") for line in shown), shown


def test_a_key_that_is_made_or_revoked_holds_on_all_replicas_without_a_restart(tenants: Tenants) -> None:
    file = str(tenants.folder / "keys.yaml")
    tenants.keys["new"] = tenants.lorafleet("keys", "create", file, "--id", "new")
    statuses = set()
    with tenants.client("new") as client:
        for wanted in (200, 401):
            in_a_row = 0
            while in_a_row < 20:  # whichever replica answers
                try:
                    complete(client, "base")
                    status = 200
                except openai.AuthenticationError as error:
                    status = error.status_code
                in_a_row = in_a_row + 1 if status == wanted else 0
                statuses.add(status)
            if wanted == 200:
                tenants.lorafleet("keys", "revoke", file, "new")
    assert statuses == {200, 401}


def test_a_replica_that_is_killed_has_metered_all_that_it_answered(tenants: Tenants) -> None:
    """Its front, with SIGKILL, while another request streams."""
    before = summed(tenants.folder / "usage", ["tenant"])["acme",]
    with tenants.client("acme") as acme:
        stream = complete(acme, "base", stream=True)
        next(iter(stream))
        usage = complete(acme, "base").usage
        assert usage is not None
        fronts = tenants.server.processes("ServeReplica:lorafleet:EngineReplica")
        assert len(fronts) == 2
        for pid in fronts:
            os.kill(pid, signal.SIGKILL)
        stream.close()
    after = summed(tenants.folder / "usage", ["tenant"])["acme",]
    assert after.completion_tokens - before.completion_tokens in (usage.completion_tokens, usage.completion_tokens + 5)
    lines = [line for path in (tenants.folder / "usage").iterdir() for line in path.read_text().splitlines()]
    assert all(json.loads(line)["at_s"] for line in lines)
