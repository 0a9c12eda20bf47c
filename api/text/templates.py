"""Renders chat templates that came with an adapter, in processes that bound their cost.

The process runs template_program.py. This file decides how many renderings run at a time, how long each may take, and
what error a client gets. The base model's own template comes from the operator and needs none of this
(api/text/tokenizer.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from lorafleet.api.text.content_forms import TEXTS, ContentForms
from lorafleet.api.text.content_probe import Form
from lorafleet.api.text.tokenizer import check_template_kwargs
from lorafleet.protocol.errors import AdapterMalformed, AdapterTooLarge, InvalidRequest, QueueFull
from lorafleet.sandbox.job_turns import JobTurns, NoRoom, TurnLimits
from lorafleet.sandbox.process import SandboxEnded, SandboxLimits, SandboxProcess, command_of
from lorafleet.sandbox.shunned import Shunned

MAX_TEMPLATE_BYTES = 1 << 20  # The longest templates of well-known models have 30 KB.
MAX_TEMPLATES_RENDERED = 3  # Renderings at a time; a process that renders takes about 25 MB.
MAX_TEMPLATES_WAITING = 64  # Queued renderings of one tenant.
PROGRAM = "lorafleet.api.text.template_program"

logger = logging.getLogger("lorafleet.http")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    cpu_s: float = 1.0  # Processor time of one rendering, including compilation; it usually takes a millisecond.
    wall_s: float = 30.0  # Elapsed time of one rendering, for machines whose processors are all busy.
    memory_bytes: int = 128 << 20
    output_chars: int = 4 << 20

    @property
    def sandbox(self) -> SandboxLimits:
        """The limits of the process. The longest spelling of a character in JSON has six bytes."""
        return SandboxLimits(self.cpu_s, self.wall_s, self.memory_bytes, 6 * self.output_chars + 1024)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    source: str  # Jinja source, as the adapter brought it.
    special_tokens: Mapping[str, str]  # Special tokens of the adapter's tokenizer, by name ("eos_token").
    forms: ContentForms = TEXTS  # How it takes the contents of messages, see TemplateSandbox.examined().

    def __post_init__(self) -> None:
        size = len(self.source.encode(errors="surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise AdapterTooLarge(
                f"the adapter's chat template has {size} bytes; at most {MAX_TEMPLATE_BYTES} are read."
            )


class TemplateSandbox:
    """Renders templates in processes that start when they are first needed."""

    def __init__(self, limits: TemplateLimits | None = None, num_processes: int = MAX_TEMPLATES_RENDERED) -> None:
        self._limits = limits or TemplateLimits()
        self._num_processes = num_processes
        self._turns = JobTurns(TurnLimits(num_processes, MAX_TEMPLATES_WAITING))
        self._pool = ThreadPoolExecutor(num_processes, thread_name_prefix="chat-template")
        self._lock = threading.Lock()
        self._idle: list[SandboxProcess] = []
        self._shunned = Shunned()
        self._closed = False

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, object]],
        *,
        group: str = "",
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the text that transformers would render. `group` is the group for fair scheduling.

        Raises InvalidRequest if the template raises or exceeds its limits, and QueueFull if too many jobs of its
        group are queued.
        """
        check_template_kwargs(template_kwargs)
        job = {
            "template": template.source,
            "special_tokens": dict(template.special_tokens),
            "messages": [
                {key: value for key, value in m.items() if value is not None} for m in template.forms.shaped(messages)
            ],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "template_kwargs": dict(template_kwargs or {}),
        }
        try:
            async with self._turns.turn(group):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._pool, self._render, group, template.source, job)
        except NoRoom as full:
            raise QueueFull(
                f"The adapter's chat template cannot be rendered now: {full}. Try again later.",
                retry_after_s=self._turns.retry_after_s,
            ) from None

    def examined(self, template: ChatTemplate) -> ChatTemplate:
        """Returns the template with the forms in which it takes contents. Compiles it, renders short conversations, and
        blocks meanwhile. Raises AdapterMalformed if it has a fault that every request would meet."""
        digest = _digest(template.source)
        fault = self._shunned.why("", digest)
        answer: dict[str, str] = {}
        if fault is None:
            try:
                answer = self._ask({"template": template.source, "special_tokens": dict(template.special_tokens)})
                fault = answer.get("error")
            except SandboxEnded as ended:
                fault = str(ended)
                self._shunned.add("", digest, fault)
        if fault is not None:
            raise AdapterMalformed(f"the adapter's chat template cannot be compiled or rendered: {fault}.")
        return replace(template, forms=ContentForms(cast("dict[str, Form]", answer)))

    def close(self) -> None:
        """Ends the processes; a rendering in progress fails."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _render(self, group: str, source: str, job: Mapping[str, object]) -> str:
        """Renders the template in a thread of the pool."""
        digest = _digest(source)
        if (why := self._shunned.why(group, digest)) is not None:
            raise _refusal(why)
        try:
            answer = self._ask(job)
        except SandboxEnded as ended:
            logger.warning("the process of a chat template was ended: %s", ended)
            self._shunned.add(group, digest, str(ended))
            raise _refusal(str(ended)) from None
        if "error" in answer:
            raise _refusal(answer["error"])
        return answer["text"]

    def _ask(self, job: Mapping[str, object]) -> dict[str, str]:
        """Runs a job in a process. If it runs out of memory in a used process, it is retried in a new one, because an
        earlier template may have left little memory."""
        process, message = self._take(), json.dumps(job).encode()
        answer = _answer(process, message)
        if "out_of_memory" in answer and process.num_jobs > 1:
            process.end()
            process = self._start()
            answer = _answer(process, message)
        if "out_of_memory" in answer:
            process.end()
            return {"error": answer["out_of_memory"]}
        self._give_back(process)
        return answer

    def _take(self) -> SandboxProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start()

    def _start(self) -> SandboxProcess:
        return SandboxProcess(command_of(PROGRAM), self._limits.sandbox, {"output_chars": self._limits.output_chars})

    def _give_back(self, process: SandboxProcess) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._num_processes:
                self._idle.append(process)
                return
        process.end()


def _answer(process: SandboxProcess, message: bytes) -> dict[str, str]:
    answer = process.ask(message)
    try:
        return msgspec.json.decode(answer, type=dict[str, str])
    except msgspec.MsgspecError:
        process.end()
        raise SandboxEnded("it returned something other than a text") from None


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"The adapter's chat template rejected these messages: {why}.", "messages")
