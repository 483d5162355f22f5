"""Collectives of the strategies' kernels: closed forms against programs for eight H100s and eight CPU devices."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import meshpar as mp
from meshpar.inspect.census import census
from meshpar.inspect.program import compile_here
from meshpar.models import context_attention as context
from tests.grid import cases
from tests.inspect.saved import pods
from tests.inspect.test_expected import BF16, F32, B, D, F, L, T, V, assert_matches, ring, verdict

MATRICES = 4 * D * D + 3 * D * F
"""Weights of a layer: query, key, value and out; gate, up and down."""
NORMS = (2 * L + 1) * D
"""Scales of norms: two in each layer, and the final norm."""
LAYER_MATRICES, TABLES, SCALES = 7, 2, 2 * L + 1
ALL = L * MATRICES + 2 * V * D + NORMS
LEAVES = L * LAYER_MATRICES + TABLES + SCALES
BYTES = (256 + 4) / 256
"""Bytes of an 8-bit element, with a scale of four bytes for each block of 256."""


def attention(n: int, rows: int, wire: int) -> tuple[int, float]:
    """Return permutes and bytes of ring attention over n ranks, including the reordering of the last hidden states.

    Keys and values of a rank are sent n-1 times in each pass, and in the backward pass also their gradients in float32.
    Hidden states are sent in two halves, once in each pass.
    """
    positions = rows * T // n
    keys_values = 2 * positions * D
    halves = 2 * min(n - 1, 2)
    count = L * 3 * (n - 1) + halves
    return count, L * (n - 1) * keys_values * (2 * wire + F32) + halves * positions * D / 2 * wire


def closed_form(case: str, target: str) -> dict[tuple[str, str], tuple[int, float]]:
    """Return (axes, kind) -> (arrays per step, bytes sent by a device per step).

    Gathers and scatters that are lowered as permutes are counted as permutes.
    """
    wire = F32 if target == "cpu" else BF16
    if case == "context":
        return {
            ("context", "all-reduce"): (LEAVES, 2 * ring(8) * F32 * ALL),
            ("context", "collective-permute"): attention(8, B, wire),
        }
    if case == "heads":  # queries, keys, values and outputs of the local positions, in both passes
        return {
            ("context", "all-reduce"): (LEAVES, 2 * ring(8) * F32 * ALL),
            ("context", "all-to-all"): (L * 2 * 4, L * 2 * 4 * ring(8) * B * T // 8 * D * wire),
        }
    if case == "context_fsdp":
        return {
            ("fsdp*context", "all-gather"): (
                2 * L * (LAYER_MATRICES + 2) + TABLES + 1,
                ring(8) * wire * (2 * (ALL - 2 * V * D) + 2 * V * D),
            ),
            ("fsdp*context", "reduce-scatter"): (LEAVES, ring(8) * F32 * ALL),
            ("context", "collective-permute"): attention(4, B // 2, wire),
        }
    if case == "overlapped":
        # Each of the two blocks gathers its input and scatters its output. The backward pass transposes both and
        # gathers the input again. Each of these rings has 7 steps with 2 messages.
        rings = L * 2 * (2 + 3)
        return {("tensor", "collective-permute"): (rings * 14, rings * ring(8) * B * T * D * wire)}
    weights = 2 * L * MATRICES + 2 * V * D  # weights of layers in both passes, embedding and head once
    gradients = L * MATRICES + 2 * V * D
    arrays = L * LAYER_MATRICES + TABLES
    stacks = 3  # scales of both stacks of norms and of the final norm, in bfloat16
    if case == "int8":
        return {
            ("fsdp", "all-gather"): (arrays + L * LAYER_MATRICES + stacks, 3 / 4 * (BYTES * weights + BF16 * NORMS)),
            ("fsdp", "all-to-all"): (arrays, 3 / 4 * BYTES * gradients),
            ("data", "all-to-all"): (arrays, 1 / 2 * BYTES * gradients / 4),
            ("data", "all-gather"): (arrays, 1 / 2 * BYTES * gradients / 4),
            ("fsdp", "reduce-scatter"): (SCALES, 3 / 4 * F32 * NORMS),
            ("data", "all-reduce"): (SCALES, 2 * 1 / 2 * F32 * NORMS / 4),
        }
    assert case == "second_shard"
    forward = L * MATRICES + 2 * V * D
    return {
        # The second shard has 2/8 of the elements, because it is replicated over two nodes.
        ("fsdp", "all-gather"): (arrays + L * LAYER_MATRICES + stacks, 3 / 4 * (BYTES * weights + BF16 * NORMS)),
        ("data", "all-gather"): (arrays + stacks, 1 / 8 * (BYTES * forward + BF16 * NORMS)),
        ("fsdp", "all-to-all"): (arrays, 3 / 4 * BYTES * gradients),
        ("data", "all-to-all"): (arrays, 1 / 8 * BYTES * gradients),
        ("data*fsdp", "reduce-scatter"): (SCALES, ring(8) * F32 * NORMS),
    }


CASES = ("context", "heads", "context_fsdp", "overlapped", "int8", "second_shard")
BOTH = [*cases(grid=[(case, "cpu") for case in CASES]), *pods(CASES, "pod")]


@pytest.mark.parametrize(("case", "target"), BOTH)
def test_kernels_send_the_bytes_of_the_closed_forms(read, case, target):
    found = verdict(*read(case, target), target)
    assert_matches(found)
    counts, sent = {}, {}
    for line in (*found.matched, *found.kernels):
        key = "*".join(line.axes), "collective-permute" if line.lowered_as == "collective-permute" else line.kind
        counts[key] = counts.get(key, 0) + line.actual_count
        sent[key] = sent.get(key, 0.0) + line.actual_bytes
        if line.lowered_as != "all-reduce":
            assert line.actual_bytes == pytest.approx(line.bytes_sent_per_device, rel=0.01), line
    expected = closed_form(case, target)
    if target == "cpu" and case == "context_fsdp":
        # test_expected.py tests how XLA:CPU lowers gathers and scatters. Permutes are equal on all platforms.
        expected = {key: value for key, value in expected.items() if key[1] == "collective-permute"}
    else:
        assert case == "overlapped" or set(counts) == set(expected)
    for key, (count, nbytes) in expected.items():
        assert counts[key] == count, key
        assert sent[key] == pytest.approx(nbytes, rel=0.002), key


OPTIONS = {
    "accumulate each": {"accumulate": 2},
    "accumulate once": {"accumulate": 2, "reduce_gradients": "once"},
    "remat full": {"remat": "full"},
}


@pytest.mark.matrix
@pytest.mark.parametrize("target", ["cpu", pytest.param("pod", marks=pytest.mark.pod)])
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("context_apart", "accumulate once"),
        ("context_apart", "remat full"),
        ("int8", "accumulate once"),
        ("fp8_tensor", "accumulate each"),
        ("context_sequence", "none"),
        ("context_sequence", "remat full"),
        ("overlapped", "accumulate each"),
        ("heads_sequence", "remat full"),
        ("int8", "remat full"),
        ("second_shard", "accumulate once"),
    ],
)
def test_every_option_under_every_strategy(read, case, options, target):
    assert_matches(verdict(*read(case, target, **OPTIONS.get(options, {})), target))


@pytest.mark.matrix
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_repeated_key_heads_are_sent_for_each_rank(planted, monkeypatch, num_kv_heads):
    monkeypatch.setattr(planted, "CONFIG", dataclasses.replace(planted.CONFIG, num_kv_heads=num_kv_heads))
    plant = planted.reference("heads", remat="full").on_cpu
    program = compile_here(plant.step.trace(plant.state, plant.batch))
    found = verdict(plant.state.setup, plant.step.options, census(program.module, plant.mesh), None, "cpu")
    assert_matches(found)
    sent = {line.role: (line.actual_count, line.actual_bytes) for line in found.matched if line.kind == "all-to-all"}
    one = ring(8) * B * T // 8 * D * F32  # keys are repeated to one head for each of 8 ranks
    assert sent["heads scattered for attention, forward"] == (2 * 4 * L, 2 * 4 * L * one)
    assert sent["heads scattered for attention, backward"] == (4 * L, 4 * L * one)


# Unexpected collectives ----------------------------------------------------------------------------------------------


def gathered_by_xla(q, k, v, *_, **__):
    """Compute attention with gathered keys and values."""
    k, v = (mp.constrain(x, "batch", None, "act_kv_heads", None) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=False)


def test_attention_that_gathers_the_sequence_is_unexpected(planted, monkeypatch):
    monkeypatch.setattr(context, "ring", gathered_by_xla)
    plant = planted.reference("context").on_cpu
    traced = plant.step.trace(plant.state, plant.batch)
    collectives = census(compile_here(traced).module, plant.mesh)
    found = verdict(plant.state.setup, plant.step.options, collectives, traced.jaxpr, "cpu")
    gathers = [one for one in found.unexpected if one.kind == "all-gather"]
    assert {(one.axes, one.module) for one in gathers} == {(("context",), "gradients/layers/attention")}
    assert sum(one.count_per_step for one in gathers) == 2 * L


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sent_as", "kinds"), [("hsdp", {"all-gather", "reduce-scatter"}), ("gradients_int8", {"all-gather"})]
)
def test_gathers_in_full_precision_are_unexpected_for_int8(read, planted, sent_as, kinds):
    """The gathers come from a program without quantization, or from one that quantizes gradients only."""
    plant = planted.reference("int8").on_cpu
    *_, jaxpr = read("int8", "cpu")
    found = verdict(plant.state.setup, plant.step.options, read(sent_as, "cpu")[2], jaxpr, "cpu")
    assert {one.kind for one in found.unexpected if one.axes == ("fsdp",)} == kinds


@pytest.mark.matrix
def test_larger_messages_than_expected_are_unexpected(read):
    """Double the messages, as if each direction of the ring sent all examples instead of half."""
    setup, options, collectives, jaxpr = read("overlapped", "cpu")

    def doubled(one):
        if one.kind != "collective-permute":
            return one
        arrays = tuple(dataclasses.replace(array, dims=(2 * array.dims[0], *array.dims[1:])) for array in one.arrays)
        parts = tuple(dataclasses.replace(part, array=array) for part, array in zip(one.parts, arrays, strict=True))
        return dataclasses.replace(one, arrays=arrays, parts=parts)

    found = verdict(setup, options, tuple(map(doubled, collectives)), jaxpr, "cpu")
    assert {(one.kind, one.axes) for one in found.unexpected} == {("collective-permute", ("tensor",))}
