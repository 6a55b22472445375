from itertools import count

import pytest

from router.chat_template import MAX_RENDERED_CHARS, ChatTemplate, ChatTemplateError
from tests.router.tiny_tokenizers import CHATML, LLAMA

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, str]] = USER) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def test_renders_for_the_assistants_turn() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_are_variables() -> None:
    assert render(LLAMA) == "<s>[user] hi\n"


def test_a_template_may_refuse() -> None:
    with pytest.raises(ChatTemplateError, match="Only user and assistant roles"):
        render(LLAMA, [{"role": "system", "content": "x"}])


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_control_flow_tags_of_transformers_work() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"


def test_generation_blocks_render_their_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!"
    assert render(source) == "hi!"


def test_tojson_keeps_characters() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_an_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_syntax_error_is_found_at_start() -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("x\n{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_an_endless_template_is_stopped(source: str) -> None:
    ticks = count()
    template = ChatTemplate(source, {}, clock=lambda: next(ticks) / 1000)
    with pytest.raises(ChatTemplateError, match="too long"):
        template.render(USER)
    assert 2000 <= next(ticks) <= 2010


def test_output_is_bounded() -> None:
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="too long"):
        render(source, [{"role": "user", "content": "x" * (MAX_RENDERED_CHARS // 50)}])
