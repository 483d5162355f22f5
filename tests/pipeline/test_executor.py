"""One executor for every schedule: gradients of the model in one piece, small buffers, and few messages."""

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
from meshpar.pipeline.stage_placement import WeightPlacement
from meshpar.pipeline.traffic import gathers_in_cells
from meshpar.sharding.types import MeshparError
from tests.grid import cases
from tests.pipeline.replay import Stale, replay

NAMES = [*SCHEDULES]
IN, EMBED, HIDDEN, LAYERS = 6, 8, 16, 2
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

# ---------------------------------------------------------------------------------------------------------------------
# A model of parts, in every variant, and the programs that run it
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule, a mesh, and what the model does."""

    schedule: str | Schedule = "1f1b"
    p: int = 2
    m: int = 4
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    gather: str = "step"
    remat: str | None = None
    sync: bool = True
    tied: bool = False
    noise: bool = False
    aux: bool = False
    weighted: bool = False
    dtype: str = "float64"
    rows: int = 2
    """Of a microbatch on one device."""
    same: bool = False
    """All microbatches alike."""
    waves: int = 0
    """Elementwise steps of a stage before its layers: much for F to keep, nothing for B to hand to W."""

    @property
    def table(self) -> Schedule:
        return self.schedule if isinstance(self.schedule, Schedule) else make(self.schedule, self.p, self.m)

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

    # The model

    def stage(self, layers, x, inputs):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        for _ in range(self.waves):
            x = x + jnp.sin(x)
        y, _ = jax.lax.scan(layer, x, layers)
        if self.noise:
            y = y * jax.random.bernoulli(inputs.key, 0.7, y.shape).astype(y.dtype)
        if not self.aux:
            return y
        return y, Aux((y**2).mean() * 0.1, {"square": (y**2).mean(), "of_dims": jnp.abs(y).mean(0)})

    def first(self, ends, inputs):
        return inputs.examples["x"] @ ends["in"]

    def last(self, ends, y, inputs):
        error = (y @ (ends["in"].T if self.tied else ends["out"]) - inputs.examples["t"]) ** 2
        if self.weighted:
            total, weight = (error.mean(-1) * inputs.examples["weight"]).sum(), inputs.examples["weight"].sum()
            return mp.MeanLoss(total, weight), {"double": 2 * total / weight}
        return error.mean(), {"double": 2 * error.mean()}

    # Its data

    @functools.cached_property
    def data(self) -> tuple[Params, dict[str, np.ndarray]]:
        seeds, parts = itertools.count(), self.table.num_parts
        rows = self.rows * self.table.microbatches * self.shards

        def normal(*shape, scale=1.0):
            return (np.random.default_rng(next(seeds)).normal(size=shape) * scale).astype(jnp.dtype(self.dtype))

        params = Params(
            {
                "up": normal(parts, LAYERS, EMBED, HIDDEN, scale=0.3),
                "down": normal(parts, LAYERS, HIDDEN, EMBED, scale=0.3),
            },
            {"in": normal(IN, EMBED)} | ({} if self.tied else {"out": normal(EMBED, IN)}),
        )
        batch = {"x": normal(rows, IN), "t": normal(rows, IN)}
        if self.weighted:
            # No weight in the first microbatch of the first device: its mean is 0 / 0.
            batch["weight"] = (np.abs(normal(rows)) + 0.5) * (np.arange(rows) >= self.rows)
        if self.same:
            batch = {name: np.tile(x[: self.rows], (rows // self.rows, 1)) for name, x in batch.items()}
        return params, batch

    # The same in one piece

    def whole(self, params, rows, key):
        """(MeanLoss, auxiliary loss, metrics, aux) of some rows; their key folded with each part."""
        x, losses, aux = self.first(params.embedding_and_head, MicrobatchInputs(rows, key, 0)), 0.0, []
        for part in range(self.table.num_parts):
            inputs = MicrobatchInputs(rows, jax.random.fold_in(key, part), part)
            x = self.stage(jax.tree.map(lambda leaf, at=part: leaf[at], params.chunks), x, inputs)
            if self.aux:
                x, one = x
                losses, aux = losses + one.loss, [*aux, one.metrics]
        loss, metrics = self.last(params.embedding_and_head, x, MicrobatchInputs(rows, key, 0))
        if not isinstance(loss, mp.MeanLoss):
            loss = mp.MeanLoss(loss, jnp.ones_like(loss))
        return loss, losses, metrics, jax.tree.map(lambda *xs: jnp.stack(xs), *aux) if aux else {}

    def reference(self):
        """((loss, (metrics, aux)), gradients) by autodiff: over the whole batch at once, or by microbatch where
        random numbers are drawn for each."""

        def by_microbatch(params, batch, key):
            cut = jax.tree.map(
                lambda x: x.reshape(self.shards, self.table.microbatches, self.rows, *x.shape[1:]), batch
            )

            def one(rows, shard, microbatch):
                own = jax.random.fold_in(key, shard) if self.shards > 1 else key
                return self.whole(params, rows, jax.random.fold_in(own, microbatch))

            return jax.vmap(jax.vmap(one, (0, None, 0)), (0, 0, None))(
                cut, jnp.arange(self.shards), jnp.arange(self.table.microbatches)
            )

        def at_once(params, batch, key):
            return jax.tree.map(lambda x: jnp.asarray(x)[None, None], self.whole(params, batch, key))

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
    """A case, traced and compiled."""

    case: Case
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled

    def __call__(self):
        with jax.enable_x64(self.case.dtype == "float64"):
            laid = jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), self.case.data, arguments(self.case)[:2]
            )
            return self.compiled(*laid, jax.random.key(7))

    @functools.cached_property
    def collectives(self):
        return census(hlo.parse(self.compiled.as_text()), self.case.mesh)

    @property
    def temporary_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes


def function(case: Case):
    return value_and_grad(
        case.stage, case.last, schedule=case.table, mesh=case.mesh, first_fn=case.first, specs=case.specs,
        gather=case.gather, remat=case.remat, sync=case.sync,
    )  # fmt: skip


def arguments(case: Case):
    """Shapes of parameters and batch as they lie on the mesh, and of the key."""
    params, batch = case.data

    def laid(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(case.mesh, spec))

    axes = tuple(axis for axis in ("fsdp", "expert") if getattr(case, axis) > 1)
    at_rest = Params(
        {name: laid(x, case.specs[name]) for name, x in params.chunks.items()},
        {name: laid(x, P()) for name, x in params.embedding_and_head.items()},
    )
    rows = {name: laid(x, P(axes or None)) for name, x in batch.items()}
    return at_rest, rows, jax.eval_shape(lambda: jax.random.key(7))


def run_of(case: Case) -> Run:
    with jax.enable_x64(case.dtype == "float64"):
        lowered = jax.jit(function(case)).lower(*arguments(case))
        return Run(case, lowered, lowered.compile(compiler_options=dict(IN_PLACE)))


@pytest.fixture(scope="module")
def run():
    """Case -> its Run, each compiled once."""
    return functools.cache(run_of)


def differences(run: Run) -> dict[str, float]:
    """Of loss, metrics, aux and every gradient: the largest difference to the model in one piece, relative."""
    result, grads = run()
    (loss, (metrics, aux)), wanted = run.case.reference()
    found = {"loss": (result.loss, loss), "grads": (grads, wanted), "aux": (result.aux, aux)}
    found["metrics"] = result.metrics, metrics
    out = {}
    for name, (got, want) in found.items():
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


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers
# ---------------------------------------------------------------------------------------------------------------------

CROSSED = [
    Case(schedule="zb-h1", fsdp=2, tensor=2),
    pytest.param(Case(schedule="1f1b", tensor=2, tied=True), marks=pytest.mark.matrix),
    pytest.param(
        Case(schedule="interleaved-1f1b", fsdp=2, tensor=2, gather="microbatch", remat="full"), marks=pytest.mark.matrix
    ),
    Case(schedule="eager-1f1b", fsdp=2, tensor=2, gather="microbatch", remat="full"),
    pytest.param(Case(schedule=make("eager-1f1b", 2, 4, chunks=2), fsdp=2), marks=pytest.mark.matrix),
    # Of two streams and of two axes that split the batch: their parts are in other cases.
    pytest.param(Case(schedule="zb-v", fsdp=2, aux=True), marks=pytest.mark.matrix),
    pytest.param(Case(schedule="dualpipe", expert=2, fsdp=2), marks=pytest.mark.matrix),
]
COUNTS = cases(grid=[Case(schedule=name, m=m) for name, m in (("1f1b", 1), ("zb-h1", 8))])
NOISY = Case(schedule="zb-v", noise=True, aux=True)
VARIANTS = [
    Case(schedule="gpipe", weighted=True, fsdp=2),
    pytest.param(Case(schedule="1f1b", weighted=True, fsdp=2, tensor=2, aux=True), marks=pytest.mark.matrix),
    pytest.param(Case(schedule="zb-v", weighted=True, fsdp=2, aux=True, noise=True), marks=pytest.mark.matrix),
    pytest.param(
        Case(schedule="dualpipe", weighted=True, expert=2, fsdp=2, gather="microbatch"), marks=pytest.mark.matrix
    ),
    pytest.param(Case(schedule="zb-h1", noise=True, fsdp=2, remat="full"), marks=pytest.mark.matrix),
    NOISY,
    pytest.param(Case(schedule="1f1b", dtype="float32"), marks=pytest.mark.matrix),
]
FOLDED = Case(schedule="dualpipe-v", p=4, m=8, tied=True, aux=True)
EVERY = [
    *(Case(schedule=name, p=4, m=8) for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe")),
    Case(schedule="zb-h2", p=4, m=8, tied=True),
    Case(schedule="eager-1f1b", p=4, m=8, tied=True),
    FOLDED,
]


@pytest.mark.parametrize("case", cases(FOLDED, grid=EVERY), ids=label)
def test_every_schedule_is_the_model_in_one_piece(run, case):
    same(run(case))


def test_no_schedule_is_forgotten():
    assert {case.schedule for case in EVERY} == {*SCHEDULES}


@pytest.mark.parametrize("case", CROSSED + COUNTS + VARIANTS, ids=label)
def test_the_model_in_one_piece(run, case):
    same(run(case))


AXES = [{"fsdp": 2, "tensor": 2}, {"fsdp": 2}, {"tensor": 2}, {"expert": 2}]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "axes"), [(name, AXES[(at + n) % len(AXES)]) for n, name in enumerate(NAMES) for at in (0, 1)], ids=str
)
def test_every_schedule_crossed(name, axes):
    """Each with two kinds of mesh, and each of those with several schedules."""
    options = {"gather": "microbatch", "remat": "full", "tied": True, "aux": True, "noise": True}
    same(run_of(Case(schedule=name, **axes, **options)))
    if math.prod(axes.values()) <= 2:
        same(run_of(Case(schedule=name, p=4, m=8, **axes)))


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_microbatches(name):
    for p, m in ((2, 1), (2, 3), (4, 5)):
        try:
            schedule = make(name, p, m)
        except MeshparError:  # fewer microbatches than its two streams need
            assert name not in ("gpipe", "1f1b", "zb-h1")
            continue
        same(run_of(Case(schedule=schedule, p=p, m=m)))


def test_masks_differ_between_microbatches_and_parts(run):
    """What the reference draws: so that a mask used twice would be seen."""
    case = NOISY
    keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(7), i), part) for i in range(4) for part in range(4)]
    masks = {tuple(np.asarray(jax.random.bernoulli(key, 0.7, (case.rows, EMBED))).ravel()) for key in keys}
    assert len(masks) == 16
    result, _ = run(case)()
    (loss, _), _ = dataclasses.replace(case, noise=False).reference()
    assert abs(float(result.loss) - float(loss)) > 1e-3


def test_narrow_weights_are_summed_wide(run):
    """Sixteen times the same gradient: in bfloat16 their sum would have lost the last bits of each."""
    few, many = (run(Case(schedule="1f1b", m=m, dtype="bfloat16", same=True))()[1] for m in (1, 16))
    for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
        a = np.asarray(a)
        lossy = sum([a.astype(jnp.bfloat16)] * 16)
        assert abs(lossy.astype(np.float32) / 16 - a).max() > 1e-4 * abs(a).max()


def test_a_table_of_ones_own(run):
    """W of stage 0 long after its B, idle ticks anywhere, microbatches in any order."""
    cells = [
        [("F", 1, 0), None],
        [("F", 0, 0), ("F", 1, 0)],
        [None, ("F", 0, 0)],
        [None, ("B", 0, 0)],
        [("B", 0, 0), ("B", 1, 0)],
        [None, None],
        [("B", 1, 0), ("W", 1, 0)],
        [("W", 0, 0), ("W", 0, 0)],
        [("W", 1, 0), None],
    ]
    same(run(Case(schedule=Schedule.from_table(cells, name="mine"), m=2)))


@pytest.mark.matrix
def test_a_table_from_a_file(run, tmp_path):
    """One rank has the first part and the last, and pairs F with B."""
    path = tmp_path / "v.csv"
    path.write_text("0F0,0F1,,3F0,3B0,(3F1;0B0)OVERLAP_F_B,3B1,0B1\n,1F0,2F0,1F1,2F1,2B0,1B0,2I1,2W1,1B1\n")
    same(run(Case(schedule=Schedule.from_csv(path), m=2)))


# ---------------------------------------------------------------------------------------------------------------------
# Memory, and the size of the program
# ---------------------------------------------------------------------------------------------------------------------


def program(name, m):
    """Activations make up nearly all of its memory, and of them what F keeps."""
    return Case(schedule=name, p=4, m=m, rows=2048, waves=12, dtype="float32")


@pytest.mark.matrix
def test_memory_of_1f1b_does_not_grow_with_microbatches_and_gpipes_does(run):
    few, many = (run(program("1f1b", m)).temporary_bytes for m in (8, 32))
    assert many <= 1.1 * few
    few, many = (run(program("gpipe", m)).temporary_bytes for m in (8, 32))
    assert many >= 3 * few
    # What F keeps of a microbatch, and the last part's output: once each, and no copy of either.
    case = program("gpipe", 8)
    part = jax.tree.map(lambda x: x[0], case.data[0].chunks)
    x = jax.ShapeDtypeStruct((case.rows, EMBED), jnp.float32)
    saved = split_vjp(lambda layers, x: case.stage(layers, x, None), part, x).saved_activations
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in (*saved, x))
    assert (many - few) / 24 == pytest.approx(kept, rel=0.05)


@pytest.mark.matrix
def test_memory_is_what_peak_activations_says(run):
    held, peak = {}, {}
    for name in ("1f1b", "zb-h2"):
        held[name] = run(program(name, 8)).temporary_bytes
        peak[name] = int(make(name, 4, 8).peak_activations.max())
    assert (peak["1f1b"], peak["zb-h2"]) == (4, 7)
    # Older releases of XLA copy a buffer of deferred weight gradients with several slots.
    more = 1.0 if jax.__version_info__ >= (0, 11) else 1.25
    assert held["zb-h2"] / held["1f1b"] == pytest.approx(7 / 4 * more, rel=0.15)


def test_the_program_does_not_grow_with_microbatches():
    lowered = (jax.jit(function(case)).lower(*arguments(case)) for case in (program("1f1b", m) for m in (8, 32)))
    few, many = (re.findall(r"stablehlo\.\w+", one.as_text()) for one in lowered)
    assert few == many


@pytest.mark.matrix
def test_the_compiled_program_does_not_grow_with_microbatches(run):
    few, many = (len(run(program("1f1b", m)).compiled.as_text().splitlines()) for m in (8, 32))
    assert few == many


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------


BATCH = {"data", "fsdp", "expert"}


def loud(case, collectives):
    """Elements of what goes over the stages but by permutes, beyond the scalars of a step."""
    scalars = 3 + (case.table.num_parts * (1 + EMBED) if case.aux else 0)
    over = [c for c in collectives if "stage" in c.axes and c.kind != "collective-permute"]
    return [size for c in over for size in (math.prod(part.array.dims) for part in c.parts) if size > scalars]


def shared_ends(case):
    """Elements of each of the ends, gradients of which several stages make."""
    parts = case.table.parts
    first, last = ((parts == part).any(1) for part in (0, case.table.num_parts - 1))
    owners = {"in": first | last if case.tied else first, "out": last}
    return [x.size for name, x in case.data[0].embedding_and_head.items() if owners[name].sum() > 1]


@pytest.mark.parametrize("case", CROSSED, ids=label)
def test_gradients_are_reduced_once_behind_the_loop(run, case):
    """And weights are gathered once before it, unless every cell is to gather its own."""
    found = [c for c in run(case).collectives if BATCH & {*c.axes}]
    gathers = [c for c in found if c.kind == "all-gather"]
    reductions = [c for c in found if c.kind != "all-gather"]
    assert bool(gathers) == bool(reductions) == (case.shards > 1)
    assert all(c.count_per_step == 1 and not c.in_loop and not c.in_branch for c in reductions)
    if case.shards > 1:
        params, _ = case.data
        of_stage = sum(x.size for x in jax.tree.leaves(params.chunks)) // case.table.stages // case.tensor
        ends = sum(x.size for x in jax.tree.leaves(params.embedding_and_head))
        assert sum(math.prod(a.dims) for c in reductions if "stage" not in c.axes for a in c.arrays) == of_stage + ends
    if case.gather == "step":
        assert all(c.count_per_step == 1 and not c.in_loop for c in gathers)
    elif case.shards > 1:
        assert all(c.in_loop and c.in_branch for c in gathers)


@pytest.mark.call_stacks
def test_a_cell_gathers_the_weights_of_a_part_once(run):
    """Where a stage holds one part, F and B of one cell share them."""
    cells = [
        [("F", 0), None],
        [("F", 1), ("F", 0)],
        [None, [("F", 1), ("B", 0)]],
        [("B", 0), [("B", 1), ("W", 0)]],
        [[("B", 1), ("W", 1)], ("W", 1)],
        [("W", 0), None],
    ]
    schedule = Schedule.from_table(cells, name="pairs")
    one = run(Case(schedule=schedule, m=2, fsdp=2, gather="microbatch"))
    same(one)
    found = census(hlo.parse(one.compiled.as_text()), one.case.mesh, ScheduleCounts(schedule))
    gathers = [c.count_by_stage for c in found if c.kind == "all-gather" and c.in_loop]
    assert np.sum(gathers, 0).tolist() == [8, 6]
    assert gathers_in_cells(schedule, (True, True, False)).tolist() == [4, 3]
    assert gathers_in_cells(schedule, (True, True, True)).tolist() == [5, 4]


@pytest.mark.parametrize("case", [*CROSSED, FOLDED], ids=label)
def test_stages_send_only_to_their_neighbours(run, case):
    """Beside scalars, and the gradients of ends that two stages share: tied ones, and the copies of two streams."""
    found = run(case).collectives
    assert any(c.axes == ("stage",) and c.kind == "collective-permute" and c.in_loop for c in found)
    assert loud(case, found) == shared_ends(case)
    if case.tensor > 1:
        assert any(c.axes == ("tensor",) and c.in_loop for c in found)


APART = [Case(schedule="zb-h2", fsdp=2, sync=False, weighted=weighted) for weighted in (False, True)]


@pytest.mark.parametrize("case", cases(APART[1], grid=APART), ids=label)
def test_stages_that_do_not_wait_for_each_other(run, case):
    """Every stage has its share of the loss; nothing but permutes crosses stages."""
    one = run(case)
    assert all(c.kind == "collective-permute" for c in one.collectives if "stage" in c.axes)
    result, grads = one()
    (loss, (metrics, _)), wanted = case.reference()
    assert result.metrics.keys() == metrics.keys()
    for shares, whole in ((result.loss, loss), *((result.metrics[name], metrics[name]) for name in metrics)):
        shares = np.asarray(shares)
        assert shares.shape == (2,)
        assert shares[0] == 0
        np.testing.assert_allclose(shares.sum(), whole, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), grads, wanted)


@pytest.mark.parametrize("sync", [pytest.param(True, marks=pytest.mark.matrix), False])
def test_late_numbers_are_summed_on_their_way(sync):
    case = Case(schedule="zb-h1", p=4, m=4, dtype="float32", sync=sync)
    late = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (4, 3)), jnp.float32)
    result, _ = jax.jit(function(case))(*case.data, jax.random.key(7), late)
    np.testing.assert_array_equal(result.late, late.sum(0) if sync else jnp.tile(late.sum(0), (4, 1)))


class Cluster(Case):
    """A stage to a node."""

    @functools.cached_property
    def mesh(self):
        return mp.MeshSpec(stage=2, tensor=8).abstract(16)


@pytest.mark.pod
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_between_nodes_only_messages_of_neighbours(pod, tied):
    case = Cluster(schedule="zb-h1", tensor=8, tied=tied, dtype="float32")
    compiled = pod.compile(jax.jit(function(case)).trace(*arguments(case)), "h100:2x8")
    found = census(compiled.module, case.mesh)
    permutes = [c for c in found if c.axes == ("stage",) and c.kind == "collective-permute"]
    assert any(c.in_loop for c in permutes)
    assert loud(case, found) == shared_ends(case)
    assert bool(shared_ends(case)) == tied
    assert {c.axes for c in found} <= {("stage",), ("tensor",)}
    assert any(c.axes == ("tensor",) and c.in_loop for c in found)


# ---------------------------------------------------------------------------------------------------------------------
# WeightPlacement
# ---------------------------------------------------------------------------------------------------------------------


def spread(placement, rest):
    """`[stage][row]` -> `[stage][chunk]`, round by round."""
    stages = len(rest)
    out = [[None] * placement.chunks for _ in range(stages)]
    for one in placement.rounds:
        pairs = one.pairs or [(stage, stage) for stage in range(stages)]
        assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
        for source, goal in pairs:
            if one.chunk[goal] >= 0:
                assert one.row[source] >= 0
                assert out[goal][one.chunk[goal]] is None
                out[goal][one.chunk[goal]] = rest[source][one.row[source]]
    return out


@pytest.mark.parametrize("name", NAMES)
def test_every_part_gets_to_where_the_schedule_has_it(name):
    for p in range(2, 9):
        if name == "dualpipe" and p % 2:
            continue
        schedule = make(name, p, 2 * p)
        placement = WeightPlacement.of(schedule, "stage")
        rest = np.arange(schedule.num_parts).reshape(p, -1).tolist()
        assert spread(placement, rest) == schedule.parts.tolist()
        # No more rounds than parts must leave or reach some stage, and a few; none for what is in place.
        assert placement.moves == sum(
            part not in rest[s] for s, row in enumerate(schedule.parts.tolist()) for part in row
        )


@pytest.mark.parametrize("name", cases("dualpipe", grid=["interleaved-1f1b", "zb-v", "dualpipe"]))
def test_parts_go_out_and_their_gradients_come_back(name):
    schedule = make(name, 4, 8)
    placement = WeightPlacement.of(schedule, "stage")
    mesh = mp.MeshSpec(stage=4).build(jax.devices()[:4])
    x = np.arange(schedule.num_parts * 3, dtype=np.float32).reshape(-1, 3)

    def there_and_back(x):
        there = placement.spread(x)
        return there, placement.collect(there)

    there, back = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=P("stage"), out_specs=P("stage")))(x)
    np.testing.assert_array_equal(there, x[schedule.parts.ravel()])
    copies = np.bincount(schedule.parts.ravel())
    np.testing.assert_array_equal(back, x * copies[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# Seeded bugs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "buffer", cases("saved_activations", grid=["saved_activations", "receive_buffer", "deferred_weight_grads"])
)
def test_a_stale_buffer_is_seen_in_the_gradients(monkeypatch, buffer):
    """A B or W that reads another slot than it should: every other gradient test would fail so."""
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


def broken(change) -> Schedule:
    schedule = make("zb-h1", 2, 4)
    table = schedule.table.copy()
    change(table)
    return dataclasses.replace(schedule, table=table)


def drop(table):
    table[table[..., 0] == 2] = -1


def swap(table):
    """The first forward of stage 1 with its last weight gradient."""
    ticks = np.argwhere((table[:, 1, :, 0] >= 0).any(1)).ravel()
    table[ticks[[0, -1]], 1] = table[ticks[[-1, 0]], 1]


@pytest.mark.parametrize("change", [drop, swap])
def test_a_broken_table_is_not_run(change):
    with pytest.raises(MeshparError, match="tick|microbatch 2"):
        broken(change).validate()
    with pytest.raises(MeshparError, match="tick|microbatch 2"):
        function(Case(schedule=broken(change)))


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------


def called(params=None, batch=None, stage=None, last=None, key=None, late=None, **options):
    case = Case(dtype="float32")
    options = {"schedule": case.table, "mesh": case.mesh, "first_fn": case.first, **options}
    given = case.data
    run = value_and_grad(stage or case.stage, last or case.last, **options)
    return jax.eval_shape(lambda *args: run(*args, key, late), params or given[0], batch or given[1])


def wider(layers, x, inputs):
    return jnp.concatenate([x, x], -1)


PARTS, ROWS = Case(dtype="float32").data
MISTAKES = {
    "ranks": ({"schedule": make("1f1b", 4, 4)}, "run the 4 stages", "MeshSpec\\(stage=4"),
    "axis": ({"axis": "tensor"}, "run the 2 stages", "tensor=1"),
    "parts": ({"schedule": make("zb-v", 2, 4)}, "`down` of shape .2, 2, 16, 8. dim 0", "stack 4 parts"),
    "rows": ({"batch": {name: x[:7] for name, x in ROWS.items()}}, "7 rows", "use a batch of 8"),
    "no rows": ({"batch": {**ROWS, "scale": jnp.float32(1)}}, "`scale`", "it has no rows"),
    "gather": ({"gather": "never"}, "gather='never'", "microbatch"),
    "remat": ({"remat": "some"}, "some", "full"),
    "remat by name": ({"remat": "save:x"}, "keep what a stage marks", "jax.checkpoint inside stage_fn"),
    "batch axis": ({"batch_axes": ("rows",)}, "split the batch over `rows`", "the mesh has data"),
    "a number of batch axes": ({"batch_axes": 3}, "batch_axes=3", "of data, stage"),
    "numbers for batch axes": ({"batch_axes": (["data"],)}, "no names of mesh axes", "leave it out"),
    "batch over stages": ({"batch_axes": ("stage",)}, "split the batch over `stage`", "the stages'"),
    "shape": ({"stage": wider}, "float32.2, 16.", "each takes float32.2, 8."),
    "dtype": (
        {"stage": lambda layers, x, inputs: x.astype(jnp.bfloat16)},
        "bfloat16.2, 8.",
        "before the layers or behind",
    ),
    "schedule": ({"schedule": "1f1b"}, "it is a str", "one_f_one_b"),
    "inputs": ({"first_fn": None}, "`inputs`", "a first_fn"),
    "no metrics": ({"last": lambda ends, y, inputs: y.mean()}, "from its result", "return loss, {}"),
    "loss of rows": ({"last": lambda ends, y, inputs: (y.mean(-1), {})}, r"a loss of shape \(2,\)", "loss.mean()"),
    "total of rows": (
        {"last": lambda ends, y, inputs: (mp.MeanLoss(y.sum(-1), y.size), {})},
        r"a loss of shape \(2,\)",
        "loss.mean()",
    ),
    "whole loss": ({"last": lambda ends, y, inputs: (y.sum().astype(int), {})}, "a loss of dtype int", "real number"),
    "no loss": ({"last": lambda ends, y, inputs: (None, {})}, "dtype object", "astype"),
    "a metric of words": ({"last": lambda ends, y, inputs: (y.mean(), {"a": "b"})}, "`a`.*it is a str", "scalar"),
    "a metric of nothing": ({"last": lambda ends, y, inputs: (y.mean(), {"a": None})}, "it is a NoneType", "scalar"),
    "a metric of keys": (
        {"last": lambda ends, y, inputs: (y.mean(), {"a": inputs.key})},
        "of dtype key<fry>",
        "scalar",
    ),
    "a metric of rows": ({"last": lambda ends, y, inputs: (y.mean(), {"a": y.mean(-1)})}, "of shape .2,.", "its mean"),
    "weights of rows": (
        {"last": lambda ends, y, inputs: (mp.MeanLoss(y.sum(), jnp.ones(len(y))), {})},
        "`weight`.*of shape .2,.",
        "its sum",
    ),
    "a weight of outputs": (
        {"last": lambda ends, y, inputs: (mp.MeanLoss(y.sum(), (y > 0).sum()), {})},
        "MeanLoss.weight.*depends on the model's",
        "from the batch and the key only",
    ),
    "a weight of ends": (
        {"last": lambda ends, y, inputs: (mp.MeanLoss(y.sum(), jnp.abs(ends["out"]).sum()), {})},
        "MeanLoss.weight.*depends on the model's",
        "from the batch and the key only",
    ),
    "another structure": ({"stage": lambda layers, x, inputs: [x]}, r"float32.2, 8. in PyTreeDef.\[", "x's structure"),
    "keys": ({"first_fn": lambda ends, inputs: inputs.key}, "as key<fry>", "inputs.key"),
    "keys as parameters": (
        {"params": Params({"k": jax.random.split(jax.random.key(0))}, {})},
        "as key<fry>",
        "numbers",
    ),
    "unequal rows": ({"batch": {**ROWS, "t": ROWS["t"][:4]}}, "4 rows and another leaf has 8|8 rows and", "same first"),
    "key": ({"key": 3}, "key, int", "it is one key"),
    "several keys": ({"key": jax.random.split(jax.random.key(0))}, "of shape .2,.", "it is one key"),
    "late": ({"late": jnp.zeros((3, 1))}, "of shape .3, 1.", r"float32 array \[2, numbers\]"),
    "late list": ({"late": [[1.0], [2.0]]}, "late, a list", "2 stages"),
    "no function": ({"stage": 3}, "stage_fn=3", "not a function"),
    "mesh": ({"mesh": None}, "mesh=None", "MeshSpec"),
    "explicit mesh": (
        {"mesh": jax.make_mesh((2,), ("stage",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])},
        "all of type Auto",
        "MeshSpec",
    ),
    "batch axis twice": ({"batch_axes": ("data", "data")}, "split the batch over `data`", "named once"),
    "specs": (
        {"specs": {"up": P("stage"), "down": P("tensor")}},
        r"`down`.*lie as .*'tensor'",
        "first",
    ),
    "specs of another tree": ({"specs": P("stage")}, "of structure", "for each leaf"),
    "specs of no axis": ({"specs": {"up": P("stage", "rows"), "down": P("stage")}}, "`up`", "tensor=1"),
    "long specs": ({"specs": {"up": P("stage", *[None] * 4), "down": P("stage")}}, "`up` of shape", "lie as"),
    "uneven specs": (
        {"specs": {"up": P("stage", None, None, "tensor"), "down": P("stage")}, "mesh": Case(tensor=3).mesh},
        "`up`",
        "tensor=3",
    ),
    "params": ({"params": {"chunks": PARTS.chunks}}, "a model of dict", "Params\\(parts, ends\\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_four_parts(mistake):
    options, *said = MISTAKES[mistake]
    with pytest.raises(MeshparError) as told:
        called(**options)
    error = told.value
    assert all((error.where, error.requested, error.reason, error.fix))
    for words in said:
        assert re.search(words, str(error)), str(error)


@pytest.mark.parametrize("name", cases("zb-h1", grid=["1f1b", "zb-h1"]))
def test_one_stage_is_a_pipeline_too(name):
    mesh = jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    run = value_and_grad(
        lambda w, x, inputs: jnp.tanh(x * w), lambda ends, y, inputs: ((y**2).mean(), {}), schedule=make(name, 1, 4),
        mesh=mesh,
    )  # fmt: skip
    w, x = np.full((1, 3), 0.5, np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)
    result, grads = jax.jit(run)(Params(w), {"inputs": x})
    loss, wanted = jax.jit(jax.value_and_grad(lambda w: (jnp.tanh(x * w) ** 2).mean()))(w)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(grads.chunks, wanted, rtol=1e-5)


TWO = np.float32([[0.5, 0.7, 0.9], [0.4, 0.2, 0.1]])


def of_two(stage, last, first, rows, **options):
    """A pipeline of two stages with two microbatches, whose parts have three numbers each."""
    mesh = mp.MeshSpec(stage=2).build(jax.devices()[:2])
    run = value_and_grad(stage, last, first_fn=first, schedule=make("zb-h1", 2, 2), mesh=mesh, **options)
    return jax.jit(run)(Params(TWO), rows)


def mean_of(loss):
    return loss.total / loss.weight


def assert_as(whole, result, grads):
    """Loss and gradients are those of the whole model."""
    loss, wanted = jax.jit(jax.value_and_grad(whole))(TWO)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(grads.chunks, wanted, rtol=1e-5, atol=1e-6)


def test_whole_numbers_go_from_part_to_part():
    """They have no gradient; and numbers of Python's own are results as any."""
    rows = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "id": np.int32([0, 2, 1, 1])}

    def stage(w, given, inputs):
        x, ids, even = given
        return (jnp.tanh(x * w[ids][:, None] + w), ids, ~even), Aux(0.5, {"count": 3})

    def last(ends, given, inputs):
        x, ids, even = given
        told = {"one": 1.0, "even": even.sum(), "small": even.sum(dtype=jnp.int8), "any": even.any()}
        return (x**2 * (1 + ids[:, None])).mean() + even.mean(), told

    def whole(w):
        given = rows["x"], rows["id"], rows["id"] % 2 == 0
        for part in w:
            given, _ = stage(part, given, None)
        return last(None, given, None)[0] + 2 * 0.5

    result, grads = of_two(
        stage, last, lambda ends, inputs: (inputs.examples["x"], inputs.examples["id"], inputs.examples["id"] % 2 == 0), rows,
    )  # fmt: skip
    assert_as(whole, result, grads)
    assert result.aux["count"].tolist() == [6, 6]
    # Counts are summed over microbatches and not averaged, and truths are shares of them.
    assert jax.tree.map(float, result.metrics) == {"one": 1.0, "even": 2.0, "small": 2.0, "any": 0.5}
    assert result.metrics["even"].dtype == result.metrics["small"].dtype == jnp.int32


def test_a_microbatch_of_no_weight_has_no_part_in_the_mean():
    rows = {"inputs": np.arange(12, dtype=np.float32).reshape(4, 3), "weight": np.float32([0, 0, 1, 3])}

    def last(ends, y, inputs):
        weight = inputs.examples["weight"].sum()
        total = ((y**2).mean(-1) * inputs.examples["weight"]).sum()
        return mp.MeanLoss(total, weight), {"mean": total / weight, "rows": len(y)}

    def whole(w):
        y = jnp.tanh(jnp.tanh(rows["inputs"] * w[0]) * w[1])
        return mean_of(last(None, y, MicrobatchInputs(rows, None, 0))[0])

    result, grads = of_two(lambda w, x, inputs: jnp.tanh(x * w), last, None, rows)
    assert_as(whole, result, grads)
    # The first microbatch has 0 / 0 as its mean.
    np.testing.assert_allclose(result.metrics["mean"], result.loss, rtol=1e-6)
    assert (int(result.metrics["rows"]), float(result.metrics["loss_weight"])) == (4, 4.0)


def test_microbatches_without_any_weight_have_loss_zero():
    rows = {"inputs": np.ones((4, 3), np.float32), "weight": np.zeros(4, np.float32)}

    def last(ends, y, inputs):
        weights = inputs.examples["weight"]
        return mp.MeanLoss((y * weights[:, None]).sum(), weights.sum()), {"mean": (y.T @ weights).sum() / weights.sum()}

    result, grads = of_two(lambda w, x, inputs: jnp.tanh(x * w), last, None, rows)
    assert float(result.loss) == float(result.metrics["loss_weight"]) == float(result.metrics["mean"]) == 0
    np.testing.assert_array_equal(grads.chunks, 0)


def test_a_sum_is_not_divided():
    rows = {"inputs": np.arange(12, dtype=np.float32).reshape(4, 3)}

    def last(ends, y, inputs):
        return mp.SumLoss((y**2).sum()), {"mean": y.mean(), "rows": len(y)}

    result, grads = of_two(lambda w, x, inputs: jnp.tanh(x * w), last, None, rows)
    assert_as(lambda w: (jnp.tanh(jnp.tanh(rows["inputs"] * w[0]) * w[1]) ** 2).sum(), result, grads)
    assert int(result.metrics["rows"]) == 4
    assert "loss_weight" not in result.metrics


@pytest.mark.parametrize("dtype", cases(bool, grid=[bool, "int8"]))
def test_what_has_no_gradient_goes_along_under_a_weight(dtype):
    rows = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "weight": np.float32([0, 0, 1, 3])}

    def first(ends, inputs):
        return inputs.examples["x"], (inputs.examples["x"] > 4).astype(dtype)

    def stage(w, given, inputs):
        x, big = given
        return jnp.tanh(x * w) + big, big

    def last(ends, given, inputs):
        weights = inputs.examples["weight"]
        return mp.MeanLoss(((given[0] ** 2).mean(-1) * weights).sum(), weights.sum()), {}

    def whole(w):
        inputs = MicrobatchInputs(rows, None, 0)
        return mean_of(last(None, stage(w[1], stage(w[0], first(None, inputs), inputs), inputs), inputs)[0])

    result, grads = of_two(stage, last, first, rows)
    assert_as(whole, result, grads)


def test_the_axes_of_the_batch():
    case = Case(fsdp=2)
    for axes, sizes in ((None, {"fsdp": 2}), ("fsdp", {"fsdp": 2}), (("data", "fsdp"), {"fsdp": 2}), ((), {})):
        step = value_and_grad(case.stage, case.last, schedule=case.table, mesh=case.mesh, batch_axes=axes)
        assert step.run.batch_axis_sizes == sizes


def test_the_gradient_of_a_tied_end_is_summed_over_its_two_stages(run):
    """In schedules of one direction the embedding and the output layer are on different stages."""
    same(run(Case(schedule="1f1b", tied=True, rows=1)))
