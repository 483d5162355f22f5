"""Digests of a program ignore names, source lines and threads, and depend on everything else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from meshpar.inspect.hlo.parser import parse
from meshpar.inspect.program_digest import digest, module_digests, opcode_counts

TEXT = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=8

%add_region (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%a.1, %b.1), metadata={op_name="jit(step)/mlp/add" source_file="a.py" source_line=3}
}

ENTRY %main.9 (x.1: f32[8,4], y.1: f32[8,4]) -> f32[8,4] {
  %x.1 = f32[8,4]{1,0} parameter(0)
  %y.1 = f32[8,4]{1,0} parameter(1)
  %c.1 = f32[] constant(2)
  %mul.1 = f32[8,4]{1,0} multiply(%x.1, %y.1), metadata={op_name="jit(step)/mlp/mul" source_file="a.py" source_line=4}
  %tanh.1 = f32[8,4]{1,0} tanh(%y.1), control-predecessors={%mul.1}, backend_config={"outer_dimension_partitions":["2"],"n":1}
  ROOT %ar.1 = f32[8,4]{1,0} all-reduce(%mul.1), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add_region, frontend_attributes={a="b.1"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mul.1", "multiply_fusion.77"),
        ("add_region", "region_5.6"),
        ("jit_step", "jit_update"),
        ("jit(step)/mlp", "jit(step)/decoder/mlp"),
        ("a.py", "folder/b.py"),
        ("source_line=4", "source_line=40"),
        ("channel_id=1", "channel_id=7"),
        ('{a="b.1"}', '{a="c"}'),
        ('["2"]', '["64"]'),
    ],
)
def test_digest_ignores_names_lines_and_threads(before, after):
    assert before in TEXT
    assert digest(parse(TEXT.replace(before, after))) == digest(parse(TEXT))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (" multiply(", " divide("),
        ("(%x.1, %y.1)", "(%y.1, %x.1)"),
        ("tanh(%y.1)", "tanh(%x.1)"),
        ("all-reduce(%mul.1)", "all-reduce(%tanh.1)"),
        ("constant(2)", "constant(3)"),
        ("{{0,1},{2,3}}", "{{0,2},{1,3}}"),
        ("f32[] add(", "f32[] maximum("),
        ("f32[8,4]{1,0} tanh", "f32[8,4]{0,1} tanh"),
        ("f32[8,4]{1,0} tanh", "bf16[8,4]{1,0} tanh"),
        (", control-predecessors={%mul.1}", ""),
        ('"n":1', '"n":2'),
        ("(0, {}, may-alias)", "(1, {}, may-alias)"),
        ("num_partitions=8", "num_partitions=4"),
    ],
)
def test_digest_depends_on_instructions(before, after):
    assert before in TEXT
    assert digest(parse(TEXT.replace(before, after))) != digest(parse(TEXT))


def test_digest_of_a_function_that_moves_to_another_file():
    source = "def {name}(x, w):\n    {a} = jax.nn.gelu(x @ w)\n    return {a} @ w.T + {constant}\n"

    def compiled(file: str, lines: int = 0, **names: str) -> str:
        namespace = {"jax": jax}
        names = {"name": "layer", "a": "hidden", "constant": "1.0", **names}
        exec(compile("\n" * lines + source.format(**names), file, "exec"), namespace)
        x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8), (8, 16)))
        return digest(parse(jax.jit(namespace[names["name"]]).lower(x, w).compile().as_text()))

    first = compiled("a.py")
    assert compiled("a.py") == compiled("other/b.py", 20, name="mlp", a="h") == first
    assert compiled("a.py", constant="2.0") != first


def test_opcode_counts_leave_out_parameters_and_constants():
    assert opcode_counts(parse(TEXT)) == {"add": 1, "all-reduce": 1, "multiply": 1, "tanh": 1}


def test_module_digests_find_the_changed_module():
    text = TEXT.replace("multiply(%x.1, %y.1)", "multiply(%x.1, %c.1)")
    before, after = (module_digests(parse(text.replace("constant(2)", f"constant({value})"))) for value in (2, 3))
    assert before.keys() == after.keys() == {"", "mlp"}
    assert (before["mlp"][0], before[""]) == (3, after[""])
    assert before["mlp"] != after["mlp"]
