"""Collectives of MoE layers: closed forms against traced steps, CPU programs and programs for 64 H100s."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware import cost_model as cost
from meshpar.inspect.census import census
from meshpar.inspect.explain import check_collectives
from meshpar.inspect.program import compile_here
from meshpar.inspect.traced_collectives import messages
from meshpar.models import LatentAttention, TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Payload, Routing, Weights, moe_layer
from meshpar.parallel.execution import with_layers
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.jaxprs import equations, in_scope

L, D, F, E, K, T = 2, 64, 96, 16, 2, 32
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compile options for programs that are inspected and not run."""

NARROW = LatentAttention(q_rank=48, kv_rank=40, nope_dim=32, rope_dim=16, v_dim=32)
MLA = {"latent": NARROW, "head_dim": 48}
BUFFERS = {"capacity_factor": 1.25}
FP8_CHUNKS = {"chunks": 2, "payload": Payload(dispatch="fp8"), "shared_experts": 1}
GPT_OSS = {"has_biases": True, "activation": "clamped_swiglu"}
TENSOR = (("fsdp", 2), ("expert", 2), ("tensor", 2))
LEVELS = ("data", "expert")
TWO_LEVELS = {
    "axes": (("data", 2), ("expert", 4)),
    "experts": LEVELS,
    "strategy": mp.ddp() | mp.expert_parallel(axis=LEVELS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An MoE decoder of `mp.models` on a mesh of host devices (`cpu`) or on a cluster."""

    axes: tuple[tuple[str, int], ...] = (("fsdp", 2), ("expert", 4))
    target: str = "cpu"
    strategy: Strategy = mp.fsdp() | mp.expert_parallel()
    experts: tuple[str, ...] = ("expert",)
    """Mesh axes that shard the experts."""
    routing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self):
        return dict(self.axes)

    @property
    def ranks(self):
        return math.prod(self.sizes[axis] for axis in self.experts)

    @property
    def chunks(self):
        return self.moe.get("chunks", 1)

    @property
    def tokens(self):
        """Tokens of a device, a micro-step and a chunk."""
        return 2 * T // self.chunks

    @property
    def micro_steps(self):
        return self.step.get("accumulate", 1)

    @property
    def forwards(self):
        """Number of forward passes of each chunk through a layer."""
        return 2 if self.step.get("remat") else 1

    @property
    def batch(self):
        split = math.prod(size for axis, size in self.axes if axis != "tensor")
        return {
            name: jax.ShapeDtypeStruct((2 * self.micro_steps * split, T), np.int32) for name in ("inputs", "targets")
        }

    @functools.cached_property
    def state_and_step(self):
        routing = Routing(num_experts=E, top_k=K, **self.routing)
        layer = MoEConfig(routing=routing, mlp_dim=F, auxiliary_weight=0.01, **self.moe)
        sizes = {"vocab_size": 32, "num_layers": L, "embed_dim": D, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
        config = TransformerConfig(**{**sizes, "mlp_dim": F, "moe": layer, **self.model})
        spec = mp.MeshSpec(**self.sizes)
        mesh = spec.build() if self.target == "cpu" else spec.abstract(math.prod(self.sizes.values()))
        state = mp.abstract_state(config.build(), optax.sgd(0.1), mesh=mesh, strategy=self.strategy)
        return state, mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), **self.step)

    @property
    def on_cpu(self):
        return self.target == "cpu"

    @property
    def execution(self):
        state, step = self.state_and_step
        return dataclasses.replace(step.describe(state, self.batch), on_cpu=self.on_cpu)

    def expected(self):
        state, _ = self.state_and_step
        return state.setup.strategy.expected_collectives(self.execution)

    def held(self, collectives, jaxpr):
        state, _ = self.state_and_step
        return check_collectives(state.setup, self.execution, collectives, jaxpr)


CASES = {
    "dropless": Case(),
    "buffers, alike over data": Case(
        axes=(("data", 2), ("expert", 4)), strategy=mp.ddp() | mp.expert_parallel(), routing=BUFFERS
    ),
    "pod": Case(axes=(("fsdp", 8), ("expert", 8)), target="h100:8x8"),
}
MORE = {
    "much at once": Case(
        routing={"score": "sigmoid", "groups": 4, "top_groups": 2},
        moe=FP8_CHUNKS | {"bias_rate": 1e-3, "bound_factor": 2},
        model={**MLA, "num_layers": L + 3, "num_dense_layers": 3, "mlp_dim": 128},
        step={"remat": "full", "accumulate": 2},
    ),
    "chunks": Case(moe={"chunks": 2}),
    "chunks of buffers": Case(moe={"chunks": 2}, routing=BUFFERS),
    "int8": Case(moe={"payload": Payload(dispatch="int8", combine="int8", grad="int8")}),
    "dots kept": Case(step={"remat": "dots"}),
    "buffers, recomputed": Case(routing=BUFFERS, step={"remat": "full"}),
    "micro-steps": Case(step={"accumulate": 2}),
    "latent": Case(model=MLA),
    "experts choose": Case(routing={"choice": "expert", "normalize": False, "force": True}),
    "biases": Case(moe=GPT_OSS),
    "biases, tensor": Case(
        axes=TENSOR, strategy=mp.fsdp() | mp.tensor_parallel(sequence=True) | mp.expert_parallel(), moe=GPT_OSS
    ),
    "two levels": Case(**TWO_LEVELS, routing=BUFFERS),
    "two levels, dropless": Case(**TWO_LEVELS, moe={"implementation": "hierarchical"}),
    "tensor": Case(axes=TENSOR, strategy=mp.fsdp() | mp.tensor_parallel() | mp.expert_parallel()),
    "tensor, buffers": Case(
        axes=TENSOR, strategy=mp.fsdp() | mp.tensor_parallel() | mp.expert_parallel(), routing=BUFFERS
    ),
    "sequence": Case(axes=TENSOR, strategy=mp.fsdp() | mp.tensor_parallel(sequence=True) | mp.expert_parallel()),
    "pod, much at once": Case(
        axes=(("fsdp", 2), ("expert", 8)),
        target="h100:2x8",
        moe=FP8_CHUNKS,
        model=MLA,
        step={"remat": "full", "accumulate": 2},
    ),
    "pod, tensor": Case(
        axes=(("expert", 4), ("tensor", 2)), target="h100:1x8", strategy=mp.tensor_parallel() | mp.expert_parallel()
    ),
}
ALL = CASES | MORE


def marks(name):
    found = [pytest.mark.pod] * (ALL[name].target != "cpu")
    return found + [pytest.mark.matrix] * (name != "dropless")


EVERY = [pytest.param(name, marks=marks(name)) for name in ALL]


def compiled(case, request):
    """Compile a case, and return the census of the program and the jaxpr of the step."""
    state, step = case.state_and_step
    traced = step.trace(state, case.batch)
    if case.on_cpu:
        program = compile_here(traced, options=QUICK)
    else:
        program = request.getfixturevalue("pod").compile(traced, case.target)
    return census(program.module, state.setup.mesh), traced.jaxpr


@pytest.fixture(scope="module")
def found(request):
    return functools.cache(lambda name: compiled(ALL[name], request))


def verdict_of(found, name):
    return ALL[name].held(*found(name))


def payload_bytes(case, dtype):
    """Return the bytes of an all-to-all: b s k d / N (N-1)/N elements, plus padding."""
    row_bytes = cost.quantized_bytes(D) if dtype == "u8" else D * (4 if case.target == "cpu" else 2)
    k = 1 if case.routing.get("choice") == "expert" else K
    factor = case.routing.get("capacity_factor")
    if factor is not None or "choice" in case.routing:
        padding = E * -(-case.tokens * K * (factor or 1) // E) / (case.tokens * k)
    elif case.target == "cpu":  # messages of equal size, for any routing
        rows = cost.dropless_rows(case.tokens, K, E, case.ranks, case.moe.get("bound_factor"))
        padding = rows / (case.tokens * K)
    else:
        padding = 1.0
    sizes = [case.sizes[axis] for axis in case.experts]  # each of the two levels sends the full payload
    return sum(cost.moe_all_to_all(row_bytes, case.tokens, k, ranks, padding=padding).bytes_sent for ranks in sizes)


@pytest.mark.parametrize("name", EVERY)
def test_moe_layer_sends_two_all_to_alls_in_each_direction(found, name):
    case = ALL[name]
    verdict = verdict_of(found, name)
    assert verdict.missing == verdict.unexpected == ()
    kind, times = "all-to-all" if case.on_cpu else "ragged-all-to-all", 1
    if len(case.experts) > 1:  # over the first axis, then over the second, to each rank
        kind, times = "collective-permute", sum(case.sizes[axis] - 1 for axis in case.experts)
    payload = case.moe.get("payload") or Payload()
    runs = L * case.chunks * case.micro_steps
    # With "dots", the outputs of experts are saved after they returned to their tokens.
    combines = 1 if case.step.get("remat") == "dots" else case.forwards
    coded = [*[payload.dispatch] * case.forwards, *[payload.combine] * combines, payload.grad, payload.grad]
    lines = [line for line in verdict.kernels if line.kind == kind and "counts" not in line.role]
    assert {axis for line in lines for axis in line.axes} == set(case.experts)
    assert sum(line.actual_count for line in lines) == len(coded) * runs * times
    expected = runs * sum(payload_bytes(case, None if one is None else "u8") for one in coded)
    assert sum(line.actual_bytes for line in lines) == expected
    collectives = found(name)[0]
    counts = [one for one in collectives if "all-to-all" in one.kind and one.dtype == "s32"]
    if "capacity_factor" in case.routing or "choice" in case.routing:
        assert counts == []  # buffers of a fixed size need no counts
    else:
        assert sum(one.count_per_step for one in counts) == runs * case.forwards
        # A rank sends its counts of all experts to each rank.
        assert sum(one.bytes_sent_per_step for one in counts) == runs * case.forwards * (case.ranks - 1) * E * 4
    rows = [one for one in collectives if one.kind == kind and one not in counts]
    assert sum(one.count_per_step for one in rows) == len(coded) * runs * times


NODE_FIRST = Case(**TWO_LEVELS, moe={"implementation": "node-first"})
NODES_FIRST = {
    "cpu": dataclasses.replace(NODE_FIRST, step={"remat": "full"}),
    "cpu, kept": NODE_FIRST,
    "pod": dataclasses.replace(
        NODE_FIRST,
        axes=(("data", 8), ("expert", 2)),
        target="h100:8x2",
        routing={"groups": 8, "top_groups": 1},
        step={"remat": "full"},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("cpu", marks=pytest.mark.matrix),
        pytest.param("cpu, kept", marks=pytest.mark.matrix),
        pytest.param("pod", marks=pytest.mark.pod),
    ],
)
def test_node_first_sends_each_token_once_to_each_node(request, name):
    """Rematerialization repeats the dispatch, and only the combine within a node."""
    case = NODES_FIRST[name]
    collectives, jaxpr = compiled(case, request)
    verdict = case.held(collectives, jaxpr)
    assert verdict.missing == verdict.unexpected == ()
    nodes, here = (case.sizes[axis] for axis in case.experts)
    visited, itemsize = (min(K, nodes), 4) if case.on_cpu else (1, 2)
    across, inside = nodes * case.tokens, nodes * case.tokens * K * here
    if not case.on_cpu:  # messages may have different sizes, so no buffer is padded
        across, inside = case.tokens * visited, nodes * case.tokens * K
    again = case.forwards
    for axis, rows, of_rows, times in (("data", across, nodes, 2 + again + 1), ("expert", inside, here, 2 * again + 2)):
        along = (again + 1) * (axis == "data")
        sent = [one for one in collectives if one.axes == (axis,) and "all-to-all" in one.kind and one.dtype != "s32"]
        assert sum(one.count_per_step for one in sent) == L * (times + along), axis
        numbers = rows * (of_rows - 1) / of_rows * (times * D * itemsize + along * 2 * K * 4)
        assert sum(one.bytes_sent_per_step for one in sent) == pytest.approx(L * numbers), axis


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_expert_gradients_are_not_reduced_over_the_expert_axis(found, name):
    case = CASES[name]
    verdict = verdict_of(found, name)
    others = tuple(axis for axis in case.sizes if axis != "expert")
    of = {}
    for line in verdict.matched:
        if line.role == "gradients":
            for tensor in line.tensors:
                of.setdefault(tensor, []).append(line)
    for weight in ("gate", "up", "down"):
        assert {line.axes for line in of[f"layers/mlp/{weight}"]} == {others}
        kind = "reduce-scatter" if "fsdp" in case.sizes else "all-reduce"
        assert {line.kind for line in of[f"layers/mlp/{weight}"]} == {kind}
    assert {axis for line in of["layers/mlp/router"] for axis in line.axes} == set(case.sizes)


@pytest.mark.matrix
@pytest.mark.pod
def test_batch_slices_scatter_each_gradient_once(request):
    """Each device sums the gradients of its slices first, so two slices scatter as many bytes as one."""
    case = Case(
        strategy=mp.fsdp(prefetch=1) | mp.expert_parallel(),
        axes=(("fsdp", 4), ("expert", 2)),
        target="h100:4x2",
        model={"num_layers": 3},
    )
    sent = []
    for count in (1, 2):
        case = dataclasses.replace(case, step={"remat": "full", "batch_slices": count})
        scattered = [one for one in compiled(case, request)[0] if one.kind == "reduce-scatter"]
        sent.append(sum(one.bytes_sent_per_step for one in scattered))
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    "name", [pytest.param("tensor", marks=pytest.mark.matrix), pytest.param("pod, tensor", marks=pytest.mark.pod)]
)
def test_tensor_parallel_experts_all_reduce_gradients_of_tokens(found, name):
    """The all-reduce over `tensor` has the size of the tokens, not that of the receive buffers."""
    case = ALL[name]
    collectives, _ = found(name)
    over_tensor = [one for one in collectives if one.axes == ("tensor",) and "moe" in one.module.split("/")]
    assert verdict_of(found, name).unexpected == ()
    assert max(max(array.size for array in one.arrays) // D for one in over_tensor) == case.tokens
    # XLA may combine them with the gradient of the tokens.
    chosen = [one for one in over_tensor if any(array.size == case.tokens * K for array in one.arrays)]
    assert sum(one.count_per_step for one in chosen) == L


@pytest.mark.matrix
def test_reduction_once_gathers_experts_and_sends_no_tokens(request):
    """With gradients reduced once, experts are gathered over all axes and tokens are not sent."""
    case = Case(step={"accumulate": 2, "reduce_gradients": "once"})
    collectives, jaxpr = compiled(case, request)
    assert not [one for one in messages(jaxpr) if one.kind == "all-to-all"]
    verdict = case.held(collectives, jaxpr)
    assert verdict.missing == verdict.unexpected == ()
    gathered = {axis for line in verdict.matched if "layers/mlp/gate" in line.tensors for axis in line.axes}
    assert gathered == {"fsdp", "expert"}


def test_experts_are_gathered_in_both_passes(found):
    """Each rank gathers its local experts over `fsdp`. An all-reduce of full gradients is unexpected."""
    collectives, jaxpr = found("dropless")
    whole = E // CASES["dropless"].ranks * D * F
    over_fsdp = [one for one in collectives if one.axes == ("fsdp",)]
    gathers = [one for one in over_fsdp if one.kind == "all-gather" and one.payload_bytes == 4 * whole]
    assert sum(one.count_per_step for one in gathers) == 2 * 3 * L
    summed = [
        dataclasses.replace(one, kind="all-reduce") if one.kind == "reduce-scatter" and one in over_fsdp else one
        for one in collectives
    ]
    missing = {tensor for line in CASES["dropless"].held(summed, jaxpr).missing for tensor in line.tensors}
    assert {"layers/mlp/gate", "layers/mlp/up", "layers/mlp/down"} <= missing


PREFETCH = Case(strategy=mp.fsdp(prefetch=1) | mp.expert_parallel(), model={"num_layers": 4})


@pytest.mark.matrix
def test_prefetched_experts_are_gathered_in_both_passes(request):
    verdict = PREFETCH.held(*compiled(PREFETCH, request))
    assert verdict.missing == verdict.unexpected == ()


def test_prefetched_experts_are_not_saved_for_the_backward_pass():
    """Each layer gathers them again. Otherwise all experts of all layers would be in memory."""
    state, step = PREFETCH.state_and_step
    jaxpr = step.trace(state, PREFETCH.batch).jaxpr.jaxpr
    in_layer = [eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "shard_map" and in_scope(eqn, "moe")]
    saved = [x.aval.shape for eqn in in_layer if "jvp" in str(eqn.source_info.name_stack) for x in eqn.outvars]
    assert saved
    assert not {shape for shape in saved if shape in ((E, D, F), (E, F, D))}


def test_replicated_experts_send_no_tokens():
    state, step = CASES["dropless"].state_and_step
    whole = mp.abstract_state(state.setup.model, optax.sgd(0.1), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp())
    jaxpr = step.trace(whole, CASES["dropless"].batch).jaxpr
    assert not [one for one in messages(jaxpr) if "to-all" in one.kind]


def test_with_layers_excludes_dense_layers_and_unnamed_dims():
    """Dense layers before the MoE layers, and tables with an unnamed dim, are not distributed over stages."""
    case = Case(model={"num_layers": L + 3, "num_dense_layers": 3})
    of = {one.path: one for one in with_layers(case.state_and_step[0].setup.table.params)}
    assert of["dense_layers/mlp/up/kernel"].leaf.names == ("layers", "embed", "mlp")
    assert of["dense_layers/mlp_norm/scale"].leaf.names[0] == "layers"
    (up,) = [one for one in case.expected() if one.role == "gradients" and "dense_layers/mlp/up/kernel" in one.tensors]
    assert up.stack == 3
    assert up.count == (3 * len(up.tensors), 3 * len(up.tensors))
    table = of["embed/embedding"]
    unnamed = dataclasses.replace(table, leaf=dataclasses.replace(table.leaf, names=(None, "embed")))
    assert with_layers([unnamed]) == (unnamed,)


# Single layers


def small_step(*, factor=None, remat=None, accumulate=1, **moe):
    """Return step, state and batch of two MoE layers with four experts on four devices."""
    config = MoEConfig(routing=Routing(num_experts=4, top_k=2, capacity_factor=factor), mlp_dim=48, **moe)
    shapes = {"router": (D, 4), "gate": (4, D, 48), "up": (4, D, 48), "down": (4, 48, D)}
    names = {"router": ("embed", "expert"), "down": ("expert", "mlp", "embed")}
    names |= dict.fromkeys(("gate", "up"), ("expert", "embed", "mlp"))

    def init(key):
        layers = {name: jax.random.normal(key, (L, *shape)) / 8 for name, shape in shapes.items()}
        return {"gain": jax.numpy.ones(D), "layers": layers}

    def apply(params, x):
        def one(x, weights):
            return x + moe_layer(x, Weights(**weights), config)[0]

        x = mp.constrain(x, "batch", None, None) * params["gain"]
        return mp.scan_layers(one, x, params["layers"])

    named = {"gain": ("embed",)} | {f"layers/{name}": ("layers", *own) for name, own in names.items()}
    mesh = mp.MeshSpec(expert=4).build(jax.devices()[:4])
    model = mp.from_functions(init, apply, names=named)
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.expert_parallel())

    def squares(model, batch, key):
        squares = model(batch["x"]) ** 2
        return mp.MeanLoss(squares.sum(), squares.size), {}

    step = mp.train_step(squares, remat=remat, accumulate=accumulate)
    return step, state, {"x": jax.ShapeDtypeStruct((8 * accumulate, T, D), np.float32)}


ROWS, ROW_BYTES = 2 * T * 2, D * 4
"""Token-expert assignments of a device, and the bytes of a token."""
BY_BYTES = {"float32": 4, "uint8": 1}


@pytest.mark.parametrize(
    ("options", "there", "back"),
    [
        # Buffers for any routing: the two experts of a token may be on any two of the four ranks.
        pytest.param({}, 2 * 2 * ROWS * ROW_BYTES, 2 * 2 * ROWS * ROW_BYTES, id="dropless"),
        pytest.param(
            {"factor": 1.0}, 2 * ROWS * ROW_BYTES, 2 * ROWS * ROW_BYTES, id="buffers", marks=pytest.mark.matrix
        ),
        pytest.param(
            {"factor": 1.0, "chunks": 2, "remat": "full", "accumulate": 2, "payload": Payload(dispatch="int8")},
            2 * 2 * ROWS * (ROW_BYTES + D + 4),
            2 * 2 * ROWS * ROW_BYTES,
            id="chunks of buffers in bytes, recomputed, in micro-steps",
        ),
    ],
)
def test_traced_moe_layer_sends_the_bytes_of_the_formulas(options, there, back):
    """Compare counts and bytes. A third all-to-all or a buffer of twice the size is a difference."""
    step, state, batch = small_step(**options)
    sent = [one for one in messages(step.trace(state, batch).jaxpr) if one.kind == "all-to-all"]
    sent = [one for one in sent if one.dtype in BY_BYTES]  # counts are not compared
    steps, chunks = options.get("accumulate", 1), options.get("chunks", 1)
    forwards = 2 if options.get("remat") else 1
    assert {one.axes for one in sent} == {("expert",)}
    assert sum(one.count for one in sent) == 2 * (1 + forwards) * L * steps * chunks
    assert sum(one.count * one.elements * BY_BYTES[one.dtype] for one in sent) == L * (there + back)
    over_own = [one for one in messages(step.trace(state, batch).jaxpr) if one.kind == "all-reduce"]
    assert not [one for one in over_own if one.elements >= D * 48], "gradients of experts are their owners'"
