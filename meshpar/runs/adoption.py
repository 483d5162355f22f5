"""Adoption of models of other packages: names, layouts, verification and a recipe.

MODULE:CLASS, inputs ─► trace ─► names ─► layouts ─► compiled and ranked ─► best ─► verified on host devices ─► recipe
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.hardware.clusters import Cluster, parse_cluster
from meshpar.inspect.dim_flow import DimFlow
from meshpar.inspect.explain import explain
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.proposed_names import ProposedNames, names_from_flow, traced_flow
from meshpar.inspect.target import require_aot
from meshpar.loop.verify import Case, Verified, verify
from meshpar.parallel import as_strategy
from meshpar.parallel.parallelism import MIN_SHARDED_BYTES
from meshpar.runs.adopted_recipe import AdoptedRecipe, LossKind, ModelOutput
from meshpar.runs.model_target import Inputs, parse_inputs, parse_target
from meshpar.runs.recipe import Recipe, batch_shapes, build_model, build_optimizer, build_step
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.errors import MeshparError, check_cases, check_choice, check_positive_int, problem
from meshpar.sharding.host_resources import user_line, write_text
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import Plain, Printed, human_mesh, table
from meshpar.sharding.types import PyTree
from meshpar.sharding.units import human_bytes, si
from meshpar.training.state import abstract_state

HOST_DEVICES = 8
"""Number of devices of a layout without a cluster, and of the verification."""
EXAMPLES = 16
"""Number of examples of the verification."""
MAX_VERIFIED_BYTES = 2**28
"""Maximum bytes of the parameters of a verified model, because each host device stores a few copies."""
_TENSOR = ("vocab", "heads", "kv_heads", "mlp")
"""Names that `tensor_parallel` shards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdoptedLayout(Plain):
    """A layout of an adopted model, with numbers of the compiled step."""

    mesh: Mapping[str, int]
    strategy: str
    """Code of the strategy without rules."""
    without: tuple[str, ...] = ()
    """Proposed names that have no rule."""
    step_s: float | None = None
    """Simulated time of a step; None for host devices."""
    sent_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Bytes that a device sends per step, by kind of collective."""
    peak_bytes: int | None = None
    refused: str = ""
    """Why the layout cannot be used: an error of the model, or missing memory."""

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key: layouts that can be used, by simulated step time, and by bytes without a simulation."""
        return bool(self.refused), self.step_s or 0.0, sum(self.sent_bytes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adoption(Printed, Plain):
    """The result of `adopt`. Prints as a report."""

    target: str
    """`MODULE:CLASS`."""
    cluster: str
    """The cluster for which the layouts were compiled."""
    names: ProposedNames
    """Proposed names of the parameters."""
    layouts: tuple[AdoptedLayout, ...]
    """Compiled layouts, from the fastest to the slowest, and refused layouts."""
    verified: Verified | None
    """Comparison of the best layout with a single device. None if it was not requested."""
    code: AdoptedRecipe = dataclasses.field(repr=False)
    """The recipe of the best layout."""
    derived = ("text",)

    @property
    def text(self) -> str:
        """Code of the recipe."""
        return self.code.text()

    @property
    def best(self) -> AdoptedLayout:
        """The best layout."""
        return self.layouts[0]

    def recipe(self) -> Recipe:
        """Return the recipe of the best layout."""
        return self.code.module().recipe()

    def save(self, path: str | Path) -> None:
        """Write the recipe as a Python file.

        Raises `MeshparError` if the model is defined in a notebook, or if the file cannot be written.
        """
        if "__main__" in self.code.target.modules:
            reason, fix = "another program cannot import it from a notebook", "define it in a Python file"
            raise problem(f"`{self.target}`", "write a recipe with this model", reason, fix, code="unsupported-feature")
        write_text(path, self.text, "recipe")

    def __rich__(self) -> Any:
        from rich.console import Group

        rows = [
            (
                str(rank),
                human_mesh(layout.mesh),
                layout.strategy.replace("mp.", ""),
                ", ".join(layout.without) or "–",
                "–" if layout.step_s is None else si(layout.step_s, "s"),
                "\n".join(f"{kind} {human_bytes(nbytes)}" for kind, nbytes in layout.sent_bytes.items()),
                "" if layout.peak_bytes is None else human_bytes(layout.peak_bytes),
            )
            for rank, layout in enumerate(self.layouts, 1)
            if not layout.refused
        ]
        refused = [f"refused: {human_mesh(x.mesh)}: {x.refused}" for x in self.layouts if x.refused]
        columns = ("", "mesh", "strategy", "names without rule", "step", "sent by a device", "peak")
        caption = "\n".join([*refused, "not verified" if self.verified is None else str(self.verified)])
        title = f"{self.target} on {self.cluster}"
        return Group(self.names.__rich__(), table(title, columns, rows, left=columns[:6], caption=caption))


def adopt(
    target: str | Callable[..., Any],
    inputs: str | Path | Mapping[str, Any],
    *,
    settings: Sequence[str] = (),
    cluster: str | Cluster | None = None,
    loss: LossKind | None = None,
    num_layouts: int = 6,
    small: Sequence[str] = (),
    verified: bool = True,
) -> Adoption:
    """Adopt a model of another package, without changes to its code.

    The model is traced without weights. Names of dims are proposed from the way in which dims meet in matmuls. Layouts
    are compiled and ranked, and the gradients of the best layout are compared with a single device.

    Args:
      target: `MODULE:CLASS`, a class of Flax Linen, Flax NNX or Equinox, or `MODULE:FUNCTION`, a function that returns
        a module or a `Model`; or the class or function itself.
      inputs: example inputs that are passed by keyword: "ids=int32[8,128],deterministic=True", the path of a Python
        file that defines a dict `inputs`, or such a dict. The first dim of each array is the global batch.
      settings: keyword arguments of the class, "NAME=VALUE". A value `MODULE:NAME` is imported, and "NAME.FIELD=VALUE"
        calls it with this keyword argument.
      cluster: `h100:8x8`, the path of a profile, or a `Cluster`, for which layouts are compiled (`aot` extra). None
        compiles for eight local devices.
      loss: "cross-entropy" or "squared-error". By default cross entropy for outputs with the name `logits` or with the
        size of the vocabulary, and otherwise squared error.
      num_layouts: number of layouts to compile.
      small: additional settings that make the model small enough for the verification on host devices.
      verified: whether to compare the best layout with a single device.

    Returns:
      The names, the layouts, the comparison and the recipe. `save` writes the recipe.

    Raises:
      MeshparError: the model cannot be created or traced, no layout divides it, it is too large to be verified, or jax
        has only one device.

    Example:
      >>> adoption = mp.adopt(  # doctest: +SKIP
      ...     "flax.linen:Dense", "inputs=float32[16,64]", settings=["features=256"], cluster="h100:1x8"
      ... )
      >>> adoption.save("recipe.py")  # doctest: +SKIP
    """
    check_positive_int("adopt", "the number of layouts to compile", num_layouts=num_layouts)
    check_choice("adopt", "the loss of the recipe", (None, "cross-entropy", "squared-error"), loss=loss)
    if not isinstance(target, str):
        if not hasattr(target, "__qualname__"):
            reason, fix = f"it is a {type(target).__name__}", "pass a class, or a function that returns a model"
            raise problem("adopt(target)", "write code that creates the model", reason, fix, code="wrong-type")
        target = f"{target.__module__}:{target.__qualname__}"
    cluster = None if cluster is None else parse_cluster(cluster)
    if cluster is not None:
        require_aot(cluster.name)
    fix = "set XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax starts"
    check_cases(
        "adopt", "compare layouts", "unsupported-feature",
        (cluster is None and len(jax.devices()) == 1, "jax has one device", f"{fix}, or name a cluster"),
        (verified and len(jax.devices("cpu")) == 1, "jax has one host device", f"{fix}, or use verified=False"),
    )  # fmt: skip
    code, names, num_bytes = _proposed(target, parse_inputs(inputs), settings, loss)
    small_code = code
    if verified and small:
        small_code, *_, num_bytes = _proposed(target, parse_inputs(inputs), (*settings, *small), loss)
    if verified and num_bytes > MAX_VERIFIED_BYTES:
        reason = f"its parameters have {human_bytes(num_bytes)}, more than {human_bytes(MAX_VERIFIED_BYTES)}"
        fix = "make it small with --small num_layers=2 or small=[...], or use --no-verify"
        raise problem(f"`{target}`", "verify the model on host devices", reason, fix, code="out-of-range")
    if cluster is not None:
        code = dataclasses.replace(code, compute="bfloat16")
    layouts = _compiled(code, names, num_bytes, cluster, num_layouts)
    best = layouts[0]
    if best.refused:
        fix = "use other inputs, or write rules by hand: mp.Rules(paths=...)"
        raise problem(f"`{target}`", "compile a layout", best.refused.rstrip("."), fix, code="not-found")
    outcome = _verified(with_layout(small_code, names, best)) if verified else None
    return Adoption(
        target=target, cluster=f"{_num_local()} local devices" if cluster is None else cluster.name, names=names,
        layouts=layouts, verified=outcome, code=with_layout(code, names, best),
    )  # fmt: skip


def _proposed(
    target: str, inputs: Inputs, settings: Iterable[str], loss: LossKind | None
) -> tuple[AdoptedRecipe, ProposedNames, int]:
    """Return a recipe without a layout, the names of the parameters, and the bytes of the parameters."""
    code = AdoptedRecipe(target=parse_target(target, settings), inputs=inputs)
    module = code.module()
    model = module.build()
    if code.target.kind in ("nnx", "equinox"):  # the trace of a Linen model's parameters calls the model
        with _model_errors(target, "create the model", "set other arguments with --set NAME=VALUE"):
            model.abstract()
    with _model_errors(
        target, "trace its forward pass", "pass all inputs that the model needs, with their names in the signature"
    ):
        flow, leaves, out = traced_flow(model, module.call, dict(inputs.arrays))
    output = _output_of(flow, out, inputs.batch_size, loss, target)
    code = dataclasses.replace(code, bounds=_bounds(flow, inputs), output=output)
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    is_small = 2 * sum(leaf.nbytes for leaf in leaves if leaf.nbytes >= MIN_SHARDED_BYTES) < num_bytes
    code = dataclasses.replace(code, shards_all=is_small, drops_names=any(leaf.names for leaf in leaves))
    return code, names_from_flow(flow, leaves), num_bytes


@contextlib.contextmanager
def _model_errors(target: str, requested: str, fix: str) -> Iterator[None]:
    """Convert an exception of the model to an error with the last line of the user's code."""
    try:
        yield
    except MeshparError:
        raise
    except Exception as error:
        message, line = str(error).strip()[:400].rstrip("."), user_line(error)
        reason = f"it raised {type(error).__name__}{f' at {line}' if line else ''}: {message or 'no message'}"
        if type(error).__name__ == "InvalidRngError":
            fix = "switch dropout off with an input such as deterministic=True or train=False"
        raise problem(f"`{target}`", requested, reason, fix, code="error-in-model") from error


def _bounds(flow: DimFlow, inputs: Inputs) -> dict[str, int]:
    """Return an upper bound of each integer input that selects rows of a table.

    In tables other than the largest, the bound is at most the last dim of the input, because models add an offset to
    positions.
    """
    names = sorted(inputs.arrays)  # in the order of a pytree
    bounds: dict[str, int] = {}
    largest = max((flow.classes.size(lookup.rows) for lookup in flow.lookups if lookup.inputs), default=0)
    for lookup in flow.lookups:
        rows = flow.classes.size(lookup.rows)
        for name in (names[index] for index in lookup.inputs):
            bound = rows if rows == largest else min(rows, inputs.arrays[name].shape[-1])
            bounds[name] = min(bound, bounds.get(name, bound))
    return bounds


def _output_of(flow: DimFlow, out: PyTree, batch_size: int, loss: LossKind | None, target: str) -> ModelOutput:
    """Return the output that the loss compares: the first array of numbers per example, or the array `logits`."""
    arrays = [
        (jax.tree_util.keystr(path), x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(out)
        if jnp.issubdtype(x.dtype, jnp.floating) and x.shape[:1] == (batch_size,)
    ]
    if not arrays:
        reason = f"its outputs have the shapes {[x.shape for x in jax.tree.leaves(out)]}"
        fix = "name a function that returns a module with an output per example"
        raise problem(f"`{target}`", "find an output with the batch as first dim", reason, fix, code="not-found")
    access, shape = next((array for array in arrays if "logits" in array[0]), arrays[0])
    tables = {flow.classes.size(lookup.rows) for lookup in flow.lookups if lookup.inputs}
    is_logits = len(shape) > 1 and ("logits" in access or shape[-1] in tables)
    kind: LossKind = loss or ("cross-entropy" if is_logits else "squared-error")
    return ModelOutput(access=access, shape=shape, loss=kind)


# ---- Layouts ---------------------------------------------------------------------------------------------------------


def with_layout(code: AdoptedRecipe, names: ProposedNames, layout: AdoptedLayout) -> AdoptedRecipe:
    """Return a recipe with the rules, mesh and strategy of a layout."""
    paths = names.paths(without=layout.without, embed_divisor=layout.mesh["fsdp"])
    return dataclasses.replace(code, paths=paths, mesh=layout.mesh, strategy=layout.strategy)


def candidate_layouts(
    names: ProposedNames, *, num_devices: int, per_node: int, batch_size: int, replicated: bool = False
) -> Iterator[AdoptedLayout]:
    """Yield layouts of a model: sizes of mesh axes that divide heads, columns, experts, layers and the batch.

    Args:
      names: the proposed names.
      num_devices: number of devices.
      per_node: devices of a node, the maximum size of `tensor`.
      batch_size: examples of the global batch.
      replicated: whether to include data parallelism without ZeRO, which needs more memory and sends fewer bytes.
    """
    tensor = [name for name in _TENSOR if name in names.names]
    subsets = [tensor, *([name for name in tensor if name in some] for some in _SUBSETS)]
    for sharded in [[], *(subset for i, subset in enumerate(subsets) if subset and subset not in subsets[:i])]:
        without = tuple(name for name in tensor if name not in sharded)
        divisor = math.gcd(*(names.divisors[name.removeprefix("kv_")] for name in sharded))
        for size, experts in itertools.product(
            _powers(divisor, per_node) if sharded else [1],
            [1, *_powers(names.divisors.get("expert", 1), num_devices)],
        ):
            rest, remainder = divmod(num_devices, size * experts)
            nodes = num_devices // per_node
            groups = {1, nodes} if rest % nodes == 0 and rest > nodes else {1}
            for data in sorted({*groups, rest} if replicated else groups):
                if remainder == 0 and batch_size % (rest * experts) == 0:
                    parts = ["mp.ddp()" if data == rest else "mp.hsdp()" if data > 1 else "mp.fsdp()"]
                    parts += ["mp.tensor_parallel()"] * (size > 1) + ["mp.expert_parallel()"] * (experts > 1)
                    mesh = {"data": data, "fsdp": rest // data, "expert": experts, "tensor": size}
                    yield AdoptedLayout(mesh=mesh, strategy=" | ".join(parts), without=without)
    stages, microbatches = 2, 4
    is_divisible = num_devices % stages == 0 and batch_size % (num_devices // stages * microbatches) == 0
    if names.divisors.get("layers", 1) % stages == 0 and "layers" in names.names and is_divisible:
        strategy = f"mp.pipeline_parallel(stages={stages}, microbatches={microbatches}) | mp.fsdp()"
        yield AdoptedLayout(mesh={"stage": stages, "fsdp": num_devices // stages}, strategy=strategy)


_SUBSETS = (("heads", "kv_heads", "mlp"), ("heads", "kv_heads"), ("mlp",))
"""Names to shard over `tensor`, apart from all of them."""


def _powers(divisor: int, most: int) -> list[int]:
    """Return the powers of two above 1 that divide a number, up to `most`."""
    sizes = itertools.takewhile(lambda size: size <= most and divisor % size == 0, (2**n for n in itertools.count(1)))
    return list(sizes)


def _estimated_bytes(layout: AdoptedLayout, names: ProposedNames, num_bytes: int) -> float:
    """Return an estimate of the bytes that a device sends, to choose the layouts to compile."""
    sizes = {"tensor": 1, **layout.mesh}
    shards = math.prod(size for axis, size in sizes.items() if axis != "tensor")
    gathers_and_scatter, all_reduce = 3 * (1 - 1 / sizes["fsdp"]), 2 * (1 - 1 / sizes.get("data", 1)) / sizes["fsdp"]
    weights = num_bytes / sizes["tensor"] * (gathers_and_scatter + all_reduce)
    moved = sum(count for name, count in names.moved.items() if name not in layout.without)
    return weights + 2 * 4 * moved / shards * (1 - 1 / sizes["tensor"])


def _compiled(
    code: AdoptedRecipe, names: ProposedNames, num_bytes: int, cluster: Cluster | None, num_layouts: int
) -> tuple[AdoptedLayout, ...]:
    """Compile the most promising layouts of each kind. Return them in order of the step time, or of the bytes."""
    num_devices = _num_local() if cluster is None else cluster.num_devices
    per_node = num_devices if cluster is None else cluster.gpus_per_node
    candidates = list(
        candidate_layouts(
            names, num_devices=num_devices, per_node=per_node, batch_size=code.inputs.batch_size,
            replicated=cluster is not None,  # without a cluster, the memory is not known
        )
    )  # fmt: skip
    if not candidates:
        reason = f"a batch of {code.inputs.batch_size} has too few examples for a mesh of {num_devices} devices"
        fix = f"use inputs with a batch of {num_devices}"
        raise problem(f"`{code.target.name}`", "find a layout", reason, fix, code="indivisible")
    candidates.sort(key=lambda layout: _estimated_bytes(layout, names, num_bytes))
    kinds: Counter[Any] = Counter()
    ordered: list[tuple[int, AdoptedLayout]] = []
    for layout in candidates:  # the best layout of each kind first, and of these data parallelism
        kind = layout.strategy, layout.without
        ordered.append((kinds[kind], layout))
        kinds[kind] += 1
    chosen = [layout for _, layout in sorted(ordered, key=lambda pair: (pair[0], "|" in pair[1].strategy))][
        :num_layouts
    ]
    with contextlib.ExitStack() as stack:
        pod = None if cluster is None else stack.enter_context(PodProcess())
        compiled = [_explained(with_layout(code, names, layout), layout, cluster, pod) for layout in chosen]
        replicated = AdoptedLayout(mesh={"data": num_devices, "fsdp": 1}, strategy="mp.ddp()")
        if all(x.refused for x in compiled) and replicated.strategy not in {x.strategy for x in chosen}:
            compiled.append(_explained(with_layout(code, names, replicated), replicated, cluster, pod))
    return tuple(sorted(compiled, key=lambda layout: layout.rank))


def _num_local() -> int:
    return min(HOST_DEVICES, len(jax.devices()))


def _explained(
    code: AdoptedRecipe, layout: AdoptedLayout, cluster: Cluster | None, pod: PodProcess | None
) -> AdoptedLayout:
    """Return the layout with the numbers of its compiled step."""
    try:
        recipe = code.module().recipe()
        devices = jax.devices()[: math.prod(layout.mesh.values())]
        mesh = recipe.mesh.build(devices) if cluster is None else recipe.mesh.abstract(cluster.num_devices)
        model = build_model(recipe)
        tx = build_optimizer(recipe, model, mesh)
        state = abstract_state(model, tx, mesh=mesh, strategy=recipe.strategy, precision=recipe.step.precision)
        report = explain(build_step(recipe), state, batch_shapes(recipe), cluster, pod=pod, advise=False)
    except MeshparError as error:
        return dataclasses.replace(layout, refused=str(error))
    sent: dict[str, float] = defaultdict(float)
    for entry in report.collectives:
        sent[entry.collective.kind] += entry.collective.bytes_sent_per_step
    return dataclasses.replace(
        layout, step_s=report.compute.predicted_step_s, sent_bytes=dict(sent), peak_bytes=report.memory.peak_bytes,
        refused="it does not fit in memory" if report.memory.fits is False else "",
    )  # fmt: skip


# ---- Verification ----------------------------------------------------------------------------------------------------


def _verified(code: AdoptedRecipe) -> Verified:
    """Compare the layout on eight host devices with a single device, in float32."""
    # The model is small, so all leaves are sharded.
    module = dataclasses.replace(code, shards_all=True).module()
    recipe, devices = module.recipe(), jax.devices("cpu")
    sizes = ",".join(f"{axis}={size}" for axis, size in _on_host(code.mesh, min(HOST_DEVICES, len(devices))).items())
    strategy = as_strategy(recipe.strategy)
    case = Case(mesh=MeshSpec.parse(sizes), strategy=strategy)
    model: Model = build_model(recipe)
    batch = {name: np.asarray(x) for name, x in module.examples(EXAMPLES).items()}
    # Adam would amplify rounding errors of small gradients, and without clipping random data may diverge.
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
    return verify(model, recipe.loss, batch, tx=tx, case=case, dtype="float32", devices=devices)


def _on_host(mesh: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Return a mesh of fewer devices with the same axes."""
    sizes = {axis: min(size, 2) for axis, size in mesh.items() if size > 1}
    rest = num_devices // math.prod(sizes.values())
    if "fsdp" in sizes:
        sizes["fsdp"] *= rest
    return sizes
