"""Test that chat templates are isolated, and that errors of templates and long inputs are reported."""

from __future__ import annotations

import pytest

import meshpar as mp
from meshpar.data.template import Template

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
    ("{% if %}", "compile it as a chat template.*TemplateSyntaxError"),
    ("{% break %}", "compile it as a chat template.*SyntaxError"),
    ("{{ " + "(" * 9_999 + "1" + ")" * 9_999 + " }}", "compile it as a chat template"),
])  # fmt: skip
def test_faulty_templates_are_rejected(source, match):
    check_rejected(source, match)
