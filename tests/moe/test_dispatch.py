"""dispatch: every form equal to the dense reference in value and gradients, whatever the routing; and what it sends."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshpar import moe
from meshpar.hardware import cost_model as cost
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.timeline import program_work as work
from meshpar.moe import Payload, choose_dispatch, dispatch, grouped_matmul
from tests.grid import cases

WIDTH, HIDDEN = 6, 4
pytestmark = pytest.mark.call_stacks
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer on a mesh of host devices. Tokens are cut over all axes but `tensor`, each expert's width over that."""

    axes: tuple[tuple[str, int], ...]
    tokens: int = 8
    """Of one rank."""
    k: int = 2
    num_experts: int = 8
    dtype: str = "float64"
    sums: str = "tokens"
    """Where the parts of a split expert are added: `tokens`, after the dispatch, or `rows`, in it."""
    capacity: int | None = None
    implementation: str = "auto"
    bound_factor: float | None = None
    payload: Payload | None = None
    chunks: int = 1
    nodes_per_token: int | None = None
    mesh_order: tuple[str, ...] = ()
    """Of the mesh's axes; by default as they are above, where specs and kernels name them."""

    @property
    def token_axes(self):
        return tuple(name for name, _ in self.axes if name != "tensor")

    @property
    def expert_axis(self):
        found = tuple(name for name, _ in self.axes if name in ("expert", "outer", "inner"))
        return found if len(found) > 1 else found[0]

    @property
    def token_ranks(self):
        return math.prod(size for name, size in self.axes if name != "tensor")

    @property
    def ranks(self):
        return math.prod(size for name, size in self.axes if name in ("expert", "outer", "inner"))

    @property
    def mesh(self):
        names = self.mesh_order or tuple(dict(self.axes))
        sizes = [dict(self.axes)[name] for name in names]
        devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

    def over_experts(self, **options):
        """The kernel, as it is called."""
        asked = ("capacity", "implementation", "bound_factor", "payload", "chunks", "nodes_per_token")
        options = {name: getattr(self, name) for name in asked} | options
        return functools.partial(dispatch, axis=self.expert_axis, num_experts=self.num_experts, **options)

    def arrays(self, seed=0):
        """Tokens, gate weights, both weights of the experts, and the cotangent of y."""
        draw = np.random.default_rng(seed).standard_normal
        tokens = self.tokens * self.token_ranks
        shapes = (tokens, WIDTH), (tokens, self.k), (self.num_experts, WIDTH, HIDDEN), (self.num_experts, HIDDEN, WIDTH)
        return [np.asarray(draw(shape), self.dtype) for shape in (*shapes, (tokens, WIDTH))]


def on(**axes):
    return tuple(axes.items())


def mlp(params, x):
    """One expert; a row of zeros does not come out as zeros."""
    up, down = params
    return jnp.cos(x @ up) @ down


def layer(case):
    """(x, experts, weights, up, down) -> (y, stats), each as one array over the mesh."""
    has_tensor = "tensor" in dict(case.axes)

    def one_device(x, experts, weights, up, down):
        def experts_here(rows, sizes):
            h = jnp.cos(grouped_matmul(rows, up, sizes, block=4))
            out = grouped_matmul(h, down, sizes, block=4)
            return lax.psum(out, "tensor") if has_tensor and case.sums == "rows" else out

        y, stats = case.over_experts()(x, experts, weights, experts_here)
        y = lax.psum(y, "tensor") if has_tensor and case.sums == "tokens" else y
        return y, stats._replace(dropped=stats.dropped[None])

    rows, tensor = P(case.token_axes), "tensor" if has_tensor else None
    of_experts = P(case.expert_axis, None, tensor), P(case.expert_axis, tensor, None)
    return jax.shard_map(one_device, mesh=case.mesh, in_specs=(rows, rows, rows, *of_experts), out_specs=(rows, rows))


@functools.cache
def program(case):
    """(experts, cotangent, x, weights, up, down) -> ((y, stats), gradients), compiled."""

    def run(experts, cotangent, *arrays):
        def product(x, weights, up, down):
            y, stats = layer(case)(x, experts, weights, up, down)
            return jnp.sum(y * cotangent), (y, stats)

        grads, found = jax.grad(product, (0, 1, 2, 3), has_aux=True)(*arrays)
        return found, grads

    with jax.enable_x64(case.dtype == "float64"):
        *arrays, cotangent = case.arrays()
        return jax.jit(run).lower(routings(case)["anyhow"], cotangent, *arrays).compile()


@functools.cache
def dense(case):
    """The same by the dense reference, on one device. It knows experts from 0 to E, which is unassigned."""

    def run(experts, cotangent, *arrays):
        def product(x, weights, up, down):
            capacity = None if case.capacity is None else min(case.capacity, case.tokens // case.chunks)
            cut = {"capacity": capacity, "token_ranks": case.token_ranks * case.chunks}
            y = moe.reference.moe(x, experts, weights, mlp, (up, down), **cut)
            return jnp.sum(y * cotangent), y

        grads, y = jax.grad(product, (0, 1, 2, 3), has_aux=True)(*arrays)
        return y, grads

    return jax.jit(run)


def routings(case, seed=0):
    """Experts of all tokens, -1 for unassigned, by name."""
    rng, shape = np.random.default_rng(seed), (case.tokens * case.token_ranks, case.k)
    anyhow = np.argsort(rng.random((shape[0], case.num_experts)), axis=1)[:, : case.k]
    found = {"anyhow": anyhow, "all to the first": np.broadcast_to(np.arange(case.k), shape)}
    found["all to the last"] = case.num_experts - 1 - found["all to the first"]
    found["even"] = np.arange(math.prod(shape)).reshape(shape) % case.num_experts
    if 2 * case.k <= case.num_experts:
        found["every other one is empty"] = 2 * np.argsort(rng.random((shape[0], case.num_experts // 2)))[:, : case.k]
    found["a rank without tokens, and tokens without experts"] = np.where(rng.random(shape) < 0.3, -1, anyhow)
    found["a rank without tokens, and tokens without experts"][: case.tokens] = -1
    found["unassigned"] = np.full(shape, -1)
    return {name: np.asarray(experts, np.int32) for name, experts in found.items()}


COMMON = (
    "anyhow",
    "even",
    "all to the first",
    "every other one is empty",
    "a rank without tokens, and tokens without experts",
)


def assert_equal(case, *, every=False):
    """Value, gradients of tokens, gate weights and both expert weights, and the counts, routing by routing."""
    with jax.enable_x64(case.dtype == "float64"):
        *arrays, cotangent = case.arrays()
        for name, experts in routings(case).items():
            if not every and name not in COMMON:
                continue
            (y, stats), grads = program(case)(experts, cotangent, *arrays)
            unassigned = np.where(experts < 0, case.num_experts, experts)
            expected_y, expected_grads = dense(case)(unassigned, cotangent, *arrays)
            found, expected = (y, *grads), (expected_y, *expected_grads)
            for what, one, other in zip(("y", "x", "weights", "up", "down"), found, expected, strict=True):
                scale = max(1.0, np.abs(other).max())
                np.testing.assert_allclose(
                    one, other, rtol=0, atol=TOLERANCE[case.dtype] * scale, err_msg=f"{name}: {what}"
                )
            assert_counted(case, experts, stats, name)


def assert_counted(case, experts, stats, name):
    """Counts of the ranks against counting by hand; drops as there is no room for more."""
    chunks = experts.reshape(case.token_ranks, case.chunks, -1)
    counts = np.array([[np.bincount(c[c >= 0], minlength=case.num_experts) for c in rank] for rank in chunks])
    fitting = counts if case.capacity is None else np.minimum(counts, case.capacity)
    np.testing.assert_array_equal(stats.chosen.reshape(counts.sum(1).shape), counts.sum(1), err_msg=name)
    np.testing.assert_array_equal(stats.dropped, (counts - fitting).sum((1, 2)), err_msg=name)
    # Ranks that differ in an expert axis share the experts; along the others there is a group for each.
    sizes = [size for name, size in case.axes if name != "tensor"]
    shared = [at for at, name in enumerate(case.token_axes) if name in ("expert", "outer", "inner")]
    of_group = fitting.sum(1).reshape(*sizes, case.ranks, -1).sum(tuple(shared), keepdims=True)
    of_rank = np.broadcast_to(of_group, (*sizes, *of_group.shape[-2:])).reshape(case.token_ranks, case.ranks, -1)
    place = np.ravel_multi_index(np.indices(sizes)[shared], [sizes[at] for at in shared]).reshape(-1)
    expected = of_rank[np.arange(case.token_ranks), place]
    np.testing.assert_array_equal(stats.received.reshape(expected.shape), expected, err_msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# Equal to the reference
# ---------------------------------------------------------------------------------------------------------------------

CASES = {
    "one rank": Case(on(expert=1), k=3),
    "two ranks, one choice": Case(on(expert=2), k=1, num_experts=4),
    "eight ranks of an expert each": Case(on(expert=8), tokens=4, k=3),
    "many experts, in chunks": Case(on(expert=4), k=3, num_experts=64, chunks=2),
    "as many choices as experts": Case(on(expert=2), tokens=4, k=8),
    "in float32": Case(on(expert=4), dtype="float32"),
    "two levels": Case(on(outer=2, inner=3), num_experts=12, implementation="hierarchical"),
    "node first": Case(on(outer=2, inner=3), num_experts=12, k=3, implementation="node-first"),
    "node first, four nodes in chunks": Case(
        on(outer=4, inner=2), num_experts=16, k=5, implementation="node-first", chunks=2
    ),
    "node first, nodes of one rank": Case(on(outer=4, inner=1), k=3, implementation="node-first"),
    "node first, one node": Case(on(outer=1, inner=4), k=3, implementation="node-first"),
    "buffers that hold what is even": Case(on(expert=4), capacity=2),
    "buffers in two levels": Case(on(outer=2, inner=2), capacity=1),
    "buffers in chunks": Case(on(expert=2), tokens=12, capacity=2, chunks=3),
}


QUICK = "many experts, in chunks", "buffers in chunks"


@pytest.mark.parametrize("name", cases(*QUICK, grid=CASES))
def test_equal_to_the_dense_reference(name):
    assert_equal(CASES[name])


SWAPPED = {"mesh_order": ("inner", "outer"), "num_experts": 12}
OUT_OF_ORDER = {
    "dropless": Case(on(outer=2, inner=3), **SWAPPED),
    "two levels": Case(on(outer=2, inner=3), implementation="hierarchical", **SWAPPED),
    "buffers": Case(on(outer=2, inner=3), capacity=2, **SWAPPED),
    "node first": Case(on(outer=2, inner=3), implementation="node-first", **SWAPPED),
    "rows cut, too": Case(on(outer=2, data=2, inner=2), mesh_order=("inner", "data", "outer")),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=() if n == "two levels" else pytest.mark.matrix) for n, c in OUT_OF_ORDER.items()],
)
def test_axes_out_of_the_order_of_the_mesh(case):
    assert_equal(case)


SPLIT = {
    "data, sums after": Case(on(data=2, expert=2, tensor=2), k=3),
    "fsdp between, sums inside": Case(on(expert=2, fsdp=2, tensor=2), sums="rows"),
    "buffers": Case(on(data=2, expert=2, tensor=2), capacity=2),
}


@pytest.mark.parametrize("name", cases("data, sums after", grid=SPLIT))
def test_equal_with_tokens_and_experts_split_further(name):
    """Weights that are alike along data or fsdp get the sum of all tokens' gradients, split ones their own columns'."""
    assert_equal(SPLIT[name])


FORMS = [{}, {"capacity": 2}, {"chunks": 2}, {"capacity": 1, "chunks": 4}]
CROSSINGS = [
    (form, (1, 2, 4, 8)[(at + number) % 4], k, (8, 16, 64)[(at + number) % 3])
    for at, form in enumerate(FORMS)
    for number, k in enumerate((1, 2, 4, 5, 8))
]
"""Every form with every k, number of ranks and of experts, and every k with each of those."""


@pytest.mark.matrix
@pytest.mark.parametrize(("form", "ranks", "k", "num_experts"), CROSSINGS)
def test_equal_in_every_crossing(form, ranks, k, num_experts):
    assert_equal(Case(on(expert=ranks), k=k, num_experts=num_experts, **form), every=True)
    program.cache_clear()
    dense.cache_clear()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("axes", "sums", "form"),
    [
        (on(data=2, fsdp=2, expert=2), "tokens", {}),
        (on(data=2, fsdp=2, expert=2), "tokens", {"capacity": 2}),
        (on(data=2, expert=4), "tokens", {"chunks": 2}),
        (on(fsdp=2, expert=2, tensor=2), "tokens", {"chunks": 2}),
        (on(fsdp=2, expert=2, tensor=2), "rows", {"capacity": 2}),
        (on(expert=4, tensor=2), "rows", {"chunks": 2}),
        (on(expert=4, tensor=2), "tokens", {"capacity": 2}),
    ],
)
def test_equal_on_every_mesh(axes, sums, form):
    assert_equal(Case(axes, sums=sums, **form), every=True)
    program.cache_clear()
    dense.cache_clear()


# ---------------------------------------------------------------------------------------------------------------------
# Drops and bounds
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def forward(case):
    return jax.jit(layer(case))


def outputs(case, experts):
    """(y, stats) with weights of one."""
    with jax.enable_x64(case.dtype == "float64"):
        x, weights, *of_experts, _ = case.arrays()
        found = forward(case)(x, np.asarray(experts, np.int32), np.ones_like(weights), *of_experts)
        return jax.tree.map(np.asarray, found)


def test_the_last_tokens_drop_and_of_one_token_the_last_choices():
    """Seven choices of expert 5 for five places: those of tokens 0, 1 and 2 twice, then the first of token 3."""
    experts = np.array([[5, 0], [5, 1], [0, 5], [5, 2], [1, 5], [5, 3], [2, 5], [3, 0]])
    case = Case(on(expert=1), capacity=5)
    y, stats = outputs(case, experts)
    assert stats.dropped.tolist() == [2]
    without, _ = outputs(case, np.where((experts == 5) & (np.arange(8) > 4)[:, None], -1, experts))
    np.testing.assert_array_equal(y, without)
    one_less, _ = outputs(case, np.where((experts == 5) & (np.arange(8) > 3)[:, None], -1, experts))
    assert (np.abs(y - one_less).max(1) > 0).tolist() == [number == 4 for number in range(8)]


def test_a_bound_drops_what_is_over_and_says_so():
    """Two ranks, 16 choices each, of which one rank takes 8: with all to one, half of them, the last tokens'."""
    case = Case(on(expert=2), bound_factor=1.0)
    y, stats = outputs(case, routings(case)["all to the first"])
    assert stats.dropped.tolist() == [8, 8]
    assert stats.received.tolist() == [8, 8] + [0] * 6
    assert y.any(1).tolist() == ([True] * 4 + [False] * 4) * 2
    even = routings(case)["even"]  # what fits is as without
    y, stats = outputs(case, even)
    np.testing.assert_array_equal(y, outputs(dataclasses.replace(case, bound_factor=None), even)[0])
    assert not stats.dropped.any()


NODES = Case(on(outer=4, inner=2), num_experts=16, k=4, implementation="node-first")


def test_a_token_visits_no_more_nodes_than_it_may():
    """Those of its first choices; choices on other nodes are dropped, as if they were unassigned."""
    experts = routings(NODES)["anyhow"]
    nodes, visited = experts // 4, []
    for of_token in nodes:
        visited.append(list(dict.fromkeys(of_token.tolist()))[:2])
    stays = np.array([[node in seen for node in of] for of, seen in zip(nodes, visited, strict=True)])
    y, stats = outputs(dataclasses.replace(NODES, nodes_per_token=2), experts)
    expected, _ = outputs(NODES, np.where(stays, experts, -1))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(stats.dropped, (~stays).reshape(8, -1).sum(1))
    assert 0 < (~stays).sum() < stays.sum()


@pytest.mark.parametrize("factor", cases(1.0, grid=[0.3, 1.0, 1.7]))
def test_a_bound_in_two_levels_counts_what_it_drops(factor):
    """What is chosen is received or dropped; a token that is received whole is as without a bound."""
    case = dataclasses.replace(NODES, bound_factor=factor)
    for name, experts in routings(case).items():
        y, stats = outputs(case, experts)
        whole, all_received = outputs(NODES, experts)
        assert stats.received.sum() + stats.dropped.sum() == stats.chosen.sum() == all_received.received.sum(), name
        same = np.isclose(y, whole, rtol=0, atol=1e-12).all(1)
        assert (~same).sum() <= stats.dropped.sum(), name
        assert (stats.dropped.sum() > 0) == (~same).any(), name


def test_choosing_an_expert_twice_may_drop_and_says_so():
    """Where a rank has fewer experts than k, it makes room for as many choices of a token as it has experts."""
    case = Case(on(expert=2), num_experts=2)
    y, stats = outputs(case, np.zeros((16, 2)))
    assert stats.dropped.tolist() == [8, 8]
    assert y.any(1).tolist() == ([True] * 4 + [False] * 4) * 2


def test_experts_that_choose():
    """A column for each expert, most of them unassigned: sums over choices are then scattered, not gathered."""
    case = Case(on(expert=2), k=8, capacity=3)
    with jax.enable_x64(True):
        *arrays, cotangent = case.arrays()
        takes = np.zeros((16, 8), bool)
        for rank in range(2):
            for expert in range(8):
                chosen = np.random.default_rng([rank, expert]).permutation(8)[:3]
                takes[8 * rank + chosen, expert] = True
        experts = np.where(takes, np.arange(8), 8).astype(np.int32)
        (y, stats), grads = program(case)(experts, cotangent, *arrays)
        expected_y, expected = dense(case)(experts, cotangent, *arrays)
        assert not stats.dropped.any()
        for one, other in zip((y, *grads), (expected_y, *expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Other forms on the wire
# ---------------------------------------------------------------------------------------------------------------------


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What the documentation of `jax.lax.ragged_all_to_all` says it does, from gathers: XLA:CPU has none.

    Sizes that contradict each other, or rows outside the buffers, come out as NaN (255 for bytes).
    """
    me = lax.axis_index(axis_name)
    rows, begins, sizes, places = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    at = jnp.arange(len(operand))
    good = (recv_sizes == sizes[:, me]).all()
    for source in range(len(rows)):
        begin, size, place = begins[source, me], sizes[source, me], places[source, me]
        good &= (begin + size <= len(operand)) & (place + size <= len(output))
        taken = rows[source].at[begin + at].get(mode="fill", fill_value=0)
        output = output.at[jnp.where(at < size, place + at, len(output))].set(taken, mode="drop")
    bad = jnp.full_like(output, 255 if output.dtype == jnp.uint8 else jnp.nan)
    return jnp.where(good, output, bad)


@pytest.fixture
def as_on_gpus(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr("meshpar.moe.transport_choice.platform_of_mesh", lambda: "gpu")


def test_the_ragged_form_is_equal(as_on_gpus):
    assert_equal(Case(on(expert=4), k=3, implementation="ragged"), every=True)


@pytest.mark.matrix
def test_node_first_is_equal_in_the_ragged_form(as_on_gpus, monkeypatch):
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, cuda=None, **_: (cuda or default)(*args))
    assert_equal(Case(on(outer=2, inner=4), k=3, implementation="node-first", bound_factor=8.0), every=True)


QUANTIZED = {
    "int8": Case(on(expert=2), payload=Payload(dispatch="int8", combine="int8", grad="int8")),
    "fp8": Case(on(expert=2), payload=Payload(dispatch="fp8", combine="int8", block=4), capacity=4),
    "ragged": Case(on(expert=2), payload=Payload(dispatch="fp8", combine="fp8", grad="fp8"), implementation="ragged"),
}


@pytest.mark.parametrize("name", cases("fp8", grid=QUANTIZED))
def test_quantized_rows_are_as_near_as_their_format(name, as_on_gpus):
    case = dataclasses.replace(QUANTIZED[name], dtype="float32")
    *arrays, cotangent = case.arrays()
    experts = routings(case)["even"]
    (y, stats), grads = program(case)(experts, cotangent, *arrays)
    expected_y, expected = dense(case)(experts, cotangent, *arrays)
    assert not stats.dropped.any()
    for one, other in jax.tree.map(np.asarray, list(zip((y, *grads), (expected_y, *expected), strict=True))):
        off = np.abs(one - other).max() / np.abs(other).max()
        assert 1e-5 < off < {"int8": 0.05, "fp8": 0.2, "ragged": 0.2}[name]


def test_quantized_rows_travel_as_bytes():
    case = dataclasses.replace(QUANTIZED["fp8"], dtype="float32")
    exchanges = exchanges_of_rows(case)
    assert [one.dtype for one in exchanges] == ["u8", "u8", "f32", "f32"]
    row = cost.quantized_bytes(WIDTH, block=4)
    assert [one.bytes_sent_per_device for one in exchanges] == [
        payload_of(case, row_bytes) for row_bytes in (row, row, 4 * WIDTH, 4 * WIDTH)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# What is sent, and what is held
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def sent(case):
    """What it sends: forward first, and forward the dispatch first, backward the combine."""
    found = census(hlo.parse(program(case).as_text()), case.mesh)
    return sorted(
        (one for one in found if one.kind != "all-reduce"),
        key=lambda one: (one.is_backward, one.module.startswith("dispatch") == one.is_backward),
    )


def exchanges_of_rows(case):
    """All-to-alls of what belongs to tokens, those of counts left out."""
    return [one for one in sent(case) if one.kind == "all-to-all" and one.dtype != "s32"]


def payload_of(case, row_bytes):
    rows = cost.dropless_rows(case.tokens, case.k, case.num_experts, case.ranks, case.bound_factor)
    if case.capacity is not None:
        rows = case.num_experts * case.capacity
    padding = rows / (case.tokens * case.k)
    return cost.moe_all_to_all(row_bytes, case.tokens, case.k, case.ranks, padding=padding).bytes_sent


COUNTED = [
    "eight ranks of an expert each",
    "in float32",
    "as many choices as experts",
    "buffers that hold what is even",
]


@pytest.mark.parametrize("name", cases("data, sums after", grid=[*COUNTED, "buffers", "data, sums after"]))
def test_two_all_to_alls_each_way_of_the_bytes_of_the_closed_form(name):
    case = {**CASES, **SPLIT}[name]
    exchanges = exchanges_of_rows(case)
    assert [(one.is_backward, one.module, one.axes, one.count_per_step) for one in exchanges] == [
        (is_backward, module, ("expert",), 1)
        for is_backward, module in ((False, "dispatch"), (False, "combine"), (True, "combine"), (True, "dispatch"))
    ]
    row_bytes = np.dtype(case.dtype).itemsize * WIDTH
    assert {one.bytes_sent_per_device for one in exchanges} == {payload_of(case, row_bytes)}
    (counts,) = (one for one in sent(case) if one not in exchanges)
    assert (counts.kind, counts.module, counts.is_backward) == ("all-to-all", "dispatch/counts", False)
    numbers = case.num_experts // case.ranks + (case.capacity is None)  # of each expert there, and where they begin
    assert counts.bytes_sent_per_device == (case.ranks - 1) * 4 * numbers


def test_two_levels_send_a_message_to_each_node_instead_of_each_rank():
    case = OUT_OF_ORDER["two levels"]
    payload = 8 * WIDTH * cost.dropless_rows(case.tokens, case.k, case.num_experts, case.ranks)
    expected = cost.hierarchical_all_to_all(payload, 6, inner=3)
    for is_backward in (False, True):
        found = [one for one in sent(case) if one.kind == "collective-permute" and one.is_backward == is_backward]
        for axis, closed in (("inner", expected.inside), ("outer", expected.across)):
            here = [one for one in found if one.axes == (axis,)]
            assert len(here) == 2 * closed.steps
            assert sum(one.bytes_sent_per_device for one in here) == pytest.approx(2 * closed.bytes_sent)
    assert {(one.kind, one.dtype) for one in sent(case)} == {("collective-permute", "f64"), ("all-to-all", "s32")}


def test_chunks_have_their_own_exchanges_of_the_same_bytes_together():
    case = CASES["many experts, in chunks"]
    exchanges = [one.bytes_sent_per_device for one in exchanges_of_rows(case)]
    assert len(exchanges) == 4 * case.chunks
    assert sum(exchanges) == 4 * payload_of(case, 8 * WIDTH)


@functools.cache
def held_bytes(ranks, num_experts, k, chunks=1, bound_factor=None):
    """Temporaries of dispatch and combine, forward and backward, with experts that hold next to nothing."""
    case = Case(on(expert=ranks), 64, k, num_experts, "float32", chunks=chunks, bound_factor=bound_factor)

    def one_device(x, experts, weights, cotangent):
        y, pull = jax.vjp(lambda x, w: case.over_experts()(x, experts, w, lambda rows, _: jnp.sin(rows))[0], x, weights)
        return y, pull(cotangent)

    rows = P("expert")
    view = jax.shard_map(one_device, mesh=case.mesh, in_specs=(rows,) * 4, out_specs=rows)
    tokens = 64 * ranks
    shapes = (((tokens, 256), "float32"), ((tokens, k), "int32"), ((tokens, k), "float32"), ((tokens, 256), "float32"))
    program = jax.jit(view).lower(*(jax.ShapeDtypeStruct(*one) for one in shapes)).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("ranks", "num_experts", "k", "options"),
    cases(
        (4, 8, 2, {"bound_factor": 1.5}),
        grid=[(4, 8, 2, {}), (1, 16, 4, {}), (8, 8, 4, {}), (4, 8, 2, {"chunks": 4}), (4, 8, 2, {"bound_factor": 1.5})],
    ),
)
def test_what_dropless_holds_is_bounded(ranks, num_experts, k, options):
    found = held_bytes(ranks, num_experts, k, **options)
    bound = cost.dropless_bytes(4 * 256, 64, k, num_experts, ranks, **options)
    assert bound / 3 < found <= bound


@pytest.mark.matrix
def test_what_dropless_holds_does_not_grow_with_the_experts():
    few, many = held_bytes(4, 8, 2), held_bytes(4, 256, 2)
    assert many - few <= 64 * 256  # counts; a row of 256 numbers for each of 64 tokens and 248 experts would be 16 MB


def test_a_layer_computes_its_share_of_dense():
    """4,096 tokens, two of 16 experts: value and gradients take k/E of what every expert for every token takes, and the
    quarter that pads blocks at the most; no array is of tokens x experts x width, nor of half of that."""
    case = Case(on(expert=1), 4096, 2, 16)

    def loss(x, weights, up, down, experts):
        def experts_here(rows, sizes):
            h = jax.nn.gelu(grouped_matmul(rows, up, sizes, typical_rows=4096 * 2))
            return grouped_matmul(h, down, sizes, typical_rows=4096 * 2)

        def one_device(x, experts, weights):
            return case.over_experts()(x, experts, weights, experts_here)[0]

        rows = P("expert")
        run = jax.shard_map(one_device, mesh=case.mesh, in_specs=(rows,) * 3, out_specs=rows)
        return jnp.sum(jnp.sin(run(x, experts, weights)))

    shapes = (((4096, 64), "float32"), ((4096, 2), "float32"), ((16, 64, 96), "float32"), ((16, 96, 64), "float32"))
    arrays = [jax.ShapeDtypeStruct(*one) for one in (*shapes, ((4096, 2), "int32"))]
    module = hlo.parse(jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*arrays).compile().as_text())
    dense_flops = 3 * 2 * cost.matmul_flops(4096 * 16, 64, 96)
    assert 1 <= work.flops_per_step(module) / (dense_flops * 2 / 16) <= 1.25
    assert max(one.nbytes for one in work.largest_temporaries(module)) < 4 * 4096 * 16 * 64 / 2


def test_weights_of_unassigned_choices_count_nothing_whatever_they_are():
    """A softmax over no expert is no number; the token of padding gets zeros, and the others what they would get."""
    case = Case(on(expert=2), dtype="float32")
    x, weights, up, down, _ = case.arrays()
    experts = routings(case)["even"]
    experts[3] = -1

    def of_padding(weight):
        return forward(case)(x, experts, np.where(experts < 0, np.float32(weight), weights), up, down)[0]

    found, expected = of_padding(np.nan), of_padding(0)
    np.testing.assert_array_equal(found, expected)
    assert (np.asarray(found)[3] == 0).all()


@pytest.mark.matrix
def test_layers_side_by_side():
    """Under `jax.vmap` a message is a batch of messages, in the ragged form that is traced beside the fixed one too."""
    case = Case(on(expert=2), tokens=4, dtype="float32")
    x, weights, up, down, _ = case.arrays()
    experts = jnp.stack([routings(case)[name] for name in ("even", "all to the first")])

    def one(experts):
        return layer(case)(x, experts, weights, up, down)[0]

    np.testing.assert_allclose(
        jax.jit(jax.vmap(one))(experts), jnp.stack([jax.jit(one)(of) for of in experts]), rtol=0, atol=1e-6
    )


# ---------------------------------------------------------------------------------------------------------------------
# Choices and mistakes
# ---------------------------------------------------------------------------------------------------------------------


def test_auto_says_why():
    assert choose_dispatch("cuda").implementation == "ragged"
    assert choose_dispatch("cpu").implementation == "fixed"
    assert "no ragged-all-to-all for cpu" in choose_dispatch().why
    assert choose_dispatch("cuda", dropless=False).implementation == "fixed"
    assert choose_dispatch("cuda", dropless=False, two_levels=True).implementation == "hierarchical"
