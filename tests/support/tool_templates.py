"""Has short chat templates in the style of three families of models that are shown tools."""

HERMES = """\
{%- if tools %}<|im_start|>system
You may call functions. <tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools> Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for m in messages -%}
<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

LLAMA3 = """\
{%- for m in messages -%}
{%- if m.role == 'user' and loop.first and tools %}<|start_header_id|>user<|end_header_id|>

Answer with {"name": function, "parameters": its arguments}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{{ m.content }}<|eot_id|>
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}{# <|python_tag|> comes of the model #}"""

MISTRAL = """\
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}, {{ m.tool_call_id }}[/TOOL_RESULTS]
{%- elif m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- else %} {{ m.content }}</s>
{%- endif %}
{%- endfor %}"""

TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL}
