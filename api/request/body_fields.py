"""Declares the types of single fields of request bodies, with their bounds from protocol/limits.py."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from lorafleet.api.request.bounds import AnyJSON, AtMost, Within, over_bound, range_schema
from lorafleet.api.request.chat_messages import MESSAGE_SCHEMA
from lorafleet.protocol import limits


def with_schema(**schema: Any) -> WithJsonSchema:
    """Returns the schema of a field that its route checks, as pydantic's errors for unions of lists name no place."""
    return WithJsonSchema(schema)


def _printable(given: str) -> str:
    if not given.isprintable():
        raise over_bound("has characters that are not printable; ids appear in logs and headers")
    return given


TOKEN_ID_SCHEMA = {"type": "integer", **range_schema(limits.TOKEN_ID)}
TOKEN_IDS_SCHEMA = {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1, "maxItems": limits.MAX_TOKEN_IDS}
TEXT_SCHEMA = {"type": "string", "maxLength": limits.MAX_TEXT_CHARS}
TEXTS_SCHEMA = {"type": "array", "items": TEXT_SCHEMA, "minItems": 1, "maxItems": limits.MAX_PROMPTS}
MANY_TOKEN_IDS_SCHEMA = {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1, "maxItems": limits.MAX_PROMPTS}
_ONE_OR_MANY = [TEXT_SCHEMA, TEXTS_SCHEMA, TOKEN_IDS_SCHEMA, MANY_TOKEN_IDS_SCHEMA]
NULL_SCHEMA = {"type": "null"}
LABEL_SCHEMA = {"type": "string", "maxLength": limits.MAX_LABEL_CHARS}
SOURCE_SCHEMA = {"type": "string", "maxLength": limits.MAX_SOURCE_BYTES}
_BIASES = {
    "type": "object",
    "maxProperties": limits.MAX_LOGIT_BIAS,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$", "maxLength": 10},
    "additionalProperties": {"type": "number", **range_schema(limits.LOGIT_BIAS)},
}

Prompts = Annotated[Any, with_schema(anyOf=_ONE_OR_MANY)]
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]
Messages = Annotated[list[Message], AtMost(limits.MAX_MESSAGES)]
ModelName = Annotated[str, AtMost(limits.MAX_MODEL_CHARS)]
RequestId = Annotated[str, AtMost(limits.MAX_REQUEST_ID_CHARS), AfterValidator(_printable)]
Salt = Annotated[str, AtMost(limits.MAX_SALT_CHARS)]
Text = Annotated[str, AtMost(limits.MAX_TEXT_CHARS)]
Path = Annotated[str, AtMost(limits.MAX_PATH_CHARS)]
Label = Annotated[str, AtMost(limits.MAX_LABEL_CHARS)]
Source = Annotated[str, AtMost(limits.MAX_SOURCE_BYTES)]
ToolName = Annotated[str, AtMost(limits.MAX_TOOL_NAME_CHARS)]
Description = Annotated[str, AtMost(limits.MAX_DESCRIPTION_CHARS)]
Object = Annotated[dict[str, Any], AtMost(limits.MAX_JSON_VALUES), AnyJSON()]
TemplateArguments = Annotated[dict[str, Any], AtMost(limits.MAX_OBJECT_FIELDS), AnyJSON()]
Weights = Annotated[list[Annotated[float, Within(limits.MIX_WEIGHT)]], AtMost(limits.MAX_MIXED)]
Metadata = Annotated[
    dict[
        Annotated[str, AtMost(limits.MAX_METADATA_KEY_CHARS)],
        Annotated[str, AtMost(limits.MAX_METADATA_CHARS)],
    ],
    AtMost(limits.MAX_METADATA),
]

MaxTokens = Annotated[int, Within(limits.MAX_TOKENS)]
MaxThinking = Annotated[int, Within(limits.MAX_THINKING)]
N = Annotated[int, Within(limits.SAMPLING["n"])]
Temperature = Annotated[float, Within(limits.SAMPLING["temperature"])]
TopP = Annotated[float, Within(limits.SAMPLING["top_p"])]
TopK = Annotated[int, Within(limits.SAMPLING["top_k"])]
MinP = Annotated[float, Within(limits.SAMPLING["min_p"])]
Penalty = Annotated[float, Within(limits.SAMPLING["presence_penalty"])]
RepetitionPenalty = Annotated[float, Within(limits.SAMPLING["repetition_penalty"])]
Seed = Annotated[int, Within(limits.SAMPLING["seed"])]
MinTokens = Annotated[int, Within(limits.SAMPLING["min_tokens"])]
NumLogprobs = Annotated[int, Within(limits.SAMPLING["logprobs"])]
Truncation = Annotated[int, Within(limits.TRUNCATE)]
Priority = Annotated[int, Within(limits.PRIORITY)]
Version = Annotated[int, Within(limits.VERSION)]
Dimensions = Annotated[int, Within(limits.DIMENSIONS)]
LogitBias = Annotated[dict[str, float], AtMost(limits.MAX_LOGIT_BIAS), WithJsonSchema(_BIASES)]
StopText = Annotated[str, AtMost(limits.MAX_STOP_CHARS)]
Stop = StopText | Annotated[list[StopText], AtMost(limits.MAX_STOP_STRINGS)]
StopIds = Annotated[list[Annotated[int, Within(limits.TOKEN_ID)]], AtMost(limits.MAX_STOP_TOKEN_IDS)]
AllowedIds = Annotated[list[Annotated[int, Within(limits.TOKEN_ID)]], AtMost(limits.MAX_ALLOWED_TOKEN_IDS)]
BadWord = Annotated[str, AtMost(limits.MAX_BAD_WORD_CHARS)]
BadWords = Annotated[list[BadWord], AtMost(limits.MAX_BAD_WORDS)]
Choices = Annotated[list[Source], AtMost(limits.MAX_CHOICES)]
