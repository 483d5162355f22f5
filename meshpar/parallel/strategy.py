"""Strategies: parallelisms composed with `|`, custom rules, and serialization."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from meshpar.parallel.execution import Execution, LayerGather
from meshpar.parallel.expected import fp8_scales as scales
from meshpar.parallel.expected import params as leaves
from meshpar.parallel.expected.collective import GRADIENTS, RENEWED, WEIGHTS, ExpectedCollective, merged
from meshpar.parallel.expected.matmuls import contracted
from meshpar.parallel.parallelism import Parallelism, RequiredAxis, RuleSets, activations, axes_of
from meshpar.sharding.errors import check_int, near, problem
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.rules import USER, Rules
from meshpar.sharding.types import MeshLike, axis_sizes

if TYPE_CHECKING:
    from meshpar.parallel.pipeline import Pipeline

BIG_LEAF_BYTES = 2**20
"""Maximum size of a leaf that may be replicated without a rule. Stacked leaves are measured per layer."""

PRESETS: dict[str, Callable[..., Strategy]] = {}
"""Public constructors of strategies, by name."""

Preset = TypeVar("Preset", bound=Callable[..., "Strategy"])


def preset(make: Preset) -> Preset:
    """Register a constructor for `parse_strategy`, `from_json` and the command line."""
    PRESETS[make.__name__] = make
    return make


@dataclasses.dataclass(frozen=True, repr=False)
class Strategy:
    """An immutable sequence of parallelisms that determines the sharding of a training step.

    `a | b` composes two strategies. The rules of `b` take precedence.

    Args:
      components: the parallelisms, in order.
      big_leaf_bytes: a larger leaf must be sharded or explicitly replicated by a rule; otherwise it is an error.

    Raises:
      MeshparError: `components` is not a nonempty tuple of `Parallelism`, or `big_leaf_bytes` is not a size.
    """

    components: tuple[Parallelism, ...]
    big_leaf_bytes: int = BIG_LEAF_BYTES

    def __post_init__(self) -> None:
        is_valid = isinstance(self.components, tuple) and all(isinstance(part, Parallelism) for part in self.components)
        if not is_valid or not self.components:
            reason, fix = "they must be a nonempty tuple of Parallelism", "write mp.fsdp() | mp.Rules(mlp=None)"
            raise problem("Strategy()", f"set components={self.components!r}", reason, fix, code="wrong-type")
        check_int("Strategy()", "the maximum size of a replicated leaf", big_leaf_bytes=self.big_leaf_bytes)

    # -- Rules --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def rules(self) -> RuleSets:
        """The merged rules of all components."""
        return functools.reduce(RuleSets.__and__, (part.rules() for part in self.components))

    @property
    def params(self) -> Rules:
        """Rules for parameters between steps."""
        return self.rules.params

    @property
    def grads(self) -> Rules:
        """Rules for gradients after the backward pass."""
        return self.rules.grads

    @property
    def optimizer(self) -> Rules:
        """Rules for optimizer state that has the shape of a parameter."""
        return self.rules.optimizer

    @property
    def activations(self) -> Rules:
        """Rules for the batch and for the activations that the model passes to `constrain`."""
        return self.rules.activations

    # -- Components --------------------------------------------------------------------------------------------------

    @property
    def required_axes(self) -> tuple[RequiredAxis, ...]:
        """Mesh axes whose size must be greater than 1."""
        return tuple(required for part in self.components for required in part.required_axes())

    @property
    def gathering(self) -> LayerGather:
        """How the weights of stacked layers are gathered. A later component overrides settings of earlier ones."""
        settings = [vars(part.gathering()) for part in self.components]
        return LayerGather(**{name: value for each in settings for name, value in each.items() if value})

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """Axes over which the weights of stacked layers are gathered ahead, or kept."""
        part = next((part for part in reversed(self.components) if part.gathering() != LayerGather()), None)
        return () if part is None else axes_of(part.name, part.axis)  # type: ignore[attr-defined]

    @property
    def is_hybrid(self) -> bool:
        """Whether `hsdp` shards the state inside groups that replicate each other."""
        return any(part.name == "hsdp" for part in self.components)

    def group_axes(self, batch_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the batch axes that shard no parameter. Ranks along these axes have equal shards."""
        return tuple(axis for axis in batch_axes if axis not in self.params.axes)

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline component, or None."""
        return next((part for part in reversed(self.components) if part.name == "pipeline_parallel"), None)  # type: ignore[return-value]

    def expected_collectives(self, execution: Execution) -> tuple[ExpectedCollective, ...]:
        """Return the collectives that XLA should insert for this strategy, in a step without pipeline stages.

        Parameter and gradient collectives follow from the merged rules. Each component adds its activation collectives.
        """
        of_params, of_scales = leaves.expected_collectives(execution), scales.expected_collectives(execution)
        expected = merged([*of_params, *of_scales, *self.activation_collectives(execution)])
        unannotated = set(execution.unannotated_axes)

        def optional(collective: ExpectedCollective) -> ExpectedCollective:
            # The sharding of activations over an unannotated axis is unknown, so XLA may use another form.
            if not unannotated & set(collective.axes) or collective.role in (WEIGHTS, GRADIENTS, RENEWED):
                return collective
            counts = tuple((axis, 0, maximum) for axis, _, maximum in collective.counts)
            return dataclasses.replace(collective, count=(0, collective.count[1]), counts=counts)

        return tuple(map(optional, expected))

    def activation_collectives(self, execution: Execution) -> tuple[ExpectedCollective, ...]:
        """Return the activation collectives. A collective that two components expect counts once."""
        expected: list[ExpectedCollective] = []
        for part in self.components:
            earlier = set(expected)
            expected += [item for item in part.expected_collectives(execution) if item not in earlier]
        return tuple(expected)

    def memory_reductions(self, part: Parallelism, execution: Execution) -> tuple[Strategy, ...]:
        """Return copies of this strategy in which `part` is replaced by a variant that needs less memory."""
        index = self.components.index(part)
        return tuple(
            dataclasses.replace(self, components=(*self.components[:index], variant, *self.components[index + 1 :]))
            for variant in part.memory_reductions(execution)
        )

    # -- Values -------------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The Python expression that creates this strategy."""
        return " | ".join(map(repr, self.components))

    def __repr__(self) -> str:
        return self.label

    def __or__(self, other: Strategy | Rules) -> Strategy:
        if not isinstance(other, Strategy | Rules):
            return NotImplemented
        other = as_strategy(other)
        self._check_not_undone(other)
        return Strategy((*self.components, *other.components), min(self.big_leaf_bytes, other.big_leaf_bytes))

    def __ror__(self, other: Rules) -> Strategy:
        return as_strategy(other) | self if isinstance(other, Rules) else NotImplemented

    def replace(self, *, big_leaf_bytes: int) -> Strategy:
        return dataclasses.replace(self, big_leaf_bytes=big_leaf_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads."""
        return {"parts": [part.to_json() for part in self.components], "big_leaf_bytes": self.big_leaf_bytes}

    # -- Checks -------------------------------------------------------------------------------------------------------

    def _check_not_undone(self, other: Strategy) -> None:
        """Reject compositions in which the second strategy has no effect, such as `fsdp() | ddp()`.

        Composition only adds rules, so `ddp()` cannot remove a rule of `fsdp()`. For the same reason
        `tensor_parallel(sequence=True) | tensor_parallel()` would keep sharding the sequence.
        """
        for field in RuleSets._fields[:3]:
            left, right = getattr(self, field), getattr(other, field)
            if left.largest and right.everything and not right.largest:
                requested = f"replicate {field} with {right.everything} after {left.largest.origin} sharded them"
                reason = "composition adds rules and never removes a rule"
                fix = f"write {other.label} alone, or replicate some leaves with mp.Rules(embed=None)"
                raise problem(f"strategy {self.label} | {other.label}", requested, reason, fix, code="conflict")
        origins = {origin for origin, _ in other.activations.sources} - {USER}
        overridden = {key for _, key in other.activations.sources}
        for origin, key in self.activations.sources:
            if origin in origins and key not in overridden:
                where, reason = f"strategy {self.label} | {other.label}", f"the first rule for `{key}` would remain"
                raise problem(where, f"replace the first {origin}", reason, f"write {origin} once", code="conflict")

    def check_axes(self, mesh: MeshLike) -> None:
        """Check that the mesh has the required axes."""
        sizes = axis_sizes(mesh)
        if math.prod(sizes.values()) == 1:  # With one device, all strategies compile to the same program.
            return
        for need in self.required_axes:
            if sizes.get(need.axis, 1) == 1:
                where, requested = f"strategy {need.strategy}", f"use mesh axis `{need.axis}`"
                fix = f"{need.fix}, or give the axis a size above 1: MeshSpec({need.axis}=2, ...)"
                raise problem(where, requested, f"the mesh has {human_mesh(sizes)}", fix, code="unknown-axis")


# ---- Custom rules ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class RulesOnly(Parallelism):
    """A `Rules` value used as a strategy, for parameters, gradients, optimizer state and activations."""

    wrapped: Rules

    name = "Rules"

    def rules(self) -> RuleSets:
        # Path patterns refer to parameters: a pattern such as `.*` must not match the batch.
        return RuleSets(self.wrapped, self.wrapped, self.wrapped, activations("default") | self.wrapped.without_paths())

    def expected_collectives(self, execution: Execution) -> Iterator[ExpectedCollective]:
        return contracted(execution)  # rules by hand may split weights over any axis, as `tensor_parallel` does

    def to_json(self) -> dict[str, Any]:
        return {"part": self.name, **self.wrapped.to_json()}

    def __repr__(self) -> str:
        return repr(self.wrapped)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Custom(Parallelism):
    """The `Parallelism` of `custom`."""

    params: Rules
    grads: Rules
    optimizer: Rules
    activations: Rules = dataclasses.field(default_factory=lambda: activations("default"))
    label: str = dataclasses.field(default="", compare=False)
    """Text that replaces the default `repr`."""

    name = "custom"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:4]:
            value = getattr(self, field.name)
            if not isinstance(value, Rules):
                fix = f'write {field.name}=mp.Rules(embed="fsdp")'
                raise problem("custom()", f"set {field.name}={value!r}", "it must be a Rules", fix, code="wrong-type")

    def rules(self) -> RuleSets:
        return RuleSets(self.params, self.grads, self.optimizer, self.activations)

    def expected_collectives(self, execution: Execution) -> Iterator[ExpectedCollective]:
        return contracted(execution)  # rules by hand may split weights over any axis, as `tensor_parallel` does

    def to_json(self) -> dict[str, Any]:
        changed = self.arguments()
        return {"part": self.name} | {field: rules.to_json() for field, rules in changed.items()}

    def __repr__(self) -> str:
        return self.label or super().__repr__()

    def arguments(self) -> dict[str, Any]:
        rules_by_field = self.rules()._asdict()
        is_default = self.activations == activations("default")
        return {name: rules for name, rules in rules_by_field.items() if name != "activations" or not is_default}


def custom(*, params: Rules, grads: Rules, optimizer: Rules, activations: Rules | None = None) -> Strategy:
    """Create a strategy from four sets of rules. Collectives follow from the rules, as for the presets.

    Args:
      params: rules for parameters between steps.
      grads: rules for gradients after the backward pass.
      optimizer: rules for optimizer state that has the shape of a parameter.
      activations: rules for the batch and the constrained activations. `None` shards the batch over the batch axes.

    Raises:
      MeshparError: an argument is not a `Rules`.

    Example:
      >>> mp.custom(params=mp.Rules(), grads=mp.Rules(embed="fsdp"), optimizer=mp.Rules(embed="fsdp")).grads
      Rules(embed='fsdp')
    """
    rules = Custom(params=params, grads=grads, optimizer=optimizer)
    return Strategy((rules if activations is None else dataclasses.replace(rules, activations=activations),))


def as_strategy(rules: Strategy | Rules) -> Strategy:
    """Return a strategy unchanged, or convert `Rules` to a strategy that uses them for all four rule sets."""
    if isinstance(rules, Strategy):
        return rules
    if not isinstance(rules, Rules):
        name, fix = getattr(rules, "__name__", rules), "write mp.fsdp() or mp.Rules(...)"
        if isinstance(name, str):
            fix = f"write mp.{name}()" if name in PRESETS else f"{fix}, or parse_strategy(text); {near(name, PRESETS)}"
        reason = f"it is a {type(rules).__name__}, not a Strategy or Rules"
        raise problem(
            "strategy", f"use {name!r}" if isinstance(rules, str) else f"use {name}", reason, fix, code="wrong-type"
        )
    return Strategy((RulesOnly(rules),))


# ---- Parsing ---------------------------------------------------------------------------------------------------------


def from_json(data: Mapping[str, Any]) -> Strategy:
    """Read the output of `Strategy.to_json`."""
    parts: list[Parallelism] = []
    for part in data["parts"]:
        arguments = dict(part)
        name = arguments.pop("part")
        if name == RulesOnly.name:
            parts.append(RulesOnly(Rules.from_json(arguments)))
        elif name == Custom.name:
            parts += custom(**{field: Rules.from_json(rules) for field, rules in arguments.items()}).components
        else:
            values = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
            parts += _preset(f"strategy part `{name}`", str(name))(**values).components
    return Strategy(tuple(parts), data.get("big_leaf_bytes", BIG_LEAF_BYTES))


def _preset(where: str, name: str) -> Callable[..., Strategy]:
    if name not in PRESETS:
        raise problem(where, f"use `{name[:100]}`", "no preset has this name", near(name, PRESETS), "unknown-name")
    return PRESETS[name]


def parse_strategy(text: str) -> Strategy:
    """Parse an expression such as "fsdp() | tensor_parallel(sequence=True)". Parentheses are optional.

    Example:
      >>> mp.parallel.parse_strategy("fsdp | tensor_parallel(sequence=True)")
      fsdp() | tensor_parallel(sequence=True)
    """
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError as error:
        raise _unreadable(text, f"it is not a Python expression ({error.msg})") from error
    except (RecursionError, MemoryError):
        raise _unreadable(f"{text[:100]}…", "it has too many components") from None


def _evaluate(node: object, text: str) -> Strategy:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _evaluate(node.left, text) | _evaluate(node.right, text)
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise _unreadable(text, "only presets joined with `|` are supported")
    make = _preset(f"strategy `{text[:100]}`", name.id)
    if isinstance(node, ast.Call) and node.args:
        raise _unreadable(text, f"`{name.id}` takes its arguments by name")
    arguments = {}
    for keyword in node.keywords if isinstance(node, ast.Call) else []:
        try:
            arguments[keyword.arg or "**"] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise _unreadable(text, f"`{keyword.arg}` is not a plain value") from error
    try:
        return make(**arguments)
    except TypeError as error:
        raise _unreadable(text, str(error)) from error


def _unreadable(text: str, reason: str) -> Exception:
    fix = 'write it like "fsdp() | tensor_parallel(sequence=True)"'
    return problem(f"strategy `{text[:100]}`", "read it", reason, fix, "bad-syntax")
