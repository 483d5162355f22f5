"""What layers of experts send, in closed form, against programs for CPU devices and for a pod of 64 H100s."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.ledger.census import census
from meshpar.ledger.holding import hold
from meshpar.ledger.program import compile_here
from meshpar.ledger.promise import promised
from meshpar.ledger.target import missing_aot
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing
from meshpar.planner import cost

L, D, F, E, K, T = 2, 64, 96, 16, 2, 32
THERE, BACK = "tokens to their experts and back, forward", "their gradients, backward"
COUNTS = "counts of choices, forward"


@dataclasses.dataclass(frozen=True)
class Case:
    """The shipped decoder with experts, on a mesh of host devices (`cpu`) or a pod."""

    axes: tuple[tuple[str, int], ...]
    target: str = "cpu"
    factor: float | None = None
    split: str | None = "fsdp"
    """What splits parameters besides the experts' axis."""

    @property
    def sizes(self):
        return dict(self.axes)

    @property
    def ranks(self):
        return self.sizes["expert"]

    @property
    def tokens(self):
        """Of one device."""
        return 2 * T

    @property
    def batch(self):
        rows = 2 * self.ranks * self.sizes.get("fsdp", 1) * self.sizes.get("data", 1)
        return {name: jax.ShapeDtypeStruct((rows, T), np.int32) for name in ("inputs", "targets")}

    @functools.cached_property
    def state_and_step(self):
        routing = Routing(num_experts=E, top_k=K, capacity_factor=self.factor)
        layer = MoEConfig(routing=routing, mlp_dim=F, auxiliary_weight=0.01)
        config = TransformerConfig(
            vocab_size=128, num_layers=L, embed_dim=D, num_heads=2, num_kv_heads=2, head_dim=32, mlp_dim=F, moe=layer
        )
        spec = mp.MeshSpec(**self.sizes)
        mesh = spec.build() if self.target == "cpu" else spec.abstract(64)
        strategy = mp.fsdp() | mp.expert_parallel() if self.split == "fsdp" else mp.ddp() | mp.expert_parallel()
        state = mp.abstract_state(config.build(), optax.sgd(0.1), mesh=mesh, strategy=strategy)
        return state, mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"))


CASES = {
    "dropless": Case((("fsdp", 2), ("expert", 4))),
    "buffers, alike over data": Case((("data", 2), ("expert", 4)), factor=1.25, split=None),
    "pod": Case((("fsdp", 8), ("expert", 8)), target="h100:8x8"),
}
EVERY = [pytest.param(name, marks=[pytest.mark.pod] * (CASES[name].target != "cpu")) for name in CASES]


@pytest.fixture(scope="module")
def found(request):
    """A case's promise and census, compiled once."""

    @functools.cache
    def one(name):
        case = CASES[name]
        state, step = case.state_and_step
        traced = step.trace(state, case.batch)
        if case.target == "cpu":
            program = compile_here(traced)
        elif missing_aot():
            pytest.skip(missing_aot())
        else:
            program = request.getfixturevalue("pod").compile(traced, case.target)
        promises = promised(state.setup, step.options, case.batch, on_cpu=case.target == "cpu")
        return promises, census(program.module, state.setup.mesh)

    return one


def payload_bytes(case):
    """Of one all-to-all, as the closed form has it: b s k d / N (N-1)/N numbers, and what is padded."""
    if case.factor is not None:
        padding = E * -(-case.tokens * K * case.factor // E) / (case.tokens * K)
    else:  # ragged for GPUs; else in parts of one size, for any routing
        rows = cost.dropless_rows(case.tokens, K, E, case.ranks)
        padding = rows / (case.tokens * K) if case.target == "cpu" else 1.0
    row_bytes = D * (4 if case.target == "cpu" else 2)
    return cost.moe_all_to_all(row_bytes, case.tokens, K, case.ranks, padding=padding).bytes_sent


@pytest.mark.parametrize("name", EVERY)
def test_two_all_to_alls_each_way_a_layer_and_nothing_that_was_not_promised(found, name):
    case = CASES[name]
    verdict = hold(*found(name))
    assert verdict.missing == ()
    assert verdict.surprise == ()
    kind = "all-to-all" if case.target == "cpu" else "ragged-all-to-all"
    kept = {line.role: line for line in verdict.kept}
    for role in (THERE, BACK):
        line = kept[role]
        assert (line.kind, line.axes, line.found_count) == (kind, ("expert",), 2 * L)
        assert line.found_bytes == 2 * L * payload_bytes(case)
    if case.factor is None:
        assert kept[COUNTS].found_count == L
        assert kept[COUNTS].found_bytes == L * (case.ranks - 1) * E * 4
    else:  # a buffer holds what it holds, and nobody asks for more
        assert COUNTS not in kept
    sent = [one for one in found(name)[1] if one.axes == ("expert",) and "all-to-all" in one.kind]
    assert sum(one.count_per_step for one in sent) == 4 * L


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_experts_are_summed_over_other_axes_and_the_routers_over_all(found, name):
    case = CASES[name]
    verdict = hold(*found(name))
    others = tuple(axis for axis in case.sizes if axis != "expert")
    of = {}
    for line in verdict.kept:
        if line.role == "gradients":
            for tensor in line.tensors:
                of.setdefault(tensor, []).append(line)
    for weight in ("gate", "up", "down"):
        assert {line.axes for line in of[f"layers/mlp/{weight}"]} == {others}
        kind = "reduce-scatter" if case.split == "fsdp" else "all-reduce"
        assert {line.kind for line in of[f"layers/mlp/{weight}"]} == {kind}
    assert {axis for line in of["layers/mlp/router"] for axis in line.axes} == set(case.sizes)


def test_experts_are_gathered_forward_and_again_backward(found):
    """Each rank its own, from the shards of `fsdp`; gradients summed whole instead are not what was promised."""
    promises, collectives = found("dropless")
    whole = E // CASES["dropless"].ranks * D * F
    over_fsdp = [one for one in collectives if one.axes == ("fsdp",)]
    gathers = [one for one in over_fsdp if one.kind == "all-gather" and one.payload_bytes == 4 * whole]
    assert sum(one.count_per_step for one in gathers) == 2 * 3 * L
    summed = [
        dataclasses.replace(one, kind="all-reduce") if one.kind == "reduce-scatter" and one in over_fsdp else one
        for one in collectives
    ]
    missing = {tensor for line in hold(promises, summed).missing for tensor in line.tensors}
    assert {"layers/mlp/gate", "layers/mlp/up", "layers/mlp/down"} <= missing


def test_experts_that_are_sent_nothing_and_gradients_over_the_wrong_axis_are_missing(found):
    """What is promised is not kept by a program without it."""
    promises, collectives = found("dropless")
    without = [one for one in collectives if one.kind != "all-to-all"]
    assert {line.role for line in hold(promises, without).missing} == {THERE, BACK}
    elsewhere = [dataclasses.replace(one, axes=("fsdp",)) if one.kind == "all-to-all" else one for one in collectives]
    assert {line.role for line in hold(promises, elsewhere).missing} == {THERE, BACK}


def test_no_experts_promise_nothing_and_whole_ones_neither():
    case = CASES["dropless"]
    state, step = case.state_and_step
    roles = {one.role for one in promised(state.setup, step.options, case.batch)}
    assert {THERE, BACK, COUNTS} <= roles
    whole = mp.abstract_state(state.setup.model, optax.sgd(0.1), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp())
    assert not {THERE, BACK, COUNTS} & {one.role for one in promised(whole.setup, step.options, case.batch)}
