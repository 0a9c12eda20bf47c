"""Chat templates of adapters: what they write equals transformers', and what they may cost is bounded."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from living import command, family
from lorafleet.api.text.templates import (
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATES_WAITING,
    ChatTemplate,
    TemplateLimits,
    TemplateSandbox,
)
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.errors import AdapterMalformed, AdapterTooLarge, InvalidRequest, QueueFull

MESSAGES = [
    {"role": "system", "content": "  be <b>brief</b> & kind "},
    {"role": "user", "content": "héllo 日本語 🎉\n"},
    {"role": "assistant", "content": "the answer "},
]
CANARY = "/tmp/lorafleet-template-canary"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    made = TemplateSandbox(TemplateLimits(cpu_s=0.3), num_processes=1)
    yield made
    made.close()


async def rendered(sandbox: TemplateSandbox, source: str, **options: Any) -> str:
    return await sandbox.render(ChatTemplate(source, {"eos_token": "<|eos|>"}), MESSAGES, **options)


def ran() -> bool:
    return Path(CANARY).exists()


LIKE_LLAMA = """{{- bos_token | default('<s>') }}
{%- for message in messages %}
    {%- if message['role'] == 'system' and loop.first %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n\\n' }}{% endif %}"""
LIKE_QWEN = """{%- set ns = namespace(last=-1, found=false) %}
{%- for m in messages[::-1] %}{% if not ns.found and m.role == 'user' %}
{% set ns.last = loop.index0 %}{% set ns.found = true %}{% endif %}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- generation %}{{ m.role }}: {{ m.content }}|{{ ns.last }}{% endgeneration %}
    {{ m | tojson(indent=2) }}
{%- endfor %}
{% if enable_thinking %}<think>{% endif %}{{ dict(a=1)['a'] }}{{ strftime_now('%Y')[:2] }}"""


@pytest.mark.parametrize("source", [LIKE_LLAMA, LIKE_QWEN], ids=["llama", "qwen"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"template_kwargs": {"enable_thinking": True, "bos_token": "<mine>"}},
    ],
    ids=str,
)
async def test_what_it_writes_is_what_transformers_writes(
    sandbox: TemplateSandbox, tokenizer: Tokenizer, source: str, options: dict[str, Any]
) -> None:
    expected = tokenizer.render_chat(MESSAGES, chat_template=source, **options)
    assert await rendered(sandbox, source, **options) == expected


LOOP = "{% for part in m.content if part.type == 'text' %}{{ part.text }}/{% endfor %}"
PARTS_ONLY = "{% for m in messages %}[{{ m.role }}]" + LOOP + "{% endfor %}"
ASSISTANTS_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role in ['assistant', 'tool'] %}" + LOOP + "{{ m.reasoning }}"
    "{% else %}{{ m.content | upper }}{% endif %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}{% endfor %}"
)
ALIKE = EITHER.replace("}}/{%", "}}{%")
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": ["u1", "u2"]},
    {"role": "assistant", "content": "", "tool_calls": [], "reasoning": "why"},
    {"role": "tool", "content": "T", "tool_call_id": "c"},
    {"role": "assistant", "content": "A"},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PARTS_ONLY, "[system]S/[user]u1/u2/[assistant]/[tool]T/[assistant]A"),
        (ASSISTANTS_PARTS, "[system]S[user]U1\nU2[assistant]/why[tool]T/[assistant]A"),
        (EITHER, "Su1\nu2TA"),
        (ALIKE, "Su1u2TA"),
        ("{{ messages[1].content[0].text }}{{ messages[-1].content[0]['text'] }}", "u1\nu2A"),
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('x') }}{% endif %}" + PARTS_ONLY,
            "[system]S/[user]u1/",
        ),
        (
            "{% if messages | length < 3 %}{{ raise_exception('x') }}{% endif %}" + PARTS_ONLY,
            "[system]S/[user]u1/u2/",
        ),
    ],
    ids=["parts", "parts of some roles", "either", "either alike", "the first part", "a system message first", "long"],
)
@pytest.mark.parametrize("goes_on", [False, True])
async def test_contents_have_the_form_that_the_template_takes(
    sandbox: TemplateSandbox, tokenizer: Tokenizer, source: str, expected: str, goes_on: bool
) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": goes_on}
    text = tokenizer.render_chat(TALK, chat_template=source, **options)
    assert text.startswith(expected)
    assert not goes_on or text.endswith("A")
    template = sandbox.examined(ChatTemplate(source, tokenizer.special_tokens))
    assert await sandbox.render(template, TALK, **options) == text


async def test_a_template_that_demands_tools_is_examined_with_some(
    sandbox: TemplateSandbox, tokenizer: Tokenizer
) -> None:
    source = "{% if not tools %}{{ raise_exception('x') }}{% endif %}" + PARTS_ONLY
    options: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    assert tokenizer.render_chat(TALK[:2], chat_template=source, **options) == "[system]S/[user]u1/u2/"
    template = sandbox.examined(ChatTemplate(source, tokenizer.special_tokens))
    assert await sandbox.render(template, TALK[:2], **options) == "[system]S/[user]u1/u2/"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
        ("{{ 'a' * 10**9 }}", "memory"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "processor time"),
    ],
)
def test_a_template_that_exceeds_its_limits_whatever_it_renders_is_refused_at_loading(
    sandbox: TemplateSandbox, source: str, cause: str
) -> None:
    for _ in range(2):
        with pytest.raises(AdapterMalformed, match=cause):
            sandbox.examined(ChatTemplate(source, {}))


@pytest.mark.parametrize("source", ["{{ messages[0].text }}", "{% for m in messages %}{{ m.role }}{% endfor %}"])
async def test_a_template_that_hides_what_users_say_is_refused_to_requests(
    sandbox: TemplateSandbox, tokenizer: Tokenizer, source: str
) -> None:
    user = [{"role": "user", "content": "hello"}]
    with pytest.raises(InvalidRequest, match="neither as a string nor as a list of parts") as refused:
        tokenizer.render_chat(user, chat_template=source)
    assert refused.value.param == "messages.0.content"
    template = sandbox.examined(ChatTemplate(source, tokenizer.special_tokens))
    with pytest.raises(InvalidRequest, match="neither as a string nor as a list of parts"):
        await sandbox.render(template, user)


HOSTILE = {
    # --- without end ---
    "nested loops": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "processor time",
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}{% set a = f(n-1) %}{% endif %}{% endmacro %}{{ f(90) }}",
        "processor time",
    ),
    "a macro without end": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "deeply"),
    "one long multiplication": ("{{ (9 ** 999999) ** 9 }}", "processor time"),
    "sorting and joining": (
        "{% for i in range(99999) %}{% set x = range(99999) | list | sort | join(',') %}{% endfor %}",
        "processor time",
    ),
    "a text of a gigabyte, cut": ("{{ ('a' * 10**9)[:1] }}", "memory"),
    # --- too much ---
    "a list of ten billion": ("{{ [0] * 10**10 }}", "memory"),
    "a wide format": ("{{ '%*d' | format(10**9, 1) }}", "memory"),
    "a wide str.format": ("{{ '{:>999999999}'.format(1) }}", "memory"),
    "centered": ("{{ 'a' | center(10**9) }}", "memory"),
    "doubling": (
        "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "memory",
    ),
    "replaced by more": ("{{ ('a' * 10000) | replace('a', 'b' * 100000) }}", "memory"),
    "much text": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 4194304 characters"),
    "a wide range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    # --- out ---
    "globals of a function": (
        f"{{{{ cycler.__init__.__globals__.os.system('touch {CANARY}') }}}}",
        "",
    ),
    "globals by filter": (
        f"{{{{ (cycler | attr('__init__') | attr('__globals__')).os.system('touch {CANARY}') }}}}",
        "",
    ),
    "subclasses": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "format reaching attributes": ("{{ '{0.__class__.__mro__}'.format('') }}", ""),
    "format by map filter": ("{{ ['{0.__class__.__mro__}'] | map('format', '') | list }}", ""),
    "a generator's frame": ("{{ (messages | map('upper')).gi_frame.f_globals }}", "unsafe"),
    "a macro's caller": ("{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}", "unsafe"),
    "self": ("{{ self.__init__.__globals__ }}", "unsafe"),
    "the environment": ("{{ self._TemplateReference__context.environment }}", ""),
    "joiner": ("{{ joiner.__init__.__globals__ }}", "unsafe"),
    "namespace with dunders": ("{{ namespace(__class__=1) }}", "underscore"),
    "messages changed": ("{{ messages.append(1) }}", "unsafe"),
    "include": ("{% include '/etc/passwd' %}", "loader"),
    "import": ("{% import '/etc/passwd' as x %}", "loader"),
    "extends": ("{% extends '/etc/passwd' %}", "loader"),
    "no template": ("{% for %}", ""),
    "nested deeply": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    "many blocks": ("{% if 1 %}" * 200 + "{% endif %}" * 200, ""),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_a_hostile_template_is_refused_soon_and_the_next_one_works(case: str, sandbox: TemplateSandbox) -> None:
    source, words = HOSTILE[case]
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidRequest, match="chat template rejected these messages: .*" + re.escape(words)) as caught:
        await rendered(sandbox, source)
    assert len(caught.value.message) < 500
    assert "/lib/" not in caught.value.message
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert not ran()
    assert await rendered(sandbox, "fine") == "fine"


async def test_a_format_reaches_no_class(sandbox: TemplateSandbox) -> None:
    assert await rendered(sandbox, "{{ '{a.__class__}'.format_map(dict(a=1)) }}") == ""


async def test_what_is_the_servers_to_say_cannot_be_given_beside_the_messages(sandbox: TemplateSandbox) -> None:
    for name in ("messages", "tokenize", "continue_final_message"):
        with pytest.raises(InvalidRequest, match=rf"may not set \['{name}'\]"):
            await rendered(sandbox, "x", template_kwargs={name: []})


async def test_a_template_that_had_to_be_ended_is_not_tried_again_for_a_while() -> None:
    sandbox = TemplateSandbox(TemplateLimits(cpu_s=0.2), num_processes=1)
    try:
        endless = HOSTILE["nested loops"][0]
        for words in ("of processor time.", "is not tried again for 60 s"):
            with pytest.raises(InvalidRequest, match=words):
                await rendered(sandbox, endless)
    finally:
        sandbox.close()


async def test_the_event_loop_goes_on_while_a_template_runs_and_others_have_their_turn() -> None:
    sandbox = TemplateSandbox(TemplateLimits(cpu_s=0.5), num_processes=2)
    try:
        await asyncio.gather(*(rendered(sandbox, "both processes run", group=str(i)) for i in range(2)))
        endless = asyncio.create_task(rendered(sandbox, HOSTILE["nested loops"][0]))
        turns = 0
        while not endless.done():
            assert await rendered(sandbox, "{{ 1 + 1 }}", group="another") == "2"
            turns += 1
        assert turns > 3
        assert isinstance(endless.exception(), InvalidRequest)
    finally:
        sandbox.close()


async def test_a_template_that_one_tenant_s_messages_made_slow_is_rendered_for_another() -> None:
    sandbox = TemplateSandbox(TemplateLimits(cpu_s=0.3), num_processes=1)
    slow_for_many = "{% for a in range(messages | length * 9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}ok"
    template = ChatTemplate(slow_for_many, {})
    try:
        with pytest.raises(InvalidRequest, match="processor time"):
            await sandbox.render(template, MESSAGES, group="many")
        assert await sandbox.render(template, [], group="none") == "ok"
        with pytest.raises(InvalidRequest, match="not tried again"):
            await sandbox.render(template, [], group="many")
    finally:
        sandbox.close()


async def test_one_tenant_s_templates_do_not_make_another_wait_and_have_a_bounded_queue() -> None:
    sandbox = TemplateSandbox(TemplateLimits(cpu_s=0.3), num_processes=2)
    try:
        endless = [
            asyncio.create_task(
                sandbox.render(ChatTemplate(HOSTILE["nested loops"][0] + str(i), {}), MESSAGES, group="loud")
            )
            for i in range(MAX_TEMPLATES_WAITING + 2)
        ]
        assert await sandbox.render(ChatTemplate("fine", {}), MESSAGES, group="quiet") == "fine"
        assert sum(task.done() for task in endless) < MAX_TEMPLATES_WAITING // 4, "it waited for others' turns"
        with pytest.raises(QueueFull, match="64 jobs of the same tenant or model are waiting") as caught:
            await endless[-1]
        assert caught.value.retry_after_s >= 1
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
    finally:
        sandbox.close()


async def test_a_template_that_left_no_memory_fails_nobody_else(sandbox: TemplateSandbox) -> None:
    """Jinja keeps compiled templates, and Python its arenas: the next template must not pay for that."""
    for i in range(4):
        with pytest.raises(InvalidRequest, match="memory"):
            await rendered(sandbox, "{% set x = '" + "a" * 50_000 + f"' %}}{{{{ [x * 9] * 10**10 }}}}{i}")
        assert await rendered(sandbox, "fine") == "fine"


def test_a_template_is_compiled_when_it_is_checked(sandbox: TemplateSandbox) -> None:
    sandbox.examined(ChatTemplate("{{ raise_exception('only when it is rendered') }}", {}))
    for source, words in (("{% for %}", "Expected"), ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "")):
        with pytest.raises(AdapterMalformed, match="cannot be compiled or rendered: .*" + words):
            sandbox.examined(ChatTemplate(source, {}))


def running() -> list[psutil.Process]:
    """The processes of this test's process that render templates."""
    return [one for one in family(os.getpid()) if any("text.template_program" in part for part in command(one))]


def test_the_process_sees_nothing_and_opens_nothing(sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    asyncio.run(rendered(sandbox, "x"))
    [process] = running()
    assert set(process.environ()) <= {"LORAFLEET_SANDBOX", "LC_ALL", "LC_CTYPE", "TOKENIZERS_PARALLELISM"}
    assert process.rlimit(psutil.RLIMIT_NOFILE) == (3, 3)
    assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert process.num_fds() == 3


def test_no_process_runs_before_it_is_needed_nor_after_the_end() -> None:
    before = len(running())
    sandbox = TemplateSandbox(num_processes=1)
    assert len(running()) == before
    assert asyncio.run(rendered(sandbox, "x")) == "x"
    assert len(running()) == before + 1
    sandbox.close()
    deadline = time.monotonic() + 120
    while len(running()) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_long_template_is_refused_before_it_is_read() -> None:
    with pytest.raises(AdapterTooLarge, match=f"{MAX_TEMPLATE_BYTES + 1} bytes; at most {MAX_TEMPLATE_BYTES}"):
        ChatTemplate("x" * (MAX_TEMPLATE_BYTES + 1), {})


async def test_tools_reach_an_adapters_template(sandbox: TemplateSandbox) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert await rendered(sandbox, "{{ tools[0].function.name }}", tools=tools) == "f"
