"""Gradients, memory and communication of the pipeline executor, for all schedules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.hardware.compile_options import IN_PLACE
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.pipeline import SCHEDULES, Aux, MicrobatchInputs, Params, Schedule, make, split_vjp, value_and_grad
from meshpar.pipeline.gradients import StagedRun
from meshpar.pipeline.stage_placement import WeightPlacement
from meshpar.pipeline.stage_program import Functions
from meshpar.pipeline.traffic import gathers_in_cells
from meshpar.schedules.uniform import uniform
from meshpar.sharding.errors import MeshparError
from tests.grid import cases
from tests.pipeline.replay import Stale, replay

NAMES = [*SCHEDULES]
SPREAD = ("eager-1f1b", "interleaved-1f1b")
"""Schedules with the option `spread_head`."""
IN, EMBED, HIDDEN, LAYERS = 6, 8, 16, 2
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

# ---- A pipelined model with variants, and the programs that run it ---------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule, a mesh and the variant of the model."""

    schedule: str | Schedule = "1f1b"
    p: int = 2
    m: int = 4
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    gather: str = "step"
    remat: str | None = None
    tied: bool = False
    noise: bool = False
    aux: bool = False
    weighted: bool = False
    dtype: str = "float64"
    rows: int = 2
    """Examples per microbatch and device."""
    same: bool = False
    """True if all microbatches are equal."""
    spread_head: bool = True
    """For schedules with this option."""
    chunks: int | None = None
    split_backward: bool = False
    unroll: bool = False
    """True if the layers of a chunk run without a loop."""
    waves: int = 0
    """Number of elementwise ops before the layers of a stage. F saves their residuals, and W does not need them."""

    @property
    def table(self) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        options = {"spread_head": True} if self.schedule in SPREAD and self.spread_head else {}
        options |= {"split_backward": True} if self.split_backward else {}
        return make(self.schedule, self.p, self.m, **options, **({"chunks": self.chunks} if self.chunks else {}))

    @property
    def is_uniform(self) -> bool:
        return uniform(self.table) is not None

    @property
    def shards(self) -> int:
        return self.fsdp * self.expert

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        spec = mp.MeshSpec(stage=self.table.stages, fsdp=self.fsdp, expert=self.expert, tensor=self.tensor)
        return spec.build(jax.devices()[: self.table.stages * self.shards * self.tensor])

    @property
    def specs(self) -> dict[str, P]:
        weight = tuple(axis for axis in ("fsdp", "expert") if getattr(self, axis) > 1) or None
        tensor = "tensor" if self.tensor > 1 else None
        return {"up": P("stage", None, weight, tensor), "down": P("stage", None, tensor, weight)}

    # The model.

    def stage(self, layers, x, inputs):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        for _ in range(self.waves):
            x = x + jnp.sin(x)
        y, _ = jax.lax.scan(layer, x, layers, unroll=self.unroll)
        if self.noise:
            y = y * jax.random.bernoulli(inputs.key, 0.7, y.shape).astype(y.dtype)
        if not self.aux:
            return y
        return y, Aux((y**2).mean() * 0.1, {"square": (y**2).mean(), "of_dims": jnp.abs(y).mean(0)})

    def first(self, params, inputs):
        return inputs.examples["x"] @ params["in"]

    def last(self, params, y, inputs):
        error = (y @ (params["in"].T if self.tied else params["out"]) - inputs.examples["t"]) ** 2
        if self.weighted:
            total, weight = (error.mean(-1) * inputs.examples["weight"]).sum(), inputs.examples["weight"].sum()
            return mp.MeanLoss(total, weight), {"double": 2 * total / weight}
        return error.mean(), {"double": 2 * error.mean()}

    # The data.

    @functools.cached_property
    def data(self) -> tuple[Params, dict[str, np.ndarray]]:
        seeds, parts = itertools.count(), self.table.num_parts
        rows = self.rows * self.table.microbatches * self.shards

        def normal(*shape, scale=1.0):
            return (np.random.default_rng(next(seeds)).normal(size=shape) * scale).astype(jnp.dtype(self.dtype))

        up, down = normal(parts, LAYERS, EMBED, HIDDEN, scale=0.3), normal(parts, LAYERS, HIDDEN, EMBED, scale=0.3)
        other = {"in": normal(IN, EMBED)} | ({} if self.tied else {"out": normal(EMBED, IN)})
        params = Params({"up": up, "down": down}, other)
        batch = {"x": normal(rows, IN), "t": normal(rows, IN)}
        if self.weighted:
            # The first microbatch of the first device has weight 0, so its mean is 0 / 0.
            batch["weight"] = (np.abs(normal(rows)) + 0.5) * (np.arange(rows) >= self.rows)
        if self.same:
            batch = {name: np.tile(x[: self.rows], (rows // self.rows, 1)) for name, x in batch.items()}
        return params, batch

    # The unsharded reference.

    def unsharded(self, params, rows, key):
        """Return (MeanLoss, auxiliary loss, metrics, aux) of examples."""
        x, losses, aux = self.first(params.embedding_and_head, MicrobatchInputs(rows, key, 0)), 0.0, []
        for part in range(self.table.num_parts):
            inputs = MicrobatchInputs(rows, jax.random.fold_in(key, part), part)
            x = self.stage(jax.tree.map(lambda leaf, part=part: leaf[part], params.chunks), x, inputs)
            if self.aux:
                x, part_aux = x
                losses, aux = losses + part_aux.loss, [*aux, part_aux.metrics]
        loss, metrics = self.last(params.embedding_and_head, x, MicrobatchInputs(rows, key, 0))
        if not isinstance(loss, mp.MeanLoss):
            loss = mp.MeanLoss(loss, jnp.ones_like(loss))
        return loss, losses, metrics, jax.tree.map(lambda *xs: jnp.stack(xs), *aux) if aux else {}

    def reference(self):
        """Return ((loss, (metrics, aux)), gradients) by autodiff.

        The full batch is processed, or each microbatch if each has its own random numbers.
        """

        def by_microbatch(params, batch, key):
            cut = jax.tree.map(
                lambda x: x.reshape(self.shards, self.table.microbatches, self.rows, *x.shape[1:]), batch
            )

            def reference(rows, shard, microbatch):
                shard_key = jax.random.fold_in(key, shard) if self.shards > 1 else key
                return self.unsharded(params, rows, jax.random.fold_in(shard_key, microbatch))

            return jax.vmap(jax.vmap(reference, (0, None, 0)), (0, 0, None))(
                cut, jnp.arange(self.shards), jnp.arange(self.table.microbatches)
            )

        def at_once(params, batch, key):
            return jax.tree.map(lambda x: jnp.asarray(x)[None, None], self.unsharded(params, batch, key))

        def model(params, batch, key):
            loss, added, metrics, aux = (by_microbatch if self.noise else at_once)(params, batch, key)
            shares = loss.weight / loss.weight.sum()
            metrics = {name: jnp.where(shares > 0, x * shares, 0).sum() for name, x in metrics.items()}
            if self.weighted:
                metrics["loss_weight"] = loss.weight.sum()
            aux = jax.tree.map(lambda x: x.mean((0, 1)), aux)
            return loss.total.sum() / loss.weight.sum() + jnp.mean(added), (metrics, aux)

        with jax.enable_x64(self.dtype == "float64"):
            return jax.jit(jax.value_and_grad(model, has_aux=True))(*self.data, jax.random.key(7))


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A case with its lowered and compiled program."""

    case: Case
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled

    def __call__(self):
        with jax.enable_x64(self.case.dtype == "float64"):
            args = jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), self.case.data, arguments(self.case)[:2]
            )
            return self.compiled(*args, jax.random.key(7))

    @functools.cached_property
    def collectives(self):
        return census(hlo.parse(self.compiled.as_text()), self.case.mesh)

    @property
    def temporary_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes


def function(case: Case):
    return value_and_grad(
        case.stage, case.last, schedule=case.table, mesh=case.mesh, first_fn=case.first, specs=case.specs,
        gather=case.gather, remat=case.remat,
    )  # fmt: skip


def arguments(case: Case):
    """Return shapes and shardings of the parameters, the batch and the key."""
    params, batch = case.data

    def shape(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(case.mesh, spec))

    axes = tuple(axis for axis in ("fsdp", "expert") if getattr(case, axis) > 1)
    param_shapes = Params(
        {name: shape(x, case.specs[name]) for name, x in params.chunks.items()},
        {name: shape(x, P()) for name, x in params.embedding_and_head.items()},
    )
    rows = {name: shape(x, P(axes or None)) for name, x in batch.items()}
    return param_shapes, rows, jax.eval_shape(lambda: jax.random.key(7))


def run_of(case: Case) -> Run:
    with jax.enable_x64(case.dtype == "float64"):
        lowered = jax.jit(function(case)).lower(*arguments(case))
        return Run(case, lowered, lowered.compile(compiler_options=dict(IN_PLACE)))


@pytest.fixture(scope="module")
def run():
    """Return a cached function from Case to Run."""
    return functools.cache(run_of)


def differences(run: Run) -> dict[str, float]:
    """Return the largest relative differences to the unsharded model, of loss, metrics, aux and gradients."""
    result, grads = run()
    (loss, (metrics, aux)), expected = run.case.reference()
    pairs = {"loss": (result.loss, loss), "grads": (grads, expected), "aux": (result.aux, aux)}
    pairs["metrics"] = result.metrics, metrics
    out = {}
    for name, (got, want) in pairs.items():
        assert jax.tree.structure(got) == jax.tree.structure(want), name
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert a.shape == b.shape, name
            out[name] = max(out.get(name, 0.0), float(abs(a - b).max() / abs(b).max()))
    return out


def same(run: Run) -> None:
    for name, difference in differences(run).items():
        assert difference <= TOLERANCE[run.case.dtype], (name, difference)


def label(case: Case) -> str:
    changed = [f.name for f in dataclasses.fields(case) if getattr(case, f.name) != f.default]
    return "-".join(f"{name}={getattr(case, name)}" for name in changed if name != "schedule") + f"-{case.table.name}"


# ---- Gradients, compared with the unsharded model --------------------------------------------------------------------

ZERO_BUBBLE = Case(schedule="zb-h1", fsdp=2, tensor=2)
IN_EACH_TICK = Case(schedule="eager-1f1b", fsdp=2, tensor=2, gather="microbatch", remat="full")
CROSSED = cases(
    ZERO_BUBBLE,
    IN_EACH_TICK,
    grid=[
        ZERO_BUBBLE,
        IN_EACH_TICK,
        Case(schedule="1f1b", tensor=2, tied=True),
        dataclasses.replace(IN_EACH_TICK, schedule="interleaved-1f1b"),
        Case(schedule="eager-1f1b", chunks=2, fsdp=2),
        Case(schedule="eager-1f1b", fsdp=2, tensor=2, spread_head=False),
        Case(schedule="zb-v", fsdp=2, aux=True),
        Case(schedule="dualpipe", expert=2, fsdp=2),
    ],
)
NOISY = Case(schedule="zb-v", noise=True, aux=True)
WEIGHTED = Case(schedule="gpipe", weighted=True, fsdp=2, aux=True)
NOISY_AND_WEIGHTED = Case(schedule="gpipe", weighted=True, fsdp=2, aux=True, noise=True)
SPLIT = Case(schedule="interleaved-1f1b", unroll=True, split_backward=True, m=5, remat="full", noise=True)
VARIANTS = cases(
    NOISY_AND_WEIGHTED,
    SPLIT,
    grid=[
        NOISY,
        WEIGHTED,
        NOISY_AND_WEIGHTED,
        Case(schedule="1f1b", m=1),
        Case(schedule="zb-h1", m=8),
        Case(schedule="1f1b", weighted=True, fsdp=2, tensor=2, aux=True),
        Case(schedule="zb-v", weighted=True, fsdp=2, aux=True, noise=True),
        Case(schedule="dualpipe", weighted=True, expert=2, fsdp=2, gather="microbatch"),
        Case(schedule="zb-h1", noise=True, fsdp=2, remat="full"),
        Case(schedule="1f1b", dtype="float32"),
        Case(schedule="zb-h1", unroll=True, fsdp=2, tensor=2),
        Case(schedule="interleaved-1f1b", unroll=True, aux=True, noise=True, remat="full", m=5),
        Case(schedule="eager-1f1b", chunks=3, weighted=True, fsdp=2, aux=True, unroll=True, m=3, gather="microbatch"),
        Case(schedule="interleaved-1f1b", chunks=2, p=4, m=2, tied=True, tensor=2),
        Case(schedule="interleaved-1f1b", chunks=5, p=4, m=7, tied=True, unroll=True),
        Case(schedule="eager-1f1b", p=4, m=13, expert=2, noise=True, waves=2),
        SPLIT,
    ],
)
UNIFORM = [
    *(
        Case(schedule="interleaved-1f1b", p=p, chunks=chunks, m=m, unroll=unroll, remat=remat, tied=bool(m % 2))
        for p, chunks, m in itertools.product((2, 4), (1, 2, 3), (1, 3, 4, 7, 9))
        for unroll, remat in ((True, None), (False, "full"))
    ),
    *(
        dataclasses.replace(SPLIT, p=p, chunks=chunks, m=m, unroll=m % 2 == 0, fsdp=fsdp, tensor=tensor)
        for p, chunks, m, fsdp, tensor in (
            (2, 1, 4, 2, 2), (2, 2, 7, 1, 1), (4, 1, 8, 2, 1), (4, 2, 9, 1, 1), (4, 3, 16, 1, 2), (3, 2, 6, 2, 1),
        )
    ),
]  # fmt: skip
FOLDED = Case(schedule="dualpipe-v", p=4, m=8, tied=True, aux=True)
ALL_SCHEDULES = [
    *(Case(schedule=name, p=4, m=8) for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe")),
    Case(schedule="zb-h2", p=4, m=8, tied=True),
    Case(schedule="eager-1f1b", p=4, m=8, tied=True, spread_head=False),
    FOLDED,
]


@pytest.mark.parametrize("case", cases(FOLDED, grid=ALL_SCHEDULES), ids=label)
def test_gradients_of_all_schedules(run, case):
    same(run(case))


@pytest.mark.matrix
@pytest.mark.parametrize("case", UNIFORM, ids=label)
def test_gradients_of_uniform_schedules(case):
    assert case.is_uniform
    same(run_of(case))


def test_all_schedules_have_a_case():
    assert {case.schedule for case in ALL_SCHEDULES} == {*SCHEDULES}


@pytest.mark.parametrize("case", CROSSED + VARIANTS, ids=label)
def test_gradients_of_variants(run, case):
    same(run(case))


AXES = [{"fsdp": 2, "tensor": 2}, {"fsdp": 2}, {"tensor": 2}, {"expert": 2}]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "axes"),
    [(name, AXES[(offset + n) % len(AXES)]) for n, name in enumerate(NAMES) for offset in (0, 1)],
    ids=str,
)
def test_gradients_with_fsdp_and_tensor(name, axes):
    """Each schedule runs on two meshes."""
    options = {"gather": "microbatch", "remat": "full", "tied": True, "aux": True, "noise": True}
    same(run_of(Case(schedule=name, **axes, **options)))
    if math.prod(axes.values()) <= 2:
        same(run_of(Case(schedule=name, p=4, m=8, **axes)))


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_gradients_with_few_microbatches(name):
    for p, m in ((2, 1), (2, 3), (4, 5)):
        same(run_of(Case(schedule=name, p=p, m=m)))


def test_bfloat16_gradients_accumulate_in_float32(run):
    """A bfloat16 sum of 16 equal gradients would lose their last bits."""
    few, many = (run(Case(schedule="1f1b", m=m, dtype="bfloat16", same=True))()[1] for m in (1, 16))
    for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
        a = np.asarray(a)
        lossy = sum([a.astype(jnp.bfloat16)] * 16)
        assert abs(lossy.astype(np.float32) / 16 - a).max() > 1e-4 * abs(a).max()


def test_gradients_of_a_custom_table(run):
    """W runs long after its B, with idle ticks, and microbatches are out of order."""
    rows = ["F1 -", "F0 F1", "- F0", "- B0", "B0 B1", "- -", "B1 W1", "W0 W0", "W1 -"]
    cells = [[None if op == "-" else (op[0], int(op[1])) for op in row.split()] for row in rows]
    same(run(Case(schedule=Schedule.from_table(cells, name="mine"), m=2)))


@pytest.mark.matrix
def test_gradients_of_a_csv_schedule(run, tmp_path):
    """Rank 0 runs the first and the last chunk, and an overlapped pair."""
    path = tmp_path / "v.csv"
    path.write_text("0F0,0F1,,3F0,3B0,(3F1;0B0)OVERLAP_F_B,3B1,0B1\n,1F0,2F0,1F1,2F1,2B0,1B0,2I1,2W1,1B1\n")
    same(run(Case(schedule=Schedule.from_csv(path), m=2)))


# ---- Memory, and the size of the program -----------------------------------------------------------------------------


def program(name, m):
    """Return a case whose memory is nearly all activations saved by F."""
    return Case(schedule=name, p=4, m=m, rows=2048, waves=12, dtype="float32")


@pytest.mark.matrix
def test_memory_grows_with_microbatches_for_gpipe_only(run):
    few, many = (run(program("1f1b", m)).temporary_bytes for m in (8, 32))
    assert many <= 1.1 * few
    few, many = (run(program("gpipe", m)).temporary_bytes for m in (8, 32))
    assert many >= 3 * few
    # Per microbatch: the residuals of F and the pending output, without copies.
    case = program("gpipe", 8)
    part = jax.tree.map(lambda x: x[0], case.data[0].chunks)
    x = jax.ShapeDtypeStruct((case.rows, EMBED), jnp.float32)
    saved = split_vjp(lambda layers, x: case.stage(layers, x, None), part, x).saved_activations
    saved_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in (*saved, x))
    assert (many - few) / 24 == pytest.approx(saved_bytes, rel=0.05)


@pytest.mark.matrix
def test_memory_is_proportional_to_peak_activations(run):
    temporary, peak = {}, {}
    for name in ("1f1b", "zb-h2"):
        temporary[name] = run(program(name, 8)).temporary_bytes
        peak[name] = int(make(name, 4, 8).peak_activations.max())
    assert (peak["1f1b"], peak["zb-h2"]) == (4, 7)
    # Older releases of XLA copy a buffer of deferred weight gradients with more than one slot.
    factor = 1.0 if jax.__version_info__ >= (0, 11) else 1.25
    assert temporary["zb-h2"] / temporary["1f1b"] == pytest.approx(7 / 4 * factor, rel=0.15)


def test_program_size_is_independent_of_microbatches():
    lowered = (jax.jit(function(case)).lower(*arguments(case)) for case in (program("1f1b", m) for m in (8, 32)))
    few, many = (re.findall(r"stablehlo\.\w+", program.as_text()) for program in lowered)
    assert few == many


# ---- Messages --------------------------------------------------------------------------------------------------------


BATCH = {"data", "fsdp", "expert"}
BETWEEN_STAGES = ("collective-permute", "all-gather", "all-to-all")


def non_permute_sizes(case, collectives):
    """Return the sizes of reductions over the stages, without scalars."""
    scalars = 3 + (case.table.num_parts * (1 + EMBED) if case.aux else 0)
    over = [c for c in collectives if "stage" in c.axes and c.kind not in BETWEEN_STAGES]
    return [size for c in over for size in (math.prod(part.array.dims) for part in c.parts) if size > scalars]


def shared_sizes(case):
    """Return the sizes of embedding and head parameters with gradients from more than one stage."""
    parts = case.table.parts
    first, last = ((parts == part).any(1) | case.is_uniform for part in (0, case.table.num_parts - 1))
    owners = {"in": first | last if case.tied else first, "out": last}
    return [x.size for name, x in case.data[0].embedding_and_head.items() if owners[name].sum() > 1]


@pytest.mark.parametrize("case", CROSSED, ids=label)
def test_gradients_are_reduced_once_after_the_loop(run, case):
    """Weights are gathered once before the loop, or in each tick with gather="microbatch"."""
    found = [c for c in run(case).collectives if BATCH & {*c.axes}]
    gathers = [c for c in found if c.kind == "all-gather"]
    reductions = [c for c in found if c.kind != "all-gather"]
    assert bool(gathers) == bool(reductions) == (case.shards > 1)
    assert all(c.count_per_step == 1 and not c.in_loop and not c.in_branch for c in reductions)
    if case.shards > 1:
        chunks, other = (sum(x.size for x in jax.tree.leaves(tree)) for tree in case.data[0])
        reduced = sum(math.prod(a.dims) for c in reductions if "stage" not in c.axes for a in c.arrays)
        assert reduced == chunks // case.table.stages // case.tensor + other
    if case.gather == "step":
        assert all(c.count_per_step == 1 and not c.in_loop for c in gathers)
    elif case.shards > 1:
        # XLA removes loops of a single tick.
        assert all((c.in_loop and c.in_branch) or case.is_uniform for c in gathers)


@pytest.mark.call_stacks
def test_ops_of_a_tick_share_one_gather(run):
    """With a single chunk per stage, F and B of a tick use the same gathered weights."""
    cells = [
        [("F", 0), None],
        [("F", 1), ("F", 0)],
        [None, [("F", 1), ("B", 0)]],
        [("B", 0), [("B", 1), ("W", 0)]],
        [[("B", 1), ("W", 1)], ("W", 1)],
        [("W", 0), None],
    ]
    schedule = Schedule.from_table(cells, name="pairs")
    case_run = run(Case(schedule=schedule, m=2, fsdp=2, gather="microbatch"))
    same(case_run)
    found = census(hlo.parse(case_run.compiled.as_text()), case_run.case.mesh, ScheduleCounts(schedule))
    gathers = [c.count_by_stage for c in found if c.kind == "all-gather" and c.in_loop]
    assert np.sum(gathers, 0).tolist() == [8, 6]
    assert gathers_in_cells(schedule, (True, True, False)).tolist() == [4, 3]
    assert gathers_in_cells(schedule, (True, True, True)).tolist() == [5, 4]


def test_gathers_of_two_chunks_are_shared_by_a_combined_backward():
    schedule = make("dualpipe", 2, 4)  # 4 F, 4 B and 4 W per stage; one B and its W are in a tick
    assert gathers_in_cells(schedule, (True, True, True)).tolist() == [11, 11]


@pytest.mark.parametrize("case", [*CROSSED, FOLDED], ids=label)
def test_stages_send_only_to_neighbors(run, case):
    """Exceptions are scalars, and gradients of embedding and head parameters that two stages use."""
    found = run(case).collectives
    assert any(c.axes == ("stage",) and c.kind == "collective-permute" and c.in_loop for c in found)
    assert non_permute_sizes(case, found) == shared_sizes(case)
    if case.tensor > 1:
        assert any(c.axes == ("tensor",) and c.in_loop for c in found)


# ---- WeightPlacement -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases("dualpipe", grid=["interleaved-1f1b", "zb-v", "dualpipe"]))
def test_placement_collect_sums_copies(name):
    schedule = make(name, 4, 8)
    placement = WeightPlacement.of(schedule, "stage")
    mesh = mp.MeshSpec(stage=4).build(jax.devices()[:4])
    x = np.arange(schedule.num_parts * 3, dtype=np.float32).reshape(-1, 3)

    def spread_and_collect(x):
        spread = placement.spread(x)
        return spread, placement.collect(spread)

    spread, collected = jax.jit(
        jax.shard_map(spread_and_collect, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"))
    )(x)
    np.testing.assert_array_equal(spread, x[placement.schedule.parts.ravel()])
    copies, stages = np.bincount(schedule.parts.ravel()), np.repeat(range(4), schedule.num_parts // 4)
    assert placement.moves == (stages[schedule.parts] != np.arange(4)[:, None]).sum()
    np.testing.assert_array_equal(collected, x * copies[:, None])


# ---- Planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "buffer", cases("saved_activations", grid=["saved_activations", "receive_buffer", "deferred_weight_grads"])
)
def test_stale_buffer_changes_gradients(monkeypatch, buffer):
    """The gradient tests would detect a B or W that reads a wrong slot."""
    case = Case(schedule="zb-h2", p=3, m=6)
    kind = 1 if buffer == "receive_buffer" else 2
    slots, schedule = case.table.slots(), case.table
    array = getattr(slots, buffer).copy()
    stage = array.max((0, 2)).argmax()
    tick = np.flatnonzero(array[:, stage, kind] >= 0)[2]
    array[tick, stage, kind] = (array[tick, stage, kind] + 1) % (array[:, stage].max() + 1)
    stale = dataclasses.replace(slots, **{buffer: array})
    with pytest.raises(Stale):
        replay(schedule, stale)
    monkeypatch.setattr(Schedule, "slots", lambda self: stale)
    assert differences(run_of(case))["grads"] > 1e-3


# ---- Errors ----------------------------------------------------------------------------------------------------------


def called(params=None, batch=None, stage=None, last=None, key=None, **options):
    case = Case(dtype="float32")
    options = {"schedule": case.table, "mesh": case.mesh, "first_fn": case.first, **options}
    default_params, default_batch = case.data
    run = value_and_grad(stage or case.stage, last or case.last, **options)
    return jax.eval_shape(lambda *args: run(*args, key), params or default_params, batch or default_batch)


PARAMS, EXAMPLES = Case(dtype="float32").data


def with_loss(loss, metrics=None):
    """Return options of a loss function, from functions of (params, y, inputs)."""
    return {"last": lambda *args: (loss(*args), {} if metrics is None else {"a": metrics(*args)})}


def mean(params, y, inputs):
    return y.mean()


WHERE = "pipeline.value_and_grad"
WITHOUT_W = make("zb-h1", 2, 4).table.copy()
WITHOUT_W[..., 2, :] = -1
INVALID_CALLS = {
    "schedule without W": (
        {"schedule": dataclasses.replace(make("zb-h1", 2, 4), table=WITHOUT_W)}, "missing-op", "microbatch 0"
    ),
    "schedule of 4 stages": ({"schedule": make("1f1b", 4, 4)}, "unknown-axis", f"{WHERE}(axis='stage')"),
    "axis of size 1": ({"axis": "tensor"}, "unknown-axis", f"{WHERE}(axis='tensor')"),
    "number of chunks": ({"schedule": make("zb-v", 2, 4)}, "wrong-shape", "`down` of shape (2, 2, 16, 8) dim 0"),
    "gather": ({"gather": "never"}, "unknown-choice", WHERE),
    "remat by name": ({"remat": "save:x"}, "unsupported-feature", f"{WHERE}(remat='save:x')"),
    "unknown batch axis": ({"batch_axes": ("rows",)}, "unknown-axis", "batch_axes=('rows',)"),
    "batch axes of a number": ({"batch_axes": 3}, "wrong-type", "batch_axes=3"),
    "batch axes of lists": ({"batch_axes": (["data"],)}, "wrong-type", "batch_axes="),
    "batch over stages": ({"batch_axes": ("stage",)}, "conflict", "batch_axes=('stage',)"),
    "batch axis twice": ({"batch_axes": ("data", "data")}, "unknown-axis", "batch_axes=('data', 'data')"),
    "schedule of a name": ({"schedule": "1f1b"}, "wrong-type", f"{WHERE}(schedule='1f1b')"),
    "no inputs": ({"first_fn": None}, "not-found", f"{WHERE}(first_fn=None)"),
    "no metrics": ({"last": mean}, "wrong-type", "loss_fn"),
    "vector loss": (with_loss(lambda params, y, inputs: y.mean(-1)), "wrong-shape", "loss_fn"),
    "vector total": (with_loss(lambda params, y, inputs: mp.MeanLoss(y.sum(-1), y.size)), "wrong-shape", "loss_fn"),
    "integer loss": (with_loss(lambda params, y, inputs: y.sum().astype(int)), "wrong-dtype", "loss_fn"),
    "loss of None": (with_loss(lambda params, y, inputs: None), "wrong-dtype", "loss_fn"),
    "keys as activations": ({"first_fn": lambda params, inputs: inputs.key}, "wrong-dtype", "first_fn"),
    "keys as parameters": ({"params": Params({"k": jax.random.split(jax.random.key(0))}, {})}, "wrong-dtype", "`k`"),
    "integer key": ({"key": 3}, "wrong-type", "key, int"),
    "several keys": ({"key": jax.random.split(jax.random.key(0))}, "wrong-type", "of shape (2,)"),
    "stage of a number": ({"stage": 3}, "wrong-type", f"{WHERE}(stage_fn=3)"),
    "no mesh": ({"mesh": None}, "wrong-type", f"{WHERE}(mesh=None)"),
    "explicit mesh": (
        {"mesh": mp.MeshSpec(stage=2, axis_types="explicit").build(jax.devices()[:2])}, "wrong-type", f"{WHERE}(mesh="
    ),
    "specs without stage": ({"specs": {"up": P("stage"), "down": P("tensor")}}, "bad-spec", "`down`"),
    "specs of a different tree": ({"specs": P("stage")}, "wrong-shape", f"{WHERE}(specs=...)"),
    "specs of an unknown axis": ({"specs": {"up": P("stage", "rows"), "down": P("stage")}}, "bad-spec", "`up`"),
    "specs with too many dims": ({"specs": {"up": P("stage", *[None] * 4), "down": P("stage")}}, "bad-spec", "`up`"),
    "indivisible specs": (
        {"specs": {"up": P("stage", None, None, "tensor"), "down": P("stage")}, "mesh": Case(tensor=3).mesh},
        "bad-spec", "`up`",
    ),
    "params of a dict": ({"params": {"chunks": PARAMS.chunks}}, "wrong-type", "pipeline parameters"),
    # Errors of other packages, whose codes are tested there.
    "7 examples": ({"batch": {name: x[:7] for name, x in EXAMPLES.items()}}, None, "batch leaf"),
    "scalar in the batch": ({"batch": {**EXAMPLES, "scale": jnp.float32(1)}}, None, "`scale`"),
    "unequal examples": ({"batch": {**EXAMPLES, "t": EXAMPLES["t"][:4]}}, None, "batch leaf"),
    "unknown remat": ({"remat": "some"}, None, "remat"),
    "shape of y": ({"stage": lambda layers, x, inputs: jnp.concatenate([x, x], -1)}, None, "stage_fn"),
    "dtype of y": ({"stage": lambda layers, x, inputs: x.astype(jnp.bfloat16)}, None, "stage_fn"),
    "structure of y": ({"stage": lambda layers, x, inputs: [x]}, None, "stage_fn"),
    "string metric": (with_loss(mean, lambda params, y, inputs: "b"), None, "`a`"),
    "metric of None": ({"last": lambda params, y, inputs: (y.mean(), {"a": None})}, None, "`a`"),
    "metric of a key": (with_loss(mean, lambda params, y, inputs: inputs.key), None, "`a`"),
    "vector metric": (with_loss(mean, lambda params, y, inputs: y.mean(-1)), None, "`a`"),
    "vector weight": (with_loss(lambda params, y, inputs: mp.MeanLoss(y.sum(), jnp.ones(len(y)))), None, "`weight`"),
    "weight from outputs": (
        with_loss(lambda params, y, inputs: mp.MeanLoss(y.sum(), (y > 0).sum())), None, "MeanLoss.weight"
    ),
    "weight from parameters": (
        with_loss(lambda params, y, inputs: mp.MeanLoss(y.sum(), jnp.abs(params["out"]).sum())), None, "MeanLoss.weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID_CALLS)
def test_value_and_grad_rejects(name):
    options, code, where = INVALID_CALLS[name]
    with pytest.raises(MeshparError) as error:
        called(**options)
    assert code is None or error.value.code == code, str(error.value)
    assert where in error.value.where
    assert all((error.value.reason, error.value.fix))


@pytest.mark.parametrize("name", cases("zb-h1", grid=["1f1b", "zb-h1"]))
def test_pipeline_of_one_stage(name):
    mesh = jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    run = value_and_grad(
        lambda w, x, inputs: jnp.tanh(x * w), lambda params, y, inputs: ((y**2).mean(), {}), schedule=make(name, 1, 4),
        mesh=mesh,
    )  # fmt: skip
    w, x = np.full((1, 3), 0.5, np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)
    result, grads = jax.jit(run)(Params(w), {"inputs": x})
    loss, expected = jax.jit(jax.value_and_grad(lambda w: (jnp.tanh(x * w) ** 2).mean()))(w)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(grads.chunks, expected, rtol=1e-5)


TWO = np.float32([[0.5, 0.7, 0.9], [0.4, 0.2, 0.1]])


def of_two(stage, last, first, rows, **options):
    """Run a pipeline of two stages with two microbatches. Chunks have three parameters each."""
    mesh = mp.MeshSpec(stage=2).build(jax.devices()[:2])
    run = value_and_grad(stage, last, first_fn=first, schedule=make("zb-h1", 2, 2), mesh=mesh, **options)
    return jax.jit(run)(Params(TWO), rows)


def assert_as(unsharded, result, grads):
    """Check loss and gradients against the unsharded model."""
    loss, expected = jax.jit(jax.value_and_grad(unsharded))(TWO)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(grads.chunks, expected, rtol=1e-5, atol=1e-6)


def test_integer_activations_and_python_metrics():
    """Integer activations have no gradient, and Python numbers are valid metrics."""
    rows = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "id": np.int32([0, 2, 1, 1])}

    def stage(w, activations, inputs):
        x, ids, even = activations
        return (jnp.tanh(x * w[ids][:, None] + w), ids, ~even), Aux(0.5, {"count": 3})

    def last(params, activations, inputs):
        x, ids, even = activations
        metrics = {"one": 1.0, "even": even.sum(), "small": even.sum(dtype=jnp.int8), "any": even.any()}
        return (x**2 * (1 + ids[:, None])).mean() + even.mean(), metrics

    def unsharded(w):
        activations = rows["x"], rows["id"], rows["id"] % 2 == 0
        for part in w:
            activations, _ = stage(part, activations, None)
        return last(None, activations, None)[0] + 2 * 0.5

    def first(params, inputs):
        ids = inputs.examples["id"]
        return inputs.examples["x"], ids, ids % 2 == 0

    result, grads = of_two(stage, last, first, rows)
    assert_as(unsharded, result, grads)
    assert result.aux["count"].tolist() == [6, 6]
    # Integers are summed over microbatches, bools are averaged.
    assert jax.tree.map(float, result.metrics) == {"one": 1.0, "even": 2.0, "small": 2.0, "any": 0.5}
    assert result.metrics["even"].dtype == result.metrics["small"].dtype == jnp.int32


def test_total_weight_zero_gives_loss_zero():
    rows = {"inputs": np.ones((4, 3), np.float32), "weight": np.zeros(4, np.float32)}

    def last(params, y, inputs):
        weights = inputs.examples["weight"]
        return mp.MeanLoss((y * weights[:, None]).sum(), weights.sum()), {"mean": (y.T @ weights).sum() / weights.sum()}

    result, grads = of_two(lambda w, x, inputs: jnp.tanh(x * w), last, None, rows)
    assert float(result.loss) == float(result.metrics["loss_weight"]) == float(result.metrics["mean"]) == 0
    np.testing.assert_array_equal(grads.chunks, 0)


def test_sum_loss_is_not_divided():
    rows = {"inputs": np.arange(12, dtype=np.float32).reshape(4, 3)}

    def last(params, y, inputs):
        return mp.SumLoss((y**2).sum()), {"mean": y.mean(), "rows": len(y)}

    result, grads = of_two(lambda w, x, inputs: jnp.tanh(x * w), last, None, rows)
    assert_as(lambda w: (jnp.tanh(jnp.tanh(rows["inputs"] * w[0]) * w[1]) ** 2).sum(), result, grads)
    assert int(result.metrics["rows"]) == 4
    assert "loss_weight" not in result.metrics


def test_batch_axes():
    case = Case(fsdp=2)
    functions = Functions(first=case.first, stage=case.stage, last=case.last)
    for axes, sizes in ((None, {"fsdp": 2}), ("fsdp", {"fsdp": 2}), (("data", "fsdp"), {"fsdp": 2}), ((), {})):
        run = StagedRun(functions=functions, schedule=case.table, mesh=case.mesh, batch_axes=axes)
        assert run.batch_axis_sizes == sizes


def test_tied_embedding_gradient_is_summed_over_two_stages(run):
    """In 1F1B the embedding and the head are on different stages."""
    same(run(Case(schedule="1f1b", tied=True, rows=1)))
