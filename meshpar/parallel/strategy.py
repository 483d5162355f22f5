"""Strategy: parts joined with `|`, and how it is written down and read back."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from meshpar.parallel.expected import fp8_scales as scales
from meshpar.parallel.expected import params as leaves
from meshpar.parallel.expected.matmuls import contracted
from meshpar.parallel.expected.step_spec import ExpectedCollective, ParamUsage, StepSpec, Weight, has_vocabulary, merged
from meshpar.parallel.parallelism import Parallelism, RequiredAxis, RuleSets, activations, axes_of
from meshpar.sharding.rules import REFINES, USER, Rules, axes_in
from meshpar.sharding.types import MeshLike, axes_of_spec, axis_sizes, near, problem

if TYPE_CHECKING:
    from meshpar.parallel.pipeline import Pipeline
    from meshpar.parallel.quantization import Quantize

BIG_LEAF_BYTES = 2**20
"""A leaf (one layer of it, when layers are stacked) of this size must not be replicated by accident."""

PRESETS: dict[str, Callable[..., Strategy]] = {}
"""By name, what makes a strategy of one part."""

Preset = TypeVar("Preset", bound=Callable[..., "Strategy"])


def preset(make: Preset) -> Preset:
    """Mark a function as one that `parse_strategy`, `from_json` and the command line know by its name."""
    PRESETS[make.__name__] = make
    return make


@dataclasses.dataclass(frozen=True, repr=False)
class Strategy:
    """How a training step is split: parts, of whose rules the later ones win.

    Args:
      parts: each a parallelism.
      big_leaf_bytes: above this size a leaf that no rule splits, and none says to replicate, is an error.
    """

    parts: tuple[Parallelism, ...]
    big_leaf_bytes: int = BIG_LEAF_BYTES

    def __post_init__(self) -> None:
        if not (
            isinstance(self.parts, tuple) and self.parts and all(isinstance(part, Parallelism) for part in self.parts)
        ):
            exists, fix = "a strategy is parts", "join presets: mp.fsdp() | mp.Rules(mlp=None); see mp.custom for rules"
            raise problem(f"Strategy({self.parts!r})", "be made of that", exists, fix)
        if isinstance(self.big_leaf_bytes, bool) or not isinstance(self.big_leaf_bytes, int) or self.big_leaf_bytes < 0:
            exists = "it is a whole number of bytes, which is not negative"
            raise problem("Strategy(big_leaf_bytes=...)", f"be {self.big_leaf_bytes}", exists, "use 2**20")

    # -- Rules --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def rules(self) -> RuleSets:
        """The four rule sets of all parts."""
        return functools.reduce(RuleSets.__and__, (part.rules() for part in self.parts))

    @property
    def params(self) -> Rules:
        """Of parameters, between steps."""
        return self.rules.params

    @property
    def grads(self) -> Rules:
        """Of gradients, as they leave the backward pass."""
        return self.rules.grads

    @property
    def optimizer(self) -> Rules:
        """Of optimizer state of the same shape as a parameter."""
        return self.rules.optimizer

    @property
    def activations(self) -> Rules:
        """Of the batch, and what the model gives names with `constrain`."""
        return self.rules.activations

    # -- What parts say -----------------------------------------------------------------------------------------------

    @property
    def required_axes(self) -> tuple[RequiredAxis, ...]:
        """Axes without which it would be another strategy."""
        return tuple(need for part in self.parts for need in part.required_axes())

    @property
    def quantize(self) -> Quantize | None:
        """How split parameters and their gradients travel; None: as XLA sends them."""
        values = (getattr(part, "quantize", None) for part in reversed(self.parts))
        return next((value for value in values if value is not None), None)

    @property
    def prefetched_axes(self) -> tuple[str, ...]:
        """Axes over which a layer's weights are gathered while the one before computes; empty: where they are used."""
        found = next((part for part in reversed(self.parts) if getattr(part, "prefetch", 0)), None)
        return () if found is None else axes_of(found.name, found.axis)  # type: ignore[attr-defined]

    @property
    def pipeline(self) -> Pipeline | None:
        """How the layers are run stage by stage; None: one after the other, by all devices."""
        return next((part for part in reversed(self.parts) if part.name == "pipeline_parallel"), None)  # type: ignore[return-value]

    def step_spec(
        self, sizes: dict[str, int], *, weights: tuple[Weight, ...], batch_axes: tuple[str, ...], tokens: int | None,
        uses: Mapping[str, ParamUsage] = MappingProxyType({}), **step: Any,
    ) -> StepSpec:  # fmt: skip
        """The facts of a step under this strategy: which axes split what follows from its rules of activations.

        Args:
          sizes: of every mesh axis, in the mesh's order.
          weights: the parameters.
          batch_axes: axes of more than one rank that split the batch.
          tokens: of one device in one micro-step, as if no axis split the sequence; None when the batch has none.
          uses: of parameters whose activations nothing lays out, by path; `meshpar.inspect.param_usage` tells.
          **step: other fields of `Facts`.
        """
        rules = self.activations

        def axes_of(*wanted: str) -> set[str]:
            chosen = (rules.name_rule(name) for name in wanted)
            found = {axis for rule in chosen if rule is not None for axis in axes_in(rule.value)}
            return {axis for axis in found if sizes.get(axis, 1) > 1}

        width = axes_of(*(name for name in rules.names if name not in ("batch", "act_expert", "seq", *REFINES)))
        context = axes_of("seq") - width - set(batch_axes)
        sequence = axes_of("norm_seq") - context
        free = (one.decision for one in weights if one.decision.leaf.names is None or one.decision.path in uses)
        untold = {axis for one in free for axis in axes_of_spec(one.spec, sizes)} - set(batch_axes)
        return StepSpec(
            sizes=sizes,
            weights=weights,
            batch_axes=batch_axes,
            tensor_axes=tuple(axis for axis in sizes if axis in (width | sequence | untold) - set(batch_axes)),
            sequence_axes=tuple(axis for axis in sizes if axis in sequence),
            context_axes=tuple(axis for axis in sizes if axis in context),
            uses=uses,
            unannotated_axes=tuple(axis for axis in sizes if axis in untold),
            tokens=None if tokens is None else tokens // math.prod(sizes[axis] for axis in context),
            quantize=self.quantize,
            is_prefetched=bool(self.prefetched_axes),
            is_tied=sum(has_vocabulary(one.decision) for one in weights) == 1,
            **step,
        )

    def expected_collectives(self, step_spec: StepSpec) -> tuple[ExpectedCollective, ...]:
        """The collectives that XLA puts in because of all parts' rules.

        Those of parameters follow from the rules of all parts together; the others each part tells of its own.
        """
        return merged([*leaves.promised(step_spec), *scales.promised(step_spec), *self.promise_of_layers(step_spec)])

    def promise_of_layers(self, step_spec: StepSpec) -> tuple[ExpectedCollective, ...]:
        """What the work on activations sends; what two parts promise alike counts once."""
        found: list[ExpectedCollective] = []
        for part in self.parts:
            before = set(found)
            found += [one for one in part.expected_collectives(step_spec) if one not in before]
        return tuple(found)

    def memory_reductions(self, part: Parallelism, step_spec: StepSpec) -> tuple[Strategy, ...]:
        """This strategy with a smaller one in a part's place, for each that it knows."""
        at = self.parts.index(part)
        return tuple(
            dataclasses.replace(self, parts=(*self.parts[:at], other, *self.parts[at + 1 :]))
            for other in part.memory_reductions(step_spec)
        )

    # -- A value ------------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """How to write it in Python, for tables and logs."""
        return " | ".join(map(repr, self.parts))

    def __repr__(self) -> str:
        return self.label

    def __or__(self, other: Strategy | Rules) -> Strategy:
        if not isinstance(other, Strategy | Rules):
            return NotImplemented
        other = as_strategy(other)
        self._check_not_undone(other)
        return Strategy((*self.parts, *other.parts), min(self.big_leaf_bytes, other.big_leaf_bytes))

    def __ror__(self, other: Rules) -> Strategy:
        return as_strategy(other) | self if isinstance(other, Rules) else NotImplemented

    def replace(self, *, big_leaf_bytes: int) -> Strategy:
        return dataclasses.replace(self, big_leaf_bytes=big_leaf_bytes)

    def to_json(self) -> dict[str, Any]:
        """As plain data, which `from_json` reads."""
        return {"parts": [part.to_json() for part in self.parts], "big_leaf_bytes": self.big_leaf_bytes}

    # -- Checks -------------------------------------------------------------------------------------------------------

    def _check_not_undone(self, other: Strategy) -> None:
        """`fsdp() | ddp()`: the second says what stays whole by adding no rule, which takes nothing from the first.

        So it is of `tensor_parallel(sequence=True) | tensor_parallel()`.
        """
        for field in RuleSets._fields[:3]:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine.largest and theirs.everything and not theirs.largest:
                asked = f"keep {field} whole by {theirs.everything} after splitting them by {mine.largest.origin}"
                exists = "strategies are joined rule by rule, and a rule that is missing takes nothing away"
                fix = f"write {other.label} alone, or to keep some leaves whole mp.Rules(embed=None)"
                raise problem(f"strategy {self.label} | {other.label}", asked, exists, fix)
        again = {origin for origin, _ in other.activations.sources} - {USER}
        said = {key for _, key in other.activations.sources}
        for origin, key in self.activations.sources:
            if origin in again and key not in said:
                where, exists = f"strategy {self.label} | {other.label}", f"the first one's rule for `{key}` would stay"
                raise problem(where, f"be {origin} as the second says", exists, f"write {origin} once")

    def check_axes(self, mesh: MeshLike) -> None:
        """See that the mesh has the axes this strategy is about.

        Raises:
          ValueError: an axis is missing, or of size 1 where the strategy would silently become another one.
        """
        sizes = axis_sizes(mesh)
        if math.prod(sizes.values()) == 1:  # one device: every strategy is the same program
            return
        for need in self.required_axes:
            if sizes.get(need.axis, 1) == 1:
                exists = f"the mesh has {', '.join(f'{k}={v}' for k, v in sizes.items() if v > 1) or 'no axis above 1'}"
                fix = f"{need.why}; or give the axis a size: MeshSpec({need.axis}=2, ...)"
                raise problem(f"strategy {need.strategy}", f"use mesh axis `{need.axis}`", exists, fix)


# ---- Rules by hand ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Bare(Parallelism):
    """A bare `Rules` in a strategy's place: it serves parameters, gradients, optimizer state and activations."""

    given: Rules

    name = "Rules"

    def rules(self) -> RuleSets:
        # Paths are those of parameters: a pattern such as `.*` must not catch the batch.
        return RuleSets(self.given, self.given, self.given, activations("default") | self.given.without_paths())

    def expected_collectives(self, step_spec: StepSpec) -> Iterator[ExpectedCollective]:
        return contracted(step_spec)  # rules by hand may split weights over any axis, as `tensor_parallel` does

    def to_json(self) -> dict[str, Any]:
        return {"part": self.name, **self.given.to_json()}

    def __repr__(self) -> str:
        return repr(self.given)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Custom(Parallelism):
    """See `custom`."""

    params: Rules
    grads: Rules
    optimizer: Rules
    activations: Rules = dataclasses.field(default_factory=lambda: activations("default"))
    label: str = dataclasses.field(default="", compare=False)
    """How to print it, where that is not by its rules."""

    name = "custom"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:4]:
            given = getattr(self, field.name)
            if not isinstance(given, Rules):
                fix = f'write {field.name}=mp.Rules(embed="fsdp")'
                raise problem(f"custom({field.name}=...)", f"be {given!r}", "each of the four is a Rules", fix)

    def rules(self) -> RuleSets:
        return RuleSets(self.params, self.grads, self.optimizer, self.activations)

    def expected_collectives(self, step_spec: StepSpec) -> Iterator[ExpectedCollective]:
        return contracted(step_spec)  # rules by hand may split weights over any axis, as `tensor_parallel` does

    def to_json(self) -> dict[str, Any]:
        changed = self.arguments()
        return {"part": self.name} | {field: rules.to_json() for field, rules in changed.items()}

    def __repr__(self) -> str:
        return self.label or super().__repr__()

    def arguments(self) -> dict[str, Any]:
        given = self.rules()._asdict()
        is_default = self.activations == activations("default")
        return {name: rules for name, rules in given.items() if name != "activations" or not is_default}


def custom(*, params: Rules, grads: Rules, optimizer: Rules, activations: Rules | None = None) -> Strategy:
    """A strategy of four `Rules` of your own.

    Args:
      params: of parameters, between steps.
      grads: of gradients, as they leave the backward pass.
      optimizer: of optimizer state of the same shape as a parameter.
      activations: of the batch and what the model constrains; None: the batch over the mesh's batch axes.

    Raises:
      ValueError: something that is no Rules.

    Example:
      >>> custom(params=Rules(), grads=Rules(embed="fsdp"), optimizer=Rules(embed="fsdp")).grads
      Rules(embed='fsdp')
    """
    one = Custom(params=params, grads=grads, optimizer=optimizer)
    return Strategy((one if activations is None else dataclasses.replace(one, activations=activations),))


def as_strategy(rules: Strategy | Rules) -> Strategy:
    """A strategy as it is; a bare `Rules` as one that serves params, gradients, optimizer state and activations."""
    if isinstance(rules, Strategy):
        return rules
    if not isinstance(rules, Rules):
        exists = f"a strategy is a Strategy or a Rules, and this is a {type(rules).__name__}"
        raise problem("strategy", f"be {getattr(rules, '__name__', repr(rules))}", exists, _advice(rules))
    return Strategy((Bare(rules),))


def _advice(given: object) -> str:
    name = getattr(given, "__name__", given)
    if isinstance(name, str) and name in PRESETS:
        return f"write mp.{name}()" + (" with its parentheses" if callable(given) else "")
    if isinstance(given, str):
        return f"write mp.fsdp() or mp.Rules(...), or read the text with parse_strategy; {near(given, PRESETS)}"
    return "write mp.fsdp() or mp.Rules(...)"


# ---- Read back -------------------------------------------------------------------------------------------------------


def from_json(data: Mapping[str, Any]) -> Strategy:
    """The strategy that `Strategy.to_json` gave.

    Raises:
      ValueError: a part that does not exist, or arguments that it does not take.
    """
    parts = [part for one in data["parts"] for part in _strategy_of(dict(one)).parts]
    return Strategy(tuple(parts), data.get("big_leaf_bytes", BIG_LEAF_BYTES))


def _strategy_of(given: dict[str, Any]) -> Strategy:
    name = given.pop("part")
    if name == Bare.name:
        return as_strategy(Rules.from_json(given))
    if name == Custom.name:
        return custom(**{field: Rules.from_json(rules) for field, rules in given.items()})
    if name not in PRESETS:
        raise problem(f"strategy part `{name}`", "be read", "there is no such part", near(str(name), PRESETS))
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return PRESETS[name](**arguments)


def parse_strategy(text: str) -> Strategy:
    """Read "fsdp() | tensor_parallel(sequence=True)", as `Strategy.label` writes it; bare names do too.

    Raises:
      ValueError: anything but presets with literal arguments, joined with `|`.
    """

    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError as error:
        raise _unreadable(text, f"it is no Python expression ({error.msg})") from error
    except (RecursionError, MemoryError):
        raise _unreadable(f"{text[:100]}…", "it has too many parts") from None


def _evaluate(node: object, text: str) -> Strategy:

    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _evaluate(node.left, text) | _evaluate(node.right, text)
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise _unreadable(text, "it is not presets joined with `|`")
    if name.id not in PRESETS:
        raise problem(
            f"strategy `{text[:100]}`", f"use `{name.id[:100]}`", "there is no such preset", near(name.id, PRESETS)
        )
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
    return problem(
        f"strategy `{text[:100]}`", "read it", why, 'write it like "fsdp() | tensor_parallel(sequence=True)"'
    )
