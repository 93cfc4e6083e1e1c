"""Templates that do with tools what the checkpoints' own do: the same calls of jinja, shorter words."""

from __future__ import annotations

# JSON signatures in <tools>, history as <tool_call>{...}</tool_call>, results in user turns.
HERMES_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>{"name": <name>, "arguments": <object>}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Python stubs, types told from the schema; history as Python in a fence.
MINICPM3_TOOLS = """\
{%- macro type_of(name, spec) %}
    {%- set known = {'string': 'str', 'number': 'float', 'integer': 'int', 'boolean': 'bool', 'null': 'None'} %}
    {%- if spec.enum %}{{- name | title }}
    {%- elif known[spec.type] is defined %}{{- known[spec.type] }}
    {%- elif spec.type == 'array' %}{{- 'List[' + type_of(name, spec['items']) + ']' }}
    {%- elif spec.type == 'object' %}{{- 'Dict[str, Any]' if not spec.properties else name | title }}
    {%- elif spec.type is iterable %}
        {{- 'Union[' }}{%- for t in spec.type %}{{- type_of(name, {'type': t}) }},{%- endfor %}{{- ']' }}
    {%- else %}{{- 'Any' }}{%- endif %}
{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}{%- set system = messages[0]['content'] %}
{%- else %}{%- set rest = messages %}{%- set system = '' %}{%- endif %}
{{- '<|im_start|>system\\n' + system if system or tools }}
{%- for tool in tools or [] %}
    {%- if tool.type is not defined or tool.type == 'function' %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '\\ndef ' + tool.name + '(' }}
        {%- for name, spec in tool.parameters.properties | items %}
            {{- name + ': ' + type_of(name, spec) }}
            {{- '=None' if name not in tool.parameters.required }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- '):\\n    \\"\\"\\"' ~ tool.description ~ '\\n' }}
        {%- for name, spec in tool.parameters.properties | items %}
            {{- name + ' ' + (spec.description | tojson if spec.description else '') + '\\n' }}
            {%- for option in spec.enum or [] %}
                {{- 'enum_' + loop.index0 | string + ' = ' + option | tojson }}
            {%- endfor %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{{- '\\n<|thought_start|>\\n{why}\\n<|thought_end|>\\n' if tools }}
{{- '<|tool_call_start|>\\n```python\\nf(a=1)\\n```\\n<|tool_call_end|>\\n' if tools }}
{{- '<|im_end|>\\n' if system or tools }}
{%- for message in rest %}
    {%- set content = message.content %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- '<|thought_start|>\\n' + message.thought + '\\n<|thought_end|>\\n' if message.thought }}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|tool_call_start|>\\n```python\\n' }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- tool_call.name + '(' }}
            {%- if tool_call.arguments is defined and tool_call.arguments | length > 0 %}
                {%- for name, value in tool_call.arguments | items %}
                    {{- name + '=' + value | tojson }}{{- ',' if not loop.last }}
                {%- endfor %}
            {%- endif %}
            {{- ')\\n' }}
        {%- endfor %}
        {{- '```\\n<|tool_call_end|>\\n' }}
        {{- content if content and not content.startswith('<|tool_call_start|>') }}
    {%- else %}{{- content }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# JSON signatures, history as XML with CDATA where a text has < & or a line's end; emits <s> itself.
MINICPM5_TOOLS = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n<function name="function-name"><param name="param-name">param-value</param></function>' }}
    {{- '\\nwrap it: <param name="param-name"><![CDATA[...]]></param><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n' if not loop.first or message.content }}
            {{- '<function name="' ~ tool_call.name ~ '">' }}
            {%- set given = tool_call.arguments if tool_call.arguments is mapping else {} %}
            {%- for name, value in given.items() %}
                {{- '<param name="' ~ name ~ '">' }}
                {%- if value is string and ('<' in value or '&' in value or '\\n' in value) %}
                    {{- '<![CDATA[' ~ value ~ ']]>' }}
                {%- elif value is string %}{{- value }}
                {%- else %}{{- value | tojson }}{%- endif %}
                {{- '</param>' }}
            {%- endfor %}
            {{- '</function>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}
{%- endif %}
"""
