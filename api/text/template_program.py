"""The program that renders untrusted chat templates; templates.py runs it in a separate process.

Jinja's sandbox protects Python's internals from a template, but does not stop it from looping or growing forever. So
it runs here: with little memory, no file to open, an empty environment, and a time limit that kills the process.
"""

from __future__ import annotations

import contextlib
import json
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

from lorafleet.api.text.content_probe import Form, Message, TooLong, find_forms
from lorafleet.sandbox.program import serve, settings

MAX_ERROR_CHARS = 300
# Longer templates are compiled for each job, so that a few of them do not fill the memory.
MAX_CACHED_CHARS = 64 << 10
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own marker; a template may trim the blank at its end.


def main() -> None:
    output_chars = settings()["output_chars"]
    warm_up()
    serve(lambda message: respond(message, output_chars))


def warm_up() -> None:
    """Makes jinja and Python do their lazy imports while files can still be opened."""
    template = compiled(
        "{% set x = 'é\\n' %}{{ strftime_now('%c') }}{{ lipsum(n=1) }}{{ x | tojson }}{{ x | urlencode }}"
        "{{ x | pprint }}{{ x | wordwrap }}{{ x | urlize }}{{ x | escape }}{{ [x] | random }}{{ raise_exception('') }}"
    )
    with contextlib.suppress(TemplateError):  # raising rewrites the traceback, which triggers imports
        template.render()


def respond(message: bytearray, output_chars: int) -> bytes:
    """Renders the template of a job. If the job has no messages, it returns the forms of contents instead."""
    try:
        job = json.loads(message)
        template = compiled(job["template"])
        if "messages" not in job:
            return json.dumps(forms(template, job, output_chars)).encode()
        return json.dumps({"text": render(template, job, output_chars)}).encode()
    except MemoryError:
        return json.dumps({"out_of_memory": "it needs more memory than a template may have"}).encode()
    except RecursionError:
        fault = "it is nested too deeply"
    except Exception as error:  # a template is a program and may raise anything
        fault = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error)
    return json.dumps({"error": fault[:MAX_ERROR_CHARS]}).encode()


def render(template: jinja2.Template, job: dict[str, Any], output_chars: int) -> str:
    messages, goes_on = job["messages"], job["continue_final_message"]
    if goes_on:
        content = messages[-1]["content"]
        final = content if isinstance(content, str) else content[-1]["text"]
        tagged = (
            final + CONTINUED
            if isinstance(content, str)
            else [*content[:-1], content[-1] | {"text": final + CONTINUED}]
        )
        messages = [*messages[:-1], messages[-1] | {"content": tagged}]
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
            raise TooLong(f"it writes more than {output_chars} characters")
        parts.append(part)
    text = "".join(parts)
    return cut_at_tag(text, final) if goes_on else text


def forms(template: jinja2.Template, job: dict[str, Any], output_chars: int) -> dict[str, Form]:
    def rendered(messages: list[Message], tools: list[Message] | None) -> str:
        given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        return render(template, job | given | {"continue_final_message": False, "template_kwargs": {}}, output_chars)

    return find_forms(rendered)


def cut_at_tag(text: str, final: str) -> str:
    if final.strip() not in text or CONTINUED.strip() not in text:
        raise ValueError("the final message, which is to be continued, does not appear in the template's output")
    begin = text.rindex(CONTINUED.strip())
    return text[:begin] if text[begin : begin + len(CONTINUED)] == CONTINUED else text[:begin].rstrip()


def compiled(source: str) -> jinja2.Template:
    return _cached(source) if len(source) <= MAX_CACHED_CHARS else _compiled(source)


@lru_cache(maxsize=32)
def _cached(source: str) -> jinja2.Template:
    return _compiled(source)


def _compiled(source: str) -> jinja2.Template:
    """Compiles the template in the environment that transformers uses (utils/chat_template_utils.py)."""
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
    """The {% generation %} block. In training it marks what the assistant wrote; here it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Macro) -> str:
        return str(caller())


class TemplateDict:
    """A `dict` for templates, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """A namespace that rejects attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja's: `namespace(self=...)` is also valid
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
        raise SecurityError(
            f"a template may not set an attribute whose name begins with an underscore, such as {name!r}"
        )


def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Serializes the value without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
