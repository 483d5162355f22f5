"""Plans: the fastest layouts of a model and batch on a cluster, as values.

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
from types import MappingProxyType
from typing import Any, cast

import jax
import optax

from meshpar.hardware.clusters import Cluster, parse_cluster
from meshpar.hardware.compile_options import Options
from meshpar.inspect.explain import explain
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.target import traced_for
from meshpar.layers.losses import LossIs
from meshpar.layers.precision import Precision, as_precision
from meshpar.models.token_loss import next_token_loss
from meshpar.moe.argument_checks import check_bound
from meshpar.parallel import Strategy, as_strategy, parse_strategy
from meshpar.planner.advice import advice
from meshpar.planner.calibration import SEARCH
from meshpar.planner.layout import FIX, Layout
from meshpar.planner.search import Candidate, Search
from meshpar.planner.workload import Workload, batch_of, describe, value_of
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.context import tracing
from meshpar.sharding.errors import MeshparError, check_int, check_positive_int, check_takes, problem
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import Plain, Printed, human_mesh, parsed, table
from meshpar.sharding.types import PyTree
from meshpar.sharding.units import human_bytes, si
from meshpar.training.checks import check_loss
from meshpar.training.gradients.selection import check_options
from meshpar.training.options import StepOptions
from meshpar.training.state import abstract_state
from meshpar.training.step import TrainStep

BYTES_ERROR = 0.02
"""Relative error of an axis's bytes above which a plan has a note."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Plain):
    """Numbers of the compiled program of a plan. The step time assumes the same rates as the estimate."""

    peak_bytes: int
    sent_bytes: Mapping[str, float]
    exposed_s: Mapping[str, float]
    hidden_fraction: float | None
    step_s: float
    fits: bool
    notes: tuple[str, ...] = ()
    """Estimates with larger errors than expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Plain):
    """A layout with the estimates of its step, or the compiler's numbers after `verify`."""

    layout: Layout
    peak_bytes: int
    step_s: float
    bound: str
    """The largest term of the step time: `compute`, `memory`, `bubble` or `network:<axes>`."""
    exposed_s: Mapping[str, float]
    """Time of messages that does not overlap with compute, by mesh axes."""
    sent_bytes: Mapping[str, float]
    """Bytes that a device sends per step, by mesh axes."""
    tokens_per_s: float | None
    """Tokens per second and device."""
    utilisation: float
    """Model FLOP utilization: the model's FLOPs over those of the GPUs at their peak."""
    memory: Mapping[str, int]
    """Estimated bytes per device, by term."""
    compiled: Compiled | None = None

    @staticmethod
    def of(
        candidate: Candidate, work: Workload, cluster: Cluster, *,
        compiled: Compiled | None = None, correction: float = 1.0,
    ) -> Plan:  # fmt: skip
        """Return the plan of a layout, with the compiler's numbers if it was compiled.

        `correction` is a factor of the estimated step time.
        """
        numbers = compiled or candidate.time
        step_s = numbers.step_s * (1.0 if compiled else correction)
        tokens = None if work.tokens is None else work.tokens / cluster.num_devices / step_s
        peak_flops = cluster.num_devices * cluster.gpu.bf16_flops_per_s * step_s
        return Plan(
            layout=candidate.layout, peak_bytes=compiled.peak_bytes if compiled else candidate.memory.peak_bytes,
            step_s=step_s, bound=candidate.time.bound, exposed_s=numbers.exposed_s, sent_bytes=numbers.sent_bytes,
            tokens_per_s=tokens, utilisation=work.model_flops * work.examples / peak_flops,
            memory=candidate.memory.to_json(), compiled=compiled,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost(Plain):
    """Duration and cost of training on a number of tokens with a plan, without restarts."""

    tokens: float
    days: float
    gpu_hours: float
    cost: float | None
    """GPU-hours times the price of a GPU-hour. None without a price."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans(Printed, Plain):
    """The fastest layouts in order. Prints as a table."""

    cluster: str
    considered: int
    """Number of combinations of a mesh and a strategy in the search."""
    rates: str
    """Sources of the rates, and the errors of the estimates."""
    plans: tuple[Plan, ...]
    advice: tuple[str, ...]
    """Lines of advice: rules of thumb, warnings, and last the recommended plan."""
    left_out: tuple[str, ...] = ()
    """Layouts that fit by estimate, but not when compiled."""
    runs: tuple[RunCost, ...] = ()
    """The training run of each plan, after `for_tokens`."""
    search: Search | None = dataclasses.field(default=None, repr=False, compare=False)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def for_tokens(self, tokens: float, price: float | None = None) -> Plans:
        """Return the plans with the duration and the cost of training on `tokens`.

        Args:
          tokens: number of tokens, such as 15e12.
          price: price of a GPU-hour, in any currency.

        Raises:
          MeshparError: a number is not positive, or the batch has no tokens.
        """
        for name, value in {"tokens": tokens, "price": price}.items():
            if value is not None and not 0 < value < math.inf:
                reason, fix = "it is not a positive number", f"write {name}={'15e12' if name == 'tokens' else '2.5'}"
                raise problem("plan", f"use {name}={value}", reason, fix, code="out-of-range")
        runs = []
        for plan in self.plans:
            if plan.tokens_per_s is None:
                reason, fix = "the batch of this model has no tokens", "remove tokens"
                raise problem("plan", f"plan for {tokens:g} tokens", reason, fix, code="unsupported-feature")
            gpu_hours = tokens / plan.tokens_per_s / 3600
            days = gpu_hours / math.prod(plan.layout.mesh.values()) / 24
            cost = None if price is None else gpu_hours * price
            runs.append(RunCost(tokens=tokens, days=days, gpu_hours=gpu_hours, cost=cost))
        return dataclasses.replace(self, runs=tuple(runs))

    def save(self, path: str | Path) -> None:
        """Write the plans as JSON for `load_plans`. Raises `MeshparError` if the file cannot be written."""
        write_json(path, self.to_json(), "plans")

    def why_not(
        self, *, mesh: str | MeshSpec, strategy: str | Strategy | None = None, remat: str | None = None,
        accumulate: int = 1, batch_slices: int = 1,
    ) -> str:  # fmt: skip
        """Explain why a layout is not the best plan.

        Args:
          mesh: `fsdp=8,tensor=8`, or a `MeshSpec`.
          strategy: as text or as a value. None selects the fastest candidate on the mesh.
          remat, accumulate, batch_slices: options of the step.

        Returns:
          The error, the missing memory, or the step time relative to the best plan, with the sources of the rates.

        Raises:
          MeshparError: a text is invalid, the plans were loaded from a file, or step options are given without a
          strategy.
        """
        if strategy is None and (remat, accumulate, batch_slices) != (None, 1, 1):
            reason, fix = "without a strategy the fastest options are selected", "pass the strategy, too"
            requested = f"use remat={remat!r}, accumulate={accumulate}, batch_slices={batch_slices}"
            raise problem("why_not", requested, reason, fix, code="missing-argument")
        if self.search is None:
            reason, fix = "the file does not contain the model", "call why_not on the result of mp.plan"
            raise problem("plans from a file", "evaluate another layout", reason, fix, code="unsupported-feature")
        spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec.parse(str(mesh))
        if strategy is not None:
            strategy = parse_strategy(strategy) if isinstance(strategy, str) else as_strategy(strategy)
        try:
            if strategy is None:
                candidate = self.search.on_mesh(spec)
            else:
                options: dict[str, Any] = {"remat": remat, "accumulate": accumulate, "batch_slices": batch_slices}
                check_options(strategy, StepOptions(**options), tuple(axis for axis, size in spec.items() if size > 1))
                candidate = self.search.estimate(Layout(mesh=spec, strategy=strategy, **options))
        except MeshparError as error:
            return f"the layout is invalid: {error}"
        label, limit, peak = candidate.layout.label, self.search.limit_bytes, candidate.memory.peak_bytes
        if peak > limit:
            largest = max(candidate.memory.parts, key=lambda term: candidate.memory.parts[term])
            return (
                f"{label} does not fit: {human_bytes(peak)} of {human_bytes(limit)} per GPU, "
                f"{human_bytes(peak - limit)} too much; the largest term is {largest.removesuffix('_bytes')}; "
                f"meshpar explain RECIPE --fit lists changes that fit\n"
                f"{self.rates}"
            )
        # Compare estimates, even if the best plan was compiled.
        ratio = candidate.time.step_s / self.search.estimate(self.plans[0].layout).time.step_s
        waits = ", ".join(f"{si(time_s, 's')} for {axes}" for axes, time_s in _longest(candidate.time.exposed_s))
        return (
            f"{label} fits and takes {si(candidate.time.step_s, 's')} per step, {ratio:.2f} times the best; bound by "
            f"{candidate.time.bound}" + (f", waits {waits}" if waits else "") + f"\n{self.rates}"
        )

    def __rich__(self) -> Any:
        columns = ("", "mesh", "strategy", "step", "bound", "waits for", "peak", "tokens/s per GPU", "MFU", "source")
        rows = [
            (
                str(rank),
                human_mesh(plan.layout.mesh),
                plan.layout.label.partition(" · ")[2],
                si(plan.step_s, "s"),
                plan.bound,
                "\n".join(f"{axes} {si(time_s, 's', digits=3)}" for axes, time_s in _longest(plan.exposed_s)),
                human_bytes(plan.peak_bytes),
                "" if plan.tokens_per_s is None else f"{plan.tokens_per_s:,.0f}",
                f"{plan.utilisation:.0%}",
                "estimate" if plan.compiled is None else "compiler",
            )
            for rank, plan in enumerate(self.plans, 1)
        ]
        if self.runs:
            columns += ("days", "GPU-hours", *(("cost",) if self.runs[0].cost is not None else ()))
            for i, run in enumerate(self.runs):
                cost = () if run.cost is None else (f"{run.cost:,.0f}",)
                rows[i] = (*rows[i], f"{run.days:,.1f}", f"{run.gpu_hours:,.0f}", *cost)
        compiled = [(rank, plan.compiled) for rank, plan in enumerate(self.plans, 1) if plan.compiled]
        notes = [f"{rank}: {note}" for rank, program in compiled for note in program.notes]
        caption = "\n".join([self.rates, *notes, *self.left_out, "", *self.advice])
        title = f"{self.cluster}: the fastest {len(self)} of {self.considered:,} layouts"
        title += f", {self.runs[0].tokens:.3g} tokens" if self.runs else ""
        return table(title, columns, rows, left=columns[:6], caption=caption)


def _longest(times_s: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the times above 1 % of their sum, in descending order."""
    threshold = sum(times_s.values()) / 100
    return sorted((item for item in times_s.items() if item[1] > threshold), key=lambda item: -item[1])


def plan(
    model: Any,
    batch: PyTree,
    cluster: str | Cluster,
    *,
    top: int = 5, verify: int = 0, loss: Callable[..., Any] = next_token_loss,
    loss_is: LossIs | None = None,
    tx: optax.GradientTransformation | None = None, precision: Precision | None = None,
    bound_factor: float | None = None, nodes_visited: Callable[[int], int] | None = None,
    row_bytes: Callable[[str, int], int | None] | None = None, xla: Options = MappingProxyType({}),
    remat: str | None = None,
) -> Plans:  # fmt: skip
    """Return the fastest layouts for training a model on a cluster.

    The search covers meshes, strategies, schedules, remat policies, micro-steps and batch slices. Memory and times are
    estimates; the plans state their sources and errors. No step is run.

    Args:
      model: a `Model`, or a config with `build()`, such as `TransformerConfig`.
      batch: the global batch, as arrays or as shapes and dtypes.
      cluster: `h100:8x8`, the path of a profile, or a `Cluster`. Measured rates replace data sheets.
      top: number of plans.
      verify: number of the fastest plans, at most `top`, to compile for the cluster. Requires the `aot` extra.
      loss: (model, batch, key) -> (loss, metrics).
      loss_is: as in `train_step`. Without it, plans for a scalar loss, and for a loss that combines examples, have
        no micro-steps and no stages.
      tx: the optimizer; AdamW by default.
      precision: precision of the step; by default bfloat16 compute with float32 parameters.
      bound_factor, nodes_visited, row_bytes: properties of MoE layers as in `MoEConfig`, for models without a config.
      xla: compile options, as in `train_step`.
      remat: an additional policy to consider, such as `save:query,attention_out`.

    Raises:
      MeshparError: no layout fits, the cluster is unknown, or an argument is invalid. Errors of the model and the loss
        are not caught.

    Example:
      >>> batch = {name: jax.ShapeDtypeStruct((512, 4096), np.int32) for name in ("inputs", "targets")}
      >>> plans = mp.plan(mp.models.llama3_8b(), batch, "h100:8x8", top=3)  # doctest: +SKIP
      >>> plans[0].layout.label  # doctest: +SKIP
      'fsdp=64 · fsdp(prefetch=1), remat=minimal, accumulate=2'
    """
    cluster = parse_cluster(cluster)
    _check_arguments(model, loss, tx, top, verify)
    precision = Precision(compute="bfloat16") if precision is None else as_precision(precision, "plan")
    options = StepOptions(precision=precision, loss_is=loss_is, xla={} if xla is None else xla)
    work = describe(
        model if isinstance(model, Model) else model.build(), batch, loss, tx=optax.adamw(3e-4) if tx is None else tx,
        precision=precision, loss_is=loss_is, cluster=cluster, remat=remat,
        **_expert_properties(model, bound_factor, nodes_visited, row_bytes),
    )  # fmt: skip
    search = Search(work, cluster)
    with warnings.catch_warnings(record=True) as caught:
        candidates = list(_traceable(search, loss, top))
    warned = [warning for warning in caught if issubclass(warning.category, UserWarning)]
    for warning in caught:
        if warning not in warned:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if not candidates:
        raise _nothing_fits(search)
    plans, left_out, correction = _verified(search, candidates, loss, verify, options)
    corrected = f"; steps of other plans are estimates times {correction:.3g}, the mean ratio of compiled plans"
    return Plans(
        cluster=cluster.name,
        considered=search.considered,
        rates=search.rates + corrected * (0 < verify < len(plans)),
        plans=tuple(plans),
        advice=(
            *advice(work, cluster, search.limit_bytes),
            *dict.fromkeys(str(warning.message) for warning in warned),
            f"start with plan 1: {plans[0].layout.label}",
        ),
        left_out=tuple(left_out),
        search=search,
    )


def _check_arguments(model: Any, loss: Any, tx: Any, top: int, verify: int) -> None:
    check_positive_int("plan", "the number of plans", top=top)
    check_int("plan", "the number of plans to compile", verify=verify)
    if verify > top:
        reason, fix = f"there are only top={top} plans", f"write top={verify}, or verify={top}"
        raise problem(f"plan(verify={verify})", "compile so many plans", reason, fix, code="out-of-range")
    for name, value, method, fix in (
        ("model", model, "build", "pass the result of an adapter, as mp.from_nnx(...), or a config"),
        ("tx", tx, "update", "pass optax.adamw(3e-4)"),
    ):
        is_default = isinstance(value, Model) or (name == "tx" and value is None)
        if not is_default and (isinstance(value, type) or not callable(getattr(value, method, None))):
            kind = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            reason = f"it is {kind}, and an instance with a method `{method}` is required"
            raise problem(f"plan({name}=...)", "trace a training step with it", reason, fix, code="wrong-type")
    check_loss("plan", loss)


def _expert_properties(model: Any, bound_factor: Any, nodes_visited: Any, row_bytes: Any) -> dict[str, Any]:
    """Return the properties of the MoE layers: those of the model's config, or else the arguments."""
    check_bound("plan", bound_factor)
    values = {"bound_factor": bound_factor, "nodes_visited": nodes_visited, "row_bytes": row_bytes}
    for name, arguments in (("nodes_visited", ("nodes",)), ("row_bytes", ("way", "width"))):
        if values[name] is not None:
            check_takes(f"plan({name}=...)", values[name], arguments, f"{name}=moe.{name} of your MoEConfig, or None")
    return {name: getattr(getattr(model, "moe", None), name, value) for name, value in values.items()}


def _traceable(search: Search, loss: Callable[..., Any], top: int) -> Iterator[Candidate]:
    """Yield the fastest layouts under which the model can be traced. Some kernels do not support all strategies."""
    is_traceable: dict[Any, bool] = {}
    for candidate in search.best(4 * top):
        axes = tuple(size > 1 for size in candidate.layout.mesh.values())
        key = axes, tuple(map(repr, candidate.layout.strategy.components)), candidate.layout.batch_slices
        if key not in is_traceable:
            is_traceable[key] = _traces(search, candidate.layout, loss)
        if is_traceable[key]:
            yield candidate
            top -= 1
        if not top:
            return


def _traces(search: Search, layout: Layout, loss: Callable[..., Any]) -> bool:
    work, mesh = search.workload, layout.mesh.abstract(search.cluster.num_devices)
    batch, variables = batch_of(work.batch, work.examples // layout.accumulate), work.model.abstract()
    try:
        with traced_for(search.cluster), tracing(mesh, layout.strategy):
            value = value_of(work.model, loss, work.precision, layout.remat, layout.batch_slices)
            jax.eval_shape(value, variables.params, variables.extra, batch, jax.ShapeDtypeStruct((2,), "uint32"))
    except MeshparError:
        return False
    return True


def _nothing_fits(search: Search) -> MeshparError:
    """Return the error with the missing memory, and the smallest change that would fit."""
    work, cluster, limit = search.workload, search.cluster, search.limit_bytes
    if search.smallest is None:
        num = cluster.num_devices
        divisible = [size for size in (work.examples // num * num, -(-work.examples // num) * num) if size]
        fewer = max((size for size in range(1, num) if work.examples % size == 0), default=1)
        reason = "no mesh of its GPUs divides this model and batch"
        fix = f"use a batch of {' or '.join(map(str, divisible))}, or {fewer} of the {num} GPUs"
    else:
        layout, memory = search.smallest
        reason = (
            f"the smallest layout needs {human_bytes(memory.peak_bytes)} of {human_bytes(limit)} per GPU, "
            f"{human_bytes(memory.peak_bytes - limit)} too much ({human_bytes(memory.state_bytes)} of it state): "
            f"{layout.label}"
        )
        sharded = memory.state_bytes + memory.gradients_bytes + memory.copies_bytes  # over all GPUs
        fix, available = "use shorter sequences or smaller microbatches", limit - (memory.peak_bytes - sharded)
        if available > 0:
            nodes = -(-sharded * cluster.nodes // available)
            name = f"{cluster.gpu.name}:{nodes}x{cluster.gpus_per_node}"
            fix = f"use about {nodes} nodes, --cluster {name}, or a larger GPU"
        fix += ", or reduce the state: meshpar explain RECIPE --fit compiles changes of the optimizer and of the loss"
    requested = f"train {sum(leaf.size for leaf in work.leaves):,} parameters with a batch of {work.examples}"
    return problem(f"plan for `{cluster.name}`", requested, reason, fix, code="does-not-fit")


# ---- By the compiler -------------------------------------------------------------------------------------------------


def _verified(
    search: Search, candidates: Sequence[Candidate], loss: Callable[..., Any], verify: int, options: StepOptions
) -> tuple[list[Plan], list[str], float]:
    """Return the plans by step time, descriptions of layouts that do not fit when compiled, and the correction.

    The correction is a factor of the estimated step times: the geometric mean of the ratios of compiled to estimated
    times. It removes an error that all estimates share, which would rank estimated plans above compiled plans.
    """
    work, cluster, remaining = search.workload, search.cluster, list(candidates)
    plans: list[Plan] = []
    left_out: list[str] = []
    log_ratios: list[float] = []
    with PodProcess() if verify else contextlib.nullcontext() as pod:
        while remaining and len(plans) < verify:
            layout = remaining.pop(0)
            program = compiled(search, layout, loss, cast(PodProcess, pod), options)
            if program.fits:
                plans.append(Plan.of(layout, work, cluster, compiled=program))
                log_ratios.append(math.log(program.step_s / layout.time.step_s))
            else:
                needed = human_bytes(program.peak_bytes)
                left_out.append(f"does not fit: {layout.layout.label}: the compiled program needs {needed}")
    if not plans and not remaining:
        reason, fix = "; ".join(left_out), f"compile more than {len(candidates)} layouts: --top {2 * len(candidates)}"
        raise problem(f"plan for `{cluster.name}`", "verify it with the compiler", reason, fix, code="does-not-fit")
    correction = math.exp(sum(log_ratios) / len(log_ratios)) if log_ratios else 1.0
    plans += [Plan.of(layout, work, cluster, correction=correction) for layout in remaining]
    return sorted(plans, key=lambda plan: plan.step_s), left_out, correction


def compiled(
    search: Search, candidate: Candidate, loss: Callable[..., Any], pod: PodProcess, options: StepOptions
) -> Compiled:
    """Compile a layout for the cluster. `options` are the step options that the layout does not determine."""
    layout, work = candidate.layout, search.workload
    mesh = layout.mesh.abstract(search.cluster.num_devices)
    state = abstract_state(work.model, work.tx, mesh=mesh, strategy=layout.strategy, precision=work.precision)
    report = explain(TrainStep(loss, layout.options(options)), state, work.batch, search.cluster, pod=pod, advise=False)
    totals = report.to_json()["totals"].items()
    sent = {axes: float(sum(kind["bytes_sent_per_device"] for kind in kinds.values())) for axes, kinds in totals}
    step_s, exposed = report.compute.predicted_step_s, dict(report.compute.exposed_s)
    assert step_s is not None
    peak = report.memory.peak_bytes
    return Compiled(
        peak_bytes=peak, sent_bytes=sent, exposed_s=exposed, hidden_fraction=report.overlap.hidden_fraction,
        step_s=step_s, fits=bool(report.memory.fits), notes=tuple(_notes(candidate, peak, sent, step_s)),
    )  # fmt: skip


def _notes(candidate: Candidate, peak: int, sent: Mapping[str, float], step_s: float) -> Iterator[str]:
    estimate = candidate.memory.peak_bytes
    if abs(estimate / peak - 1) > SEARCH.memory_error:
        yield f"peak memory: estimated {human_bytes(estimate)}, compiled {human_bytes(peak)}"
    total = sum(sent.values())
    for label, nbytes in sent.items():
        estimated_bytes = candidate.time.sent_bytes.get(label, 0.0)
        if nbytes > total / 100 and abs(estimated_bytes / nbytes - 1) > BYTES_ERROR:
            yield f"bytes over {label}: estimated {human_bytes(estimated_bytes)}, compiled {human_bytes(nbytes)}"
    if abs(candidate.time.step_s / step_s - 1) > SEARCH.time_error:
        yield f"step: estimated {si(candidate.time.step_s, 's')}, simulated from the program {si(step_s, 's')}"


# ---- From a file -----------------------------------------------------------------------------------------------------


def load_plans(path: str | Path) -> Plans:
    """Read plans that `Plans.save` or `meshpar plan --json` wrote."""
    where = f"plans `{path}`"
    try:
        data = read_json(path, where, FIX)
        runs = [parsed(RunCost, run, where, FIX) for run in data.get("runs", ())]
        each = [_plan(plan, where) for plan in data["plans"]]
        plans = parsed(Plans, {**data, "plans": each, "runs": runs}, where, FIX)
        reason = "" if plans.plans else "the file has no plans"
    except MeshparError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"the file has no plans ({error})"
    if reason:
        raise problem(where, "read them", reason, FIX, code="damaged-file")
    return plans


def _plan(data: Mapping[str, Any], where: str) -> Plan:
    compiled = data.get("compiled")
    program = compiled and parsed(Compiled, compiled, where, FIX)
    return parsed(Plan, {**data, "layout": Layout.from_json(data["layout"]), "compiled": program}, where, FIX)
