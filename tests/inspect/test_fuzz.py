"""Ten thousand damaged programs: the parser gives a module or an HloSyntaxError, and never hangs or crashes."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.hlo.parser import HloSyntaxError
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.simulator import timeline

CLUSTER = parse_cluster("h100:2x4")
SMALL_SEEDS, LARGE_SEEDS, EDITS = 450, 50, 20  # (450 + 50) x 20 mutations

# One instruction of every kind the parser treats on its own, in a program small enough to be read thousands of times.
SMALL = """HloModule small, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=8

FileNames
1 "a.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[], f32[8,4]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,4]{1,0} get-tuple-element((s32[], f32[8,4]) %t), index=1
  %one = s32[] constant(1)
  %n = s32[] add(%i, %one)
  %r = f32[8,4]{1,0} all-reduce(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}, use_global_device_ids=true, to_apply=%add
  ROOT %o = (s32[], f32[8,4]{1,0}) tuple(%n, /*index=1*/%r)
}

%test (t: (s32[], f32[8,4])) -> pred[] {
  %t = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %stop = s32[] constant(4)
  ROOT %c = pred[] compare(%i, %stop), direction=LT
}

%part (q: f32[8,4], i: s32[]) -> f32[2,4] {
  %q = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[2,4]{1,0} dynamic-slice(%q, %i, %z), dynamic_slice_sizes={2,4}
}

ENTRY %main (p: f32[8,4], i: s32[]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0), sharding={devices=[2,4]<=[8]}, metadata={op_name="x" stack_frame_id=2}
  %i = s32[] parameter(1)
  %c = f32[2,2]{1,0} constant({ { 1, -2e-3 }, { nan, inf } })
  %z = s32[] constant(0)
  %t = (s32[], f32[8,4]{1,0}) tuple(%z, %p)
  %w = (s32[], f32[8,4]{1,0}) while(%t), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %y = f32[8,4]{1,0} get-tuple-element(%w), index=1
  %s = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%y), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %e = f32[8,4]{1,0} all-reduce-done(%s)
  %f = f32[2,4]{1,0} fusion(%e, %i), kind=kLoop, calls=%part
  %g = f32[8,4]{1,0} all-gather(%f), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, use_global_device_ids=true, frontend_attributes={is_spmd_generated="true"}, metadata={op_name="jit(f)/jvp(mlp)/dot_general" source_file="a.py" source_line=3}
  %h = f32[8,4]{1,0} collective-permute(%g), channel_id=4, source_target_pairs={{0,1},{1,0}}
  %m = f32[8,8]{1,0} dot(%h, %g), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %b = f32[8,4]{1,0} conditional(%i, %h, %h), branch_computations={%same, %same}
  ROOT %k = f32[8,4]{1,0} custom-call(%b, %m), custom_call_target="__cublas$gemm", backend_config="{\\"x\\": 1}"
}
"""  # noqa: E501  (as XLA prints it: an instruction a line)
SMALL = SMALL.replace(
    "\nENTRY", "\n%same (u: f32[8,4]) -> f32[8,4] {\n  ROOT %u = f32[8,4]{1,0} parameter(0)\n}\n\nENTRY"
)
TOKENS = [
    *"(){}[]\"',=%/*\\: \n-<>",
    *("/*", "*/", "->", "<=", "ROOT ", "ENTRY ", "HloModule ", "mesh[", "{{", "}}", "f32[", "%p", "\x00", "é", "∞"),
    *(
        "9" * 30,
        "-1",
        "0",
        "(" * 50,
        "{" * 50,
        "body",
        "%main",
        "%body",
        "StackFrames\n",
        "all-reduce",
        ", to_apply=%add",
    ),
]

edits = st.tuples(
    st.sampled_from(["delete", "insert", "replace", "repeat", "move", "cut", "number", "name", "line"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 40),
    st.sampled_from(TOKENS),
)


def damage(text: str, edit) -> str:
    """The text with one edit made."""
    what, start, other, length, token = edit
    at, to = int(start * len(text)), int(other * len(text))
    if what == "delete":
        return text[:at] + text[at + length :]
    if what == "insert":
        return text[:at] + token + text[at:]
    if what == "replace":
        return text[:at] + token + text[at + length :]
    if what == "repeat":
        return text[:at] + text[at : at + length] * length + text[at:]
    if what == "number":  # another number, and the program may well still be one
        return text[:at] + re.sub(r"[0-9]+", str(length - 1), text[at:], count=1)
    if what == "name":
        other_name = re.search(r"%[\w.\-]+", text[to:])
        return text[:at] + re.sub(r"%[\w.\-]+", other_name.group() if other_name else "%p", text[at:], count=1)
    if what == "line":
        return "\n".join(line for number, line in enumerate(text.split("\n")) if number != length)
    if what == "move":
        return text[:to] + text[at : at + length] + text[to:]
    return text[:at]


def read(text: str) -> None:
    """Reads the text and whatever can be asked of it; errors other than those promised go through."""
    with contextlib.suppress(HloSyntaxError):
        module = hlo.parse(text)
        with contextlib.suppress(ValueError):  # a mesh of another size, a call tree without end, no schedule
            collectives = census(module, {"a": 2, "b": 4})
            timeline(module, collectives, CLUSTER)
            work.flops_per_step(module)
            work.largest_temporaries(module)
            for computation in module:
                for ins in computation:
                    assert len(module.stack(ins)) <= 200
                    assert isinstance(ins.backend_config, dict)
                    assert isinstance(ins.frontend_attributes, dict)


@pytest.fixture(scope="module")
def compiled(programs):
    """Every saved text."""
    platforms = ("cpu", "cuda", "lowered")
    return [text for name in programs.PROGRAMS for kind in platforms for text in programs.saved(name, kind).values()]


def fuzz(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def test_the_seed_is_a_program():
    module = hlo.parse(SMALL)
    assert [c.kind for c in census(module, {"a": 2, "b": 4})] == [
        "all-reduce",
        "all-gather",
        "collective-permute",
        "all-reduce",
    ]


SOME = st.lists(edits, min_size=EDITS, max_size=EDITS)


@fuzz(SMALL_SEEDS // 16)
@given(SOME)
def test_a_few_damaged_small_programs(many):
    read_damaged(many)


@pytest.mark.matrix
@fuzz(SMALL_SEEDS)
@given(SOME)
def test_damaged_small_programs(many):
    read_damaged(many)


def read_damaged(many):
    text = SMALL
    for number, edit in enumerate(many):
        read(damage(SMALL, edit))
        text = damage(text, edit) if number < 4 else text  # and a few edits on top of each other
    read(text)


@pytest.mark.matrix
@fuzz(LARGE_SEEDS)
@given(which=st.integers(0, 100), many=SOME)
def test_damaged_compiled_programs(compiled, which, many):
    for number, edit in enumerate(many):
        read(damage(compiled[(which + number) % len(compiled)], edit))
