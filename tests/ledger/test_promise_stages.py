"""What stages send, from schedule and strategy alone, against programs compiled for eight CPU devices and two nodes."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.ledger.cells import Cells
from meshpar.ledger.census import census, on_stage
from meshpar.ledger.holding import hold
from meshpar.ledger.parts import parts_of
from meshpar.ledger.program import compile_here
from meshpar.ledger.promise import promised_by_stage
from meshpar.models import TransformerConfig, next_token_loss

L, D, F, V, T = 4, 16, 32, 64, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of a small decoder (`deep`), or of a few matmuls."""

    mesh: mp.MeshSpec
    schedule: str
    microbatches: int
    inside: mp.Strategy
    gather: str = "step"
    deep: bool = True
    tied: bool = False

    @property
    def strategy(self):
        asked = {"microbatches": self.microbatches, "schedule": self.schedule, "gather": self.gather}
        return mp.pipeline_parallel(stages=self.mesh["stage"], **asked) | self.inside

    def step(self, mesh, dtype="float32", size=1, rows=None):
        """(step, state, batch): sizes times `size`."""
        model, loss, batch = (decoder if self.deep else matmuls)(self, size)
        rows = rows or self.microbatches * mesh.size
        batch = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in batch.items()}
        state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=self.strategy)
        return mp.train_step(loss, precision=mp.Precision(compute=dtype)), state, batch


def decoder(case, size):
    cfg = TransformerConfig(
        vocab_size=V, num_layers=L, embed_dim=D * size, num_heads=4, num_kv_heads=4, head_dim=D * size // 4,
        mlp_dim=F * size, tied_embeddings=case.tied,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((T * size,), np.int32)
    return cfg.build(), next_token_loss, {"inputs": tokens, "targets": tokens}


def matmuls(case, size):
    def init(key):
        shapes = {"layers": {"up": (L, D, F), "down": (L, F, D)}, "first": {"w": (V, D)}, "last": {"w": (D, V)}}
        return jax.tree.map(lambda shape: jnp.ones(shape) / 8, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def layer(x, one):
        return x + jnp.tanh(x @ one["up"]) @ one["down"]

    def apply(params, x):
        return mp.pipeline.scan_layers(layer, x @ params["first"]["w"], params["layers"]) @ params["last"]["w"]

    names = {
        "layers/up": ("layers", "embed", "mlp"), "layers/down": ("layers", "mlp", "embed"),
        "first/w": (None, "embed"), "last/w": ("embed", None),
    }  # fmt: skip
    x = jax.ShapeDtypeStruct((V,), np.float32)
    model = mp.from_functions(init, apply, names=names)
    return model, lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}), {"x": x}


CASES = {
    "zb-h1": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "zb-h1", 4, mp.fsdp() | mp.tensor_parallel()),
    "zb-v": Case(mp.MeshSpec(stage=2, tensor=2), "zb-v", 4, mp.tensor_parallel(), tied=True),
    "1f1b": Case(mp.MeshSpec(stage=4, data=2), "1f1b", 4, mp.ddp(), deep=False),
    "dualpipe": Case(mp.MeshSpec(stage=2, data=2), "dualpipe", 3, mp.ddp(), deep=False),
    "microbatch": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "1f1b", 2, mp.fsdp() | mp.tensor_parallel(),
                       gather="microbatch"),
}  # fmt: skip
MORE = {
    "1f1b, tensor": Case(mp.MeshSpec(stage=4, tensor=2), "1f1b", 8, mp.tensor_parallel()),
    "zb-v, four stages": Case(mp.MeshSpec(stage=2, data=2, tensor=2), "zb-v", 8, mp.ddp() | mp.tensor_parallel()),
    "dualpipe-v": Case(mp.MeshSpec(stage=2, fsdp=4), "dualpipe-v", 4, mp.fsdp()),
    "interleaved": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "interleaved-1f1b", 4, mp.fsdp() | mp.tensor_parallel(),
                        gather="microbatch"),
    "zero1": Case(mp.MeshSpec(stage=2, fsdp=4), "gpipe", 2, mp.zero1()),
    "hsdp": Case(mp.MeshSpec(data=2, stage=2, fsdp=2), "zb-h2", 4, mp.hsdp()),
    "tied": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "1f1b", 4, mp.fsdp() | mp.tensor_parallel(), tied=True),
    "one microbatch": Case(mp.MeshSpec(stage=2, fsdp=2), "gpipe", 1, mp.fsdp()),
}  # fmt: skip
ALL = CASES | MORE


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled step and what was promised of it."""

    case: Case
    setup: object
    parts: object
    collectives: tuple
    promises: tuple

    @property
    def verdicts(self):
        return [self.verdict(stage) for stage in range(len(self.promises))]

    def verdict(self, stage, collectives=None):
        collectives = self.collectives if collectives is None else collectives
        return hold(self.promises[stage], on_stage(collectives, stage), closed=("stage",))


def built_of(case, program, step, state, batch, *, on_cpu=True):
    parts = parts_of(step, state, batch)
    return Built(
        case=case,
        setup=state.setup,
        parts=parts,
        collectives=census(program.module, state.setup.mesh, Cells(parts.schedule)),
        promises=promised_by_stage(state.setup, step.options, batch, parts, on_cpu=on_cpu),
    )


@pytest.fixture(scope="module")
def built(program_of):
    known = {}

    def one(name):
        if name not in known:
            case = ALL[name]
            mesh = case.mesh.build(jax.devices()[: math.prod(case.mesh.values())])
            step, state, batch = case.step(mesh)
            program = program_of(("stages", name), lambda: compile_here(step.trace(state, batch)))
            known[name] = built_of(case, program, step, state, batch)
        return known[name]

    return one


NAMES = [*CASES, *(pytest.param(name, marks=pytest.mark.matrix) for name in MORE)]


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_sends_what_was_promised_and_nothing_else(built, name):
    for stage, verdict in enumerate(built(name).verdicts):
        assert not verdict.missing, stage
        assert not verdict.surprise, stage
        assert not verdict.written, stage
        for line in verdict.kept:
            assert line.count[0] <= line.found_count <= line.count[1], line
