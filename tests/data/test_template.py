"""Test that chat templates are isolated, and that errors of templates and long inputs are reported."""

from __future__ import annotations

import contextlib
import json
import os

import pytest

import meshpar as mp
from meshpar.data import template
from meshpar.data.template import Template
from tests import grid
from tests.errors import raises

jinja2 = pytest.importorskip("jinja2", reason="renders templates: pip install meshpar[hf]")
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def check_rejected(source: str, match: str) -> None:
    with pytest.raises(mp.MeshparError, match=match):
        Template(source, {}, where="template").render("line 1", CHAT)


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
    ("{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}", "RecursionError"),
    ("{{ 'x' * 10 ** 7 }}{{ 'x' }}", "the limit is"),
    ("{% if %}", "compile it as a chat template.*TemplateSyntaxError"),
    ("{% break %}", "compile it as a chat template.*SyntaxError"),
    ("{{ " + "(" * 9_999 + "1" + ")" * 9_999 + " }}", "compile it as a chat template"),
    (" " * 100_001, "compile it as a chat template.*the limit is 100,000"),
])  # fmt: skip
def test_faulty_templates_are_rejected(source, match):
    check_rejected(source, match)


@pytest.mark.parametrize("size", [template.MAX_CHARS, template.MAX_CHARS + 1])
def test_long_conversations_are_refused(size):
    chat = [{"role": "user", "content": "x" * (size - len(json.dumps([{"role": "user", "content": ""}])))}]
    with raises("out-of-range") if size > template.MAX_CHARS else contextlib.nullcontext():
        Template("{{ messages | length }}", {}, where="template").render("line 1", chat)


PIPES = ["template.jinja", "chat_template.jinja", "tokenizer_config.json"]


@pytest.mark.parametrize("name", grid.cases(*PIPES[:1], grid=PIPES))
def test_template_file_must_not_be_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with raises("wrong-type"):
        Template.of(str(tmp_path), str(tmp_path / name) if name == "template.jinja" else None)
