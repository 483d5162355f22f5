"""Planted faults for `diff`: wrong lines in models, strategies, kernels, pipelines, experts and optimizers."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import meshpar as mp
from meshpar.loop.difference import ValueDifference
from meshpar.loop.verify import named
from tests.loop import diff_models, test_verify

ONE = "data=1; ddp()"
NUM_TRACEBACKS = 3
"""The first tracebacks of a report, in which a fault must be. Each has at most four lines."""


class DiffFault(NamedTuple):
    """A wrong line, and a layout that shows it."""

    area: str
    module: str
    """`model` for tests/loop/diff_models.py, otherwise below meshpar."""
    old: str
    """Occurs once in the module."""
    new: str
    program: str
    """A name of `PROGRAMS`."""
    case: str
    """The layout, as for `verify`."""
    at: str = ""
    """The text of the line to name, if it is not `old`: if a statement is missing, the line that uses its value."""
    is_located: bool = True
    """Whether the line is in the first tracebacks of the report."""


PROGRAMS = {
    "mlp": (lambda: test_verify.model_of(), test_verify.squares, test_verify.batch, lambda: optax.adam(1e-2)),
    "noisy": (lambda: test_verify.model_of(), test_verify.noisy, test_verify.batch, lambda: optax.adam(1e-2)),
    "sequence": (
        lambda: diff_models.sequence_model(), lambda *args: diff_models.sequence_loss(*args),
        lambda: diff_models.sequence_batch(), lambda: optax.sgd(0.1),
    ),
    "clipped": (
        lambda: test_verify.model_of(), test_verify.squares, test_verify.batch, lambda: diff_models.optimizer(),
    ),
    "muon": (lambda: test_verify.model_of(), test_verify.squares, test_verify.batch, lambda: mp.muon(1e-2)),
    "kernels": (
        lambda: diff_models.kernel_model(), lambda *args: diff_models.kernel_loss(*args),
        lambda: diff_models.kernel_batch(), lambda: optax.sgd(0.1),
    ),
    "routed": (
        lambda: diff_models.routed_model(), lambda *args: diff_models.routed_loss(*args),
        lambda: diff_models.routed_batch(), lambda: optax.sgd(0.1),
    ),
}  # fmt: skip
"""Model, loss, batch and optimizer. They are looked up when they are used, because faults replace them."""

RING = "tensor=4; ddp() | tensor_parallel()"
TENSOR = "data=2,tensor=2; ddp() | tensor_parallel()"
EXPERTS = "expert=2; ddp() | expert_parallel()"
ONCE = "accumulate=2, reduce_gradients=once"
STAGES = "stage=2; ddp() | pipeline_parallel(stages=2, microbatches=2, schedule='{}')"
FAULTS = {
    # Models
    "lookup without the reduction": DiffFault(
        "model", "model", 'return lax.psum(jnp.where(inside[..., None], found, 0), "tensor")',
        "return jnp.where(inside[..., None], found, 0)", "sequence", TENSOR,
    ),
    "lookup with the mask of another shard": DiffFault(
        "model", "model", 'index = tokens - lax.axis_index("tensor") * rows', "index = tokens", "sequence", TENSOR,
        at="inside = (index >= 0) & (index < rows)",
    ),
    "lookup without a mask": DiffFault(
        "model", "model", "jnp.where(inside[..., None], found, 0)", "found", "sequence", TENSOR,
    ),
    "shift from the wrong neighbor": DiffFault(
        "model", "model", "[(i, i + 1) for i in range(count - 1)]", "[(i + 1, i) for i in range(count - 1)]",
        "sequence", TENSOR,
    ),
    "shift without a neighbor": DiffFault(
        "model", "model", 'lax.ppermute(x[:, -1:], "tensor", [(i, i + 1) for i in range(count - 1)])',
        "jnp.zeros_like(x[:, -1:])", "sequence", TENSOR, at="return jnp.concatenate([before, x[:, :-1]], axis=1)",
    ),
    "norm over local features": DiffFault(
        "model", "model", 'lax.psum(jnp.sum(x**2, axis=-1, keepdims=True), "tensor")',
        "jnp.sum(x**2, axis=-1, keepdims=True)", "sequence", TENSOR,
    ),
    "norm divided by local features": DiffFault(
        "model", "model", '(x.shape[-1] * lax.axis_size("tensor"))', "x.shape[-1]", "sequence", TENSOR,
    ),
    "gathered positions in a different order": DiffFault(
        "model", "model", 'full = lax.all_gather(x, "tensor", axis=1, tiled=True)',
        'full = lax.all_gather(jnp.roll(x, lax.axis_index("tensor"), 1), "tensor", axis=1, tiled=True)', "sequence",
        TENSOR,
    ),
    "positions of a sum in a different order": DiffFault(
        "model", "model", 'lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)',
        'lax.psum_scatter(jnp.roll(partial, lax.axis_index("tensor"), 1), "tensor", scatter_dimension=1, tiled=True)',
        "sequence", TENSOR,
    ),
    "local slice in place of a reduce-scatter": DiffFault(
        "model", "model", 'return lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)',
        "size = partial.shape[1] // lax.axis_size('tensor'); "
        "return lax.dynamic_slice_in_dim(partial, lax.axis_index('tensor') * size, size, 1)", "sequence", TENSOR,
    ),
    "input gradient without the reduction": DiffFault(
        "model", "model", 'return lax.psum(dy @ w.T, "tensor")', "return dy @ w.T", "sequence", TENSOR,
        is_located=False,
    ),
    "input gradient as a mean": DiffFault(
        "model", "model", 'return lax.psum(dy @ w.T, "tensor")', 'return lax.pmean(dy @ w.T, "tensor")', "sequence",
        TENSOR,
        is_located=False,
    ),
    "softmax over the local vocabulary": DiffFault(
        "model", "model", 'lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "tensor")',
        "jnp.exp(logits - largest[..., None]).sum(-1)", "sequence", TENSOR,
    ),
    "targets of every shard": DiffFault(
        "model", "model", 'lax.psum(jnp.where(inside, score, 0), "tensor")', 'lax.psum(score, "tensor")', "sequence",
        TENSOR,
    ),
    "maximum of a different shard": DiffFault(
        "model", "model", 'lax.pmax(lax.stop_gradient(logits).max(-1), "tensor")',
        "lax.stop_gradient(logits).max(-1)", "sequence", TENSOR, at="jnp.exp(logits - largest[..., None])",
    ),
    "random keys not folded with the rank": DiffFault(
        "model", "model", "rank * rows + jnp.arange(rows)", "jnp.arange(rows)", "sequence", TENSOR,
    ),
    # Optimizers
    "clipping by the norm of a shard": DiffFault(
        "optimizer", "model", 'jnp.sqrt(lax.psum(squares, "fsdp"))', "jnp.sqrt(squares)", "clipped",
        "fsdp=4; fsdp(min_bytes=0)",
    ),
    "moments updated on the first shard only": DiffFault(
        "optimizer", "model", "decay * m + (1 - decay) * g",
        'jnp.where(lax.axis_index("fsdp") == 0, decay * m + (1 - decay) * g, m)', "clipped",
        "fsdp=4; fsdp(min_bytes=0)",
    ),
    "moments of gradients that are summed again": DiffFault(
        "optimizer", "model", "decay * m + (1 - decay) * g", 'decay * m + (1 - decay) * lax.psum(g, "fsdp")', "clipped",
        "fsdp=4; fsdp(min_bytes=0)",
    ),
    "parameters are not updated": DiffFault(
        "optimizer", "training.step", "params = optax.apply_updates(old, updates)",
        "params = optax.apply_updates(old, updates) if setup.mesh.size == 1 else old", "mlp", "data=2; ddp()",
    ),
    # Strategies
    "loss of a device": DiffFault(
        "strategy", "training.gradients.batch_region", "lax.psum((sums.loss, sums.metrics), self.axes)",
        "(sums.loss, sums.metrics)", "mlp", f"data=2; ddp(); {ONCE}", at="        sums = jax.shard_map(\n",
    ),
    "reduction over the wrong axis": DiffFault(
        "strategy", "training.gradients.batch_region", "lax.psum((sums.loss, sums.metrics), self.axes)",
        "lax.psum((sums.loss, sums.metrics), self.axes[:1])", "mlp", f"data=2,fsdp=2; hsdp(min_bytes=0); {ONCE}",
    ),
    "gradients of a group": DiffFault(
        "strategy", "training.gradients.fsdp", "lax.reduce(g, zero, lax.add, range(len(remaining)))",
        "g[(0,) * len(remaining)]", "mlp", "data=2,fsdp=2; hsdp(min_bytes=0); accumulate=2",
    ),
    "gradients that are not finite": DiffFault(
        "strategy", "training.gradients.fsdp", "lax.reduce(g, zero, lax.add, range(len(remaining)))",
        "g[(0,) * len(remaining)] * np.nan", "mlp", "data=2,fsdp=2; hsdp(min_bytes=0); accumulate=2",
    ),
    "a lost micro-step": DiffFault(
        "strategy", "training.accumulation", "(batches, keys))",
        "(jax.tree.map(lambda x: x.at[0].set(x[-1]), batches), keys))", "mlp", "data=2; ddp(); accumulate=2",
    ),
    "mean of the means of micro-steps": DiffFault(
        "strategy", "layers.losses", "return Normalizer(num_parts, lax.psum(total, tuple(axes)) if axes else total)",
        "return Normalizer(num_parts, weight_of(part, keys[0]) * num_parts)", "mlp", "data=2; ddp(); accumulate=2",
    ),
    "mean of the means of devices": DiffFault(
        "strategy", "layers.losses", "lax.psum(total, tuple(axes)) if axes else total", "total * num_parts / len(keys)",
        "mlp", f"data=2; ddp(); {ONCE}",
        is_located=False,
    ),
    "weights of the layer before": DiffFault(
        "strategy", "training.gradients.layer_loop", "self._gathered(params, layer + self.ahead)",
        "self._gathered(params, layer + self.ahead - 1)", "mlp", "fsdp=2; fsdp(min_bytes=0, prefetch=1)",
    ),
    "a different random key on a mesh": DiffFault(
        "strategy", "training.step", "jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)",
        "jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step + setup.mesh.size)", "noisy",
        "data=2; ddp()",
    ),
    # Pipelines
    "a lost microbatch": DiffFault(
        "pipeline", "pipeline.stage_program", "read(self.examples, microbatch), key",
        "read(self.examples, jnp.maximum(microbatch, 1)), key", "mlp", STAGES.format("gpipe"),
    ),
    "weights are not summed over microbatches": DiffFault(
        "pipeline", "pipeline.stage_program", ".normalized(self.functions.normalizer)", ".normalized()", "mlp",
        STAGES.format("1f1b"),
    ),
    # Experts
    "tokens stay on their rank": DiffFault(
        "experts", "moe.token_exchange", "return lax.all_to_all(buffers, link.axis, 0, 0)", "return buffers", "routed",
        EXPERTS,
        is_located=False,
    ),
    # Kernels
    "off by one in a ring": DiffFault(
        "kernel", "collectives.ring", "(rank - stride * (T + 1)) % num_ranks), arrived",
        "(rank - stride * (T + 2)) % num_ranks), arrived", "kernels", RING,
        is_located=False,
    ),
    "parts of a sum for the next rank": DiffFault(
        "kernel", "collectives.ring", "(rank - stride * jnp.arange(1, num_ranks + 1)) % num_ranks",
        "(rank - stride * jnp.arange(num_ranks)) % num_ranks", "kernels", RING,
        is_located=False,
    ),
    "attention to later ranks": DiffFault(
        "kernel", "collectives.attention", "(rank - s) % ring.num_ranks < rank", "(rank - s) % ring.num_ranks > rank",
        "kernels", RING,
        is_located=False,
    ),
}  # fmt: skip

CORRECT = [
    ("mlp", "data=2; ddp()"),
    ("mlp", f"data=2; ddp(); {ONCE}"),
    ("mlp", "fsdp=4; fsdp(min_bytes=0)"),
    ("mlp", "fsdp=2; fsdp(min_bytes=0, prefetch=1)"),
    ("mlp", "fsdp=2,tensor=2; fsdp(min_bytes=0) | tensor_parallel(); accumulate=2"),
    ("mlp", "data=2,fsdp=2; hsdp(min_bytes=0); accumulate=2"),
    ("mlp", "fsdp=4; zero1(min_bytes=0); accumulate=2"),
    ("mlp", "fsdp=2; zero2(min_bytes=0); remat=full"),
    ("mlp", STAGES.format("gpipe")),
    ("mlp", STAGES.format("zb-h1")),
    ("noisy", "data=2,tensor=2; ddp() | tensor_parallel()"),
    ("sequence", TENSOR),
    ("sequence", "tensor=4; ddp() | tensor_parallel()"),
    ("kernels", RING),
    ("routed", EXPERTS),
    ("routed", "data=2,expert=2; ddp() | expert_parallel()"),
    ("clipped", "fsdp=4; fsdp(min_bytes=0)"),
    ("muon", "fsdp=2; fsdp(min_bytes=0)"),
]
"""Programs and layouts without a fault."""


@contextlib.contextmanager
def planted(fault: DiffFault) -> Iterator[tuple[str, range]]:
    """Run the changed source of a module, and replace its functions in all modules that have imported them.

    Yields the file and the lines of the fault.
    """
    for engine in ("layer_loop", "xla", "fsdp", "stages"):  # a later import would keep the fault
        importlib.import_module(f"meshpar.training.gradients.{engine}")
    for package in (mp, mp.collectives):  # names that are imported on first use would keep it, too
        for name in package.__all__:
            getattr(package, name)
    module = diff_models if fault.module == "model" else importlib.import_module(f"meshpar.{fault.module}")
    file = Path(module.__file__ or "")
    source = file.read_text()
    assert source.count(fault.old) == 1, fault.old
    changed = {**vars(module)}
    exec(compile(source.replace(fault.old, fault.new), str(file), "exec"), changed)
    replaced = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:  # instances and subclasses keep the class
            for attribute, new in vars(changed[name]).items():
                if isinstance(new, FunctionType | property | classmethod | staticmethod) and attribute in vars(value):
                    replace(value, attribute, new)
                if "__class__" in getattr(getattr(new, "__code__", None), "co_freevars", ()):  # it calls super()
                    new.__closure__[new.__code__.co_freevars.index("__class__")].cell_contents = value
            changed[name] = value
    for other in [x for name, x in sys.modules.items() if name.split(".")[0] == "meshpar" or x is diff_models]:
        for name, value in list(vars(other).items()):
            is_function = callable(value) and not isinstance(value, type)
            if is_function and getattr(value, "__module__", "") == module.__name__ and name in changed:
                replace(other, name, changed[name])
    text = fault.at or fault.old
    assert source.count(text) == 1, text
    first = source[: source.index(text)].count("\n") + 1
    jax.clear_caches()  # traces of functions that call the replaced functions
    try:
        yield str(file), range(first, first + text.rstrip("\n").count("\n") + 1)
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)
        jax.clear_caches()


def difference(program: str, case: str, *, compute: str | None = None, find_origin: bool = True) -> ValueDifference:
    """Compare a layout of a program with another layout."""
    build, loss, batch, optimizer = PROGRAMS[program]
    layouts = [named(ONE), named(case)]
    meshes = [layout.mesh.build(jax.devices()[: int(np.prod([*layout.mesh.values()]))]) for layout in layouts]
    examples = jax.tree.map(lambda x: np.asarray(x, np.float32) if x.dtype.kind == "f" else x, batch())
    precision = mp.Precision(compute=compute)
    state = mp.init_state(
        build(), optimizer(), mesh=meshes[0], strategy=layouts[0].strategy, key=jax.random.key(0), precision=precision
    )
    step, other = (mp.train_step(loss, precision=precision, **layout.options) for layout in layouts)
    options = {"mesh": meshes[1], "strategy": layouts[1].strategy, "find_origin": find_origin}
    return mp.diff(step, state, examples, other, **options)


def located(fault: DiffFault) -> tuple[ValueDifference, bool]:
    """Plant a fault. Return the difference, and whether the wrong line is one of the first lines of the report."""
    with planted(fault) as (file, lines):
        found = difference(fault.program, fault.case)
    if found.origin is None:
        return found, False
    origin = found.origin
    tracebacks = [origin.unreduced, *origin.between, (origin.source, *origin.callers), origin.operands]
    first = itertools.chain.from_iterable([lines for lines in tracebacks if lines][:NUM_TRACEBACKS])
    return found, any(line.file == file and line.line in lines for line in first)
