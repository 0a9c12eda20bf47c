"""Bounds on the contents of one request, each declared once. The HTTP schema (api/request/body_fields.py),
SamplingParams and docs/limits.md import them from here.

The bounds are generous compared to what clients of OpenAI and vLLM send. They are small enough that a request at
every bound blocks the event loop of its replica for tens of milliseconds at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lorafleet.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Range:
    """An interval from low to high. Both ends are included unless open_low is set."""

    low: int | float
    high: int | float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        """Returns False for NaN. Integers of any size are compared exactly."""
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low}, {self.high}]"

    def check(self, name: str, value: float, param: str | None = None) -> None:
        """Raises InvalidRequest if the value is out of range. The error names `param`, or `name` if that is not
        given.

        A range with integer bounds accepts integers only: 1.5 would fail much later, in another process.
        """
        if isinstance(self.low, int) and not isinstance(value, int):
            raise InvalidRequest(f"{name}={value} must be an integer in {self}.", param or name)
        if value not in self:
            raise InvalidRequest(f"{name}={shown_number(value)} is out of range; it must be in {self}.", param or name)


def shown_number(value: float) -> str:
    """Formats the number for an error message; shortens integers of more than 20 digits."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"about {'-' * (value < 0)}1e{int(math.log10(abs(value)))}"
    return str(value)


INT32 = 2**31 - 1

# -- the body ---------------------------------------------------------------------------------------------------------

# The body of SGLang's /load_lora_adapter_from_tensors.
MAX_TENSOR_COPIES = 64  # Copies of an adapter, one for each tensor-parallel rank.
MAX_TENSOR_TEXT_CHARS = 1 << 30  # base64 of one copy; --max-body-bytes is lower by default.
MAX_TENSOR_NAME_CHARS = 1024
CHECKSUM_CHARS = 64
MAX_BODY_BYTES = 16 << 20  # Default of --max-body-bytes.
MAX_BODY_COMMAS = 1 << 20  # Commas are counted before the body is parsed; parsing a million values takes about 30 ms.
MAX_BODY_BRACKETS = 1 << 17  # Opening brackets; an object takes twenty times its text in memory.
MAX_BODY_COLONS = 1 << 17  # A million object keys take half a second to parse.
# Bytes of all bodies in progress on a replica; two bodies of the largest size are always allowed.
MAX_BODIES_BYTES = 256 << 20
RESPONSE_STORE_BYTES = 256 << 20  # Default of --response-store-bytes.
MAX_BODY_READ_S = 60.0  # Time from the request's head to the last byte of its body.
MAX_OBJECT_FIELDS = 256  # Fields of an object with a fixed set of names; the largest one has about 70.

# -- lists ------------------------------------------------------------------------------------------------------------

MAX_MODELS = 1000  # Entries on one page of /v1/models; also the default.

# -- texts and token ids ----------------------------------------------------------------------------------------------

MAX_TEXT_CHARS = 8 << 20  # One prompt, message or message part; a million tokens are about 5 million characters.
MAX_TOKENIZE_CHARS = 1 << 20  # Text of /tokenize, which has no context to fit.
MAX_TOKEN_IDS = 1 << 20  # Ids of one prompt, which must also fit the context.
MAX_DETOKENIZE_IDS = 1 << 17
MAX_PROMPTS = 2048  # Prompts of one request.
MAX_NAMED_MODELS = 64  # Models that the prompts of one request name; each may have to be looked up and fetched.
MAX_SAMPLES = 2048  # Prompts x n.
# Tokens of all prompts, each counted n times; the engine holds this many ids in about 80 MB.
MAX_PROMPT_TOKENS = 1 << 21
MAX_PAIR_CHARS = 16 << 20  # Texts of all prompts of a /score or /rerank request, a repeated text counted each time.
# Logprobs of one request's prompts, and of its whole answers; each takes about 200 bytes while it is written.
MAX_ANSWER_LOGPROBS = 2 << 20
MAX_ROUTED_BYTES = 64 << 20  # Numbers of the experts that one request returns.
MAX_HEAD_VALUES = 1 << 22  # Numbers that the heads of adapters compute for one request.
MAX_MODEL_CHARS = 4096  # Eight full names joined by "+", after a base's name.
MAX_MIXED = 8  # Adapters that one request mixes.
MIX_WEIGHT = Range(-1e4, 1e4)
MAX_REQUEST_ID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_PATH_CHARS = 4096  # A folder or a URI of an adapter.

# -- sampling ---------------------------------------------------------------------------------------------------------

MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 128
MAX_BAD_WORDS_TOKENS = 16_384  # All spellings of a request's words. Each takes some bytes of the GPU for each answer.
# Formats, stops and bad words of one request, counted once for each prompt x n, since the engine gets them as often.
MAX_SENT_CHARS = 32 << 20
MAX_LISTED_IDS = 1 << 21  # Token ids in all lists of one request, counted once for each prompt x n.
MAX_LOGPROBS = 20
# Which probabilities logprobs are of: the model's own, or those with which the token was drawn. vLLM's names.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
MAX_N = 128
TOKEN_ID = Range(0, INT32)
MAX_TOKENS = Range(0, INT32)  # 0 asks for the prompt's logprobs alone, on routes that support it.
MAX_THINKING = Range(0, INT32)  # Tokens of reasoning.
LOGIT_BIAS = Range(-100.0, 100.0)
TRUNCATE = Range(-1, INT32)
PRIORITY = Range(-INT32, INT32)
BACKGROUND = INT32  # The priority of requests that start after those of all tenants and adapters, such as batches.
TOP_N = Range(0, INT32)  # 0 asks for all documents.
DIMENSIONS = Range(1, 1 << 20)  # No model's hidden size is larger; the served model's own size is a further bound.
# Bounds of the numeric fields of SamplingParams.
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
MAX_PARTS = 16_384  # Content parts and tool calls of all messages together.
MAX_PARTS_OF_ONE = 4096  # Content parts and tool calls of one message.
MAX_TOOLS = 512  # OpenAI accepts 128.
MAX_TOOL_NAME_CHARS = 256
MAX_DESCRIPTION_CHARS = 64 << 10
MAX_CALL_CHARS = 1 << 20  # Arguments of one call.
MAX_METADATA = 64  # OpenAI accepts 16 entries of 64 and 512 characters.
MAX_METADATA_KEY_CHARS = 256
MAX_METADATA_CHARS = 4096
BUDGET_TOKENS = Range(1024, INT32)  # `budget_tokens` in /v1/messages; Anthropic's minimum.
MAX_INCLUDED = 64  # Entries of `include` in /v1/responses.
ITEMS_LISTED = Range(1, 100)  # Input items of a response on a page, as in OpenAI.
SEQUENCE_NUMBER = Range(0, INT32)  # Number of an event in a stream.
MAX_LABEL_CHARS = 1024  # Texts without effect: `user`, an item's `id`, a format's `name`.

# -- values of any shape: schemas, template arguments, fields without effect ------------------------------------------

MAX_JSON_VALUES = 65_536  # Values in one such field, including nested ones.
MAX_JSON_DEPTH = 64
MAX_JSON_KEY_CHARS = 1024
MAX_JSON_TEXT_CHARS = 1 << 20
JSON_NUMBER = Range(-1e308, 1e308)

# -- structured output ------------------------------------------------------------------------------------------------

MAX_SOURCE_BYTES = 1 << 20  # A schema, regex, grammar or list of choices.
MAX_TAG_TEXT_CHARS = 4096  # One trigger, begin, end, separator or constant text of a structural tag.
MAX_CHOICES = 10_000
MAX_TRIGGERS = 64  # All text is searched for each of them.
MAX_TAGS = 1024  # Structures or tags in one part of a structural tag.

# -- headers ----------------------------------------------------------------------------------------------------------

QUEUE_TIMEOUT_S = Range(0.0, 86_400.0)  # Value of X-Queue-Timeout-Seconds.

# -- administration ---------------------------------------------------------------------------------------------------

MAX_ADAPTERS_LISTED = 1000  # Adapters on one page of /v1/adapters.
MAX_OPTIONS_CHARS = 32 << 10  # Options of an upload, which are part of its URL.
MAX_TENANT_CHARS = 64
MAX_GROUP_NAME_CHARS = 128  # Name of a trainer's process group.
MAX_DEVICE_CHARS = 64  # UUID of a GPU.
MAX_HOST_CHARS = 253  # Name of a host, as in DNS.
MAX_DTYPE_CHARS = 32
PORT = Range(1, 65_535)
GROUP_SIZE = Range(2, 65_536)  # Members of a trainer's process group.
GROUP_RANK = Range(1, 65_535)  # The server's rank there.
TENSOR_SIZE = Range(0, (1 << 48) - 1)  # One dimension of a tensor.
RECEIVE_S = Range(0.0, 300.0, open_low=True)
MAX_SPLIT = 64  # Versions in the split of an alias.
SPLIT_WEIGHT = Range(0.0, 1e6, open_low=True)
VERSION = Range(1, INT32)
REPLICAS = Range(1, 65_536)
REMOVE_WAIT_S = Range(0.0, 86_400.0)

# -- files and batches ------------------------------------------------------------------------------------------------

FILE_LIVES_S = Range(3600, 30 * 86_400)  # Seconds after which an uploaded file expires; OpenAI's bounds.
BATCH_STORE_BYTES = 64 << 30  # Default of --batch-store-bytes.

# -- answers ----------------------------------------------------------------------------------------------------------

MAX_SHOWN_CHARS = 120  # Length of a client's value that an error message quotes.


def cut(text: str) -> str:
    """Shortens a client's own text for an error message."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
