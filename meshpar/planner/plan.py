"""Plans: the best layouts of a model and batch on a cluster, as values; confirmed by the compiler where asked.

plans = mp.plan(model, batch, "h100:8x8", top=5, verify=1)
print(plans)
plans.save("plan.json")                            # meshpar train RECIPE --plan plan.json
print(plans.why_not(mesh="fsdp=8,tensor=8"))
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import jax
import optax

from meshpar.hardware.clusters import Cluster, parse_cluster
from meshpar.hardware.compile_options import Options
from meshpar.inspect.explain import explain
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.target import traced_for
from meshpar.layers.precision import Precision, as_precision
from meshpar.models.token_loss import next_token_loss
from meshpar.moe.dispatch_combine import check_bound
from meshpar.parallel import Strategy, as_strategy, parse_strategy
from meshpar.planner.advice import advice
from meshpar.planner.calibration import SEARCH
from meshpar.planner.layout import Layout, abbreviated
from meshpar.planner.search import Found, Search, shortage
from meshpar.planner.workload import Workload, describe, value_of
from meshpar.sharding.adapters import Model
from meshpar.sharding.context import tracing
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import Plain, Printed, human_mesh, table
from meshpar.sharding.types import MeshparError, PyTree, check_takes, is_int, near, problem
from meshpar.sharding.units import human_bytes, si
from meshpar.training.gradients.selection import check_options
from meshpar.training.options import StepOptions
from meshpar.training.state import abstract_state
from meshpar.training.step import TrainStep, check_loss

Of = TypeVar("Of")
BYTES_ERROR = 0.02
"""Share by which estimates are expected to miss the compiled bytes of an axis; more is told."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Plain):
    """The compiled program's figures for a plan. Its time assumes the same rates as the estimate."""

    peak_bytes: int
    sent_bytes: Mapping[str, float]
    exposed_s: Mapping[str, float]
    hidden_fraction: float | None
    step_s: float
    fits: bool
    notes: tuple[str, ...] = ()
    """Where the estimate was further off than is expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Plain):
    """A layout, and what is told of a step under it; after `verify`, by the compiler."""

    layout: Layout
    peak_bytes: int
    step_s: float
    bound: str
    """What most of the step is spent on: `compute`, `memory`, `bubble` or `network:<axes>`."""
    exposed_s: Mapping[str, float]
    """Time that compute waits for messages, by mesh axes."""
    sent_bytes: Mapping[str, float]
    """By one device, by mesh axes."""
    tokens_per_s: float | None
    """Of one device."""
    utilisation: float
    """Model FLOPs over the peak of the GPUs."""
    memory: Mapping[str, int]
    """Estimated bytes of one device, by what takes them."""
    compiled: Compiled | None = None

    @staticmethod
    def of(found: Found, work: Workload, cluster: Cluster, compiled: Compiled | None = None) -> Plan:
        """A layout that was found, with the compiler's figures in the estimates' place where there are some."""
        told = compiled or found.time
        tokens = None if work.tokens is None else work.tokens / cluster.num_devices / told.step_s
        peak_flops = cluster.num_devices * cluster.gpu.bf16_flops_per_s * told.step_s
        return Plan(
            layout=found.layout,
            peak_bytes=compiled.peak_bytes if compiled else found.memory.peak_bytes,
            step_s=told.step_s,
            bound=found.time.bound,
            exposed_s=told.exposed_s,
            sent_bytes=told.sent_bytes,
            tokens_per_s=tokens,
            utilisation=work.model_flops * work.rows / peak_flops,
            memory=found.memory.to_json(),
            compiled=compiled,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans(Printed):
    """The best layouts, the quickest first. Prints as a table."""

    cluster: str
    considered: int
    """Strategies on meshes that were looked at."""
    rates: str
    """Which figures the times are made of, and how far off they were found to be."""
    plans: tuple[Plan, ...]
    advice: tuple[str, ...]
    """Rules of thumb, warnings, and in the last line the plan to start with."""
    left_out: tuple[str, ...] = ()
    """What was estimated to fit, and compiled does not."""
    search: Search | None = dataclasses.field(default=None, repr=False, compare=False)

    def __getitem__(self, at: int) -> Plan:
        return self.plans[at]

    def __len__(self) -> int:
        return len(self.plans)

    def to_json(self) -> dict[str, Any]:
        """The plans as plain data; `load_plans` reads them back."""
        fields = ("cluster", "considered", "rates", "advice", "left_out")
        return {**{field: getattr(self, field) for field in fields}, "plans": [one.to_json() for one in self.plans]}

    def save(self, path: str | Path) -> None:
        """Write them as JSON, which `load_plans` reads. Raises `ValueError` where it cannot be written."""
        write_json(path, self.to_json(), "plans")

    def diff(self, other: Plans) -> tuple[str, ...]:
        """What is not as in other plans: layouts that came or went, and ranks, peaks and times that moved."""
        if not isinstance(other, Plans):
            fix = "give what mp.plan gave, or planner.plan.load_plans(path)"
            raise problem("plans.diff", f"compare them with {abbreviated(other)}", f"it is a {type(other).__name__}", fix)
        mine, theirs = ({one.layout: (at, one) for at, one in enumerate(each.plans, 1)} for each in (self, other))
        lines = [f"only here: {one.label}" for one in mine if one not in theirs]
        lines += [f"only there: {one.label}" for one in theirs if one not in mine]
        for layout in (one for one in mine if one in theirs):
            (rank, one), (was, before) = mine[layout], theirs[layout]
            moved = [f"rank {was} → {rank}"] * (rank != was)
            moved += [f"step {si(before.step_s, 's')} → {si(one.step_s, 's')}"] * (before.step_s != one.step_s)
            peaks = before.peak_bytes, one.peak_bytes
            moved += [f"peak {human_bytes(peaks[0])} → {human_bytes(peaks[1])}"] * (peaks[0] != peaks[1])
            lines += [f"{layout.label}: {', '.join(moved)}"] * bool(moved)
        return tuple(lines)

    def why_not(
        self, *, mesh: str | MeshSpec, strategy: str | Strategy | None = None, remat: str | None = None,
        accumulate: int = 1, interleave: int = 1,
    ) -> str:  # fmt: skip
        """Why a layout is not the plan: what forbids it, by how much it does not fit, or how much longer it takes, and
        behind what is estimated the figures that it is made of.

        Args:
          mesh: `fsdp=8,tensor=8`, or a `MeshSpec`.
          strategy: as text or a value; None: the quickest of those that parts try on that mesh.
          remat, accumulate, interleave: of its step.

        Raises:
          ValueError: a text that cannot be read, plans that were loaded from a file, or how its step is cut without a
            strategy.
        """
        if strategy is None and (remat, accumulate, interleave) != (None, 1, 1):
            exists, fix = "without a strategy the quickest way to cut its step is told", "name the strategy, too"
            asked = f"use remat={remat!r}, accumulate={accumulate}, interleave={interleave}"
            raise problem("why_not", asked, exists, fix)
        if self.search is None:
            exists, fix = "it remembers no model", "ask the plans that mp.plan gave"
            raise problem("plans from a file", "tell why a layout is not among them", exists, fix)
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        if not isinstance(spec, MeshSpec):
            fix = 'write mesh="fsdp=8,tensor=8", or mp.MeshSpec(fsdp=8, tensor=8)'
            raise problem(f"why_not(mesh={mesh!r})", "look at that mesh", f"it is a {type(mesh).__name__}", fix)
        given = parse_strategy(strategy) if isinstance(strategy, str) else strategy
        given = None if given is None else as_strategy(given)
        try:
            if given is None:
                one = self.search.on_mesh(spec)
            else:
                options = StepOptions(remat=remat, accumulate=accumulate, interleave=interleave)
                check_options(given, options, tuple(axis for axis, size in spec.items() if size > 1))
                layout = Layout(mesh=spec, strategy=given, remat=remat, accumulate=accumulate, interleave=interleave)
                one = self.search.estimate(layout)
        except MeshparError as error:
            return f"it cannot be: {error}"
        best, limit, held = self.plans[0], self.search.limit_bytes, one.memory.peak_bytes
        if held > limit:
            largest = max(one.memory.parts, key=lambda what: one.memory.parts[what])
            return (
                f"{one.layout.label} does not fit: {human_bytes(held)} of {human_bytes(limit)} a GPU, "
                f"{human_bytes(held - limit)} too much; most of it {largest.removesuffix('_bytes')}\n{self.rates}"
            )
        # Both estimated, though the best may have been compiled, too.
        longer = one.time.step_s / self.search.estimate(best.layout).time.step_s
        waits = ", ".join(f"{si(time_s, 's')} for {axes}" for axes, time_s in _longest(one.time.exposed_s))
        return (
            f"{one.layout.label} fits and takes {si(one.time.step_s, 's')} a step, {longer:.2f} times the best; bound "
            f"by {one.time.bound}" + (f", waits {waits}" if waits else "") + f"\n{self.rates}"
        )

    def __rich__(self) -> Any:
        columns = ("", "mesh", "strategy", "step", "bound", "waits for", "peak", "tokens/s a GPU", "of peak", "from")
        rows = [
            (
                str(at),
                human_mesh(one.layout.mesh),
                one.layout.label.partition(" · ")[2],
                si(one.step_s, "s"),
                one.bound,
                "\n".join(f"{axes} {si(time_s, 's', digits=3)}" for axes, time_s in _longest(one.exposed_s)),
                human_bytes(one.peak_bytes),
                "" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
                f"{one.utilisation:.0%}",
                "estimate" if one.compiled is None else "compiler",
            )
            for at, one in enumerate(self.plans, 1)
        ]
        notes = [f"{at}: {note}" for at, one in enumerate(self.plans, 1) if one.compiled for note in one.compiled.notes]
        caption = "\n".join([self.rates, *notes, *self.left_out, "", *self.advice])
        title = f"{self.cluster}: the best {len(self)} layouts of {self.considered:,} strategies on meshes"
        return table(title, columns, rows, left=columns[:6], caption=caption)


def _longest(times_s: Mapping[str, float]) -> list[tuple[str, float]]:
    """Those of a hundredth of all, the longest first."""
    least = sum(times_s.values()) / 100
    return sorted(((axes, one) for axes, one in times_s.items() if one > least), key=lambda item: -item[1])


def plan(
    model: Any,
    batch: PyTree,
    cluster: str | Cluster,
    *,
    top: int = 5, verify: int = 0, loss: Callable[..., Any] = next_token_loss,
    loss_is: Literal["mean_over_examples"] | None = None,
    tx: optax.GradientTransformation | None = None, precision: Precision | None = None,
    bound_factor: float | None = None, nodes_visited: Callable[[int], int] | None = None,
    row_bytes: Callable[[str, int], int | None] | None = None, xla: Options = MappingProxyType({}),
    remat: str | None = None,
) -> Plans:  # fmt: skip
    """The best layouts for training a model on a cluster: meshes, strategies, recomputation, micro-steps, slices.

    Nothing is run. Memory and times are estimates, which the plans say the source and error of.

    Args:
      model: from an adapter, or a config with `build()`, as `TransformerConfig`.
      batch: the global batch, arrays or their shapes and dtypes.
      cluster: `h100:8x8`, a profile's path, or a `Cluster`; measured links count before data sheets.
      top: how many.
      verify: so many of the best, `top` at the most, are compiled for the pod (needs the `aot` extra), and told by the
        compiler.
      loss: (model, batch, key) -> (loss, metrics).
      loss_is: as for `train_step`. Without it, plans for a scalar loss have neither micro-steps nor stages.
      tx: the optimizer; None: AdamW.
      precision: of the step; None: bfloat16 compute on float32 parameters.
      bound_factor, nodes_visited, row_bytes: of MoE layers, as `MoEConfig` has them, where the model's config does not
        say them.
      xla: compile options, as for `train_step`.
      remat: a policy to consider in addition to `full`, `dots`, `minimal` and the like, as `save:query,attention_out`.

    Raises:
      ValueError: nothing fits, with what is short and by how much, by estimate or as compiled; no such cluster; an
        argument that is none of its kind; what the model or the loss raises.
    """
    cluster = parse_cluster(cluster)
    _check_asked(model, loss, tx, top, verify)
    precision = Precision(compute="bfloat16") if precision is None else as_precision(precision, "plan")
    how = StepOptions(precision=precision, loss_is=loss_is, xla={} if xla is None else xla)
    work = describe(
        model if isinstance(model, Model) else model.build(),
        batch,
        loss,
        tx=optax.adamw(3e-4) if tx is None else tx,
        precision=precision,
        loss_is=loss_is,
        cluster=cluster,
        remat=remat,
        **_of_experts(model, bound_factor, nodes_visited, row_bytes),
    )
    search = Search(work, cluster)
    found, told = _running(search, loss, top)
    if not found:
        raise _nothing_fits(search)
    plans, left_out = _verified(search, found, loss, verify, how)
    return Plans(
        cluster=cluster.name,
        considered=search.considered,
        rates=search.rates,
        plans=tuple(plans),
        advice=(*advice(work, cluster, search.limit_bytes), *told, f"start with plan 1: {plans[0].layout.label}"),
        left_out=tuple(left_out),
        search=search,
    )


def _check_asked(model: Any, loss: Any, tx: Any, top: int, verify: int) -> None:
    """Raises `ValueError` for what is none of its kind."""
    for name, number, least in (("top", top, 1), ("verify", verify, 0)):
        if not is_int(number, least):
            exists, fix = f"it is a whole number from {least} on", f"write {name}={max(least, 1)}"
            raise problem(f"plan({name}={number!r})", "give so many plans", exists, fix)
    if verify > top:
        exists, fix = f"top={top} gives fewer", f"write top={verify}, or verify={top}"
        raise problem(f"plan(verify={verify})", "compile so many plans", exists, fix)
    for name, value, method, fix in (
        ("model", model, "build", "give an adapter's, as mp.from_nnx(...), or a config"),
        ("tx", () if tx is None else tx, "update", "give optax.adamw(3e-4)"),
    ):
        if value == () or isinstance(value, Model):
            continue
        if isinstance(value, type):
            exists = f"it is the class {value.__name__} itself"
            raise problem(f"plan({name}=...)", "trace a training step with it", exists, f"call it, or {fix}")
        if not callable(getattr(value, method, None)):
            exists = f"it is a {type(value).__name__}, without `{method}`"
            raise problem(f"plan({name}=...)", "trace a training step with it", exists, fix)
    check_loss("plan", loss)


def _of_experts(model: Any, bound_factor: Any, nodes_visited: Any, row_bytes: Any) -> dict[str, Any]:
    """What the model's config says of its MoE layers, else what is given; raises `ValueError` for what none says."""
    check_bound("plan", bound_factor)
    for name, value, arguments in (
        ("nodes_visited", nodes_visited, ("nodes",)),
        ("row_bytes", row_bytes, ("way", "width")),
    ):
        if value is not None:
            check_takes(f"plan({name}=...)", value, arguments, f"{name}=moe.{name} of your MoEConfig, or None")
    given = {"bound_factor": bound_factor, "nodes_visited": nodes_visited, "row_bytes": row_bytes}
    return {name: getattr(getattr(model, "moe", None), name, value) for name, value in given.items()}


def _running(search: Search, loss: Callable[..., Any], top: int) -> tuple[list[Found], list[str]]:
    """The best layouts under which the model runs, and what it warns of there: that is about the plans."""
    with warnings.catch_warnings(record=True) as caught:
        found = list(_tracing(search, loss, top))
    about = [one for one in caught if issubclass(one.category, UserWarning)]
    for one in caught:
        if one not in about:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return found, list(dict.fromkeys(str(one.message) for one in about))


def _tracing(search: Search, loss: Callable[..., Any], top: int) -> Iterator[Found]:
    """The best layouts under which the model can be traced: some kernels refuse some strategies."""
    refused: dict[Any, bool] = {}
    for one in search.best(4 * top):
        axes = tuple(size > 1 for size in one.layout.mesh.values())
        key = axes, tuple(map(repr, one.layout.strategy.parts)), one.layout.interleave
        if key not in refused:
            refused[key] = not _traces(search, one.layout, loss)
        if not refused[key]:
            yield one
            top -= 1
        if not top:
            return


def _traces(search: Search, layout: Layout, loss: Callable[..., Any]) -> bool:
    work, mesh = search.workload, layout.mesh.abstract(search.cluster.num_devices)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // layout.accumulate, *x.shape[1:]) if x.shape else (), x.dtype),
        work.batch,
    )
    variables = work.model.abstract()
    try:
        with traced_for(search.cluster), tracing(mesh, layout.strategy):
            value = value_of(work.model, loss, work.precision, layout.remat, layout.interleave)
            jax.eval_shape(value, variables.params, variables.extra, rows, jax.ShapeDtypeStruct((2,), "uint32"))
    except MeshparError:
        return False
    return True


def _nothing_fits(search: Search) -> MeshparError:
    work = search.workload
    asked = f"train {sum(leaf.size for leaf in work.leaves):,} parameters on batches of {work.rows} rows"
    return problem(f"plan for `{search.cluster.name}`", asked, shortage(search), _nearest(search))


def _nearest(search: Search) -> str:
    """The nearest change that would fit: another batch, more nodes, or else fewer rows at once."""
    if search.smallest is None:
        rows, num = search.workload.rows, search.cluster.num_devices
        near = [one for one in (rows // num * num, -(-rows // num) * num) if one]
        fewer = max((one for one in range(1, num) if rows % one == 0), default=1)
        return f"use a batch of {' or '.join(map(str, near))} rows, or {fewer} of the {num} GPUs"
    cluster, held = search.cluster, search.smallest.memory
    shared = held.state_bytes + held.gradients_bytes + held.copies_bytes  # among all GPUs, where parameters are split
    spare = search.limit_bytes - (held.peak_bytes - shared)
    if spare <= 0:
        return "train shorter rows, or fewer of them in a microbatch"
    nodes = -(-shared * cluster.nodes // spare)
    return f"take about {nodes} nodes, --cluster {cluster.gpu.name}:{nodes}x{cluster.gpus_per_node}, or a larger GPU"


# ---- By the compiler -------------------------------------------------------------------------------------------------


def _verified(
    search: Search, found: Sequence[Found], loss: Callable[..., Any], verify: int, how: StepOptions
) -> tuple[list[Plan], list[str]]:
    """The plans, of which so many are compiled and fit, before those that are not; and what turned out not to fit."""
    work, cluster, rest = search.workload, search.cluster, list(found)
    plans: list[Plan] = []
    left_out: list[str] = []
    with PodProcess() if verify else contextlib.nullcontext() as pod:
        while rest and len(plans) < verify:
            one = rest.pop(0)
            told = compiled(search, one, loss, cast(PodProcess, pod), how)
            if told.fits:
                plans.append(Plan.of(one, work, cluster, told))
            else:
                left_out.append(f"does not fit: {one.layout.label}: compiled it takes {human_bytes(told.peak_bytes)}")
    if not plans and not rest:
        exists, fix = "; ".join(left_out), f"look at more than {len(found)}: --top {2 * len(found)}"
        raise problem(f"plan for `{cluster.name}`", "confirm it by the compiler", exists, fix)
    plans.sort(key=lambda one: one.step_s)
    return plans + [Plan.of(one, work, cluster) for one in rest], left_out


def compiled(search: Search, found: Found, loss: Callable[..., Any], pod: PodProcess, how: StepOptions) -> Compiled:
    """A layout compiled for the cluster, its step cut as the layout says and else as `how`; errors are `explain`'s."""
    layout, work = found.layout, search.workload
    options = dataclasses.replace(how, accumulate=layout.accumulate, remat=layout.remat, interleave=layout.interleave)
    mesh = layout.mesh.abstract(search.cluster.num_devices)
    state = abstract_state(work.model, work.tx, mesh=mesh, strategy=layout.strategy, precision=work.precision)
    report = explain(TrainStep(loss, options), state, work.batch, search.cluster, pod=pod, advise=False)
    sent: dict[str, float] = {}
    for label, kinds in report.to_json()["totals"].items():
        sent[label] = sum(one["bytes_sent_per_device"] for one in kinds.values())
    step_s, exposed = report.compute.predicted_step_s, dict(report.compute.exposed_s)
    assert step_s is not None
    peak = report.memory.peak_bytes
    return Compiled(
        peak_bytes=peak,
        sent_bytes=sent,
        exposed_s=exposed,
        hidden_fraction=report.overlap.hidden_fraction,
        step_s=step_s,
        fits=bool(report.memory.fits),
        notes=tuple(_notes(found, peak, sent, step_s)),
    )


def _notes(found: Found, peak: int, sent: Mapping[str, float], step_s: float) -> Iterator[str]:
    told = found.memory.peak_bytes
    if abs(told / peak - 1) > SEARCH.memory_error:
        yield f"peak memory was estimated at {human_bytes(told)}; compiled it is {human_bytes(peak)}"
    all_bytes = sum(sent.values())
    for label, nbytes in sent.items():
        guess = found.time.sent_bytes.get(label, 0.0)
        if nbytes > all_bytes / 100 and abs(guess / nbytes - 1) > BYTES_ERROR:
            yield f"{human_bytes(guess)} over {label} were estimated; compiled it is {human_bytes(nbytes)}"
    if abs(found.time.step_s / step_s - 1) > SEARCH.time_error:
        yield f"a step was estimated at {si(found.time.step_s, 's')}; simulated from the program it is " + si(
            step_s, "s"
        )


# ---- From a file -----------------------------------------------------------------------------------------------------


def load_plans(path: str | Path) -> Plans:
    """The plans that `Plans.save` or `meshpar plan --json` wrote.

    Raises:
      ValueError: no such file, or one that holds something else.
    """
    where, fix = f"plans `{path}`", "write them with meshpar plan RECIPE --cluster h100:8x8 --save plan.json"
    try:
        data = read_json(path, where, fix)
        lists = {field: _listed(data[field]) for field in ("advice", "left_out") if field in data}
        plans = _made(Plans, {**data, **lists, "plans": tuple(_plan(one, where) for one in data["plans"])}, where)
        if not plans.plans:
            raise problem(where, "take one of them", "it holds none", fix)
        return plans
    except MeshparError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise problem(where, "read them", f"it holds something else ({error})", fix) from None


def _plan(data: Mapping[str, Any], where: str) -> Plan:
    read: dict[str, Any] = {"layout": Layout.from_json(data["layout"])}
    if told := data.get("compiled"):
        read["compiled"] = _made(Compiled, {**told, "notes": _listed(told.get("notes", []))}, where)
    return _made(Plan, {**data, **read}, where)


def _made(kind: type[Of], data: Mapping[str, Any], where: str) -> Of:
    """A value of plain data, which have its fields and no others."""
    fields = {one.name: one for one in dataclasses.fields(kind) if one.name != "search"}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise problem(where, f"read `{key}`", f"a {kind.__name__} has no such field", near(key, fields))
    for key in fields:
        if key not in data:
            fix = "write them anew with meshpar plan"
            raise problem(where, f"read `{key}`", f"this {kind.__name__} lacks it", fix)
    hints = get_type_hints(kind)
    for key, value in data.items():
        if not _is(value, hints[key]):
            exists = f"of a {kind.__name__} it is {_in_words(hints[key])}"
            raise problem(f"{where}, `{key}`", f"read {abbreviated(value)}", exists, "write them anew with meshpar plan")
    return kind(**data)


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is(value: Any, hint: Any) -> bool:
    """Whether a value out of a file is of a field's type."""
    args = get_args(hint)
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping) and all(_is(one, args[1]) for one in value.values())
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is(one, args[0]) for one in value)
    if get_origin(hint) is UnionType:
        return any(_is(value, one) for one in args)
    if hint in (int, float):
        return is_int(value, 0) or (hint is float and isinstance(value, float) and 0 <= value < math.inf)
    return isinstance(value, hint)


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def _in_words(hint: Any) -> str:
    args = [_WORDS.get(one, "an object") for one in get_args(hint) if one is not Ellipsis]
    if get_origin(hint) is UnionType:
        return " or ".join(args)
    kind = {Mapping: "an object of", tuple: "a list of"}.get(get_origin(hint))
    return f"{kind} {args[-1].split(maxsplit=1)[1]}s" if kind else _WORDS.get(hint, "an object")
