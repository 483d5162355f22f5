"""Strategies: four sets of rules, for parameters, gradients, optimizer state and activations.

ZeRO-1, ZeRO-2 and ZeRO-3 differ in nothing but what is split: the optimizer state, the gradients too, the parameters
too (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from meshpar.rules import ACTIVATION_NAMES, BATCH_AXES, PARAMETER_NAMES, DimRule, Largest, Rules
from meshpar.types import AnyMesh, axis_sizes, near, problem

if TYPE_CHECKING:
    from meshpar.pipeline.schedules import Schedule

BIG_LEAF_BYTES = 2**20
"""A leaf (one layer of it, when layers are stacked) of this size must not be replicated by accident."""
MIN_SHARDED_BYTES = 2**16
"""Leaves without names are split by ZeRO from this size on; below it a collective costs more than it saves."""

PARTS = ("params", "grads", "optimizer", "activations")

Gather: TypeAlias = Literal["step", "microbatch"]

QUANTIZED = ("int8", "fp8")
"""What weights and gradients can be sent as."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """A mesh axis that must be larger than one for a strategy to be what its name says."""

    axis: str
    strategy: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """In how few bits split parameters and their gradients travel.

    Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training".
    """

    weights: str | None = "int8"
    """Weights, when they are gathered: "int8", "fp8" (e4m3), or None: in the compute dtype (qwZ)."""
    gradients: str | None = "int8"
    """Gradients, when they meet: each rank adds up what arrives in float32 (qgZ). None: in the reduction dtype."""
    block: int = 256
    """The most elements that share a scale."""
    stochastic: bool = False
    """Round up or down at random, right in the mean, instead of to the nearest."""
    secondary: str | tuple[str, ...] | None = None
    """Axes inside a node over which a second shard is kept from forward to backward, so that the backward pass gathers
    inside the node only (hpZ): `size of the other axes` times the bytes of the first, one byte a parameter. Gradients
    then meet inside the node first, too."""

    def __post_init__(self) -> None:
        if isinstance(self.secondary, list):
            object.__setattr__(self, "secondary", tuple(self.secondary))
        for field in ("weights", "gradients"):
            name = getattr(self, field)
            if name is not None and name not in QUANTIZED:
                fix = near(str(name), QUANTIZED)
                raise problem(f"quantize {field}={name!r}", "send them in that", "there is no such format", fix)
        if self.weights is None and self.gradients is None and self.secondary is None:
            fix = 'write quantize="int8", or leave it out'
            raise problem("quantize", "send weights and gradients as they are", "that is what quantize=None does", fix)
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            exists = "a block has a whole number of elements, one or more"
            raise problem(f"quantize block={self.block!r}", "share scales among so many", exists, "write block=256")
        if not isinstance(self.stochastic, bool):
            exists = "it is neither True nor False"
            raise problem(f"quantize stochastic={self.stochastic!r}", "round so", exists, "write one of them")

    @property
    def literal(self) -> str | dict[str, object]:
        """The shortest plain value that means the same."""
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        if self.weights == self.gradients and set(changed) <= {"weights", "gradients"} and self.weights:
            return self.weights
        return changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelined:
    """How a model's stacked layers are run stage by stage."""

    stages: int
    """Ranks of `axis`; each holds a share of the layers."""
    microbatches: int
    """Into which the rows of every device are cut."""
    schedule: str = "1f1b"
    """A name from `meshpar.pipeline.SCHEDULES`, or the path of a `.csv` file as `Schedule.from_csv` reads it."""
    chunks: int | None = None
    """Shares of the layers on one stage, for a schedule that takes several."""
    gather: Gather = "step"
    """Weights that are split over axes that split the batch, too: gathered once a step and held whole, or in every
    forward and backward of a microbatch and held as shards."""
    axis: str = "stage"
    fewer_layers: tuple[int, int] = (0, 0)
    """How many layers fewer than the parts between them the first and the last part have, beside embedding and head."""

    def __post_init__(self) -> None:
        fewer = self.fewer_layers
        whole = isinstance(fewer, tuple) and all(type(count) is int and count >= 0 for count in fewer)
        if not whole or len(fewer) != 2:
            where, exists = f"pipeline_parallel(fewer_layers={fewer!r})", "it is two whole numbers, of both end parts"
            fix = "write fewer_layers=(0, 1) for a lighter last part"
            raise problem(where, "make parts that much lighter", exists, fix)
        for field in ("stages", "microbatches", *(() if self.chunks is None else ("chunks",))):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                where, exists = f"pipeline_parallel({field}={value!r})", "it is a whole number, one or more"
                raise problem(where, "run a pipeline of so many", exists, "write pipeline_parallel(stages=4, ...)")
        if self.gather not in get_args(Gather):
            where, fix = f"pipeline_parallel(gather={self.gather!r})", near(str(self.gather), get_args(Gather))
            raise problem(where, "gather weights then", "there is no such choice", fix)
        if not isinstance(self.schedule, str):
            exists = "a strategy names its schedule, so that it can be written down"
            fix = 'give a name, schedule="zb-h1", or a file that Schedule.to_csv wrote'
            raise problem(f"pipeline_parallel(schedule={self.schedule!r})", "run it", exists, fix)
        if self.schedule.endswith(".csv"):
            if self.chunks is not None:
                where, exists = f"pipeline_parallel(chunks={self.chunks})", "a file says which parts a stage holds"
                raise problem(where, f"run `{self.schedule}` with so many", exists, "leave chunks out")
        else:
            self.table()

    def table(self) -> Schedule:
        """The schedule that is named."""
        from meshpar.pipeline.schedules import Schedule, make

        if self.schedule.endswith(".csv"):
            return Schedule.from_csv(self.schedule)
        options = {} if self.chunks is None else {"chunks": self.chunks}
        return make(self.schedule, self.stages, self.microbatches, **options)

    def layers_of_parts(self, num_layers: int, num_parts: int) -> tuple[int, ...]:
        """How many layers each part of the model runs: as even as they go, what is over to the parts between the ends.

        Raises:
          ValueError: a part would have none.
        """
        first, last = self.fewer_layers
        level, over = divmod(num_layers + first + last, num_parts)
        counts = [level] * num_parts
        for part in [*range(1, num_parts - 1), 0, num_parts - 1][:over]:
            counts[part] += 1
        counts[0] -= first
        counts[-1] -= last
        if min(counts) < 1:
            lighter = any(self.fewer_layers)
            least = num_parts * (1 + max(first, last)) - first - last
            raise problem(
                f"{num_layers} stacked layers under pipeline_parallel(schedule={self.schedule!r})",
                f"be cut into {num_parts} parts" + f" with fewer_layers={self.fewer_layers}" * lighter,
                "every part of the model has one layer at the least",
                f"use {least} layers or more, or fewer stages (times chunks)" + ", or leave fewer_layers out" * lighter,
            )
        return tuple(counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a training step is split: four `Rules`. Joined with `|`, the later one wins rule by rule."""

    params: Rules
    """Parameters, between steps."""
    grads: Rules
    """Gradients, as they leave the backward pass."""
    optimizer: Rules
    """Optimizer state of the same shape as a parameter."""
    activations: Rules = dataclasses.field(default_factory=lambda: _activations("default"))
    """The batch, and what the model gives names with `constrain`."""
    label: str = "custom"
    """How to write it in Python, for tables and logs."""
    big_leaf_bytes: int = BIG_LEAF_BYTES
    """Above this size a leaf that no rule splits, and none says to replicate, is an error."""
    needs: tuple[Need, ...] = ()
    """Axes without which it would be another strategy."""
    quantize: Quantize | None = None
    """How split parameters and their gradients travel; None: as XLA sends them."""
    pipeline: Pipelined | None = None
    """How the layers are run stage by stage; None: one after the other, by all devices."""

    def __post_init__(self) -> None:
        for part in PARTS:
            if not isinstance(getattr(self, part), Rules):
                raise problem(
                    f"Strategy({part}=...)",
                    f"be {getattr(self, part)!r}",
                    "each of its four parts is a Rules",
                    f'write {part}=mp.Rules(embed="fsdp")',
                )
        if not isinstance(self.quantize, Quantize | None):
            asked, fix = f"be {self.quantize!r}", 'write quantize=mp.Quantize(weights="int8")'
            raise problem("Strategy(quantize=...)", asked, "it is a Quantize or None", fix)
        if self.big_leaf_bytes < 0:
            raise problem(
                "Strategy(big_leaf_bytes=...)", f"be {self.big_leaf_bytes}", "a size is not negative", "use 2**20"
            )

    def __or__(self, other: Strategy | Rules) -> Strategy:
        if not isinstance(other, Strategy | Rules):
            return NotImplemented
        other = as_strategy(other)
        self._check_not_undone(other)
        return dataclasses.replace(
            self,
            **{part: getattr(self, part) | getattr(other, part) for part in PARTS},
            label=f"{self.label} | {other.label}",
            big_leaf_bytes=min(self.big_leaf_bytes, other.big_leaf_bytes),
            needs=self.needs + other.needs,
            quantize=other.quantize or self.quantize,
            pipeline=other.pipeline or self.pipeline,
        )

    def _check_not_undone(self, other: Strategy) -> None:
        """`fsdp() | ddp()`: the second says what stays whole by adding no rule, which takes nothing from the first."""
        for part in PARTS[:3]:
            mine, theirs = getattr(self, part), getattr(other, part)
            if mine.largest and theirs.everything and not theirs.largest:
                raise problem(
                    f"strategy {self.label} | {other.label}",
                    f"keep {part} whole by {theirs.everything} after splitting them by {mine.largest.origin}",
                    "strategies are joined rule by rule, and a rule that is missing takes nothing away",
                    f"write {other.label} alone, or to keep some leaves whole mp.Rules(embed=None)",
                )

    def __ror__(self, other: Rules) -> Strategy:
        return as_strategy(other) | self if isinstance(other, Rules) else NotImplemented

    def __str__(self) -> str:
        return self.label

    def replace(self, **changes: object) -> Strategy:
        """The same strategy with some parts changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def check_axes(self, mesh: AnyMesh) -> None:
        """See that the mesh has the axes this strategy is about.

        Raises:
          ValueError: an axis is missing, or of size 1 where the strategy would silently become another one.
        """
        sizes = axis_sizes(mesh)
        if math.prod(sizes.values()) == 1:  # one device: every strategy is the same program
            return
        for need in self.needs:
            if sizes.get(need.axis, 1) == 1:
                raise problem(
                    f"strategy {need.strategy}",
                    f"use mesh axis `{need.axis}`",
                    f"the mesh has {', '.join(f'{k}={v}' for k, v in sizes.items() if v > 1) or 'no axis above 1'}",
                    f"{need.why}; or give the axis a size: MeshSpec({need.axis}=2, ...)",
                )


def as_strategy(rules: Strategy | Rules) -> Strategy:
    """A strategy as it is; a bare `Rules` as one that serves params, gradients, optimizer state and activations."""
    if isinstance(rules, Strategy):
        return rules
    if not isinstance(rules, Rules):
        raise problem(
            "strategy",
            f"be {getattr(rules, '__name__', repr(rules))}",
            f"a strategy is a Strategy or a Rules, and this is a {type(rules).__name__}",
            _advice(rules),
        )
    return Strategy(
        params=rules,
        grads=rules,
        optimizer=rules,
        # Paths are those of parameters: a pattern such as `.*` must not catch the batch.
        activations=_activations("default") | rules.without_paths(),
        label=repr(rules),
    )


def _advice(given: object) -> str:
    name = getattr(given, "__name__", given)
    if name in PRESETS:
        return f"write mp.{name}()" + (" with its parentheses" if callable(given) else "")
    if isinstance(given, str):
        return f"write mp.fsdp() or mp.Rules(...), or read the text with parse_strategy; {near(given, PRESETS)}"
    return "write mp.fsdp() or mp.Rules(...)"


def _activations(origin: str, by_name: dict[str, DimRule] | None = None) -> Rules:
    return Rules.preset(
        origin, {"batch": BATCH_AXES, **(by_name or {})}, known=ACTIVATION_NAMES, optional_axes=BATCH_AXES
    )


def _sharded(origin: str, axis: str | tuple[str, ...], min_bytes: int) -> Rules:
    axes = _axes(origin, axis)
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise problem(
            f"{origin}(min_bytes={min_bytes!r})",
            "leave smaller leaves whole",
            "it is not a number of bytes",
            "write one, say min_bytes=2**16",
        )
    return Rules.preset(
        origin,
        {"embed": axes[0] if len(axes) == 1 else axes},
        known=PARAMETER_NAMES,
        largest=Largest(axes, min_bytes, origin),
    )


def _whole(origin: str) -> Rules:
    return Rules.preset(origin, known=PARAMETER_NAMES, everything=True)


def _axes(origin: str, axis: str | tuple[str, ...]) -> tuple[str, ...]:
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, tuple | list) else ()
    if not axes or not all(isinstance(name, str) for name in axes) or len(set(axes)) != len(axes):
        raise problem(
            f"{origin}(axis={axis!r})",
            "split over that",
            "it is no mesh axis, and no tuple of different ones",
            'write the name of one, as in mp.fsdp(axis="data"), or several: mp.fsdp(axis=("data", "fsdp"))',
        )
    return axes


def _call(
    name: str, default: str, axis: str | tuple[str, ...], min_bytes: int, quantize: Quantize | None = None
) -> str:
    parts = [] if axis == default else [f"axis={axis!r}"]
    parts += [] if min_bytes == MIN_SHARDED_BYTES else [f"min_bytes={min_bytes}"]
    parts += [] if quantize is None else [f"quantize={quantize.literal!r}"]
    return f"{name}({', '.join(parts)})"


def ddp() -> Strategy:
    """Data parallel: everything whole on every device, the batch split; gradients are all-reduced.

    Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """
    return Strategy(
        params=_whole("ddp"),
        grads=_whole("ddp"),
        optimizer=_whole("ddp"),
        activations=_activations("ddp"),
        label="ddp()",
    )


def zero1(*, axis: str | tuple[str, ...] = "fsdp", min_bytes: int = MIN_SHARDED_BYTES) -> Strategy:
    """ZeRO-1: optimizer state split over `axis`; the new parameters are gathered after the update.

    The compiler scatters the gradients as soon as it sees that only shards are used, so the program is ZeRO-2's.

    Args:
      axis: the mesh axis, or axes, to split over.
      min_bytes: unnamed leaves smaller than this stay whole.
    """
    return Strategy(
        params=_whole("zero1"),
        grads=_whole("zero1"),
        optimizer=_sharded("zero1", axis, min_bytes),
        activations=_activations("zero1"),
        label=_call("zero1", "fsdp", axis, min_bytes),
    )


def zero2(*, axis: str | tuple[str, ...] = "fsdp", min_bytes: int = MIN_SHARDED_BYTES) -> Strategy:
    """ZeRO-2: optimizer state and gradients split over `axis`; no device ever holds a whole gradient.

    Args:
      axis: the mesh axis, or axes, to split over.
      min_bytes: unnamed leaves smaller than this stay whole.
    """
    return Strategy(
        params=_whole("zero2"),
        grads=_sharded("zero2", axis, min_bytes),
        optimizer=_sharded("zero2", axis, min_bytes),
        activations=_activations("zero2"),
        label=_call("zero2", "fsdp", axis, min_bytes),
    )


def zero3(
    *,
    axis: str | tuple[str, ...] = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
) -> Strategy:
    """ZeRO-3: parameters, gradients and optimizer state split over `axis`; weights are gathered where they are used.

    Args:
      axis: the mesh axis, or axes, to split over.
      min_bytes: unnamed leaves smaller than this stay whole.
      quantize: as for `fsdp`.
    """
    return _zero3("zero3", axis, min_bytes, quantize)


def fsdp(
    *,
    axis: str | tuple[str, ...] = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
) -> Strategy:
    """Fully sharded data parallel: another name for ZeRO-3 (Zhao et al. 2023, "PyTorch FSDP").

    On a model with no names at all every leaf of at least `min_bytes` is split on its largest dim that divides, and
    the table says so.

    With `quantize` it is ZeRO++ (Wang et al. 2023): weights of two dims or more are gathered, and their gradients
    exchanged, in a byte an element. The loss is then given a device's own rows only, as in `train_step` with
    `accumulate_mode="once"`; `eval_step` gathers weights as they are.

    Args:
      axis: the mesh axis, or axes, to split over.
      min_bytes: unnamed leaves smaller than this stay whole.
      quantize: "int8" or "fp8" for weights and gradients; or fields of `Quantize`, as a dict or as such.
    """
    return _zero3("fsdp", axis, min_bytes, quantize)


def hsdp(
    *,
    axis: str | tuple[str, ...] = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
) -> Strategy:
    """Hybrid sharding: ZeRO-3 inside a group of `axis`, replicated over `data`.

    Gathers and scatters stay in the group; only 1/size of the gradients is all-reduced across groups.

    Args:
      axis: the mesh axis, or axes, to split over.
      min_bytes: unnamed leaves smaller than this stay whole.
      quantize: as for `fsdp`; the all-reduce across groups is quantized too.
    """
    strategy = _zero3("hsdp", axis, min_bytes, quantize)
    need = Need(axis="data", strategy="hsdp()", why="use fsdp(), which it is with nothing to replicate over")
    return strategy.replace(needs=(*strategy.needs, need))


def _zero3(
    origin: str,
    axis: str | tuple[str, ...],
    min_bytes: int,
    quantize: str | Mapping[str, object] | Quantize | None,
) -> Strategy:
    sharded = _sharded(origin, axis, min_bytes)
    wire = _quantize(origin, _axes(origin, axis), quantize)
    return Strategy(
        params=sharded,
        grads=sharded,
        optimizer=sharded,
        activations=_activations(origin),
        label=_call(origin, "fsdp", axis, min_bytes, wire),
        quantize=wire,
    )


def _quantize(
    origin: str, axes: tuple[str, ...], given: str | Mapping[str, object] | Quantize | None
) -> Quantize | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        known = [field.name for field in dataclasses.fields(Quantize)]
        for name in given:
            if name not in known:
                exists = "Quantize has no such field"
                raise problem(f"{origin}(quantize={given!r})", f"set `{name}`", exists, near(str(name), known))
        given = Quantize(**given)  # type: ignore[arg-type]
    wire = given if isinstance(given, Quantize) else Quantize(weights=given, gradients=given)
    if wire.secondary is not None:
        inside = _axes(f"{origin}(quantize=...) secondary", wire.secondary)
        if not set(inside) < set(axes):
            raise problem(
                f"{origin}(axis={axes!r}, quantize=...) secondary={wire.secondary!r}",
                "keep a second shard inside the node",
                "those are some of the axes that parameters are split over, and the others go across nodes",
                'split over both kinds: mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"})',
            )
    return wire


def tensor_parallel(*, sequence: bool = False, axis: str = "tensor") -> Strategy:
    """Tensor parallel: heads, MLP width and vocabulary split over `axis`, inside every layer.

    Column-parallel then row-parallel matmuls leave one all-reduce per block and direction (Shoeybi et al. 2019,
    "Megatron-LM").

    Args:
      sequence: also split the residual stream's sequence between blocks, which turns each all-reduce into a
        reduce-scatter and an all-gather of the same bytes (Korthikanti et al. 2022, "Reducing Activation
        Recomputation in Large Transformer Models").
      axis: the mesh axis to split over.
    """
    _axes("tensor_parallel", axis)
    split: dict[str, DimRule] = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), axis)
    rules = Rules.preset("tensor_parallel", split, known=PARAMETER_NAMES)
    inner: dict[str, DimRule] = dict.fromkeys(("act_heads", "act_kv_heads", "act_mlp", "act_vocab"), axis)
    if sequence:
        inner["norm_seq"] = axis
    arguments = (["sequence=True"] if sequence else []) + ([] if axis == "tensor" else [f"axis={axis!r}"])
    return Strategy(
        params=rules,
        grads=rules,
        optimizer=rules,
        activations=_activations("tensor_parallel", inner),
        label=f"tensor_parallel({', '.join(arguments)})",
    )


def expert_parallel(*, axis: str = "expert") -> Strategy:
    """Expert parallel: each rank of `axis` owns some experts; tokens go to their owners and back.

    Lepikhin et al. 2020, "GShard". Gradients of what is not an expert are reduced over `axis` like any batch axis.

    Args:
      axis: the mesh axis to split over.
    """
    _axes("expert_parallel", axis)
    rules = Rules.preset("expert_parallel", {"expert": axis}, known=PARAMETER_NAMES)
    return Strategy(
        params=rules,
        grads=rules,
        optimizer=rules,
        activations=_activations("expert_parallel", {"act_expert": axis}),
        label="expert_parallel()" if axis == "expert" else f"expert_parallel(axis={axis!r})",
    )


def context_parallel(*, axis: str = "context") -> Strategy:
    """Context parallel: the sequence split over `axis` in every layer, for sequences too long for one device.

    Only attention looks across positions: the shipped decoders run it as a ring, in which keys and values travel from
    rank to rank (`meshpar.collectives.ring_attention`; Liu et al. 2023, "Ring Attention"). Weights are whole over
    `axis` unless another strategy splits them, as in `mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel()`, and
    their gradients are reduced over it. The batch is whole over `axis`: each rank takes its positions of every row.
    With `tensor_parallel(sequence=True)`, joined in either order, the residual stream is split over both.

    Args:
      axis: the mesh axis to split over, one of your own: MeshSpec(fsdp=2, context=4).

    Raises:
      ValueError: an axis that is no name of one.
    """
    _axes("context_parallel", axis)
    if not isinstance(axis, str) or not axis:
        exists = "the sequence goes round one axis"
        raise problem(f"context_parallel(axis={axis!r})", "split over that", exists, 'name it, as axis="context"')
    rules = Rules.preset("context_parallel", known=PARAMETER_NAMES)
    label = "context_parallel()" if axis == "context" else f"context_parallel(axis={axis!r})"
    return Strategy(
        params=rules,
        grads=rules,
        optimizer=rules,
        activations=_activations("context_parallel", {"seq": axis}),
        label=label,
        needs=(Need(axis=axis, strategy=label, why="leave it out, for there is nothing to split the sequence over"),),
    )


def pipeline_parallel(
    *,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int | None = None,
    gather: Gather = "step",
    fewer_layers: tuple[int, int] = (0, 0),
    axis: str = "stage",
) -> Strategy:
    """Pipeline parallel: the stacked layers split over `axis`, and every batch run through them in microbatches.

    The model runs its layers by `meshpar.pipeline.scan_layers`, as the shipped decoders do; what stands before is the
    first stage's and what stands behind the last one's. Any schedule of `meshpar.pipeline` runs as one program, with
    what other strategies split inside a stage left to XLA. Gradients are summed on every device and over the axes that
    split the batch once, behind the last microbatch. Parameters outside of the layers (embedding, head) are whole on
    every stage; their gradients are sent from the stage that makes them, or summed where two do. The stages meet at the
    end of a step, for the gradient norm and the metrics.

    Layers need not divide: parts have as many as they go evenly, those between the ends what is over, 10 layers on 4
    stages 2, 3, 3 and 2. Between steps such layers are split over `axis` along another dim (the largest that divides,
    not split otherwise where there is one), and go to their stages once a step; a leaf with no such dim is whole on
    every stage. `Setup.table` tells.

    Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM"; Qi et al. 2024, "Zero Bubble Pipeline Parallelism".

    Args:
      stages: ranks of `axis`.
      microbatches: into which the rows of every device are cut; the loss is the mean over them.
      schedule: a name from `meshpar.pipeline.SCHEDULES`, or the path of a `.csv` file.
      chunks: shares of the layers on one stage, for the interleaved schedule.
      gather: with `fsdp()`, weights are gathered once a "step" and held, or for every "microbatch" and dropped again.
      fewer_layers: how many layers fewer than the parts between them the first and the last part of the model have, to
        make up for embedding and head.
      axis: the mesh axis of the stages.

    Raises:
      ValueError: no such schedule, or not for these numbers.
    """
    _axes("pipeline_parallel", axis)
    pipelined = Pipelined(
        stages=stages, microbatches=microbatches, schedule=schedule, chunks=chunks, gather=gather, axis=axis,
        fewer_layers=fewer_layers,
    )  # fmt: skip
    rules = Rules.preset("pipeline_parallel", {"layers": axis}, known=PARAMETER_NAMES)
    changed = (
        f"{field.name}={getattr(pipelined, field.name)!r}"
        for field in dataclasses.fields(Pipelined)
        if getattr(pipelined, field.name) != field.default
    )
    label = f"pipeline_parallel({', '.join(changed)})"
    why = "leave it out, for there are no stages to split the layers over"
    return Strategy(
        params=rules,
        grads=rules,
        optimizer=rules,
        activations=_activations("pipeline_parallel"),
        label=label,
        needs=(Need(axis=axis, strategy=label, why=why),),
        pipeline=pipelined,
    )


PRESETS: dict[str, Callable[..., Strategy]] = {
    preset.__name__: preset
    for preset in (
        ddp, zero1, zero2, zero3, fsdp, hsdp, tensor_parallel, expert_parallel, context_parallel, pipeline_parallel
    )
}  # fmt: skip


def parse_strategy(text: str) -> Strategy:
    """Read "fsdp() | tensor_parallel(sequence=True)", as `Strategy.label` writes it; bare names do too.

    Raises:
      ValueError: anything but presets with literal arguments, joined with `|`.
    """
    import ast

    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _unreadable(text, f"it is no Python expression ({error.msg})") from error
    return _evaluate(tree, text)


def _evaluate(node: object, text: str) -> Strategy:
    import ast

    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _evaluate(node.left, text) | _evaluate(node.right, text)
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise _unreadable(text, "it is not presets joined with `|`")
    if name.id not in PRESETS:
        raise problem(f"strategy `{text}`", f"use `{name.id}`", "there is no such preset", near(name.id, PRESETS))
    if isinstance(node, ast.Call) and node.args:
        raise _unreadable(text, f"`{name.id}` takes its arguments by name")
    arguments = {}
    for keyword in node.keywords if isinstance(node, ast.Call) else []:
        try:
            arguments[keyword.arg or "**"] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise _unreadable(text, f"`{keyword.arg}` is not a plain value") from error
    try:
        return PRESETS[name.id](**arguments)
    except TypeError as error:
        raise _unreadable(text, str(error)) from error


def _unreadable(text: str, why: str) -> Exception:
    return problem(f"strategy `{text}`", "read it", why, 'write it like "fsdp() | tensor_parallel(sequence=True)"')
