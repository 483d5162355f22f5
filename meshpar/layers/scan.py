"""`scan_layers`, which runs the stacked layers of a model as the training step requires.

layers in sequence: a `lax.scan`, a loop that gathers weights explicitly, or pipeline stages
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.layers.batch_slices import check_batch_dims, join_batch, layer_on_slices, split_batch
from meshpar.layers.precision import NUMERICS, REGATHERS
from meshpar.layers.remat import regathering, remat_policy
from meshpar.sharding.context import TraceOption, ambient
from meshpar.sharding.errors import check_cases, check_positive_int, near_or, problem
from meshpar.sharding.types import PyTree

_Leaf = TypeVar("_Leaf")


class Aux(NamedTuple):
    """Auxiliary loss and metrics of a layer, or of a larger part of the model, returned next to its output.

    With pipeline stages an `Aux` is complete only after all microbatches. Values computed from it are therefore
    evaluated once, after the last tick, from sums and means over microbatches and devices. This requires that

      - the loss only adds `aux.loss`, times a constant, and does not use `aux.metrics`;
      - metrics and updated variables that depend on `aux` otherwise depend only on constants and on the variables
        before the step (`bias = update_bias(bias, aux.metrics["load"])`);
      - all other metrics are computed per microbatch, as usual.

    The results equal those of a scan if losses and metrics are means over examples, or counts.

    Example:
      >>> def layer(x, w):
      ...     y = jnp.tanh(x @ w)
      ...     return y, mp.Aux(loss=1e-3 * jnp.square(y).mean(), metrics={"positive": (y > 0).mean()})
      >>> y, aux = mp.scan_layers(layer, jnp.ones((2, 4)), jnp.ones((3, 4, 4)))
      >>> aux.metrics["positive"].shape
      (3,)
    """

    loss: jax.Array
    """Scalar, a mean over examples like the main loss."""
    metrics: dict[str, jax.Array]
    """Arrays without gradients. Integers are counts, which are summed over microbatches and devices. Other dtypes are
    means over examples, which are averaged."""
    sums: Sums | None = None
    """Sums from which loss and metrics follow, if they are not means over examples. `scan_layers` adds the sums of the
    slices of a batch (`train_step(batch_slices=...)`), and does not return them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over tokens or examples, and the function that computes an `Aux` from them."""

    values: PyTree
    """Arrays to be added over slices of the batch."""
    finish: Callable[[Any], Aux] = dataclasses.field(metadata={"static": True})
    """values -> Aux. A hashable value, equal for all slices."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefetchedWeight:
    """A weight that was gathered while the previous layer computed, for kernels that otherwise gather it themselves.

    The kernel computes with `gathered` and returns the gradient to `shard`. Modules of the model pass the object on
    like an array. If they use it in arithmetic it acts as `shard`, which the compiler gathers there.
    """

    shard: jax.Array
    """The sharded parameter, which receives the gradient."""
    gathered: jax.Array
    """The gathered weight, a constant without gradient."""

    def __jax_array__(self) -> jax.Array:
        return self.shard

    def __getattr__(self, name: str) -> Any:
        if name in ("shard", "gathered"):  # not set yet, while the object is created or copied
            raise AttributeError(name)
        return getattr(self.shard, name)

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else self.shard[index]


def _shard_operator(name: str) -> Any:
    return lambda self, *operands: getattr(self.shard, name)(*operands)


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _operator in (f"__{_name}__", f"__r{_name}__"):
        setattr(PrefetchedWeight, _operator, _shard_operator(_operator))
setattr(PrefetchedWeight, "__neg__", _shard_operator("__neg__"))  # noqa: B010


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWeight:
    """Weights of experts, `[E, d, f]`, with a LoRA pair for each, used as `weight + scale * a @ b`."""

    weight: jax.Array
    a: jax.Array
    """[E, d, r]"""
    b: jax.Array
    """[E, r, f]"""
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> np.dtype:
        return self.weight.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


Layer: TypeAlias = Callable[[Any, PyTree], Any]
"""(x, inputs of a layer) -> x, or -> (x, Aux)."""


class LayerRunner:
    """Runs the stacked layers of a model with `lax.scan`. Gradient engines set other runners with `running`.

    jax compares trace contexts by equality, so runners are compared by identity, and each trace needs a new one.
    """

    regathers: ClassVar[bool] = False
    """Whether the runner gathers weights, so that layers save none for the backward pass."""

    def run(self, stack_path: str, layer: Layer, x: PyTree, inputs: tuple[PyTree, PyTree, PyTree]) -> PyTree:
        """Return the result of `scan_layers`. `inputs` are stacked parameters, extra inputs and caches."""
        with jax.named_scope(stack_path):
            return scanned(layer, x, inputs, with_caches=inputs[2] is not None)


RUNNER = TraceOption[LayerRunner]("runner")
_OUTSIDE_LOOP = TraceOption[bool]("layer outside loop")


def is_outside_loop() -> bool:
    """Return whether the compiled program runs the layer that is being traced outside of a loop.

    Forward and backward pass are then in the same computation, where XLA would merge the recomputation of a layer with
    its forward pass. `jax.checkpoint` needs `prevent_cse=True`.
    """
    return bool(_OUTSIDE_LOOP.value)


@contextlib.contextmanager
def running(runner: LayerRunner) -> Iterator[None]:
    """Run the stacked layers of the model with a runner."""
    with RUNNER.set(runner), REGATHERS.set(runner.regathers):
        yield


@dataclasses.dataclass(frozen=True, eq=False)
class StageRunner(LayerRunner):
    """Passes the layers to a function that runs the layers of a pipeline stage."""

    function: Callable[[Layer, Any, PyTree], Any]
    """(layer, x, stacked inputs) -> x, or -> (x, Aux of all layers)."""
    in_part: bool = False
    """Whether only a part of the model is traced, so that some modules may not be called."""

    def run(self, stack_path: str, layer: Layer, x: PyTree, inputs: tuple[PyTree, PyTree, PyTree]) -> PyTree:
        reason = "pipeline stages run full sequences and keep no caches"
        fix = "restore the checkpoint with a strategy without stages, and decode with it"
        has_caches = inputs[2] is not None, reason, fix
        check_cases("scan_layers(caches=...)", "decode in stages", "unsupported-feature", has_caches)
        return self.function(layer, x, inputs)


def is_staged() -> bool:
    """Return whether pipeline stages run the layers of the model that is being traced."""
    return isinstance(RUNNER.value, StageRunner)


def is_partial_trace() -> bool:
    """Return whether only a part of the model is being traced, so that some modules may not be called."""
    runner = RUNNER.value
    return isinstance(runner, StageRunner) and runner.in_part


def step_selects_residuals() -> bool:
    """Return whether the step alone selects the arrays that are saved for a layer's backward pass.

    Layers must then not use `jax.checkpoint`. With `remat="full"` only the layer's input is saved. With pipeline
    stages, activations that a layer recomputes would be kept until its weight gradients are computed.
    """
    context = NUMERICS.value
    return is_staged() or (context is not None and context.remat == "full")


def scan_layers(
    layer: Callable[..., Any],
    x: PyTree,
    params: PyTree,
    *,
    extra: PyTree = None,
    caches: PyTree = None,
    per_example: PyTree = None,
    path: str = "layers",
    staged: bool = True,
    unroll: int | bool = 1,
) -> PyTree:
    """Apply the stacked layers of a model in sequence.

    Outside a training step this is `lax.scan`. Inside a step the options of the step and the strategy also apply:

        option                          effect
        train_step(remat=...)           each layer is recomputed in the backward pass, according to the policy
        train_step(batch_slices=2)        each layer runs on two slices of the local batch, whose communication overlaps
        mp.fsdp(prefetch=1)             the weights of a layer are gathered while the previous layer computes
        mp.fsdp(keep=2)                 the gathered weights of the last two layers are kept for the backward pass
        mp.fsdp(quantize=...)           the weights of each layer are gathered from quantized shards, in both passes
        mp.pipeline_parallel(...)       the stages run the layers

    With stages a model calls `scan_layers` once with `staged=True`. The first stage runs the code before the call and
    the last stage the code after it. A layer may only depend on its arguments and on values computed from the batch;
    see `Aux` for computations that use auxiliary losses.

    Args:
      layer: function `(x, params, extra, cache, per_example) -> x`. The last three arguments are left out if they were
        not passed to `scan_layers`. It may return `(x, Aux)`. With caches it returns `(x, cache)` in place of `x`.
      x: pytree whose structure, shapes and dtypes all layers preserve. With `batch_slices` the batch is the first dim
        of its leaves.
      params: stacked parameters, `[layers, ...]`, with the logical name `layers` and the same paths as in the model
        below `path`.
      extra: other per-layer inputs, `[layers, ...]`: variables (an NNX state, a Linen collection) or constants.
      caches: per-layer state for decoding, `[layers, ...]`, such as keys and values. The updated caches are returned.
      per_example: inputs of all layers with the batch as first dim, or with a first dim of 1 for all examples, such as
        positions. A layer that closes over them instead cannot run on slices of the batch.
      path: path, or end of the path, of the stacked layers in the model. It also names the scope of their operations.
      staged: whether pipeline stages share these layers; False for a stack that runs within one stage.
      unroll: number of layers in an iteration of the compiled loop, as in `lax.scan`; True for all layers.

    Returns:
      `x`, or `(x, caches)` if caches were passed. If the layers return an `Aux`, so does
      `scan_layers`: `(x, aux)` or `((x, caches), aux)`, with the loss summed over layers and the metrics stacked,
      `[layers, ...]`.

    Raises:
      MeshparError: the loss of an `Aux` is not a scalar, a layer changes the shape or dtype of x, caches are used with
        stages, the path of a parameter that has to be gathered is not found, or `unroll` is not a positive integer.

    Example:
      >>> weights = jnp.asarray([2.0, 3.0, 5.0])
      >>> mp.scan_layers(lambda x, w: x * w, jnp.float32(1), weights)
      Array(30., dtype=float32)
      >>> y, aux = mp.scan_layers(lambda x, w: (x * w, mp.Aux(w, {})), jnp.float32(1), weights)
      >>> float(aux.loss)
      10.0
    """
    context, runner = NUMERICS.value, RUNNER.value
    if runner is None or (is_staged() and not staged):
        runner = LayerRunner()
    check_unroll("scan_layers", unroll)
    num_layers = max((jnp.shape(leaf)[0] for leaf in jax.tree.leaves((params, extra))), default=1)
    unroll = num_layers if unroll is True else unroll
    # Remaining layers run after the loop, and XLA removes a loop with a single iteration.
    is_outside = unroll > 1 and (is_staged() or num_layers < 2 * unroll or num_layers % unroll > 0)
    num_slices = 1 if context is None or caches is not None else context.batch_slices
    if num_slices > 1:
        check_batch_dims(x, per_example, num_slices)
        call = layer_on_slices(lambda *args: with_aux(layer(*args), has_sums=True), per_example, num_slices)
    else:
        call = layer if per_example is None else lambda *args: layer(*args, per_example)
    body = _in_context(call, runner, is_outside)
    body = body if unroll == 1 else UnrolledLayer(body, unroll)
    body = body if num_slices == 1 else SlicedLayer(body, num_slices)
    return runner.run(path, body, x, (params, extra, caches))


def check_unroll(where: str, unroll: Any) -> None:
    """Check a number of layers per iteration: a positive integer, or True for all layers."""
    if unroll is not True:
        check_positive_int(where, "the number of layers in an iteration", unroll=unroll)


def _in_context(layer: Callable[..., Any], runner: LayerRunner, is_outside: bool) -> Layer:
    """Return the layer as a function of (x, inputs), with the step's remat policy."""

    def body(x: Any, inputs: tuple[PyTree, PyTree, PyTree]) -> Any:
        weights, *optional = inputs
        with _OUTSIDE_LOOP.set(True) if is_outside else contextlib.nullcontext():
            return layer(x, weights, *(tree for tree in optional if tree is not None))

    context = NUMERICS.value
    if context is None:
        return body
    context.num_scans += 1
    if context.remat is None and not runner.regathers:
        return body
    policy = None if context.remat is None else remat_policy(context.remat, context.names)
    policy = regathering(policy) if runner.regathers else policy
    # Inside a scan nothing outside the loop can be shared with the body, so the barrier against CSE is not needed.
    return jax.checkpoint(body, policy=policy, prevent_cse=is_outside)


@dataclasses.dataclass(frozen=True, eq=False)
class UnrolledLayer:
    """A layer of which several run in each iteration of a loop."""

    layer: Layer
    unroll: int
    """Layers in an iteration."""

    def __call__(self, x: Any, inputs: PyTree) -> Any:
        return self.layer(x, inputs)


def unroll_of(layer: Layer) -> int:
    """Return the number of layers in an iteration."""
    return layer.unroll if isinstance(layer, UnrolledLayer) else 1


@dataclasses.dataclass(frozen=True, eq=False)
class SlicedLayer:
    """Adapts a layer that takes a tuple of batch slices: it takes and returns the full local batch."""

    layer: Layer
    num_slices: int

    def __call__(self, x: Any, inputs: PyTree) -> Any:
        return on_slices(self, x, lambda layer, xs: layer(xs, inputs))


def on_slices(layer: Layer, x: PyTree, run: Callable[[Layer, Any], Any]) -> PyTree:
    """Return `run(layer, x)`. If the layer is a `SlicedLayer`, slice x once for all layers, and join the outputs."""
    if not isinstance(layer, SlicedLayer):
        return run(layer, x)
    out, aux = with_aux(run(layer.layer, split_batch(x, layer.num_slices)))
    return join_batch(out) if aux is None else (join_batch(out), aux)


def scanned(layer: Layer, x: PyTree, inputs: PyTree, *, with_caches: bool = False, unroll: int = 1) -> PyTree:
    """Run the layers with `lax.scan`. See `scan_layers` for the result."""
    if isinstance(layer, SlicedLayer):
        return on_slices(layer, x, lambda layer, xs: scanned(layer, xs, inputs, with_caches=with_caches, unroll=unroll))

    def step(x: Any, layer_inputs: PyTree) -> Any:
        out, aux = with_aux(layer(x, layer_inputs))
        is_wrong = with_caches and not (isinstance(out, tuple) and len(out) == 2)
        case = is_wrong, "the layer does not return a cache", "return (x, cache), or ((x, cache), Aux)"
        check_cases("scan_layers(caches=...)", "update the cache of a layer", "wrong-signature", case)
        y, cache = out if with_caches else (out, None)
        # A weakly typed x takes the dtype of the layer's output, so it cannot be checked.
        if not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(x)):
            check_alike("a layer", x, y)
        return y, (cache, aux)

    x, (caches, aux) = jax.lax.scan(step, x, inputs, unroll=max(unroll, unroll_of(layer)))
    out = (x, caches) if with_caches else x
    return out if aux is None else (out, Aux(aux.loss.sum(0), aux.metrics))


def check_alike(name: str, x: PyTree, y: PyTree) -> None:
    """Check that a function which is applied repeatedly preserves structure, shapes and dtypes."""
    structures = [str(jax.tree.structure(tree)) for tree in (x, y)]
    if structures[0] == structures[1] and _types(x) == _types(y):
        return
    where, reason = name, f"each takes {_types(x)} in {structures[0]}"
    requested, code = f"pass its output, {_types(y)} in {structures[1]}, to the next", "wrong-shape"
    fix = "return y with the structure, shapes and dtypes of x; change them before or after the layers"
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (x, y)]
    if structures[0] == structures[1] and shapes[0] == shapes[1]:
        code, context = "wrong-dtype", ambient()
        rules = [f"`{rule.key}`" for rule in context.rules.precision] if context is not None else []
        if rules:
            where = f"{name}, under precision rule {', '.join(rules)}"
            reason += ", and the rule also matches the module that computes the input of the first layer"
            fix = "let the rule match only modules of the layers, such as r'layers/.*'"
    raise problem(where, requested, reason, fix, code)


def _types(tree: PyTree) -> str:
    return ", ".join(f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in jax.tree.leaves(tree)) or "no array"


def with_aux(output: PyTree, *, has_sums: bool = False) -> tuple[Any, Aux | None]:
    """Split the output of a layer into x and its `Aux`, or None. `has_sums` keeps the sums of the `Aux`."""
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Aux)):
        return output, None
    x, aux = output
    for is_wrong, code, reason, fix in (
        (jnp.shape(aux.loss) != (), "wrong-shape", f"its loss has shape {jnp.shape(aux.loss)}",
         "take its mean in the layer, and report values of examples or experts as Aux.metrics"),
        (not isinstance(aux.metrics, Mapping), "wrong-type", f"its metrics are a {type(aux.metrics).__name__}",
         "write Aux(loss, {}), with a dict from names to arrays"),
    ):  # fmt: skip
        if is_wrong:
            raise problem("the Aux of a layer", "add it to the loss and the metrics", reason, fix, code)
    metrics = {name: jax.lax.stop_gradient(jnp.asarray(value)) for name, value in aux.metrics.items()}
    return x, Aux(jnp.asarray(aux.loss), metrics, aux.sums if has_sums else None)


def leaf_at(stack_path: str, path: str, leaves: Mapping[str, _Leaf], layout: Callable[[_Leaf], Any]) -> _Leaf:
    """Return the stacked leaf with the path `path` within a layer, of the layers whose path ends in `stack_path`.

    Leaves of several stacks may match if they have the same `layout`.
    """
    # NNX stores an array as the `value` of a variable.
    suffix = f"/{stack_path}/{path.removesuffix('/value')}".rstrip("/")
    matches = [leaf for name, leaf in leaves.items() if f"/{name}".endswith(suffix)]
    if len({layout(leaf) for leaf in matches}) == 1:
        return matches[0]
    where = f"scan_layers(path={stack_path!r})" + f", parameter `{path}`" * bool(path)
    reason = f"{len(matches) or 'no'} parameters have paths that end in `{suffix[1:]}`"
    reason += ", and their layouts differ" * bool(matches)
    fix = near_or(suffix[1:], leaves, "pass the full path of the stacked layers as `path`")
    raise problem(where, "gather it for a layer", reason, fix, "conflict" if matches else "not-found")
