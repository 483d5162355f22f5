"""Tests of malicious chat templates: they raise an error within the limits of time, memory and output."""

from __future__ import annotations

import os
import time

import pytest

import meshpar as mp
from meshpar.data import template
from meshpar.data.template import Template
from tests import grid
from tests.errors import raises

jinja2 = pytest.importorskip("jinja2", reason="renders templates: pip install meshpar[hf]")
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
SECONDS = 0.3
DOUBLED = "{{% set n = namespace(x='xy') %}}{{% for a in range(60) %}}{{% set n.x = {} %}}{{% endfor %}}{{{{ n.x }}}}"
LOOPED = "{{% set t = 'a b' * 33333 %}}{{% for a in range(99999) %}}{{% set x = {} %}}{{% endfor %}}"
TIME, MEMORY, CHARS = "seconds of processor time", "needs too much memory", "the limit is"
ENDLESS = f"{TIME}|{MEMORY}|{CHARS}"


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(template, "MAX_SECONDS", SECONDS)
    monkeypatch.setattr(template, "MAX_BYTES", 1 << 28)


def check_rejected(source: str, match: str) -> None:
    start = time.monotonic()
    with pytest.raises(mp.MeshparError, match=match):
        Template(source, {}, where="template").render("line 1", CHAT)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("source", "match"), [
    ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% for m in messages %}{{ m.content }}{{ messages | length }}{% endfor %}", "if this message follows"),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
     "{% if add_generation_prompt %}<assistant><think>{% endif %}", "generation prompt, '<assistant><think>'"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ range(999999999) | list }}", "OverflowError|Range too big"),
    ("{{ lipsum(n=10 ** 9) }}", "UndefinedError"),
    ("{{ cycler() }}", "RuntimeError"),
    ("{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}", "RecursionError|" + TIME),
    ("{{ 'x' * 10 ** 15 }}", MEMORY),
    ("{{ 'x' * 10 ** 7 }}{{ 'x' }}", CHARS),
    ("{{ 2 ** 999999999 }}", ENDLESS),
    (LOOPED.format("range(99999) | sum"), TIME),
    (DOUBLED.format("n.x ~ n.x"), ENDLESS),
    ("{% if %}", "compile it as a chat template.*TemplateSyntaxError"),
    ("{% break %}", "compile it as a chat template.*SyntaxError"),
    ("{{ " + "(" * 99_999 + "1" + ")" * 99_999 + " }}", "compile it as a chat template"),
])  # fmt: skip
def test_template_is_isolated_and_limited(source, match):
    check_rejected(source, match)


FILTERS = sorted(jinja2.defaults.DEFAULT_FILTERS)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FILTERS)
def test_filters_in_loops_are_limited(name):
    """Filters that reject the arguments raise an error. All others exceed a limit."""
    for values in ("range(99999)", "('x y-' * 33333)", "('<!---->' * 33333)", "([[1, 2]] * 33333)"):
        loop = "{% for a in range(99999) %}"  # the variable `x` prevents constant folding in jinja2
        body = "{{ x | " + name + " | list | length }}{% endfor %}{% endfor %}"
        check_rejected("{% set x = " + values + " %}" + loop + loop + body, f"{ENDLESS}|Error")


@pytest.mark.matrix
@pytest.mark.parametrize(("source", "match"), [
    *((DOUBLED.format(x), ENDLESS) for x in (
        "n.x + n.x", "[n.x, n.x] | join", "''.join([n.x, n.x])", "n.x | replace('x', n.x)", "n.x.replace('x', n.x)",
        "[n.x, n.x]", "(n.x, n.x)", "{1: n.x, 2: n.x}", "dict(a=n.x, b=n.x)", "[n.x] * 2",
        "([n.x] + [n.x]) | batch(2) | list", "n.x * 99", "[n.x] | map('upper') | list + [n.x]",
    )),
    (DOUBLED.format("namespace(a=n.x, b=n.x)"), f"{ENDLESS}|differently"),  # renders memory addresses
    *((LOOPED.format(x), TIME) for x in (
        "range(99999) | list", "range(99999) | sort", "range(99999) | unique | list", "t | title",
        "range(99999) | groupby('real') | list", "range(99999) | map('abs') | list",
        "range(99999) | map('string') | join",
        "range(99999) | select('odd') | list", "dict(range(99998) | batch(2))", "([[1]] * 999) | sum(start=[])",
    )),
    ("{% set n = namespace(x=9) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}", ENDLESS),
    ("{% set x = 'x' * 9999 %}{% for a in range(9) %}{{ x.translate({120: x}) }}{% endfor %}", ENDLESS),
    # Quadratic time in a single C function: list copies and hash collisions.
    ("{{ ([[1] * 999] * 99999) | sum(start=[]) | length }}", ENDLESS),
    ("{{ range(0, 2305843009213693951 * 99999, 2305843009213693951) | unique | list | length }}", ENDLESS),
    ("{% for a in range(999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", TIME),
    ("{% for a in range(999) %}{{ 'x' * 99999 }}{% endfor %}", CHARS),
    ("{% set x %}{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}", ENDLESS),
    ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}", ENDLESS),
    ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
    *(("{{ " + x + " }}", MEMORY) for x in (
        "'%999999999d' % 1", "'{:>999999999}'.format(1)", "'x'.ljust(10 ** 9)", "'x' | center(10 ** 9)",
        "[1] | tojson(indent=10 ** 9)",
    )),
    *((open_ * 5000 + "1" + close * 5000, "compile it as a chat template") for open_, close in (
        ("{% if 1 %}", "{% endif %}"), ("{% for a in [1] %}", "{% endfor %}"), ("{% set x %}", "{% endset %}"),
    )),
    ("{{ " + "-" * 99_999 + "1 }}", f"Error|ended with code|{TIME}"),
    ("{{ 1" + " + 1" * 99_999 + " }}", f"Error|ended with code|{TIME}"),
    ("{{ x" + ".x" * 99_999 + " }}", f"Error|ended with code|{TIME}"),
    ("{{ [1]" + " | list" * 99_999 + " }}", f"Error|ended with code|{TIME}"),
])  # fmt: skip
def test_growing_and_nested_templates_are_limited(source, match):
    check_rejected(source, match)


def test_template_restarts_its_process():
    looping = Template(
        "{% for a in range(messages[0].n) %}{% for b in range(9999) %}{% endfor %}{% endfor %}!", {}, where="t"
    )
    with pytest.raises(mp.MeshparError, match=TIME):
        looping.render("line 1", [{"role": "user", "content": "", "n": 99_999}])
    assert looping.render("line 2", [{"role": "user", "content": "", "n": 1}])[0].text == "!"
    process = looping._process._process
    del looping
    assert process.poll() is not None


PIPES = ["template.jinja", "chat_template.jinja", "tokenizer_config.json"]


@pytest.mark.parametrize("name", grid.cases(*PIPES[:1], grid=PIPES))
def test_template_file_must_not_be_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with raises("wrong-type"):
        Template.of(str(tmp_path), str(tmp_path / name) if name == "template.jinja" else None)
