"""Test that `match_collectives` reports additional and absent collectives with their counts."""

from __future__ import annotations

import dataclasses

import pytest

from meshpar.hardware.cost_model import bytes_sent
from meshpar.inspect.census import Collective, Member
from meshpar.inspect.hlo.parser import ArrayShape
from meshpar.inspect.hlo.walk import Loop
from meshpar.inspect.matching import SMALL, match_collectives, merge_stages
from meshpar.inspect.traced_collectives import Message
from meshpar.parallel.expected.collective import GRADIENTS, WEIGHTS, ExpectedCollective
from tests.inspect.test_expected import verdict

SIZES = {"data": 2, "fsdp": 4, "tensor": 8}
LAYERS, WIDTH = 3, 1000
LOOP = Loop("while", "while", LAYERS, "gradients/layers")
GATHER = ExpectedCollective(
    role=WEIGHTS, kind="gather", axes=("fsdp",), elements=4 * WIDTH, dtype="f32", count=(6, 6), tensors=("w",),
    stack=LAYERS, is_param=True,
)  # fmt: skip
REDUCTION = ExpectedCollective(
    role=GRADIENTS, kind="sum", axes=("data", "fsdp"), scattered=("fsdp",), elements=4 * WIDTH, dtype="f32",
    count=(3, 3), tensors=("w",), stack=LAYERS, is_param=True,
)  # fmt: skip


def collective(kind, axes, elements, count=1, *, origin="partitioner", loops=(), module="gradients/layers/mlp"):
    """Return a compiled collective of a float32 array with `elements` local elements."""
    array, group_size = ArrayShape("f32", (elements,)), 1
    for axis in axes:
        group_size *= SIZES.get(axis, 2)
    payload = 4 * elements * (group_size if kind == "all-gather" else 1)
    primitive = {"all-reduce": "psum", "all-gather": "all_gather"}.get(kind, kind)
    op_name = f"jit(step)/{module}/{primitive}"
    part = Member(array=array, op_name=op_name, source="model.py:7", is_sliced=False)
    return Collective(
        kind=kind, axes=tuple(axes), group_size=group_size, arrays=(array,), dtype="f32", payload_bytes=payload,
        bytes_sent_per_device=bytes_sent(kind, payload, group_size), count_per_step=count, count_by_stage=(),
        count_known=True, loops=loops, in_branch=False, op_name=op_name, module=module, source="model.py:7",
        is_backward=False, origin=origin, is_async=False, is_promoted=False, parts=(part,), name=kind, computation="c",
        groups=(),
    )  # fmt: skip


CORRECT = (
    collective("all-gather", ("fsdp",), WIDTH, 6, loops=(LOOP,)),
    collective("reduce-scatter", ("fsdp",), 4 * WIDTH, 3, loops=(LOOP,)),
    collective("all-reduce", ("data",), WIDTH, 3, loops=(LOOP,)),
)
"""A program with the collectives of `GATHER` and `REDUCTION`."""
TRACED = (
    Message(kind="all-to-all", axes=("fsdp",), elements=800, dtype="float32", count=4),
    Message(kind="all-gather", axes=("tensor",), elements=1600, dtype="float32", count=2),
)
"""Messages of a kernel. The program sends them in `SENT`."""
SENT = (
    collective("all-to-all", ("fsdp",), 800, 4, origin="kernel", module="gradients/kernel"),
    collective("all-gather", ("tensor",), 200, 2, origin="kernel", module="gradients/kernel"),
)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")


def match(*collectives, traced=TRACED, **options):
    return match_collectives([GATHER, REDUCTION], collectives, traced, sizes=SIZES, **options)


def reported(result):
    """Return (kind, axes) -> count of the unexpected collectives."""
    return {(entry.kind, entry.axes): entry.count_per_step for entry in result.unexpected}


def test_a_correct_program_has_no_alarm():
    found = match(*CORRECT, *SENT)
    assert found.missing == found.unexpected == found.small == ()
    assert {(entry.kind, entry.actual_count) for entry in found.kernels} == {("all-to-all", 4), ("all-gather", 2)}


def test_a_gradient_that_xla_combined_with_a_kernel_is_no_shard_of_its_message():
    """Both arrays have the name of the kernel."""
    traced = Message(kind="reduce-scatter", axes=("fsdp",), elements=8 * 4 * WIDTH, dtype="float32", count=3)
    of_kernel = collective("reduce-scatter", ("fsdp",), 8 * 4 * WIDTH, 3, origin="kernel", module="shard_map")
    parts = [dataclasses.replace(x.parts[0], op_name="step/shard_map/psum_scatter") for x in (CORRECT[1], of_kernel)]
    combined = dataclasses.replace(of_kernel, parts=tuple(parts), arrays=tuple(part.array for part in parts))
    found = match(CORRECT[0], combined, CORRECT[2], traced=[traced])
    assert found.missing == found.unexpected == ()


@pytest.mark.parametrize("origin", ["partitioner", "kernel"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_additional_collective_is_unexpected(kind, origin):
    """No expected collective has the axes and the size of the planted collective."""
    for axes in (("data",), ("fsdp",), ("tensor",), ("data", "tensor"), ("unknown",)):
        elements = 4 * WIDTH if kind == "all-reduce" and axes == ("tensor",) else 777
        planted = collective(kind, axes, elements, 5, origin=origin, module="gradients/layers/attention")
        found = match(*CORRECT, *SENT, planted, batch_axes=("data", "fsdp"), longest=500)
        assert reported(found) == {(kind, axes): 5}
        (entry,) = found.unexpected
        assert (entry.module, entry.source) == ("gradients/layers/attention", "model.py:7")
        assert entry.bytes_sent_per_device == 5 * planted.bytes_sent_per_device
        assert entry.fix
        assert not found.missing


@pytest.mark.parametrize("more", range(1, 4))
def test_a_kernel_that_sends_more_than_the_trace_is_unexpected(more):
    """Each run without a traced message is unexpected."""
    for number, sent in enumerate(SENT):
        planted = dataclasses.replace(sent, count_per_step=sent.count_per_step + more)
        found = match(*CORRECT, planted, *(other for other in SENT if other is not sent))
        assert reported(found) == {(sent.kind, sent.axes): more}, number
        assert sum(entry.actual_count for entry in found.kernels) == 6
    found = match(*CORRECT, *SENT, traced=())
    assert reported(found) == {(sent.kind, sent.axes): sent.count_per_step for sent in SENT}
    assert not found.kernels


@pytest.mark.parametrize(
    "message",
    [
        Message(kind="all-to-all", axes=("fsdp",), elements=799, dtype="float32", count=4),
        Message(kind="all-to-all", axes=("data", "fsdp"), elements=800, dtype="float32", count=4),
        Message(kind="collective-permute", axes=("fsdp",), elements=800, dtype="float32", count=4),
        # More shards than the other mesh axes have devices.
        Message(kind="all-to-all", axes=("fsdp",), elements=32 * 800, dtype="float32", count=4),
    ],
)
def test_a_message_with_another_size_kind_or_axes_does_not_explain_a_collective(message):
    found = match(*CORRECT, SENT[0], traced=(message,))
    assert reported(found) == {("all-to-all", ("fsdp",)): 4}


def test_each_traced_message_explains_one_run():
    (first, _), message = SENT, TRACED[0]
    three = dataclasses.replace(first, count_per_step=3)
    found = match(*CORRECT, three, three, traced=(message,))
    assert reported(found) == {("all-to-all", ("fsdp",)): 2}
    found = match(*CORRECT, three, three, traced=(dataclasses.replace(message, count=6),))
    assert not found.unexpected


def test_equal_collectives_of_several_layers_are_one_entry():
    layers = [collective("all-to-all", ("fsdp",), 777, 2, module=f"gradients/layers_{n}/mlp") for n in range(3)]
    (entry,) = match(*CORRECT, *layers, traced=()).unexpected
    assert (entry.module, entry.layers, entry.count_per_step) == ("gradients/layers_*/mlp", 3, 6)
    assert entry.bytes_sent_per_device == sum(layer.bytes_sent_per_step for layer in layers)


def test_repeated_collectives_are_unexpected():
    for number, repeated in enumerate(CORRECT):
        others = [other for other in CORRECT if other is not repeated]
        twice = dataclasses.replace(repeated, count_per_step=2 * repeated.count_per_step)
        found = match(*others, twice, traced=())
        assert reported(found) == {(repeated.kind, repeated.axes): repeated.count_per_step}, number


def test_absent_collectives_are_missing():
    for absent in CORRECT:
        found = match(*(other for other in CORRECT if other is not absent), traced=())
        assert {(e.kind, e.axes, e.count[0]) for e in found.missing} == {
            (absent.kind, absent.axes, absent.count_per_step)
        }
        fewer = dataclasses.replace(absent, count_per_step=absent.count_per_step - 1)
        found = match(*(other for other in CORRECT if other is not absent), fewer, traced=())
        assert {(e.kind, e.axes, e.count[0]) for e in found.missing} == {(absent.kind, absent.axes, 1)}
        assert not found.unexpected


def test_merged_stages_keep_the_stage_that_sends_the_most():
    planted = [collective("all-to-all", ("tensor",), 777, count) for count in (2, 5, 3)]
    stages = [match(*CORRECT, each, traced=()) for each in planted]
    merged = merge_stages(stages)
    assert reported(merged) == {("all-to-all", ("tensor",)): 5}
    assert (merged.unexpected, merged.matched, merged.missing) == (stages[1].unexpected, stages[0].matched, ())
    (absent,) = match(*CORRECT[1:], traced=()).missing
    assert merge_stages([*stages, match(*CORRECT[1:], traced=())]).missing == (absent,)


def test_only_vectors_over_the_batch_are_bookkeeping():
    options = {"traced": (), "longest": 500, "batch_axes": ("data",)}

    def is_small(kind, axes, elements, module="gradients/loss", origin="partitioner"):
        planted = collective(kind, axes, elements, module=module, origin=origin)
        found = match(*CORRECT, planted, **options)
        assert bool(found.small) != bool(found.unexpected)
        return bool(found.small)

    assert is_small("all-gather", ("tensor",), SMALL // 8)
    assert not is_small("all-gather", ("tensor",), SMALL // 8 + 1)
    assert is_small("all-reduce", ("data",), 500)
    assert is_small("all-reduce", ("data",), 500, origin="kernel")
    assert not is_small("all-reduce", ("data",), 501)
    assert not is_small("all-reduce", ("tensor",), 500)
    assert not is_small("all-to-all", ("data",), 500)
    assert is_small("all-to-all", ("data",), 500, module="update/clip")


def test_only_collectives_over_unannotated_axes_are_unjudged():
    planted = [
        collective("all-to-all", axes, 777) for axes in (("tensor",), ("fsdp", "tensor"), ("unknown",), ("fsdp",))
    ]
    found = match(*CORRECT, *planted, traced=(), unannotated_axes=("tensor",))
    assert reported(found) == {("all-to-all", ("fsdp",)): 1}
    assert sum(entry.actual_count for entry in found.unjudged) == 3


def test_small_arrays_are_unexpected_above_their_share():
    total = sum(each.bytes_sent_per_step for each in CORRECT)
    planted = collective("all-to-all", ("tensor",), 800)
    few = planted.bytes_sent_per_device / (total + planted.bytes_sent_per_device)
    assert not match(*CORRECT, planted, traced=(), small_share=1.01 * few).unexpected
    assert match(*CORRECT, planted, traced=(), small_share=0.99 * few).unexpected


def test_the_messages_of_a_kernel_are_unexpected_without_their_trace(read):
    setup, options, collectives, _ = read("sliced_all_reduce", "pod")
    found = verdict(setup, options, collectives, None, "pod")
    modules = {(entry.kind, entry.module) for entry in found.unexpected}
    assert ("all-reduce", "gradients/layers/kernel") in modules
