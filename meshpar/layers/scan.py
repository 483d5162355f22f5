"""The one hook of a model's stacked layers: where a step gathers their weights, recomputes them, runs them by stages.

one layer's shards ─► gathered, where the strategy quantizes ─► layer     recomputed by the step's `remat` policy
layers one after the other: a `lax.scan`, or stage by stage
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.layers.batch_slices import check_rows, in_slices, joined, slices
from meshpar.layers.precision import Numerics
from meshpar.sharding.context import ambient, current, within
from meshpar.sharding.types import PyTree, near, near_or, problem, spec_axes

_Leaf = TypeVar("_Leaf")


class Aux(NamedTuple):
    """What a layer, or a part of the model, gives beside its output.

    Under stages it is complete only when all microbatches are through, so what a model and its loss function make of it
    is worked out once, behind the last tick, of the sums and means over microbatches and devices. For that,

      - the loss may add `aux.loss`, times a constant, and use no `aux.metrics`;
      - a metric, or a variable that the model changes, may be made of `aux`, constants and the model's variables as
        they were before the step, and then of nothing else (`bias = update_bias(bias, aux.metrics["load"])`);
      - a metric that is not made of `aux` is one of each microbatch, as always.

    All of this gives what a scan gives, as far as losses and metrics are means over rows, or counts.
    """

    loss: jax.Array
    """Scalar; a mean over rows, as losses are."""
    metrics: dict[str, jax.Array]
    """Arrays that no gradient passes through. Over microbatches and devices those of whole numbers are summed, for they
    are counts, and all others averaged, for they are means over rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
    """A weight that a kernel gathers itself, as a layer is given it where that is done during the layer before.

    The kernel computes with `whole`, and hands the gradient to `shard`. A model's own modules pass it on as a weight;
    where they compute with it themselves it is `shard`, which the compiler gathers there.
    """

    shard: jax.Array
    """As the parameter lies; its gradient is the weight's."""
    whole: jax.Array
    """The same numbers, gathered. A constant: it has no gradient."""

    def __jax_array__(self) -> jax.Array:
        return self.shard

    def __getattr__(self, name: str) -> Any:
        if name in ("shard", "whole"):  # of one that is not made yet
            raise AttributeError(name)
        return getattr(self.shard, name)

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else self.shard[index]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """Experts' matrices, `[E, d, f]`, with a low-rank pair beside each, which computes as `weight + scale a b`."""

    weight: Any
    a: Any
    """[E, d, r]"""
    b: Any
    """[E, r, f]"""
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices; so are the dtype and the number of dims."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _of_shard(name: str) -> Any:
    return lambda self, *others: getattr(self.shard, name)(*others)


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _operator in (f"__{_name}__", f"__r{_name}__"):
        setattr(Ahead, _operator, _of_shard(_operator))
setattr(Ahead, "__neg__", _of_shard("__neg__"))  # noqa: B010


Layer: TypeAlias = Callable[[Any, PyTree], Any]
"""(x, row of one layer) -> x, or -> (x, Aux)."""
Run: TypeAlias = Callable[[Layer, Any, PyTree], Any]
"""(layer, x, stacked rows) -> x, or -> (x, Aux of all layers)."""


@contextlib.contextmanager
def running(run: Run, *, in_part: bool = False) -> Iterator[None]:
    """Put in force what `scan_layers` does instead of a scan; `in_part`: the trace is of a part of the model alone."""
    # An object of its own for every trace: jax compares contexts by equality.
    with within(run=_Identity(run, in_part)):
        yield


class _Identity:
    def __init__(self, run: Run, in_part: bool) -> None:
        self.run, self.in_part = run, in_part


def is_staged() -> bool:
    """Whether stages run the layers of the model that is being traced."""
    return current().run is not None


def is_part() -> bool:
    """Whether a part of the model alone is being traced, which need not call all of its modules."""
    return is_staged() and current().run.in_part


def keeps_are_others() -> bool:
    """Whether what a layer keeps for its backward pass is not its own to say.

    Stages hold what a microbatch's B makes again until its W, like what was kept; `remat="full"` keeps nothing anyway.
    """
    context = current().numerics
    return is_staged() or (context is not None and context.remat == "full")


def scan_layers(
    layer: Callable[..., Any],
    x: Any,
    params: PyTree,
    *,
    extra: PyTree = None,
    caches: PyTree = None,
    per_example: PyTree = None,
    at: str = "layers",
    staged: bool = True,
) -> Any:
    """Run a model's stacked layers one after the other, as the step and its strategy ask.

        x = scan_layers(layer, x, params["layers"])
        x, aux = scan_layers(layer, x, params, extra=bias)      where layer gives (x, Aux(loss, {"load": counts}))
        x, caches = scan_layers(layer, x, params, caches=kv)    where layer gives (x, cache)

    It is a `lax.scan`, in which each layer is recomputed in the backward pass as `train_step(remat=...)` says, and
    gets whole weights where the strategy quantizes what it gathers (`mp.fsdp(quantize=...)`): there the model holds
    shards, gathered one layer at a time and again in the backward pass. With `mp.fsdp(prefetch=1)` a layer's weights
    are gathered while the one before it computes. Under `mp.pipeline_parallel` stages run the layers. With
    `train_step(interleave=2)` each layer runs on two slices of the rows, beside each other. Outside of a step it is the
    plain scan.

    A layer may give an `Aux` with its output: an auxiliary loss, and metrics. Then so does `scan_layers`: the losses
    summed over layers, the metrics stacked, `[layers, ...]`.

    Under stages a model calls it once with `staged`; what stands before is the first stage's and what stands behind the
    last one's. The layer must depend on nothing but its arguments and what follows from the batch. `Aux` says what may
    be made of one.

    Args:
      layer: `(x, params, extra, cache, beside) -> x` of one layer, without those of the last three that are not
        given; or `-> (x, Aux)`. With caches `(x, cache)` stands where x stands.
      x: a pytree; every layer gives it back in the same shapes and dtypes. The batch is the first dim of its leaves
        where rows are interleaved.
      params: the layers' parameters, stacked: `[layers, ...]`, logical name `layers`, with the paths that they have in
        the model below `at`.
      extra: what else has a row for every layer: variables (the state of an NNX module, a Linen collection), constants.
      caches: likewise, and given back as the layers leave it: keys and values for decoding.
      beside: what all layers read of each row of the batch, its first dim (or one row for all), as positions: a layer
        that closes over it instead cannot be given slices of the rows.
      at: the path of the stacked layers in the model, or its end; the scope of their operations, too.
      staged: whether stages share these layers. False for a stack that one stage runs all of.

    Returns:
      x or `(x, caches)`; `(that, Aux)` where the layers give one.

    Raises:
      ValueError: an Aux whose loss is no scalar; a layer that gives back another x; caches under stages; parameters
        to be gathered with a path that no parameter has.
    """
    context, rows = current().numerics, (params, extra, caches)
    count = 1 if context is None or caches is not None else context.interleave
    if count > 1:
        check_rows(x, per_example, count)
        return _scan(in_slices(lambda *given: with_aux(layer(*given)), per_example, count), x, rows, at, staged, count)
    return _scan(layer if per_example is None else lambda *given: layer(*given, per_example), x, rows, at, staged)


def _scan(
    layer: Callable[..., Any], x: Any, rows: tuple[PyTree, PyTree, PyTree], at: str, staged: bool, count: int = 1
) -> Any:
    """The layers, which are of so many slices, as the step and its strategy ask."""
    run, body, caches = current().run, _in_context(layer, at), rows[2]
    if run is None or not staged:
        with jax.named_scope(at):
            return _on_slices(count, x, lambda x: _one_by_one(body, x, rows, at))
    if caches is not None:
        exists = "stages run whole sequences, and keep nothing of them"
        fix = "decode with a strategy without stages; checkpoints move to it"
        raise problem("scan_layers(caches=...) under mp.pipeline_parallel", "decode by stages", exists, fix)
    return run.run(body if count == 1 else _OnSlices(body, count), x, rows)


def _on_slices(count: int, x: Any, run: Callable[[Any], Any]) -> Any:
    """What is run on a tuple of slices of the rows, of whole rows; of one slice it is given x itself."""
    if count == 1:
        return run(x)
    out, aux = with_aux(run(slices(x, count)))
    return joined(out) if aux is None else (joined(out), aux)


@dataclasses.dataclass(frozen=True, eq=False)
class _OnSlices:
    """A layer of slices as one of whole rows: those that `scanned` runs are cut once, and joined behind the last."""

    layer: Layer
    count: int

    def __call__(self, x: Any, row: PyTree) -> Any:
        return _on_slices(self.count, x, lambda xs: self.layer(xs, row))


def _in_context(layer: Callable[..., Any], at: str) -> Layer:
    """The layer as a function of (x, its row): weights gathered, and recomputed, as the step asks."""
    context = current().numerics
    gather = None if context is None else context.gather

    def body(x: Any, row: tuple[PyTree, PyTree, PyTree]) -> Any:
        params, *others = row
        whole = params if gather is None else gather(at, params)
        return layer(x, whole, *(other for other in others if other is not None))

    if context is None:
        return body
    context.num_scans += 1
    regathers = gather is not None or context.prefetch is not None
    if context.remat is None and not regathers:
        return body
    policy = None if context.remat is None else remat_policy(context.remat, context.names)
    policy = _regathering(policy) if regathers else policy
    # Inside a scan nothing outside the loop can be shared with the body, so the barrier against CSE is not needed.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def _one_by_one(layer: Layer, x: Any, rows: tuple[PyTree, PyTree, PyTree], at: str) -> Any:
    """The layers by a scan, or by the one that the step puts in its place; what keeps caches has no backward pass."""
    context, with_caches = current().numerics, rows[2] is not None
    if context is None or context.prefetch is None or with_caches:
        return scanned(layer, x, rows, with_caches=with_caches)
    return context.prefetch(at, layer, x, rows[:2])


def scanned(layer: Layer, x: Any, rows: PyTree, *, with_caches: bool = False) -> Any:
    """The layers, one after the other."""
    if isinstance(layer, _OnSlices):
        return _on_slices(layer.count, x, lambda xs: scanned(layer.layer, xs, rows, with_caches=with_caches))

    def step(x: Any, row: PyTree) -> Any:
        out, aux = with_aux(layer(x, row))
        if with_caches and not (isinstance(out, tuple) and len(out) == 2):
            asked, exists = "keep the cache of a layer", "the layer gives back x alone"
            raise problem("scan_layers(caches=...)", asked, exists, "return (x, cache), or ((x, cache), Aux)")
        y, cache = out if with_caches else (out, None)
        # What is weakly typed takes the type that the layers give it.
        if not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(x)):
            check_alike("a layer", x, y)
        return y, (cache, aux)

    x, (caches, aux) = jax.lax.scan(step, x, rows)
    out = (x, caches) if with_caches else x
    return out if aux is None else (out, Aux(aux.loss.sum(0), aux.metrics))


def check_alike(name: str, x: PyTree, y: PyTree) -> None:
    """What takes x and gives y, one after the other, gives it as it takes it."""
    trees = [str(jax.tree.structure(tree)) for tree in (x, y)]
    if trees[0] != trees[1] or _types(x) != _types(y):
        of_x, of_y = ("", "") if trees[0] == trees[1] else (f" in {tree}" for tree in trees)
        wider = [f"`{rule.key}`" for rule in here.rules.precision] if (here := ambient()) is not None else []
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (x, y)]
        if wider and shapes[0] == shapes[1]:
            where = f"{name}, under precision rule {', '.join(wider)}"
            exists = f"each takes {_types(x)}: the rule names what makes the first one's input, too"
            fix = "narrow it to modules in the layers, say r'layers/.*'"
            raise problem(where, f"give its result, {_types(y)}, to the next", exists, fix)
        fix = "make y of x's structure, shapes and dtypes; what changes them belongs before the layers or behind them"
        raise problem(name, f"give its result, {_types(y)}{of_y}, to the next", f"each takes {_types(x)}{of_x}", fix)


def _types(tree: PyTree) -> str:
    return ", ".join(f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in jax.tree.leaves(tree)) or "no array"


def with_aux(given: Any) -> tuple[Any, Aux | None]:
    """What a layer gives, as its output and an Aux or None."""
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Aux)):
        return given, None
    x, aux = given
    if jnp.shape(aux.loss) != ():
        fix = "take its mean in the layer; what is to be seen of every row or expert belongs into Aux.metrics"
        raise problem("the Aux of a layer", "add its loss to the loss", f"it has shape {jnp.shape(aux.loss)}", fix)
    if not isinstance(aux.metrics, Mapping):
        asked = f"take metrics from a {type(aux.metrics).__name__}"
        raise problem("the Aux of a layer", asked, "they are a dict of arrays by name", "write Aux(loss, {})")
    metrics = {name: jax.lax.stop_gradient(jnp.asarray(value)) for name, value in aux.metrics.items()}
    return x, Aux(jnp.asarray(aux.loss), metrics)


# ---- What the backward pass keeps of a layer -------------------------------------------------------------------------

MATMUL = "matmul"
"""Name, for `jax.checkpoint`, of the result of a matmul with a weight that policies cannot see for what it is."""

ATTENTION = "attention"
"""Name, for `jax.checkpoint`, of what attention gives, and of what its kernels keep beside that."""

FLASH = "flash_attention"
"""In the names of tokamax's kernels that give attention's output, with what its backward pass needs."""

_NAMED = jax.checkpoint_policies.save_only_these_names(MATMUL)

REMAT_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _NAMED
    ),
    "all_dots": jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, _NAMED),
}
"""What a rematerialised layer keeps: nothing but its input; results of matmuls with weights; of all matmuls."""


def _mark_of(primitive: Any, params: Mapping[str, Any]) -> str | None:
    """The name that an operation gives its results; kernels for attention are some that none can mark outside."""
    if primitive.name == "name":
        return str(params["name"])
    if primitive.name == "remat_opt":  # a kernel with what it keeps, which jax drops where nobody needs it
        return ATTENTION if FLASH in str(params["fwd_jaxpr"]) else None
    return ATTENTION if "dot_product_attention_fwd" in primitive.name else None


def _with_attention(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The policy, which keeps what attention gives, too: the matmuls of its kernels are not to be seen from outside."""

    def kept(primitive: Any, *operands: Any, **params: Any) -> Any:
        return _mark_of(primitive, params) == ATTENTION or policy(primitive, *operands, **params)

    return kept


REMAT_POLICIES["minimal"] = _with_attention(REMAT_POLICIES["dots"])
REMAT_POLICIES["all_dots"] = _with_attention(REMAT_POLICIES["all_dots"])


def remat_policy(remat: str, seen: set[str] | None = None) -> Callable[..., Any]:
    """The policy for `jax.checkpoint` that a spec names.

    Args:
      remat: words joined by `+`: one of `REMAT_POLICIES`; `save:NAMES`, which keeps what the model marks by
        `jax.ad_checkpoint.checkpoint_name` with one of these names, joined by commas; `offload:NAMES`, which keeps it
        in pinned memory of the host.
      seen: gets the names that the model marks, while it is differentiated.

    Raises:
      ValueError: no such word, no names, or a name twice.
    """
    words, saved, offloaded = _remat_parts(remat)

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        mark = _mark_of(primitive, params)
        if mark is not None and seen is not None:
            seen.add(mark)
        if mark in saved:
            return True
        if mark in offloaded:
            return Offloadable(src="device", dst="pinned_host")
        return any(REMAT_POLICIES[word](primitive, *operands, **params) for word in words)

    return policy


def named_in(remat: str) -> tuple[str, ...]:
    """The names that a spec keeps or offloads."""
    _, saved, offloaded = _remat_parts(remat)
    return (*saved, *offloaded)


def offloads(remat: str | None) -> bool:
    """Whether a spec keeps anything in the memory of the host."""
    return remat is not None and bool(_remat_parts(remat)[2])


def _remat_parts(remat: str, where: str = "") -> tuple[list[str], list[str], list[str]]:
    """Words of a spec, names it keeps, names it offloads."""
    where = where or f"remat={remat!r}"
    found: dict[str, list[str]] = {"": [], "save": [], "offload": []}
    for part in remat.split("+"):
        kind, colon, names = part.strip().partition(":")
        given = [name.strip() for name in names.split(",")] if colon else [kind]
        if colon and (kind not in ("save", "offload") or not all(given)):
            exists, fix = "names stand behind `save:` or `offload:`", "write save:attention,mlp_out, say"
            raise problem(where, f"keep by {part.strip()!r}", exists, fix)
        if not colon and kind not in REMAT_POLICIES:
            fix = near(kind, [*REMAT_POLICIES, "save:NAMES", "offload:NAMES"])
            raise problem(where, "recompute by that policy", "there is no such policy", fix)
        found[kind if colon else ""] += given
    both = sorted(name for name in found["save"] if name in found["offload"])
    if both:
        exists = "it is kept on the device or on the host"
        raise problem(where, f"save and offload `{both[0]}`", exists, "name it once")
    return found[""], found["save"], found["offload"]


SECOND_SHARD = "second_shard"
"""Name, for `jax.checkpoint`, of what a quantizing strategy keeps inside the node from forward to backward."""

Gather: TypeAlias = Callable[[str, PyTree], PyTree]
"""(path of the stacked layers, one layer's shards) -> its weights."""


def check_remat(remat: str | None, where: str = "") -> None:
    """See that a remat policy exists, which stands at `where` in the error. Raises `ValueError`: it does not."""
    if remat is not None:
        _remat_parts(str(remat), where)


@contextlib.contextmanager
def gathering(gather: Gather) -> Iterator[Numerics]:
    """Put in force, within `numerics`, how `scan_layers` makes whole weights of a layer's shards."""
    context = current().numerics
    assert context is not None
    before, context.gather = context.gather, gather
    try:
        yield context
    finally:
        context.gather = before


def leaf_at(at: str, path: str, leaves: Mapping[str, _Leaf], layout: Callable[[_Leaf], Any]) -> _Leaf:
    """What is known of a parameter of stacked layers.

    Args:
      at: as `scan_layers` is given it.
      path: of the parameter in one layer.
      leaves: by path in the model.
      layout: how such a leaf is split: all whose path ends so have to be split alike.

    Raises:
      ValueError: a path that no parameter has, or several that are split in different ways.
    """
    # NNX keeps an array as the `value` of a variable.
    wanted = f"/{at}/{path.removesuffix('/value')}".rstrip("/")
    found = [leaf for name, leaf in leaves.items() if f"/{name}".endswith(wanted)]
    if len({layout(leaf) for leaf in found}) == 1:
        return found[0]
    raise problem(
        f"scan_layers(at={at!r})" + f", parameter `{path}`" * bool(path),
        "gather it for one layer",
        f"{len(found) or 'no'} parameters have paths that end in `{wanted[1:]}`"
        + ", and they are not split alike" * bool(found),
        near_or(wanted[1:], leaves, "give the path of the stacked layers as `at`"),
    )


_LAYOUT_ONLY = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy"})
"""What costs no arithmetic: a weight in another form must not be kept in its place."""

_ELEMENTWISE = frozenset({"add", "erf", "integer_pow", "logistic", "max", "mul", "sub", "tanh"})
"""What activations and rotations make of matmuls in one pass: whoever keeps all keeps what they were made of."""


def _lies_by_rows(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Whether it lays an array by its rows over all devices of the mesh: nothing is sent for that, which is not to be
    sent again."""
    sharding = params.get("sharding")
    if primitive.name != "sharding_constraint" or not isinstance(sharding, NamedSharding) or not sharding.spec:
        return False
    rows, *others = sharding.spec
    sizes = dict(sharding.mesh.shape)
    ways = math.prod(sizes[axis] for axis in spec_axes(rows)) if rows is not PartitionSpec.UNCONSTRAINED else 0
    return ways == math.prod(sizes.values()) and not any(others)


def _regathering(policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """The policy, or with None to keep everything, but for gathered weights; second shards are kept.

    Weights come out of messages, which are bytes: whatever is made of bytes is made again.
    """

    def keeps(primitive: Any, *operands: Any, **params: Any) -> Any:
        if primitive.name == "name" and params["name"] == SECOND_SHARD:
            return True
        if any(getattr(operand, "dtype", None) == jnp.uint8 for operand in operands):
            return False
        if policy is None:
            return primitive.name not in _LAYOUT_ONLY | _ELEMENTWISE and not _lies_by_rows(primitive, params)
        return policy(primitive, *operands, **params)

    return keeps
