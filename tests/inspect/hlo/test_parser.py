"""The parser on saved programs of both backends and two jax versions, on single constructs and on invalid text."""

from __future__ import annotations

import pickle
import textwrap

import pytest

from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.hlo.parser import HloSyntaxError
from meshpar.inspect.hlo.shapes import ArrayShape, TupleShape
from meshpar.inspect.hlo.walk import executed

VERSIONS = ("jax0.10", "jax0.12")
COMPILED = [(program, platform, v) for program in ("scan", "kernels") for platform in ("cpu", "cuda") for v in VERSIONS]


def parse_entry(body: str, header: str = "HloModule m", before: str = ""):
    """Return the entry computation of a module with these instructions."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    return hlo.parse(f"{header}\n{textwrap.dedent(before)}\nENTRY e {{\n{lines}\n}}\n").entry


def first(body: str, **kwargs):
    return parse_entry(body, **kwargs).instructions[-1]


ADD = """
    add {
      a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT s = f32[] add(a, b)
    }
"""


# Saved programs


@pytest.mark.parametrize("key", COMPILED, ids="-".join)
def test_compiled_programs_are_read(saved, key):
    module = saved[key]
    assert module.is_scheduled
    assert module.num_partitions == 8
    assert module.replica_count == 1
    assert module.entry is module.computations[module.entry.name]


@pytest.mark.parametrize("key", [key for key in COMPILED if key[0] == "scan"], ids="-".join)
def test_loops_carry_their_trip_count(saved, key):
    visits = [visit for visit in executed(saved[key]) if visit.loops]
    assert [v.loops[-1].trip_count for v in visits if v.loops[-1].body == v.computation.name] == [4, 4]


@pytest.mark.parametrize("key", COMPILED, ids="-".join)
def test_stack_tables_name_source_files(saved, programs, key):
    module = saved[key]
    stacks = [module.stack(ins) for computation in module for ins in computation if ins.metadata.stack_frame_id]
    innermost = {stack[0] for stack in stacks}
    assert any(frame.file.endswith("/programs.py") for frame in innermost)
    assert {"scan": "layer", "kernels": "body"}[key[0]] in {frame.function.split(".")[-1] for frame in innermost}
    # Stacks end at the top level of the script, or at the body of a shard_map, which is traced by itself.
    outermost = {stack[-1].function for stack in stacks}
    assert outermost == {"<module>"} | ({"kernels.<locals>.body"} if key[0] == "kernels" else set())


def test_saved_programs_contain_no_machine_paths(programs):
    for name in programs.PROGRAMS:
        for platform in ("cpu", "cuda"):
            for text in programs.saved(name, platform).values():
                assert '"/' not in text
                assert "site-packages" not in text


def test_module_pickles(saved):
    module = saved["scan", "cuda", "jax0.12"]
    assert pickle.loads(pickle.dumps(module)) == module


# Shapes


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("f32[]", ArrayShape("f32", ())),
        ("bf16[4,8]{1,0}", ArrayShape("bf16", (4, 8), "{1,0}")),
        ("s32[<=5]", ArrayShape("s32", (5,))),
        ("f32[2,3]{1,0:T(8,128)S(1)}", ArrayShape("f32", (2, 3), "{1,0:T(8,128)S(1)}")),
        ("token[]", ArrayShape("token", ())),
        ("()", TupleShape(())),
        (
            "((f32[2]{0}, /*index=1*/bf16[]), (u32[]))",
            TupleShape(
                (
                    TupleShape((ArrayShape("f32", (2,), "{0}"), ArrayShape("bf16", ()))),
                    TupleShape((ArrayShape("u32", ()),)),
                )
            ),
        ),
    ],
)
def test_shapes(text, shape):
    assert first(f"p = {text} parameter(0)").shape == shape


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("bf16[4,8]", 64),
        ("pred[3]", 3),
        ("s4[5]", 5),
        ("s4[5]{0:E(4)}", 3),
        ("f8e4m3fn[7]", 7),
        ("c64[2]", 16),
        ("(f32[2], (s8[3], token[]))", 11),
        ("f32[0,4]", 0),
    ],
)
def test_sizes_of_shapes(text, nbytes):
    assert first(f"p = {text} parameter(0)").shape.nbytes == nbytes


def test_shapes_print_like_xla():
    assert str(first("p = (f32[2,3]{1,0}, token[]) parameter(0)").shape) == "(f32[2,3], token[])"


# Instructions


def test_operands_with_and_without_sigils_and_shapes():
    entry = parse_entry("""
        %p = f32[2]{0} parameter(0)
        q = (f32[2], s32[]) parameter(1)
        g = f32[2] get-tuple-element((f32[2], s32[]) %q), index=0
        ROOT %a = f32[2]{0} add(f32[2]{0} %p, g)
    """)
    assert entry["g"].operands == ("q",)
    assert entry["g"].tuple_index == 0
    assert entry["a"].operands == ("p", "g")
    assert entry.root.name == "a"
    assert [user.name for user in entry.users["p"]] == ["a"]


def test_constants_keep_their_payload():
    entry = parse_entry("""
        c = f32[2,2] constant({ { 1, -2e-3 }, { nan, inf } })
        s = s32[] constant(-7)
        b = pred[] constant(true)
    """)
    assert entry["c"].payload == "{ { 1, -2e-3 }, { nan, inf } }"
    assert entry["c"].operands == ()
    assert entry["s"].payload == "-7"


def test_comments_are_skipped():
    entry = parse_entry("""
        p = f32[] parameter(0)
        t = (f32[], f32[], /*index=2*/f32[]) tuple(p, p, /*index=2*/p)
    """)
    assert entry["t"].operands == ("p", "p", "p")


def test_quoted_text_may_contain_brackets_and_escapes():
    call = r'c = f32[] custom-call(p), custom_call_target="a \"b\" {[(", backend_config="x,}\\"'
    metadata = r'metadata={op_name="f(\"g\"}/h" source_line=3}'
    ins = first(f"p = f32[] parameter(0)\n{call}, {metadata}")
    assert ins.metadata.op_name == 'f("g"}/h'
    assert ins.metadata.source_line == 3
    assert ins.backend_config == {}


def test_quoted_text_is_utf_8():
    r"""XLA writes bytes outside of ASCII as octal numbers."""
    ins = first(r'p = f32[] parameter(0), metadata={op_name="jit(f)/\346\227\245\346\234\254/back\\346/\303\tx\n"}')
    assert ins.metadata.op_name == "jit(f)/日本/back\\346/\N{REPLACEMENT CHARACTER}\tx\n"


def test_metadata_and_attributes():
    attributes = (
        'frontend_attributes={is_spmd_generated="true",xla.sdy.meshes={m = <["x"=2, "y"=4]>}}',
        'metadata={op_type="dot" op_name="jit(f)/a/b" source_file="f.py" source_line=12 source_end_line=13}',
        'backend_config={"known_trip_count":{"n":"5"},"nested":{"k":[1,"}"]}}',
    )
    ins = first(f"p = f32[2] parameter(0)\nr = f32[2] copy(p), {', '.join(attributes)}")
    assert ins.frontend_attributes["is_spmd_generated"] == "true"
    assert ins.frontend_attributes["xla.sdy.meshes"] == '{m = <["x"=2, "y"=4]>}'
    assert (ins.metadata.op_name, ins.metadata.source_file, ins.metadata.source_line) == ("jit(f)/a/b", "f.py", 12)
    assert ins.backend_config["nested"] == {"k": [1, "}"]}
    assert ins.trip_count == 5


def test_backend_config_may_be_quoted_json():
    ins = first(r'c = f32[] custom-call(), custom_call_target="x", backend_config="{\"a\": 1}"')
    assert ins.backend_config == {"a": 1}


def test_called_computations_have_roles():
    entry = hlo.parse("""
        HloModule m
        cond {
          s = s32[] parameter(0)
          ROOT c = pred[] constant(false)
        }
        body {
          ROOT s = s32[] parameter(0)
        }
        other {
          ROOT s = s32[] parameter(0)
        }
        ENTRY e {
          p = s32[] parameter(0)
          i = s32[] parameter(1)
          w = s32[] while(p), condition=%cond, body=%body
          b = s32[] conditional(i, w, w), branch_computations={%body, %other}
          f = s32[] fusion(b), kind=kLoop, calls=other
          ROOT a = s32[] call(f), to_apply=body
        }
    """).entry
    assert entry["w"].called_as("body") == ("body",)
    assert entry["w"].called_as("condition") == ("cond",)
    assert entry["b"].called_as("branch") == ("body", "other")
    assert entry["f"].called_as("calls") == ("other",)
    assert entry["a"].called_as("to_apply") == ("body",)


def test_stack_tables_may_follow_computations():
    module = hlo.parse(
        textwrap.dedent("""
        HloModule m
        ENTRY e {
          ROOT p = s32[] parameter(0), metadata={op_name="x" stack_frame_id=2}
        }

        FileNames
        1 "a.py"
        2 "b.py"

        FunctionNames
        1 "outer"
        2 "inner"

        FileLocations
        1 {file_name_id=1 function_name_id=1 line=10 column=1}
        2 {file_name_id=2 function_name_id=2 line=20 column=1}

        StackFrames
        1 {file_location_id=1 parent_frame_id=0}
        2 {file_location_id=2 parent_frame_id=1}
        """)
    )
    root = module.entry.root
    assert [str(frame) for frame in module.stack(root)] == ["b.py:20", "a.py:10"]
    assert (root.metadata.source_file, root.metadata.source_line) == ("b.py", 20)


def test_stack_from_metadata_source():
    module = hlo.parse(
        'HloModule m\nENTRY e {\n ROOT p = s32[] parameter(0), metadata={source_file="f.py" source_line=3}\n}'
    )
    assert [str(frame) for frame in module.stack(module.entry.root)] == ["f.py:3"]


# Replica groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", ()),
        ("{{}}", ()),
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{1,0},{3,2}}", ((1, 0), (3, 2))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh[a=2,b=2] {a,b}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=4,'b'=1] {}", ((0,), (1,), (2,), (3,))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("mesh['a b'=2,'x/y'=2] {'x/y'}", ((0, 1), (2, 3))),
    ],
)
def test_replica_group_formats(text, groups):
    ins = first(
        f"p = f32[4] parameter(0)\nr = f32[4] all-gather(p), channel_id=1, replica_groups={text}, dimensions={{0}}"
    )
    assert ins.replica_groups == groups
    assert ins.attributes["dimensions"] == "{0}"


@pytest.mark.parametrize(
    "text",
    [
        "[2,2]<=[5]",
        "[2,2]<=[2,2]T(0,0)",
        "mesh['a'=2] {'b'}",
        "mesh['a'=2,'b'=2], device_ids=(0,1,2) {'b'}",
        "mesh['a'=2]",
        "everyone",
    ],
)
def test_unknown_replica_groups_raise(text):
    with pytest.raises(HloSyntaxError, match="line 5"):
        first(f"p = f32[4] parameter(0)\nr = f32[4] all-gather(p), replica_groups={text}, dimensions={{0}}")


def test_source_target_pairs():
    ins = first("p = f32[] parameter(0)\nr = f32[] collective-permute(p), source_target_pairs={{0,1},{1,0}}")
    assert ins.source_target_pairs == ((0, 1), (1, 0))
    assert ins.replica_groups is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "HloModule"),
        ("ENTRY e {\n  ROOT p = s32[] parameter(0)\n}", "HloModule"),
        ("HloModule m\n", "ENTRY"),
        ("HloModule m\nc {\n  ROOT p = s32[] parameter(0)\n}\n", "ENTRY"),
        ("HloModule m\nENTRY e {\n  p s32[] parameter(0)\n}", "line 3: expected an instruction"),
        ("HloModule m\nENTRY e {\n  p = s32[ parameter(0)\n}", "line 3: 's32\\[' is not a shape"),
        ("HloModule m\nENTRY e {\n  p = f31[2] parameter(0)\n}", "line 3: unknown HLO element type 'f31'"),
    ],
)
def test_invalid_text_raises_with_line(text, match):
    with pytest.raises(HloSyntaxError, match=match):
        hlo.parse(text)
