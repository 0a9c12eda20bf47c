"""Bounds of what one request may hold, each declared once: the HTTP schema (api/request/request_bodies.py),
SamplingParams and docs/limits.md import them from here.

Sizes are generous beside what clients of OpenAI and vLLM send, and small enough that a request at every bound holds
the event loop of its replica for tens of milliseconds at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lorafleet.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from low to high, both included unless open_low is set."""

    low: int | float
    high: int | float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        """False for NaN. Integers of any size are compared exactly."""
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low}, {self.high}]"

    def check(self, name: str, value: float, param: str | None = None) -> None:
        """Raises InvalidRequest. param: the field to name, where it is called otherwise than `name`.

        A range of integers takes integers only: 1.5 would fail much later, in another process.
        """
        if isinstance(self.low, int) and not isinstance(value, int):
            raise InvalidRequest(f"{name}={value} must be an integer in {self}.", param or name)
        if value not in self:
            raise InvalidRequest(f"{name}={shown_number(value)} is out of range; it must be in {self}.", param or name)


def shown_number(value: float) -> str:
    """The number in an error message: one of thousands of digits is cut."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"about {'-' * (value < 0)}1e{int(math.log10(abs(value)))}"
    return str(value)


INT32 = 2**31 - 1

# -- the body ---------------------------------------------------------------------------------------------------------

MAX_BODY_BYTES = 16 << 20  # the default of --max-body-bytes
MAX_BODY_COMMAS = 1 << 20  # parted values are counted before they are parsed: a million take about 30 ms
MAX_BODY_BRACKETS = 1 << 17  # opening ones: an object costs twenty times its text in memory
MAX_BODY_COLONS = 1 << 17  # a million keys of objects take half a second to parse
MAX_BODIES_BYTES = 256 << 20  # of all bodies under way on a replica; at least two bodies of the largest size
MAX_BODY_READ_S = 60.0  # from a request's head to the last byte of its body
MAX_OBJECT_FIELDS = 256  # of an object whose fields have names of their own; the largest has about 70

# -- lists ------------------------------------------------------------------------------------------------------------

MAX_MODELS = 1000  # of one page of /v1/models, and so many where the request does not say

# -- texts and token ids ----------------------------------------------------------------------------------------------

MAX_TEXT_CHARS = 8 << 20  # one prompt, message or part of one; a million tokens are about 5 million characters
MAX_TOKENIZE_CHARS = 1 << 20  # of /tokenize, which has no context to fit
MAX_TOKEN_IDS = 1 << 20  # of one prompt, which must fit the context besides
MAX_DETOKENIZE_IDS = 1 << 17
MAX_PROMPTS = 2048  # of one request
MAX_SAMPLES = 2048  # prompts x n
MAX_PROMPT_TOKENS = 1 << 21  # of all prompts, each n times: the engine holds so many ids in about 80 MB
MAX_MODEL_CHARS = 4096  # eight full names joined by "+", behind a base's name
MAX_MIXED = 8  # adapters that one request mixes
MIX_WEIGHT = Range(-1e4, 1e4)
MAX_REQUEST_ID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_PATH_CHARS = 4096  # a folder, or a URI of an adapter

# -- sampling ---------------------------------------------------------------------------------------------------------

MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_N = 128
TOKEN_ID = Range(0, INT32)
MAX_TOKENS = Range(0, INT32)  # of requests: 0 asks for the prompt's logprobs alone, where a route has that
LOGIT_BIAS = Range(-100.0, 100.0)
TRUNCATE = Range(-1, INT32)
PRIORITY = Range(-INT32, INT32)
DIMENSIONS = Range(1, 1 << 20)  # no model's hidden size is larger; this model's own bounds it as well
# The numbers of SamplingParams, by field.
SAMPLING = {
    "n": Range(1, MAX_N),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, open_low=True),
    "top_k": Range(-1, INT32),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.0, 1e6, open_low=True),
    "seed": Range(-(2**63), 2**63 - 1),
    "max_tokens": Range(1, INT32),
    "min_tokens": Range(0, INT32),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}

# -- chats ------------------------------------------------------------------------------------------------------------

MAX_MESSAGES = 4096
MAX_PARTS = 16_384  # parts of content, and calls of tools, of all messages together
MAX_PARTS_OF_ONE = 4096  # of one message
MAX_TOOLS = 512  # OpenAI takes 128
MAX_TOOL_NAME_CHARS = 256
MAX_DESCRIPTION_CHARS = 64 << 10
MAX_CALL_CHARS = 1 << 20  # the arguments of one call
MAX_METADATA = 64  # OpenAI takes 16 entries of 64 and 512 characters
MAX_METADATA_KEY_CHARS = 256
MAX_METADATA_CHARS = 4096
MAX_INCLUDED = 64  # entries of /v1/responses' `include`
MAX_LABEL_CHARS = 1024  # texts that change nothing: `user`, an item's `id`, a format's `name`

# -- values of any shape: schemas, template arguments, fields without effect ------------------------------------------

MAX_JSON_VALUES = 65_536  # in one such value, nested ones included
MAX_JSON_DEPTH = 64
MAX_JSON_KEY_CHARS = 1024
MAX_JSON_TEXT_CHARS = 1 << 20
JSON_NUMBER = Range(-1e308, 1e308)

# -- structured output ------------------------------------------------------------------------------------------------

MAX_SOURCE_BYTES = 1 << 20  # of a schema, regex, grammar or list of choices
MAX_CHOICES = 10_000
MAX_TRIGGERS = 64  # each is looked for in all text
MAX_TAGS = 1024  # parts of one part of a structural tag

# -- headers ----------------------------------------------------------------------------------------------------------

QUEUE_TIMEOUT_S = Range(0.0, 86_400.0)  # of X-Queue-Timeout-Seconds

# -- administration ---------------------------------------------------------------------------------------------------

MAX_OPTIONS_CHARS = 32 << 10  # of an upload, which are in its URL
MAX_TENANT_CHARS = 64
MAX_SPLIT = 64  # versions that an alias stands for
SPLIT_WEIGHT = Range(0.0, 1e6, open_low=True)
VERSION = Range(1, INT32)
REPLICAS = Range(1, 65_536)
REMOVE_WAIT_S = Range(0.0, 86_400.0)

# -- answers ----------------------------------------------------------------------------------------------------------

MAX_SHOWN_CHARS = 120  # of a client's value in an error message


def cut(text: str) -> str:
    """A client's own words as an error message repeats them."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
