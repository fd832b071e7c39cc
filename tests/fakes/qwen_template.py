"""The chat template of Qwen 3.8 models for text, in Jinja, as released checkpoints carry it (images left out)."""

from __future__ import annotations

import json
from typing import Any

import jinja2

XHIGH = (
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
    "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer."
)
LOW = (
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion without "
    "unnecessary elaboration."
)
FORMAT = (
    "\\n\\nIf you choose to call a function ONLY reply in the following format with NO suffix:\\n\\n<tool_call>\\n"
    "<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n"
    "<parameter=example_parameter_2>\\nThis is the value for the second parameter\\nthat can span\\nmultiple lines\\n"
    "</parameter>\\n</function>\\n</tool_call>\\n\\n<IMPORTANT>\\nReminder:\\n- Function calls MUST follow the "
    "specified format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML "
    "tags\\n- Required parameters MUST be specified\\n- You may provide optional reasoning for your function call in "
    "natural language BEFORE the function call, but NOT after\\n- If there is no function call available, answer the "
    "question like normal with your current knowledge and do not tell the user about function calls\\n</IMPORTANT>"
)
TEMPLATE = """\
{%- set note = '' %}
{%- if enable_thinking is undefined or enable_thinking is true %}
    {%- set effort = reasoning_effort|default('xhigh') %}
    {%- if effort not in ('xhigh', 'medium', 'low') %}{{- raise_exception('Unexpected reasoning effort') }}{%- endif %}
    {%- if effort == 'xhigh' %}{%- set note = 'XHIGH' %}{%- elif effort == 'low' %}{%- set note = 'LOW' %}{%- endif %}
{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n' }}
    {%- if note %}{{- note + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>" }}
    {{- 'FORMAT' }}
    {%- if messages[0].role == 'system' %}
        {%- set content = messages[0].content|trim %}
        {%- if content %}{{- '\\n\\n' + content }}{%- endif %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {%- set content = messages[0].content|trim %}
    {%- if content %}
        {{- '<|im_start|>system\\n' + (note + '\\n\\n' if note else '') + content + '<|im_end|>\\n' }}
    {%- elif note %}{{- '<|im_start|>system\\n' + note + '<|im_end|>\\n' }}{%- endif %}
{%- elif note %}{{- '<|im_start|>system\\n' + note + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set content = message.content|trim %}
        {%- if not(content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.searching = false %}
            {%- set ns.last_query_index = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.searching %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = (message.content or '')|trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content|trim %}{%- endif %}
        {%- if preserve_thinking is undefined or preserve_thinking is true or loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- set tool_call = tool_call.function %}
                {%- if not loop.first %}{{- '\\n' }}{%- elif content|trim %}{{- '\\n\\n' }}{%- endif %}
                {{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
                {%- for name, value in tool_call.arguments|items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {{- value | string if value is string else value | tojson | safe }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
""".replace("XHIGH", XHIGH).replace("LOW", LOW).replace("FORMAT", FORMAT)  # fmt: skip


def apply(messages: list[dict[str, Any]], tools: list[dict[str, Any]], **options: Any) -> str:
    """As transformers applies a template."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(TEMPLATE)
    return template.render(messages=messages, tools=tools, add_generation_prompt=True, **options)
