"""Renders chat templates that came with an adapter, in processes that bound what a template may cost.

What the process does is template_program.py's; here is who waits for it, for how long, and what an end means. The
base model's own template is the operator's and needs none of this (workers/tokenizer.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from lorafleet.workers.errors import AdapterTooLarge, InvalidRequest
from lorafleet.workers.template_program import LENGTH
from lorafleet.workers.tokenizer import check_template_kwargs

MAX_TEMPLATE_BYTES = 1 << 20  # the longest of well-known models have 30 KB
SHUN_S = 60.0  # for how long a template that had to be ended is refused without another try
MAX_SHUNNED = 1024
PROGRAM = Path(__file__).resolve().with_name("template_program.py")

logger = logging.getLogger("lorafleet.http")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    cpu_s: float = 1.0  # of one rendering, with compiling; a usual one takes a millisecond
    wall_s: float = 10.0  # for machines whose processors are all taken
    memory_bytes: int = 128 << 20
    output_chars: int = 4 << 20


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """source: Jinja, as an adapter brought it. special_tokens: of its tokenizer, by name ("eos_token")."""

    source: str
    special_tokens: Mapping[str, str]

    def __post_init__(self) -> None:
        size = len(self.source.encode(errors="surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise AdapterTooLarge(
                f"the adapter's chat template has {size} bytes; at most {MAX_TEMPLATE_BYTES} are read."
            )


class TemplateSandbox:
    """num_processes: templates that are rendered at a time; each has about 25 MB. None runs before it is needed."""

    def __init__(self, limits: TemplateLimits | None = None, num_processes: int = 2) -> None:
        self._limits = limits or TemplateLimits()
        # Threads of its own: those of asyncio.to_thread, which tokenize, must not all wait for templates.
        self._pool = ThreadPoolExecutor(num_processes, thread_name_prefix="chat-template")
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._shunned: dict[bytes, tuple[float, str]] = {}  # template -> until when, why
        self._closed = False

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """What transformers makes of it. InvalidRequest where the template raises, or costs more than its limits."""
        check_template_kwargs(template_kwargs)
        job = {
            "template": template.source,
            "special_tokens": dict(template.special_tokens),
            "messages": [{key: value for key, value in m.items() if value is not None} for m in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "template_kwargs": dict(template_kwargs or {}),
        }
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._render, template.source, job)

    def close(self) -> None:
        """Ends the processes; a rendering under way fails."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _render(self, source: str, job: Mapping[str, object]) -> str:
        """In a thread of the pool."""
        key = hashlib.sha256(source.encode(errors="surrogatepass")).digest()
        self._check_not_shunned(key)
        process = self._take()
        try:
            answer = process.ask(json.dumps(job).encode())
        except _Ended as ended:
            process.end()
            self._shun(key, str(ended))
            raise _refusal(str(ended)) from None
        except BaseException:
            process.end()
            raise
        self._give_back(process)
        if "error" in answer:
            raise _refusal(answer["error"])
        return answer["text"]

    def _take(self) -> _Process:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Process(self._limits)

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.end()

    def _check_not_shunned(self, key: bytes) -> None:
        with self._lock:
            until_s, why = self._shunned.get(key, (0.0, ""))
        if until_s > time.monotonic():
            raise _refusal(f"{why}, and is not tried again for {SHUN_S:.0f} s")

    def _shun(self, key: bytes, why: str) -> None:
        logger.warning("a chat template was ended: %s", why)
        with self._lock:
            if len(self._shunned) >= MAX_SHUNNED:
                self._shunned.clear()
            self._shunned[key] = (time.monotonic() + SHUN_S, why)


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"The adapter's chat template refused these messages: {why}.", "messages")


class _Ended(Exception):
    """The process is gone, or must go; why, in words for the client."""


class _Process:
    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        with theirs:
            # -I: nothing of this process's folder, environment or site is imported there. No token is in its reach.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(PROGRAM)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"LORAFLEET_TEMPLATE_LIMITS": json.dumps(asdict(limits)), "LC_ALL": "C.UTF-8"},
                cwd="/",
            )

    def ask(self, message: bytes) -> dict[str, str]:
        """Raises _Ended."""
        deadline_s = time.monotonic() + self._limits.wall_s
        try:
            self._socket.settimeout(self._limits.wall_s)
            self._socket.sendall(LENGTH.pack(len(message)) + message)
            (size,) = LENGTH.unpack(self._receive(LENGTH.size, deadline_s))
            if size > 6 * self._limits.output_chars + 1024:  # JSON's longest spelling of a character
                raise _Ended("it answered with more than it may write")
            return msgspec.json.decode(self._receive(size, deadline_s), type=dict[str, str])
        except msgspec.MsgspecError:
            raise _Ended("it answered with something else than a text") from None
        except TimeoutError:
            raise _Ended(f"it took longer than {self._limits.wall_s:g} s") from None
        except OSError:
            raise self._how_it_ended() from None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, size: int, deadline_s: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise self._how_it_ended()
            data += part
        return data

    def _how_it_ended(self) -> _Ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        if self._process.returncode == -signal.SIGPROF:
            return _Ended(f"it took more than {self._limits.cpu_s:g} s of processor time")
        return _Ended("it ended the process that renders it")
