"""The built-in ChatML template: tools as Hermes and Qwen are shown them; without any, nothing but the turns."""

from __future__ import annotations

CHATML = """\
{%- set led = messages and messages[0]['role'] == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {{- messages[0]['content'] + '\\n\\n' if led -}}
    {{- 'You can call these functions:\\n<tools>\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
    {{- '</tools>\\nTo call one, answer with its name and its arguments as JSON:\\n' -}}
    {{- '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if tools and message['role'] == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif not (tools and led and loop.first) -%}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}
        {%- for call in message['tool_calls'] or [] -%}
            {{- '\\n' if message['content'] or not loop.first -}}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
