"""Expected collectives of pipeline stages, compared with programs for eight CPU devices and two nodes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshpar as mp
from meshpar.inspect import explain as explain_module
from meshpar.inspect import stage_summary
from meshpar.inspect.census import census, on_stage
from meshpar.inspect.expected import expected_by_stage
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.hlo.walk import executed
from meshpar.inspect.matching import SMALL, match_collectives
from meshpar.inspect.program import compile_here
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.target import missing_aot
from meshpar.inspect.traced_collectives import by_stage, messages
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.models.embedding_lookup import GATHERED
from meshpar.moe import MoEConfig, Routing
from meshpar.parallel.expected.fp8_scales import SCALES
from meshpar.parallel.strategy import Strategy
from meshpar.pipeline import executor, stage_program
from meshpar.pipeline.executor import TickPlan
from meshpar.pipeline.jaxpr_slicing import arrays
from meshpar.pipeline.traffic import traffic
from meshpar.schedules import make
from meshpar.schedules.uniform import uniform
from meshpar.sharding.types import axis_sizes
from tests.grid import cases
from tests.inspect.saved import Compiled

L, D, F, V, T = 4, 16, 32, 64, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """Configuration of a step: a small decoder (`deep`) or a few matmuls."""

    mesh: mp.MeshSpec
    schedule: str
    microbatches: int
    inside: Strategy
    gather: str = "step"
    deep: bool = True
    tied: bool = False
    remat: str | None = None
    compute: str = "float32"
    curved: bool = False
    """Whether the gradient of a weight depends on the weight."""
    experts: bool = False
    batch_slices: int = 1
    matmul: str | None = None

    @property
    def strategy(self):
        asked = {"microbatches": self.microbatches, "schedule": self.schedule, "gather": self.gather}
        return mp.pipeline_parallel(stages=self.mesh["stage"], **asked) | self.inside

    def step(self, mesh, size=1, rows=None):
        """Return step, state and batch with sizes multiplied by `size`."""
        model, loss, batch = (decoder if self.deep else matmuls)(self, size)
        rows = rows or self.microbatches * self.batch_slices * mesh.size
        batch = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in batch.items()}
        state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=self.strategy)
        asked = {"remat": self.remat, "batch_slices": self.batch_slices}
        return (
            mp.train_step(loss, precision=mp.Precision(compute=self.compute, matmul=self.matmul), **asked),
            state,
            batch,
        )


def decoder(case, size):
    experts = MoEConfig(routing=Routing(num_experts=4, top_k=2, score="sigmoid"), mlp_dim=F * size, bias_rate=0.01)
    cfg = TransformerConfig(
        vocab_size=V, num_layers=L, embed_dim=D * size, num_heads=4, num_kv_heads=4, head_dim=D * size // 4,
        mlp_dim=F * size, tied_embeddings=case.tied, moe=experts if case.experts else None,
        attention="xla" if size > 1 else "blockwise",  # blockwise attention also computes the masked part of a tile
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((T * size,), np.int32)
    return cfg.build(), next_token_loss, {"inputs": tokens, "targets": tokens}


def matmuls(case, size):
    def init(key):
        shapes = {"layers": {"up": (L, D, F), "down": (L, F, D)}, "first": {"w": (V, D)}, "last": {"w": (D, V)}}
        return jax.tree.map(lambda shape: jnp.ones(shape) / 8, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def layer(x, one):
        down = jnp.tanh(one["down"]) if case.curved else one["down"]
        return x + jnp.tanh(x @ one["up"]) @ down

    def apply(params, x):
        return mp.pipeline.scan_layers(layer, x @ params["first"]["w"], params["layers"]) @ params["last"]["w"]

    names = {
        "layers/up": ("layers", "embed", "mlp"), "layers/down": ("layers", "mlp", "embed"),
        "first/w": (None, "embed"), "last/w": ("embed", None),
    }  # fmt: skip
    x = jax.ShapeDtypeStruct((V,), np.float32)
    model = mp.from_functions(init, apply, names=names)
    return model, lambda model, batch, key: (mp.SumLoss((model(batch["x"]) ** 2).sum()), {}), {"x": x}


CASES = {
    "zb-h1": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "zb-h1", 4, mp.fsdp() | mp.tensor_parallel()),
    "zb-v": Case(mp.MeshSpec(stage=2, tensor=2), "zb-v", 4, mp.tensor_parallel(), deep=False),
    "1f1b": Case(mp.MeshSpec(stage=4, data=2), "1f1b", 4, mp.ddp(), deep=False),
    "dualpipe": Case(mp.MeshSpec(stage=2, data=2), "dualpipe", 3, mp.ddp(), deep=False),
    "microbatch": Case(
        mp.MeshSpec(stage=2, fsdp=2, tensor=2), "1f1b", 2, mp.fsdp() | mp.tensor_parallel(), "microbatch", deep=False
    ),
    "sequence": Case(mp.MeshSpec(stage=2, tensor=2), "1f1b", 2, mp.tensor_parallel(sequence=True)),
    "microbatch, read by W": Case(
        mp.MeshSpec(stage=2, fsdp=2), "zb-h1", 4, mp.fsdp(), "microbatch", deep=False, curved=True
    ),
    "slices": Case(mp.MeshSpec(stage=2, tensor=2), "eager-1f1b", 2, mp.tensor_parallel(sequence=True), batch_slices=2),
}  # fmt: skip
MORE = {
    "1f1b, tensor": Case(mp.MeshSpec(stage=4, tensor=2), "1f1b", 8, mp.tensor_parallel()),
    "zb-v, four stages": Case(mp.MeshSpec(stage=2, data=2, tensor=2), "zb-v", 8, mp.ddp() | mp.tensor_parallel()),
    "dualpipe-v": Case(mp.MeshSpec(stage=2, fsdp=4), "dualpipe-v", 4, mp.fsdp()),
    "interleaved": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "interleaved-1f1b", 4, mp.fsdp() | mp.tensor_parallel(),
                        gather="microbatch"),
    "eager": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "eager-1f1b", 4,
                  mp.fsdp() | mp.tensor_parallel(sequence=True), gather="microbatch", remat="full"),
    "slices, whole": Case(mp.MeshSpec(stage=2, data=2, tensor=2), "zb-h1", 4, mp.ddp() | mp.tensor_parallel(),
                          remat="full", batch_slices=2),
    "slices, fsdp": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "1f1b", 4,
                         mp.fsdp() | mp.tensor_parallel(sequence=True), gather="microbatch", batch_slices=2),
    "zero1": Case(mp.MeshSpec(stage=2, fsdp=4), "gpipe", 2, mp.zero1()),
    "hsdp": Case(mp.MeshSpec(data=2, stage=2, fsdp=2), "zb-h2", 4, mp.hsdp()),
    "microbatch, decoder": Case(
        mp.MeshSpec(stage=2, fsdp=2, tensor=2), "1f1b", 2, mp.fsdp() | mp.tensor_parallel(), "microbatch"
    ),
    "tied, on one stage": Case(mp.MeshSpec(stage=2, tensor=2), "zb-v", 4, mp.tensor_parallel(), tied=True),
    "tied": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "1f1b", 4, mp.fsdp() | mp.tensor_parallel(), tied=True),
    "recomputed": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "zb-h1", 4, mp.fsdp() | mp.tensor_parallel(),
                       gather="microbatch", remat="full", compute="bfloat16"),
    "sequence, fsdp": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "zb-h1", 4,
                           mp.fsdp() | mp.tensor_parallel(sequence=True)),
    "one microbatch": Case(mp.MeshSpec(stage=2, fsdp=2), "gpipe", 1, mp.fsdp()),
    "8 bits by row": Case(mp.MeshSpec(stage=2, fsdp=2, tensor=2), "eager-1f1b", 2, mp.fsdp() | mp.tensor_parallel(),
                          matmul="fp8-rowwise"),
    "experts": Case(mp.MeshSpec(stage=2, fsdp=2, expert=2), "1f1b", 2, mp.fsdp() | mp.expert_parallel(), experts=True),
}  # fmt: skip
ALL = CASES | MORE
SPARED = ("1f1b, tensor", "zero1", "tied, on one stage", "microbatch, decoder")
"""Further cases by name."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled step with its expected collectives."""

    case: Case
    setup: object
    schedule: object
    uses: object
    collectives: tuple
    expected: tuple
    messages: tuple

    @property
    def verdicts(self):
        return [self.verdict(stage) for stage in range(len(self.expected))]

    def verdict(self, stage):
        sent = by_stage(self.messages, stage)
        sizes, axes = axis_sizes(self.setup.mesh), self.setup.batch_axes
        return match_collectives(
            self.expected[stage], on_stage(self.collectives, stage), sent, sizes=sizes, batch_axes=axes
        )


def built_of(case, program, step, state, batch, *, on_cpu=True):
    execution = dataclasses.replace(step.describe(state, batch), on_cpu=on_cpu)
    schedule = execution.pipeline.table()
    cells = ScheduleCounts(schedule)
    return Built(
        case=case,
        setup=state.setup,
        schedule=schedule,
        uses=execution.stage_uses,
        collectives=census(program.module, state.setup.mesh, cells),
        expected=expected_by_stage(state.setup.strategy, execution),
        messages=messages(step.trace(state, batch).jaxpr, cells),
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


NAMES = cases("zb-h1", grid=[name for name in ALL if name not in SPARED])


@pytest.mark.parametrize("name", NAMES)
def test_stages_send_only_expected_collectives(built, name):
    for stage, verdict in enumerate(built(name).verdicts):
        assert verdict.missing == verdict.unexpected == (), stage
        for line in verdict.matched:
            assert line.count[0] <= line.actual_count <= line.count[1], line


@pytest.mark.matrix
def test_rowwise_scales_are_expected_on_each_stage(built):
    for verdict in built("8 bits by row").verdicts:
        found = [line for line in verdict.matched if line.role == SCALES]
        assert found
        assert all(line.axes == ("tensor",) and line.actual_count for line in found)


@pytest.mark.parametrize("name", NAMES)
def test_messages_between_stages_follow_the_schedule_table(built, name):
    """Derive the expected counts from the schedule table, independent of buffer slots."""
    one = built(name)
    schedule, axis = one.schedule, "stage"
    done, on = schedule.done_in, schedule.done_on
    ticks = {1: [], -1: []}
    for kind, source, goal in ((0, on[:, :-1], on[:, 1:]), (1, on[:, 1:], on[:, :-1])):
        made = done[kind][:, :-1] if kind == 0 else done[kind][:, 1:]
        for tick, a, b in zip(made.flat, source.flat, goal.flat, strict=True):
            if a != b:
                ticks[1 if (b - a) % schedule.stages == 1 else -1].append((tick, a))
    # A permute sends at most one message of a stage, so count the most messages of a stage in each tick.
    most = 0
    for sent in ticks.values():
        for tick in {tick for tick, _ in sent}:
            most += max(sent.count((tick, stage)) for stage in range(schedule.stages))
    # XLA removes loops of a single tick.
    in_ticks = [c for c in one.collectives if c.axes == (axis,) and (c.loops or c.module.startswith("gradients/tick"))]
    found = [c for c in in_ticks if c.kind == "collective-permute"]
    if uniform(schedule) is None:
        assert found == in_ticks
    else:  # All stages send in each tick.
        most = sum(int((schedule.table[..., kind, 0] >= 0).any(1).sum()) for kind in (0, 1))
    assert sum(c.count_per_step for c in found) == most
    (x,) = one.uses.outputs
    assert {c.bytes_sent_per_device for c in found} == {4 * math.prod(x.shape)}


def test_stage_operations_follow_the_schedule_table(built):
    """Count operations by stage. DualPipe starts two of three microbatches on the first stage."""
    one = built("zb-h1")
    counts = defaultdict(int)
    for c in one.collectives:
        if c.count_by_stage:
            counts[c.module.rpartition("cell/")[2]] += np.array(c.count_by_stage)
    counts = {module: tuple(count.tolist()) for module, count in counts.items()}
    m, layers = 4, L // 2
    assert counts[f"forward/if_first/first/embed/{GATHERED}"] == (m, 0)
    assert counts["backward/if_last/loss/loss"] == (0, 2 * m)  # a maximum and a sum
    assert counts["forward/stage/mlp"] == (m * layers, m * layers)
    assert traffic(make("dualpipe", 2, 3)).first.tolist() == [2, 1]


def test_chunks_are_sent_between_stages_as_shards():
    """Chunks are sent before weights are gathered and after gradients are reduced: a quarter of each on fsdp=4."""
    case = Case(mp.MeshSpec(stage=2, fsdp=4), "zb-v", 2, mp.fsdp(), deep=False)
    step, state, batch = case.step(case.mesh.build())
    moved = messages(step.trace(state, batch).jaxpr, ScheduleCounts(make("zb-v", 2, 2)))
    sizes = [one.elements for one in moved if one.axes == ("stage",)]
    # A chunk is a layer with two arrays. One chunk of each stage is sent to the other stage and back.
    assert (sizes.count(D * F // 4), sizes.count(D * F)) == (4, 0)


def test_weights_are_gathered_per_step_or_per_microbatch(built):
    lines = {name: {line.role: line for line in built(name).verdict(0).matched} for name in ("zb-h1", "microbatch")}
    assert lines["zb-h1"]["weights before use"].actual_count == 12
    assert lines["microbatch"]["weights before use"].actual_count == 2  # embedding and head
    count, sent = in_cells(built("microbatch").verdict(0))
    assert count == 2 * 2 * 2  # two weights, in F and B of two microbatches
    assert sent == count * 4 * (L // 2 * D * F // 2) / 2  # a ring of two; `tensor` halves the weight


def in_cells(verdict):
    """Return (count, bytes) of weights gathered per microbatch."""
    lines = [line for line in verdict.kernels if (line.kind, line.axes) == ("all-gather", ("fsdp",))]
    return sum(line.actual_count for line in lines), sum(line.actual_bytes for line in lines)


def test_weights_are_gathered_by_operations_that_read_them(built):
    """W gathers a weight only if its gradient depends on the weight and B of the same tick slot did not gather it."""
    one = built("microbatch, read by W")
    schedule = one.schedule
    assert one.uses.reads == {"layers/down": (True, True, True), "layers/up": (True, True, False)}
    has = schedule.table[..., 0] >= 0
    clear_context_mesh = (has[..., 2] & ~has[..., 1]).sum(0)
    assert (clear_context_mesh > 0).any()
    for stage, verdict in enumerate(one.verdicts):
        assert in_cells(verdict)[0] == 2 * 8 + clear_context_mesh[stage]


@pytest.mark.matrix
def test_stage_partition_of_moe_layers():
    """F and B read router and experts, W does not."""
    case = MORE["experts"]
    step, state, batch = case.step(case.mesh.abstract(devices=8))
    uses = step.describe(state, batch).stage_uses
    assert uses.reads["layers/mlp/router"] == uses.reads["layers/mlp/up"] == (True, True, False)
    (y,) = uses.outputs
    assert y.shape == (2, T, D)


@pytest.mark.matrix
def test_collectives_of_stages_name_lines_of_the_model(built):
    """A stage runs slices of the traced model, but sends the same collectives as without stages."""
    lines, first = inspect.getsourcelines(matmuls)
    (line,) = (first + at for at, text in enumerate(lines) if '@ one["up"]' in text)
    found = [c for c in built("microbatch").collectives if c.axes == ("tensor",) and c.count_by_stage]
    assert {c.is_backward for c in found} == {True, False}
    assert {c.source for c in found} == {f"{__file__}:{line}"}
    found = [c for c in built("zb-h1").collectives if c.axes == ("tensor",) and c.count_by_stage]
    files = {c.source.rpartition(":")[0].rpartition("meshpar/")[2] for c in found}
    assert files <= {"models/transformer.py", "models/layers.py", "models/token_loss.py"}
    assert {c.module.rpartition("/")[2] for c in found} >= {"attention", "mlp", GATHERED}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "eager-1f1b", "zb-h2", "zb-v", "dualpipe"])
def test_makespan_is_between_free_and_lockstep_stages(name):
    """The makespan is between the simulations with free and with lockstep stages."""
    schedule = make(name, 4, 8)
    # The executor sends the output of B before it runs W of the same block.
    schedule = dataclasses.replace(schedule, joined=np.zeros_like(schedule.joined))
    share = schedule.stages / schedule.num_parts
    lengths = (schedule.table[..., 0] >= 0).sum(2) * share
    found, simulated = ScheduleCounts(schedule).makespan(lengths), schedule.simulate()
    assert simulated.free.makespan - 1e-9 <= found <= simulated.lockstep.makespan + 1e-9


def test_branches_of_conditionals_are_numbered_by_index():
    """HLO lists the true branch of a boolean conditional first, and the branches of an index in order."""
    text = """HloModule chosen
yes {
  ROOT a = f32[] parameter(0)
}
no {
  ROOT b = f32[] parameter(0)
}
ENTRY main {
  truth = pred[] parameter(0)
  number = s32[] parameter(1)
  x = f32[] parameter(2)
  one = f32[] conditional(truth, x, x), true_computation=yes, false_computation=no
  two = f32[] conditional(number, x, x), branch_computations={no, yes}
  ROOT sum = f32[] add(one, two)
}
"""
    visits = [(visit.branches[-1], visit.computation.name) for visit in executed(hlo.parse(text)) if visit.branches]
    found = {(branch.name, branch.index): name for branch, name in visits}
    assert found == {("one", 0): "no", ("one", 1): "yes", ("two", 0): "no", ("two", 1): "yes"}


FAULTS = {
    "gradients reduced in every tick": ("all-reduce", "data"),
    "weights of all stages gathered": ("all-gather", "stage"),
    "a message in every tick": ("collective-permute", "stage"),
}
"""Faults with the unexpected collective and axis."""


@pytest.fixture(scope="module")
def faulty(program_of):
    """Return a function from a fault name to a program with this fault and the original expected collectives."""
    case = Case(mp.MeshSpec(stage=2, data=2), "1f1b", 2, mp.ddp(), deep=False)

    def compile_with(fault):
        step, state, batch = case.step(case.mesh.build(jax.devices()[:4]), rows=64)
        added, sent, plan = stage_program.add, executor.Executor._messages, executor.TickPlan.of

        def reduced(totals, grads, index=None):
            return added(totals, jax.tree.map(lambda g: lax.psum(arrays(g), "data"), grads), index)

        def stray(self, inbox, results, at, moves, *more):
            got = sent(self, inbox, results, at, moves, *more)
            return jax.tree.map(lambda x: x + 0 * lax.all_gather(x, "stage").sum(0), got)

        def eager(schedule, **options):
            whole = plan(schedule, **options)
            return dataclasses.replace(whole, moves=np.ones_like(whole.moves) * whole.moves.any(0))

        with pytest.MonkeyPatch.context() as patch:
            kind = FAULTS[fault][0]
            if kind == "all-reduce":
                patch.setattr(stage_program, "add", reduced)
            elif kind == "all-gather":
                patch.setattr(executor.Executor, "_messages", stray)
            else:
                patch.setattr("meshpar.pipeline.gradients.TickPlan.of", staticmethod(eager))
            return compile_here(step.trace(state, batch))

    def one(fault):
        step, state, batch = case.step(case.mesh.build(jax.devices()[:4]), rows=64)
        return built_of(case, program_of(("stages", fault), lambda: compile_with(fault)), step, state, batch)

    return one


@pytest.mark.parametrize("fault", cases("gradients reduced in every tick", grid=list(FAULTS)))
def test_faults_of_stages_are_unexpected(faulty, fault):
    assert FAULTS[fault] in {(one.kind, *one.axes) for one in faulty(fault).verdict(0).unexpected}


# The report


@pytest.fixture(scope="module")
def reports(program_of):
    """Return a function from case names to reports, which reuses compiled programs."""

    def one(name):
        case = ALL[name]
        step, state, batch = case.step(case.mesh.build())
        program = program_of(("stages", name), lambda: compile_here(step.trace(state, batch)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(explain_module, "compile_here", lambda traced: program)
            return mp.explain(step, state, batch)

    return one


@pytest.mark.matrix
def test_explain_counts_flops_and_bytes_of_stages(reports):
    """Each matmul runs once, on one stage, and attention scores again in the backward pass."""
    report, case = reports("zb-h1"), CASES["zb-h1"]
    assert report.is_as_expected
    again = case.microbatches * T * 2 * T * D * L  # recomputed scores of the examples of a device
    flops = report.compute.model_flops_per_device
    assert report.compute.flops_per_device == pytest.approx(flops + again, abs=1e-3)
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    stages = report.stages
    assert (stages.schedule, stages.microbatches, stages.gather) == (case.schedule, case.microbatches, "step")
    assert stages.bubble_fraction == mp.pipeline.zb_h1(2, 4).bubble_fraction
    assert stages.waiting_fraction is None
    assert "bubble" in str(report)
    norms = 2 * L // 2 * D
    layers = {name: sum(d.leaf.size for d in leaves_of(case) if is_layer(d) == name) for name in (True, False)}
    held = 4 * ((layers[True] // 2 - norms) // 2 + norms)  # of a stage; `tensor` halves all weights except norms
    once, often = stages.gathering
    assert (once.gather, once.held_bytes, once.sent_bytes) == ("step", held, held / 2)
    assert often.sent_bytes == 2 * case.microbatches * once.sent_bytes
    assert often.held_bytes == held // 2 + held
    ends = 4 * ((layers[False] - D) // 2 + D) / 2
    (line,) = (line for line in report.matching.matched if line.role == "weights before use")
    assert line.actual_bytes == once.sent_bytes + ends


def test_bytes_of_gathers_are_those_of_the_busiest_stage():
    """F and B in a tick share a gather, and each of the 8 ticks gathers."""
    inside = mp.fsdp(min_bytes=0)
    case = Case(mp.MeshSpec(stage=2, fsdp=2), "eager-1f1b", 4, inside, deep=False, gather="microbatch")
    step, state, batch = case.step(case.mesh.abstract())
    once, often = stage_summary.stages(step.describe(state, batch), None).gathering
    held = 4 * 2 * L * D * F // 2
    assert (once.held_bytes, once.sent_bytes) == (held, held / 2)
    assert (often.held_bytes, often.sent_bytes) == (held // 2 + held, 8 * once.sent_bytes)


def leaves_of(case):
    return case.step(case.mesh.abstract(devices=8))[1].setup.table.params


def is_layer(decision):
    return (decision.leaf.names or ())[:1] == ("layers",)


@pytest.fixture(scope="module")
def across_nodes(program_of, request):
    """Return a decoder on two nodes, with a stage on each node and tensor parallelism inside a node."""
    case = Case(
        mp.MeshSpec(stage=2, fsdp=2, tensor=4), "zb-h1", 4, mp.fsdp() | mp.tensor_parallel(), compute="bfloat16"
    )
    step, state, batch = case.step(case.mesh.abstract(devices=16), size=4, rows=32)

    def compile():
        return request.getfixturevalue("pod").compile(step.trace(state, batch), "h100:2x8")

    if missing_aot():
        pytest.skip(f"compiles for GPUs, which needs `pip install meshpar[aot]`: {missing_aot()}")
    program = program_of(("stages", "pod"), compile)
    return (
        built_of(case, program, step, state, batch, on_cpu=False),
        mp.explain(step, state, batch, "h100:2x8", pod=Compiled(program)),
    )


@pytest.mark.pod
def test_only_stages_communicate_across_nodes(across_nodes):
    one, report = across_nodes
    assert report.matching.missing == report.matching.unexpected == ()
    for sent in report.collectives:
        found = sent.collective
        if "stage" in found.axes and found.kind != "collective-permute":  # scalars such as loss and gradient norm
            assert sum(array.size for array in found.arrays) <= SMALL
        if found.axes == ("tensor",):
            assert sent.crosses_node is False
    results = [c for c in one.collectives if c.axes == ("stage",) and c.kind == "collective-permute" and c.loops]
    assert sum(c.bytes_sent_per_step for c in results) == 8 * 2 * (32 // 2 // 4) * T * 4 * D * 4
    gradients = [c for c in one.collectives if c.kind == "reduce-scatter"]
    assert gradients
    assert not [c for c in gradients if c.loops]


@pytest.mark.pod
def test_timeline_of_stages_contains_the_bubble(across_nodes):
    _, report = across_nodes
    assert report.compute.ratio == pytest.approx(1, abs=1e-9)
    times = report.timeline
    parts = times.compute_s + times.memory_s + times.bubble_s + sum(times.exposed_s.values())
    assert parts == pytest.approx(times.step_s)
    for label, time_s in times.network_s.items():
        assert sum(t.time_s for t in times.collectives if t.collective.axes_label == label) == pytest.approx(time_s)
    assert report.compute.bubble_s == times.bubble_s
    assert report.stages.waiting_fraction == pytest.approx(times.bubble_s / times.step_s)
    # The bubble of the schedule itself assumes equal operations and a step without work before and after the ticks.
    assert 0 < times.bubble_s < times.step_s / 2


@pytest.mark.pod
@pytest.mark.parametrize("schedule", cases("1f1b", grid=["1f1b", "eager-1f1b", "zb-h1", "zb-h2"]))
def test_ticks_do_not_copy_buffers(pod, schedule):
    """Buffers of saved activations are updated in place, one slot at a time."""
    if schedule != "1f1b" and jax.__version_info__ < (0, 12):
        pytest.skip(
            "XLA of jax before 0.12 copies buffers that an operation reads and writes; Python 3.12 installs a newer jax"
        )
    case = Case(mp.MeshSpec(stage=4, fsdp=2), schedule, 8, mp.fsdp(), compute="bfloat16", remat="full")
    step, state, batch = case.step(case.mesh.abstract(devices=8), size=4)
    program = pod.compile(step.trace(state, batch), "h100:1x8", options=step.compile_options(state.setup))
    table = case.strategy.pipeline.table()
    kept = {
        (count,)
        for name, count in TickPlan.of(table).buffers().items()
        if name in ("saved_activations", "deferred_weight_grads")
    } - {(1,)}
    handed_on = 4 * (T * 4) * (D * 4)  # elements of the activations of a microbatch
    ticks = [visit for visit in executed(program.module) if visit.loops and visit.loops[0].trip_count == table.ticks]
    copied = [
        ins.name
        for visit in ticks
        for ins in visit.computation
        if ins.opcode == "copy" and ins.shape.dims[:1] in kept and ins.shape.size >= ins.shape.dims[0] * handed_on
    ]
    assert ticks
    assert not copied
