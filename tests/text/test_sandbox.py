"""A template from the internet cannot run code, run forever or fill the memory."""

from __future__ import annotations

import threading
import time

import pytest

from minicpm_cli.errors import TemplateError
from minicpm_cli.text.meter import Limits
from minicpm_cli.text.sandbox import Sandbox

MESSAGES = {"messages": [{"role": "user", "content": "x" * 1000}]}
DOUBLING = "{% set a = 'x' * 1000 %}"

ESCAPES = [
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (messages|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[0].content.format_map.__self__.__class__ }}",
]
ENDLESS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999)|select('odd')|list|length }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
]
HUGE = [
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**8 }}",
    "{{ 10**9 * 'a' }}",
    "{{ 7 ** (10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ ('\t' * 100000).expandtabs(100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "{{ ('a\n' * 100000)|indent(100000) }}",
    "{{ ('a' * 100000)|list|join('b' * 100000) }}",
    "{{ ('b' * 100000).join(('a' * 100000)|list) }}",
    "{{ 'aaaa'.translate({97: 'b' * 100000}) }}",
    "{{ (5).to_bytes(10**9, 'big') }}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    DOUBLING + "{% set a %}{{ a }}{{ a }}{{ a }}{{ a }}{% endset %}" * 20,
    DOUBLING + "{% set a = [a, a, a, a, a, a] %}" * 20 + "{{ a }}",
    DOUBLING + "{% set a = (a, a, a, a, a, a) %}" * 20 + "{{ a }}",
    DOUBLING + "{% set a = {'a': a, 'b': a, 'c': a} %}" * 30 + "{{ a|tojson }}",
    "{% macro f(n) %}{{ f(n - 1, varargs, varargs, varargs) if n }}{% endmacro %}{{ f(40, 1) }}",
    "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out(source: str) -> None:
    """An error, or nothing: what is unsafe is undefined."""
    try:
        text = Sandbox(source, "chat template").render(MESSAGES)
    except TemplateError:
        return
    assert text == ""


@pytest.mark.parametrize("source", [*ENDLESS, *HUGE])
def test_stopped_within_seconds(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError, match="chat template"):
        Sandbox(source, "chat template", Limits(seconds=3)).render(MESSAGES)
    assert time.monotonic() - start < 10


def test_formats_that_do_no_harm() -> None:
    source = "{{ '%05.2f|%s' % (1.5, 'a') }}{{ '{:>5}{}'.format('a', 1) }}{{ 'a'|center(5) }}"
    assert Sandbox(source, "t").render({}) == "01.50|a    a1  a  "


def test_time_is_limited_in_any_thread() -> None:
    sandbox = Sandbox(ENDLESS[1], "chat template", Limits(steps=10**12, seconds=0.2))
    errors = []

    def render() -> None:
        try:
            sandbox.render(MESSAGES)
        except TemplateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(10)
    assert len(errors) == 1
    assert "more than 0.2 s" in errors[0]


def test_steps_are_limited_however_quick_they_are() -> None:
    with pytest.raises(TemplateError, match="takes more than 1000 steps"):
        Sandbox(ENDLESS[1], "chat template", Limits(steps=1000, seconds=20)).render(MESSAGES)


def test_a_run_does_not_use_up_the_budget_of_the_next() -> None:
    sandbox = Sandbox("{% for i in range(90) %}x{% endfor %}", "chat template", Limits(steps=400))
    assert {sandbox.render({}) for _ in range(10)} == {"x" * 90}


def test_two_threads_do_not_mix() -> None:
    sandbox = Sandbox("{% for i in range(200) %}{{ name }}{% endfor %}", "chat template")
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda name=name: results.append(sandbox.render({"name": name}))) for name in "abcdef"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [c * 200 for c in "abcdef"]


def test_a_long_prompt_is_no_problem() -> None:
    text = "word " * 400_000
    source = "{% for m in messages %}{{ m.content.split('</x>')[-1]|trim + '\n' }}{% endfor %}"
    assert Sandbox(source, "t").render({"messages": [{"content": text}]}) == text.strip() + "\n"


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("a\nb\n{% if %}", 3, "Expected an expression"),
        ("a\n{{ messages.foo.bar }}", 2, "no attribute 'foo'"),
        ("a\n\n{{ raise_exception('Roles must alternate') }}", 3, "Roles must alternate"),
        ("{{ messages|nofilter }}", 1, "No filter named"),
        ("\n{{ 1 / 0 }}", 2, "division by zero"),
    ],
)
def test_errors_name_line_and_reason(source: str, line: int, reason: str) -> None:
    with pytest.raises(TemplateError, match=rf"^chat template, line {line}: .*{reason}"):
        Sandbox(source, "chat template").render(MESSAGES)
