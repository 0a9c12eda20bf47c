"""The program that renders strangers' chat templates, run as a process of its own by template_sandbox.py.

Jinja's sandbox keeps a template from Python's insides, not from looping or growing for ever; so whatever it does, it
does here: with little memory, no file to open, nothing in its environment, and a clock that kills. It imports nothing
of lorafleet, since it is run by its path: `python -I template_program.py`, a socket as its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LENGTH = struct.Struct("<Q")  # before each message
MAX_ERROR_CHARS = 300
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own; a template may trim the blank at its end


def main() -> None:
    limits = json.loads(os.environ["LORAFLEET_TEMPLATE_LIMITS"])
    server = socket.socket(fileno=0)
    warm_up()
    confine(limits["memory_bytes"])
    while (message := receive(server)) is not None:
        # A clock of this process's own CPU time: no other process's load makes a good template fail.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
        answer = respond(json.loads(message), limits["output_chars"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(server, answer)


def warm_up() -> None:
    """What jinja and Python import when they first need it, they need while files can still be opened."""
    template = compiled(
        "{% set x = 'é\\n' %}{{ strftime_now('%c') }}{{ lipsum(n=1) }}{{ x | tojson }}{{ x | urlencode }}"
        "{{ x | pprint }}{{ x | wordwrap }}{{ x | urlize }}{{ x | escape }}{{ [x] | random }}{{ raise_exception('') }}"
    )
    with contextlib.suppress(TemplateError):  # raising rewrites the traceback, which has imports of its own
        template.render()


def confine(memory_bytes: int) -> None:
    """memory_bytes: beside what the interpreter has already."""
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also within one long call
    resource.setrlimit(resource.RLIMIT_AS, (present + memory_bytes,) * 2)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(limit, (value, value))


def receive(server: socket.socket) -> bytes | None:
    """None at the end."""
    head = _exactly(server, LENGTH.size)
    return None if head is None else _exactly(server, LENGTH.unpack(head)[0])


def _exactly(server: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = server.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(server: socket.socket, message: bytes) -> None:
    server.sendall(LENGTH.pack(len(message)) + message)


def respond(job: dict[str, Any], output_chars: int) -> bytes:
    try:
        return json.dumps({"text": render(job, output_chars)}).encode()
    except MemoryError:
        fault = "it needs more memory than a template may have"
    except RecursionError:
        fault = "it is nested too deeply"
    except Exception as error:  # a template is a program: it may raise anything
        fault = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error)
    return json.dumps({"error": fault[:MAX_ERROR_CHARS]}).encode()


def render(job: dict[str, Any], output_chars: int) -> str:
    template = compiled(job["template"])
    messages, goes_on = job["messages"], job["continue_final_message"]
    if goes_on:
        final = messages[-1]["content"]
        messages = [*messages[:-1], messages[-1] | {"content": final + CONTINUED}]
    parts, size = [], 0
    for part in template.generate(
        **job["special_tokens"] | job["template_kwargs"],
        messages=messages,
        tools=job["tools"],
        documents=None,
        add_generation_prompt=job["add_generation_prompt"],
    ):
        size += len(part)
        if size > output_chars:
            raise ValueError(f"it writes more than {output_chars} characters")
        parts.append(part)
    text = "".join(parts)
    return cut_at_tag(text, final) if goes_on else text


def cut_at_tag(text: str, final: str) -> str:
    if final.strip() not in text or CONTINUED.strip() not in text:
        raise ValueError("the final message, which is to be continued, does not appear in what the template writes")
    at = text.rindex(CONTINUED.strip())
    return text[:at] if text[at : at + len(CONTINUED)] == CONTINUED else text[:at].rstrip()


@lru_cache(maxsize=32)
def compiled(source: str) -> jinja2.Template:
    """As transformers' environment for chat templates (utils/chat_template_utils.py) has it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=TemplateDict(),
        namespace=TemplateNamespace,
    )
    return environment.from_string(source)


class GenerationBlock(Extension):
    """{% generation %}: marks what the assistant wrote, for training; here it is what is in it."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Macro) -> str:
        return str(caller())


class TemplateDict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """A namespace that takes no attribute with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja's: `namespace(self=...)` is one too
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        check_attribute(name)
        super().__setitem__(name, value)


def check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may set no attribute that begins with an underscore, as {name!r} does")


def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
