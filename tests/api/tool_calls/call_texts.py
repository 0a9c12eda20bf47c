"""Texts with calls in every format, and texts that only look like calls."""

from __future__ import annotations

import json
from typing import Any

from lorafleet.api.tool_calls.known import FORMATS
from lorafleet.api.tool_calls.parser import Calls, ToolCallParser
from lorafleet.api.tool_calls.section_formats import SECTIONS

ARGUMENTS = '{"a": [1, "x\\"}]", {"b": null, "c": -1.5e3}], "é": "\\u00e9 <tool_call>", "t": true}'
F, G = f'{{"name": "f", "arguments": {ARGUMENTS}}}', '{"arguments": {}, "type": "function", "name": "g"}'
TWO = [("f", ARGUMENTS), ("g", "{}")]

ARRAYS = ("granite", "phi4_mini_json", "nemotron_json", "hunyuan")
DS, DS_CALL, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
# A text that has the markers of calls, quotes and escapes.
CODE = "def f():\n\treturn '<tool_call> </tool_call> \\\"é' # </function> [f(a=1)] <parameter=b>\n"
TYPED = [
    (
        "typed",
        f'{{"text": {json.dumps(CODE, ensure_ascii=False)}, "n": -1.5, "flag": true, "more": {{"a": [1, "é\\""], "b": null}}}}',  # noqa: E501
    ),
    ("g", "{}"),
]
SCHEMAS: dict[str, Any] = {
    "typed": {
        "properties": {
            "text": {"$ref": "#/$defs/text"},
            "n": {"type": "number"},
            "flag": {"type": "boolean"},
            "more": {"type": "object"},
        },
        "$defs": {"text": {"type": "string"}},
    }
}
_MORE = '{"a": [1, "é\\""], "b": null}'
_VALUES = {"text": CODE, "n": "-1.5", "flag": "True", "more": _MORE}
QWEN = (
    "Well\n<tool_call>\n<function=typed>\n"
    + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _VALUES.items())
    + "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="typed">\n'
    + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in _VALUES.items())
    + '</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
)
GLM = (
    "Well\n<tool_call>typed\n"
    + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _VALUES.items())
    + "</tool_call>\n<tool_call>g\n</tool_call>"
)
PYTHON = f"text={CODE!r}, n=-1.5, flag=True, more={{'a': [1, 'é\"'], \"b\": None}}"

# format, text, its content, its calls
CALLS = [
    ("hermes", f"Let me see. \n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>\n", "Let me see.", TWO),
    ("hermes", f"<tool_call>{G}</tool_call> That was it.", " That was it.", [("g", "{}")]),
    ("hermes", f"<tool_call>{G}", "", [("g", "{}")]),
    ("llama3_json", f" {F}; {G}", "", TWO),
    ("llama3_json", f"<|python_tag|>{F};{G}\n", "", TWO),
    ("llama3_json", f"Well <|python_tag|>{F.replace('arguments', 'parameters')}", "Well", TWO[:1]),
    ("mistral", f"Well [TOOL_CALLS] [{F}, {G}]\n", "Well", TWO),
    ("mistral", f"[TOOL_CALLS]f{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", "", TWO),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{ARGUMENTS}[TOOL_CALLS]g[CALL_ID]q[ARGS] {{}}", "", TWO),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a[ARGS", "[TOOL_CALLS]f[CALL_ID]a[ARGS", []),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        "Let me see.",
        TWO,
    ),
    ("harmony", " to=functions.g<|channel|>commentary<|message|>{}", "", [("g", "{}")]),
    ("harmony", "<|channel|>analysis<|message|>to=functions.f<|channel|>final<|message|>Hi <b>\n", "Hi <b>\n", []),
    ("harmony", "<|channel|>commentary to=functions.other<|message|>{}<|call|>", "{}", []),
    ("harmony", "<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>fin", "Hi", []),
    ("deepseek_v3", f"Well \n{DS}{DS_CALL}function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```{DS_END}\n{DS_CALL}function"
     f"<｜tool▁sep｜>g\n```json\n{{}}\n```{DS_END}<｜tool▁calls▁end｜> x", "Well x", TWO),
    ("deepseek_v31", f"{DS}{DS_CALL}f<｜tool▁sep｜>{ARGUMENTS}{DS_END}{DS_CALL}g<｜tool▁sep｜>{{}}", "", TWO),
    ("deepseek_v31", f"```\n{DS}\n```", f"```\n{DS}\n```", []),
    ("kimi_k2", f"Hm <|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{ARGUMENTS}"  # noqa: E501
     "<|tool_call_end|> <|tool_call_begin|>g:4<|tool_call_argument_begin|> {}<|tool_call_end|>"
     "<|tool_calls_section_end|>\n", "Hm", TWO),
    ("granite", f"<|tool_call|>[{F}, {G}]", "", TWO),
    ("granite", f"<|tool_call|> [{F}] <|tool_call|>[{G}]", "", TWO),
    ("phi4_mini_json", f"a<|tool_call|>[{F}, {G}]<|/tool_call|>b", "ab", TWO),
    ("nemotron_json", f"<TOOLCALL>[{F}, {G}]</TOOLCALL>\n", "", TWO),
    ("hunyuan", f"<tool_calls>\n[{F}, {G}]\n</tool_calls>", "", TWO),
    ("qwen3_coder", QWEN, "Well", TYPED),
    ("qwen3_coder", "<tool_call><function=typed><parameter=text>a\n\nb</parameter></function>", "",
     [("typed", '{"text": "a\\n\\nb"}')]),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>", "", [("g", "{}")]),
    ("qwen3_coder", "<tool_call><tool_call><function=g></function></tool_call>", "<tool_call>", [("g", "{}")]),
    ("seed_oss", QWEN.replace("tool_call>", "seed:tool_call>"), "Well",
     [("typed", TYPED[0][1].replace("tool_call>", "seed:tool_call>")), *TYPED[1:]]),
    ("minimax_m2", MINIMAX, "", TYPED),
    ("glm45", GLM, "Well", TYPED),
    ("glm45", "<tool_call>g</tool_call><tool_call>g\n</tool_call>", "", [("g", "{}"), ("g", "{}")]),
    ("gemma4", 'Well <|tool_call>call:typed{text:<|"|>' + CODE + '<|"|>,n:-1.5,flag:true,more:{a:[1,<|"|>é"<|"|>],"b":null}}'  # noqa: E501
     "<tool_call|><|tool_call>call:g{}<tool_call|>", "Well", TYPED),
    ("llama4_pythonic", " [typed(" + PYTHON + "), g()]", "", TYPED),
    ("llama4_pythonic", "Hm <|python_start|>[typed(" + PYTHON + ", ), g()]<|python_end|>", "Hm", TYPED),
    ("lfm2", "<|tool_call_start|>[typed(" + PYTHON + "), g()]<|tool_call_end|>Hm", "Hm", TYPED),
    ("olmo3", "<function_calls>typed(" + PYTHON + ")\ng()</function_calls>", "", TYPED),
]  # fmt: skip
# The beginning of a call of f, where it is no JSON.
BEGUN = {
    "mistral": "[TOOL_CALLS]f",
    "harmony": "<|channel|>commentary to=functions.f<|message|>",
    "deepseek_v3": f"{DS}{DS_CALL}function<｜tool▁sep｜>f\n```json\n",
    "deepseek_v31": f"{DS}{DS_CALL}f<｜tool▁sep｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
    **{name: FORMATS[name].marker + '[{"name": "f", "arguments": ' for name in ARRAYS},
}
# The beginning of a call of typed up to the first two characters of its text, what breaks it, and the arguments so far.
TEXT_BEGUN = {
    "qwen3_coder": ("<tool_call><function=typed><parameter=text>\n", "</parameter>?"),
    "seed_oss": ("<seed:tool_call><function=typed><parameter=text>\n", "</parameter>?"),
    "minimax_m2": ('<minimax:tool_call><invoke name="typed"><parameter name="text">', "</parameter>?"),
    "glm45": ("<tool_call>typed\n<arg_key>text</arg_key>\n<arg_value>", "</arg_value>?"),
    "gemma4": ('<|tool_call>call:typed{text:<|"|>', '<|"|>?'),
    "llama4_pythonic": ("[typed(text='", "'?"),
    "lfm2": ("<|tool_call_start|>[typed(text='", "'?"),
    "olmo3": ("<function_calls>typed(text='", "'?"),
}
JSON_FORMATS = sorted(set(FORMATS) - set(TEXT_BEGUN))
# format, text that only looks like a call: it stays what it is
TEXTS = [
    ("hermes", "a < b, and <tool_c"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x'),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}'),
    ("hermes", "</tool_call> alone"),
    ("llama3_json", '{"x": 1} is JSON'),
    ("llama3_json", '{"name": "f", "parameters": 3}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("llama3_json", 'Here: {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python"),
    ("mistral", "[TOOL_CALLS]f(1)"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS] [{"name": "f"}]'),
    ("mistral", "[TOOL"),
    ("harmony", '{"a": 1} < 2'),
    ("harmony", "to be"),
    ("harmony", " to="),
    ("harmony", "<|chan"),
    ("harmony", BEGUN["harmony"] + "[1]"),
    ("harmony", "to=functions.f is " + "x" * 600),
    *((name, "Hm\n" + FORMATS[name].marker) for name in SECTIONS),
    *((name, FORMATS[name].marker[:-1]) for name in SECTIONS),
    *((name, f"```\n{FORMATS[name].marker} is a marker\n```") for name in SECTIONS),
    *((name, FORMATS[name].marker + SECTIONS[name][0].end) for name in SECTIONS),
    ("qwen3_coder", "<tool_call><function=unknown></function></tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f\n"),
    ("glm45", "<tool_call>unknown</tool_call>"),
    ("gemma4", "<|tool_call>call:f(a)<tool_call|>"),
    ("llama4_pythonic", "[1] is a note"),
    ("llama4_pythonic", "[f] and [f(1)]"),
    ("llama4_pythonic", "Here: [f()]"),
    ("deepseek_v31", f"{DS}{DS_CALL}unknown<｜tool▁sep｜>{{}}"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}"),
    ("granite", "<|tool_call|>{}"),
]


def calls_of(name: str, *, eager: bool) -> ToolCallParser:
    """Returns a parser of calls of f, g and typed."""
    known = FORMATS[name]
    return known.make(Calls(("f", "g", "typed"), eager=eager, new_id=known.new_id, schemas=SCHEMAS))


def begun_by(name: str) -> str:
    """Returns the beginning of a call of f up to its arguments, or of typed within its text."""
    if name in TEXT_BEGUN:
        return TEXT_BEGUN[name][0]
    return BEGUN.get(name, FORMATS[name].marker + '{"name": "f", "arguments": ')
