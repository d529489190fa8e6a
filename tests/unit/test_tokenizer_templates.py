"""Chat templates render as transformers renders them, in a sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt.errors import BadRequest, ModelError
from sapwood.srt.tokenizer.templates import MAX_REASON_CHARS, ChatTemplate, prepare

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content|trim + '\n\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """\
{% if not tools is defined %}{% set tools = none %}{% endif %}
{% set ns = namespace(count=0, first=true) %}
{%- if tools is not none %}
  {% for tool in tools %}
    {{- tool | tojson(indent=2) }}
    {{ loop.index }}/{{ tools | length }}
  {% endfor %}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% if message.content is string %}{% set text = message.content %}{% else %}{% set text = 1 %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% generation %}
<{{ message.role }}|{{ ns.count }}>{{ text }}{{ message | tojson }}
    {% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}<bot>{% endif %}
{% if extra is defined %}{{ extra }}{% endif %}
"""
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}{{ part['text'] }}{% endfor %};"
    "{% endfor %}"
)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi  there"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Ünï 🌳 <b>&\"'"}],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": " B\n"},
    ],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A river is "}],
]


def reference(source: str, chat: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([chat], chat_template=source, **VARIABLES, **options)
    text: str = rendered[0]
    return text


def ours(source: str, chat: list[dict[str, Any]], **options: Any) -> str:
    template = ChatTemplate(source, VARIABLES)
    return template.render(prepare(chat, wants_parts=template.wants_parts), **options)


def refused(source: str, chat: list[dict[str, Any]], **options: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        ours(source, chat, **options)
    return caught.value


@pytest.mark.parametrize("source", [CHATML, INST, TOOLS], ids=["chatml", "inst", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("begin", [True, False])
def test_renders_as_transformers(source: str, chat: list[dict[str, Any]], begin: bool) -> None:
    assert ours(source, chat, add_generation_prompt=begin) == reference(
        source, chat, add_generation_prompt=begin
    )


@pytest.mark.parametrize("source", [CHATML, INST, TRIMS], ids=["chatml", "inst", "trims"])
@pytest.mark.parametrize("text", ["A river is", "A river is ", "", "  ", "x\n"])
def test_continues_the_final_message_as_transformers(source: str, text: str) -> None:
    chat = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": text}]
    mine = ours(source, chat, add_generation_prompt=False, continue_final=True)
    assert mine == reference(source, chat, continue_final_message=True)
    assert not mine.endswith(("<|im_end|>\n", "</s>"))


def test_template_kwargs_and_tools_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "é <x>"}}]
    mine = ours(TOOLS, CHATS[0], tools=tools, kwargs={"extra": "more"})
    assert mine == reference(TOOLS, CHATS[0], tools=tools, extra="more", add_generation_prompt=True)
    assert "é <x>" in mine
    error = refused(TOOLS, CHATS[0], kwargs={"messages": []})
    assert error.param == "chat_template_kwargs"
    assert "messages" in error.message


def test_a_templates_words_are_cut_and_hold_no_control_characters() -> None:
    chat = [{"role": "user", "content": "a\r\n\x1b[2J\u202eé木" + "\x00" * 100_000}]
    for source in (
        "{{ raise_exception(messages[0].content) }}",
        "{{ {}[messages[0].content] + 1 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ ('%d' ~ messages[0].content) % messages[0].content }}",
    ):
        message = refused(source, chat).message
        assert message.isprintable(), source
        assert len(message) < MAX_REASON_CHARS + 100
    message = refused("{{ raise_exception(messages[0].content) }}", chat).message
    assert message.startswith(r"a\r\n\x1b[2J\u202eé木\x00")
    assert (len(message), message[-1]) == (MAX_REASON_CHARS, "…")
    whole = "x" * MAX_REASON_CHARS
    assert (
        refused("{{ raise_exception(messages[0].content) }}", [{"role": "", "content": whole}]).message
        == whole
    )
    assert refused("{{ raise_exception('Roles must alternate') }}", chat).message == "Roles must alternate"


def test_contents_become_strings() -> None:
    for content in ("", [], None, [{"type": "text", "text": ""}]):
        chat = [{"role": "assistant", "content": content}]
        assert ours("{{ messages[0].content + '|' }}", chat) == "|"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ours("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert ours("{{ messages[0].content }}", [{"role": "user"}]) == ""


def test_a_template_that_loops_over_parts_gets_parts() -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "yo"}]},
    ]
    assert ours(PARTS, chat) == "[user]hi;[assistant]yo;"
    assert ours(PARTS, chat, add_generation_prompt=False, continue_final=True) == "[user]hi;[assistant]yo"
    set_first = "{% set body = messages[0].content %}{% for p in body %}{{ p.text }}{% endfor %}"
    assert ours(set_first, chat) == "hi"
    both = "{% if messages[0].content is string %}S{% endif %}{% for p in messages[0].content %}.{% endfor %}"
    assert ours(both, chat) == "S.."


def test_null_values_are_as_if_absent() -> None:
    chat = [{"role": "user", "content": "x", "name": None, "tool_calls": None}]
    assert ours("{{ messages[0].name is defined }} {{ messages[0] | tojson }}", chat) == (
        'False {"role": "user", "content": "x"}'
    )


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}], "content[1]"),
        ([{"type": "text"}], "content[0]"),
        ([7], "content[0]"),
        (7, "content"),
        ({"text": "x"}, "content"),
    ],
)
def test_other_contents_are_refused(content: Any, place: str) -> None:
    error = refused(CHATML, [{"role": "user", "content": content}])
    assert f"messages[0].{place}" in error.message
    assert (error.status, error.param) == (400, "messages")


def test_messages_without_a_role_are_refused() -> None:
    assert "messages[0].role" in refused(CHATML, [{"content": "x"}]).message
    assert "messages[0].role" in refused(CHATML, [{"role": 3, "content": "x"}]).message
    assert "at least one" in refused(CHATML, []).message


def test_the_templates_own_words_reach_the_client() -> None:
    chat = [{"role": "assistant", "content": "first"}]
    assert refused(INST, chat).message == "Roles must alternate user/assistant/user/assistant/..."


def test_begin_and_continue_exclude_each_other() -> None:
    error = refused(CHATML, CHATS[3], add_generation_prompt=True, continue_final=True)
    assert error.param == "continue_final_message"
    hides = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert (
        "cannot be continued"
        in refused(hides, CHATS[3], add_generation_prompt=False, continue_final=True).message
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[5].content.x }}",
        "{{ undefined_thing.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content | int(base=99) + 'x' }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_gives_an_error_with_its_reason(source: str) -> None:
    assert refused(source, CHATS[0]).message.startswith("the chat template fails on these messages: ")


def test_what_a_template_writes_is_bounded() -> None:
    assert (
        "more than 8388608 characters"
        in refused("{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", CHATS[0]).message
    )


def test_a_template_that_is_none_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_strftime_now_is_there() -> None:
    assert ours("{{ strftime_now('%Y') }}", CHATS[0]).isdigit()
