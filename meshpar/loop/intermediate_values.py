"""Evaluate a traced step and return values of its equations, also those inside loops and `shard_map`.

    jaxpr ─► `Graph`: a node for each result of an equation, with the nodes that it reads
    jaxpr, arguments, nodes ─► an array for each node: [devices and iterations..., *shape]

Calls are inlined. The iterations of a scan become leading dims. The manual axes of a `shard_map` do so, too, because
each device has its own value. Values inside `while` loops and kernels are not visible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import PartitionSpec

from meshpar.collectives.wire import varying
from meshpar.pipeline.jaxpr_slicing import CALLS

EXACT = frozenset(
    {
        "abs", "all_gather", "all_to_all", "broadcast_in_dim", "ceil", "concatenate", "cond", "convert_element_type",
        "copy", "copy_p", "device_put", "dynamic_slice", "dynamic_update_slice", "floor", "gather", "iota", "max",
        "min", "name", "neg", "optimization_barrier", "pad", "pbroadcast", "ppermute", "pvary", "random_bits",
        "reduce_max", "reduce_min", "reshape", "reshard", "rev", "round", "scan", "select_n", "shard_map",
        "sharding_constraint", "sign", "slice", "sort", "squeeze", "stop_gradient", "top_k", "transpose", "while",
    }
)  # fmt: skip
"""Primitives that do not round, and primitives whose equations are evaluated one by one."""
COPIES = frozenset({"sharding_constraint", "reshard", "copy", "optimization_barrier", "pvary", "pcast", "carry"})
"""Primitives that return their operands."""
_LIBRARIES = ("/jax/", "/jaxlib/", "/flax/")

Path = tuple[int, ...]
"""Numbers of the equation in the nested jaxprs, outermost first. Branches of `cond` have a number, too."""


class SourceLine(NamedTuple):
    """A line of source code in a traceback."""

    file: str
    line: int
    function: str
    column: int = 0


class Dim(NamedTuple):
    """A leading dim of a captured value."""

    axis: str | None
    """A manual mesh axis. None for the iterations of a loop."""
    size: int
    loop: int = -1
    """The first node of the loop."""
    is_reversed: bool = False
    """Whether the loop starts at the last index."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A result of an equation."""

    path: Path
    """Path of the equation, and the number of the result."""
    primitive: str
    frames: tuple[SourceLine, ...] = ()
    """Lines of source code, innermost first, without jax and flax."""
    scope: str = ""
    """Named scopes with jax's transformations: `gradients/transpose(jvp(layers))`."""
    dims: tuple[Dim, ...] = ()
    shape: tuple[int, ...] = ()
    """Shape of the value itself, without the leading dims."""
    dtype: Any = None
    inputs: list[int]
    """Nodes that the equation reads."""
    label: str = ""
    """Name given by `jax.ad_checkpoint.checkpoint_name`."""

    @property
    def num_bytes(self) -> int:
        return math.prod((*(dim.size for dim in self.dims), *self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def is_numerical(self) -> bool:
        """Whether the value is compared. False for equations that copy their input."""
        return self.primitive not in COPIES and self.dtype is not None and 0 not in self.shape


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The equations of a program, in order."""

    nodes: tuple[Node, ...]
    outputs: tuple[frozenset[int], ...]
    """The nodes that determine each output of the program."""

    @functools.cached_property
    def exact(self) -> frozenset[Path]:
        """Paths of the nodes that are computed from the arguments without sums and products."""
        is_exact: list[bool] = []
        for index, node in enumerate(self.nodes):
            operands = [other < index and is_exact[other] for other in node.inputs]
            is_exact.append(node.primitive in EXACT and all(operands))
        return frozenset(node.path for node, flag in zip(self.nodes, is_exact, strict=True) if flag)

    def ancestors(self, starts: Collection[int], *, stops: Collection[int] = ()) -> set[int]:
        """Return `starts` and their ancestors, without `stops` and the ancestors of `stops`."""
        reached: set[int] = set()
        pending = list(starts)
        while pending:
            index = pending.pop()
            if index not in reached and index not in stops:
                reached.add(index)
                pending += self.nodes[index].inputs
        return reached


_Reads = frozenset[int]


class _Context(NamedTuple):
    """The equations around a jaxpr."""

    path: Path = ()
    scope: str = ""
    dims: tuple[Dim, ...] = ()
    frames: tuple[SourceLine, ...] = ()


def graph_of(closed: Any) -> Graph:
    """Return the nodes of a `ClosedJaxpr`."""
    nodes: list[Node] = []
    outputs = _add(nodes, closed.jaxpr, [frozenset()] * len(closed.jaxpr.invars), _Context())
    return Graph(tuple(nodes), tuple(outputs))


def _add(nodes: list[Node], jaxpr: Any, args: Sequence[_Reads], context: _Context) -> list[_Reads]:
    """Add the nodes of a jaxpr, and return the nodes of its outputs."""
    reads: dict[Any, _Reads] = dict.fromkeys(jaxpr.constvars, frozenset())
    reads.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> _Reads:
        return frozenset() if isinstance(atom, core.Literal) else reads[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        scope = "/".join(filter(None, (context.scope, str(eqn.source_info.name_stack))))
        frames = _frames(eqn) or context.frames
        inner = _Context((*context.path, number), scope, context.dims, frames)
        out = _add_equation(nodes, eqn, [read(atom) for atom in eqn.invars], inner)
        reads.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _add_equation(nodes: list[Node], eqn: Any, args: list[_Reads], context: _Context) -> list[_Reads]:
    name, params = eqn.primitive.name, eqn.params
    if (callee := _callee(eqn)) is not None:
        start = len(nodes)
        out = _add(nodes, callee.jaxpr, args, context)
        if name in ("jit", "pjit"):
            # jax caches the traces of jitted functions, so outer frames may belong to an earlier call.
            for index in range(start, len(nodes)):
                node = nodes[index]
                nodes[index] = dataclasses.replace(node, frames=_outside(node.frames, context.frames))
        return out
    if name == "scan":
        results = _add_scan(nodes, eqn, args, context)
    elif name == "shard_map":
        axes = [Dim(axis, params["mesh"].shape[axis]) for axis in _manual_axes(eqn)]
        results = _add(nodes, params["jaxpr"], args, context._replace(dims=(*context.dims, *axes)))
    elif (platform := _platform_branch(eqn)) is not None:
        inner = context._replace(path=(*context.path, platform))
        return _add(nodes, params["branches"][platform].jaxpr, args[1:], inner)
    elif name == "cond":
        branches = [
            _add(nodes, branch.jaxpr, args[1:], context._replace(path=(*context.path, number)))
            for number, branch in enumerate(params["branches"])
        ]
        results = [args[0].union(*reads) for reads in zip(*branches, strict=True)]
    else:
        results = [frozenset[int]().union(*args)] * len(eqn.outvars)
    for number, (var, reads) in enumerate(zip(eqn.outvars, results, strict=True)):
        label = str(params["name"]) if name == "name" else ""
        value = jax.eval_shape(_comparable, var.aval) if _is_key(var.aval) else var.aval
        node = Node(
            path=(*context.path, number), primitive=name, frames=context.frames, scope=context.scope, dims=context.dims,
            shape=tuple(getattr(value, "shape", ())), dtype=getattr(value, "dtype", None), inputs=sorted(reads),
            label=label,
        )  # fmt: skip
        nodes.append(node)
    return [frozenset({index}) for index in range(len(nodes) - len(results), len(nodes))]


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _comparable(x: Any) -> Any:
    """Return random keys as their data."""
    return jax.random.key_data(x) if _is_key(x) else x


def _add_scan(nodes: list[Node], eqn: Any, args: list[_Reads], context: _Context) -> list[_Reads]:
    """Add the nodes of a loop. A node stands for each carry, because an iteration reads the iteration before."""
    params = eqn.params
    num_consts, num_carry = _scan_counts(eqn)
    start = len(nodes)
    for number, init in enumerate(args[num_consts : num_consts + num_carry]):
        nodes.append(Node(path=(*context.path, -1, number), primitive="carry", inputs=sorted(init)))
    carry = [frozenset({start + number}) for number in range(num_carry)]
    dim = Dim(None, params["length"], start, params["reverse"])
    body_args = [*args[:num_consts], *carry, *args[num_consts + num_carry :]]
    out = _add(nodes, params["jaxpr"].jaxpr, body_args, context._replace(dims=(*context.dims, dim)))
    for number, after in enumerate(out[:num_carry]):
        nodes[start + number].inputs.extend(after)
    return out


def _scan_counts(eqn: Any) -> tuple[int, int]:
    """Return the numbers of constants and carries, which jax 0.12 does not store. Other arrays have a dim of steps."""
    body = eqn.params["jaxpr"].jaxpr

    def num_equal(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].aval.shape == pair[1].aval.shape, pairs))

    num_carry = num_equal(eqn.outvars, body.outvars)
    return num_equal(eqn.invars, body.invars) - num_carry, num_carry


def _callee(eqn: Any) -> Any:
    """Return the jaxpr that an equation only calls, or None."""
    name = CALLS.get(eqn.primitive.name)
    inner = eqn.params.get(name) if name else None
    if inner is None or hasattr(inner, "consts"):
        return inner
    return core.ClosedJaxpr(inner, ())


def _platform_branch(eqn: Any) -> int | None:
    """Return the branch of `lax.platform_dependent` that the current platform runs. None for other equations."""
    branches = eqn.params.get("branches_platforms")
    if branches is None:
        return None
    names = {"gpu": {"gpu", "cuda", "rocm"}}.get(jax.default_backend(), {jax.default_backend()})
    return next(number for number, platforms in enumerate(branches) if platforms is None or names & {*platforms})


def _manual_axes(eqn: Any) -> list[str]:
    """Return the manual axes of a `shard_map`, in the order of the mesh."""
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return [axis for axis in eqn.params["mesh"].axis_names if axis in axes]


@functools.lru_cache(maxsize=100_000)
def _frame(code: types.CodeType, instruction: int) -> SourceLine | None:
    if any(part in code.co_filename for part in _LIBRARIES):
        return None
    line, _, column, _ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return SourceLine(code.co_filename, line or code.co_firstlineno, code.co_qualname, column or 0)


def _frames(eqn: Any) -> tuple[SourceLine, ...]:
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else map(_frame, *traceback.raw_frames())
    return tuple(frame for frame in frames if frame is not None)


def _outside(frames: tuple[SourceLine, ...], caller: tuple[SourceLine, ...]) -> tuple[SourceLine, ...]:
    """Return the frames of an equation in a jitted function, with the frames of the actual caller."""
    functions = {(frame.file, frame.function) for frame in caller}
    inner = []
    for frame in frames:
        if (frame.file, frame.function) in functions:
            break
        inner.append(frame)
    return (*(inner if len(inner) < len(frames) else ()), *caller)


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    closed: Any, args: Sequence[Any], selected: Collection[Path], noise: Any = None, exact: Collection[Path] = ()
) -> tuple[list[Any], dict[Path, Any]]:
    """Evaluate a program inside `jax.jit`, and return its outputs and the values of nodes.

    Args:
      closed: the `ClosedJaxpr`.
      args: its arguments.
      selected: paths of the nodes to return.
      noise: an int32 scalar. 1, 2, ...: results of rounding operations are multiplied with 1 plus or minus the machine
        epsilon, where a bit of each element determines the sign (Monte Carlo arithmetic; Parker, 1997). 0: exact.

      exact: paths of nodes without noise, such as parameters in low precision, which all layouts round equally.

    Returns:
      The outputs, and an array for each selected node with the leading dims `Node.dims`.
    """
    evaluator = _Evaluator(frozenset(selected), noise is not None, frozenset(exact))
    return evaluator.run(closed.jaxpr, closed.consts, args, (), noise)


@dataclasses.dataclass(frozen=True)
class _Evaluator:
    selected: frozenset[Path]
    is_noisy: bool
    exact: frozenset[Path]

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: Path, noise: Any
    ) -> tuple[list[Any], dict[Path, Any]]:
        values: dict[Any, Any] = {**dict(zip(jaxpr.constvars, consts, strict=True))}
        values.update(zip(jaxpr.invars, args, strict=True))
        captured: dict[Path, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            with _as_traced(eqn):
                out, inner = self._equation(eqn, [read(atom) for atom in eqn.invars], (*path, number), noise)
            values.update(zip(eqn.outvars, out, strict=True))
            captured |= inner
        out = [
            jnp.asarray(x.val, jnp.result_type(x.aval)) if isinstance(x, core.Literal) else read(x)
            for x in jaxpr.outvars
        ]
        return out, captured

    def _equation(self, eqn: Any, args: list[Any], path: Path, noise: Any) -> tuple[list[Any], dict[Path, Any]]:
        name, params = eqn.primitive.name, eqn.params
        if (callee := _callee(eqn)) is not None:
            return self.run(callee.jaxpr, callee.consts, args, path, noise)
        if (number := _platform_branch(eqn)) is not None:
            branch = params["branches"][number]
            return self.run(branch.jaxpr, branch.consts, args[1:], (*path, number), noise)
        captured: dict[Path, Any] = {}
        visible = self.is_noisy or any(x[: len(path)] == path and len(x) > len(path) + 1 for x in self.selected)
        if name in ("scan", "shard_map", "cond") and visible:
            out, captured = getattr(self, f"_{name}")(eqn, args, path, noise)
        else:
            result = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
            out = list(result) if eqn.primitive.multiple_results else [result]
        if self.is_noisy and (*path, 0) not in self.exact and (name not in EXACT or _is_narrowing(eqn)):
            out = [_with_noise(x, noise, is_cast=name in EXACT) for x in out]
        captured |= {(*path, k): _comparable(x) for k, x in enumerate(out) if (*path, k) in self.selected}
        return out, captured

    def _scan(self, eqn: Any, args: list[Any], path: Path, noise: Any) -> tuple[list[Any], dict[Path, Any]]:
        params, body = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = _scan_counts(eqn)
        consts, carry, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]

        def step(carry: list[Any], xs: list[Any]) -> Any:
            out, captured = self.run(body.jaxpr, body.consts, [*consts, *carry, *xs], path, noise)
            return out[:num_carry], (out[num_carry:], captured)

        carry, (ys, captured) = lax.scan(step, carry, xs, length=params["length"], reverse=params["reverse"])
        return [*carry, *ys], captured

    def _cond(self, eqn: Any, args: list[Any], path: Path, noise: Any) -> tuple[list[Any], dict[Path, Any]]:
        def branch(number: int, closed: Any) -> Callable[..., Any]:
            return lambda *operands: self.run(closed.jaxpr, closed.consts, operands, (*path, number), noise)

        branches = [branch(number, closed) for number, closed in enumerate(eqn.params["branches"])]
        likes = [jax.eval_shape(branch, *args[1:])[1] for branch in branches]
        zeros = {key: (x.shape, x.dtype) for like in likes for key, x in like.items()}

        manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)

        def with_all(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                out, captured = branch(*operands)
                values = {key: captured[key] if key in captured else jnp.zeros(*x) for key, x in zeros.items()}
                return out, {key: varying(x, manual) if manual else x for key, x in values.items()}

            return run

        index = args[0].astype(jnp.int32)
        return lax.switch(index, [with_all(branch) for branch in branches], *args[1:])

    def _shard_map(self, eqn: Any, args: list[Any], path: Path, noise: Any) -> tuple[list[Any], dict[Path, Any]]:
        params, axes = eqn.params, _manual_axes(eqn)

        def inside(noise: Any, *args: Any) -> Any:
            out, captured = self.run(params["jaxpr"], (), args, path, noise)
            return out, {key: varying(x, tuple(axes))[(None,) * len(axes)] for key, x in captured.items()}

        # The keys of the captured values are known only after a trace, so the specs are a prefix of the outputs.
        mapped = jax.shard_map(
            inside, mesh=params["mesh"], in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=(list(params["out_specs"]), PartitionSpec(*axes)), axis_names=set(axes),
            check_vma=params["check_vma"],
        )  # fmt: skip
        return mapped(jnp.zeros((), jnp.int32) if noise is None else noise, *args)


def _is_narrowing(eqn: Any) -> bool:
    """Return whether an equation rounds to a dtype with a shorter mantissa."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return all(jnp.issubdtype(x, jnp.floating) for x in (old, new)) and jnp.finfo(new).eps > jnp.finfo(old).eps


def _with_noise(x: Any, noise: Any, *, is_cast: bool) -> Any:
    """Perturb each element by the machine epsilon, with the sign of bit `noise - 1` of its mantissa; 0: not at all.

    A layout may cast each term of a sum instead of the sum, so casts are also perturbed relative to the other elements.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize == 1:
        return x
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    bit = ((bits >> jnp.maximum(noise - 1, 0).astype(bits.dtype)) & bits.dtype.type(1)).astype(x.dtype)
    size = jnp.minimum(noise, 1).astype(x.dtype) * jnp.finfo(x.dtype).eps
    noisy = x * ((1 - size) + 2 * size * bit)
    if not is_cast:
        return noisy
    rms = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))).astype(x.dtype)
    return jnp.where(x == 0, x, noisy + size * rms * (1 - 2 * bit))


@contextlib.contextmanager
def _as_traced(eqn: Any) -> Iterator[None]:
    scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes), eqn.ctx.manager:
        yield
