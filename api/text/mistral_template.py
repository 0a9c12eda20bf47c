"""The chat template for Mistral models whose folder has tekken.json and no template.

It writes the instruct formats v3, v7, v11 and v13, with text and tools. Source: mistral-common,
tokens/tokenizers/instruct.py.
"""

from __future__ import annotations

_VERSIONS = (3, 7, 11, 13)

_TEMPLATE = """\
{%- set version = VERSION -%}
{%- set seen = namespace(first=-1, last=-1, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set seen.last = loop.index0 -%}
        {%- if seen.first < 0 -%}{%- set seen.first = loop.index0 -%}{%- endif -%}
    {%- elif message.role in ('system', 'developer') and version < 7 -%}
        {%- set seen.system = seen.system + message.content + '\\n\\n' -%}
    {%- endif -%}
{%- endfor -%}
{%- set tools_at = seen.first if version >= 13 else seen.last -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role in ('system', 'developer') -%}
        {%- if version >= 7 -%}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}{%- endif -%}
    {%- elif message.role == 'user' -%}
        {%- if tools and loop.index0 == tools_at -%}
            {{- '[AVAILABLE_TOOLS][' -}}
            {%- for tool in tools -%}
                {%- set shown = {'name': tool.function.name, 'description': tool.function.description or '',
                    'parameters': tool.function.parameters or {}} -%}
                {{- {'type': 'function', 'function': shown} | tojson -}}
                {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
            {%- endfor -%}
            {{- '][/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' + (seen.system if loop.index0 == seen.last else '') + message.content + '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {%- if not message.content and not message.tool_calls -%}
            {{- raise_exception('a message of the assistant needs content or tool calls') -}}
        {%- endif -%}
        {%- if message.content and message.tool_calls and version < 7 -%}
            {{- raise_exception('a message of the assistant cannot have both content and tool calls') -}}
        {%- endif -%}
        {{- message.content.rstrip(' ') -}}
        {%- if message.tool_calls and version < 11 -%}
            {{- '[TOOL_CALLS][' -}}
            {%- for call in message.tool_calls -%}
                {%- set shown = {'name': call.function.name, 'arguments': call.function.arguments} -%}
                {%- if call.id -%}{%- set shown = dict(shown, id=call.id) -%}{%- endif -%}
                {{- shown | tojson -}}
                {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
            {%- endfor -%}
            {{- ']' -}}
        {%- elif message.tool_calls -%}
            {%- for call in message.tool_calls -%}
                {{- '[TOOL_CALLS]' + call.function.name -}}
                {%- if call.id and version < 13 -%}{{- '[CALL_ID]' + call.id -}}{%- endif -%}
                {{- '[ARGS]' + call.function.arguments | tojson -}}
            {%- endfor -%}
        {%- endif -%}
        {{- eos_token -}}
    {%- elif message.role == 'tool' -%}
        {%- if version < 7 -%}
            {{- '[TOOL_RESULTS]' + {'content': message.content, 'call_id': message.tool_call_id} | tojson -}}
        {%- elif version < 13 -%}
            {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content -}}
        {%- else -%}
            {{- '[TOOL_RESULTS]' + message.content -}}
        {%- endif -%}
        {{- '[/TOOL_RESULTS]' -}}
    {%- else -%}
        {{- raise_exception('messages of the role ' + message.role + ' are not supported') -}}
    {%- endif -%}
{%- endfor -%}
"""


def mistral_template(version: int) -> str | None:
    """Returns the template for a version of the format, or None if that version is not known."""
    return _TEMPLATE.replace("VERSION", str(version)) if version in _VERSIONS else None
