"""Sharding rules: logical names and path patterns of leaves, mapped to a `PartitionSpec`.

A rule maps a logical name to mesh axes, or a path pattern to a layout. `resolve` applies `Rules` to one leaf and
returns a `Decision`. `constrain` applies activation rules inside a model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from meshpar.sharding.errors import MeshparError, near, near_or, problem
from meshpar.sharding.types import Decision, Leaf, MeshLike, axis_sizes, num_shards, spec_axes

PARAMETER_NAMES = ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "expert", "layers")
UNSHARDED_NAMES = ("dense_layers",)
"""Parameter names that need no rule. Stacks of dense layers before MoE layers are not distributed over stages."""
ACTIVATION_NAMES = (
    "batch", "seq", "norm_seq", "act_embed", "act_heads", "act_kv_heads", "act_head_dim", "act_mlp", "act_vocab",
    "act_expert", "attn_seq", "attn_heads", "attn_kv_heads",
)  # fmt: skip
REFINES = {"norm_seq": "seq", "attn_seq": "seq", "attn_heads": "act_heads", "attn_kv_heads": "act_kv_heads"}
"""Names that refine another name. A dim named `norm_seq` is sharded over the axes of `seq` first, and then over those
of `norm_seq`. `norm_seq` is the sequence dim of the residual stream, which sequence parallelism shards further than
`seq` inside a layer. The `attn_` names are for activations between the projections and attention, where a rule may
replicate a dim."""
ACTIVATIONS_OF = {"vocab": "act_vocab", "heads": "act_heads", "kv_heads": "act_kv_heads", "mlp": "act_mlp"}
"""Parameter names, and the activation names that presets shard over the same axis."""
BATCH_AXES = ("data", "fsdp", "expert")
"""Axes over which the presets shard the batch."""

LARGEST_DIM = "largest dim"
"""Key of the rule for leaves without names."""

USER = "user"
"""Origin of a rule that does not belong to a preset."""


class _Replicated:
    def __repr__(self) -> str:
        return "replicated"

    def __reduce__(self) -> str:
        return "replicated"


replicated = _Replicated()
"""Marks a leaf or a dim as replicated on purpose."""


@dataclasses.dataclass(frozen=True)
class First:
    """Alternatives for a dim, in order of preference. Created by `first`."""

    alternatives: tuple[str | tuple[str, ...] | None, ...]

    def __repr__(self) -> str:
        return f"first({', '.join(map(repr, self.alternatives))})"


def first(*alternatives: str | tuple[str, ...] | None) -> First:
    """Return a rule that uses the first alternative whose axes are free and divide the dim.

    Args:
      *alternatives: mesh axes, tuples of different axes, or None for a replicated dim.

    Raises:
      ValueError: an alternative has a wrong type, or there are none.

    Example:
      Shard the dim over `tensor` if the size of `tensor` divides it, and replicate it otherwise:

      >>> mp.Rules(kv_heads=mp.first("tensor", None))
      Rules(kv_heads=first('tensor', None))
    """
    choices = tuple(tuple(choice) if isinstance(choice, list) else choice for choice in alternatives)
    if not choices or not all(choice is None or isinstance(choice, str) or _is_axes(choice) for choice in choices):
        expected = "each alternative must be a mesh axis, a tuple of different axes, or None for a replicated dim"
        raise _invalid("first", choices, expected, 'first("tensor", None)')
    return First(choices)


@dataclasses.dataclass(frozen=True)
class InTurn(First):
    """Alternatives with the semantics of Flax's logical axis rules. Created by `Rules.from_logical_axis_rules`.

    The pairs of the list are processed in order. A dim gets the axes of the first pair with its name whose axes no
    earlier pair has used. If there is none, the dim is replicated.
    """

    lines: tuple[int, ...] = ()
    """Position of each alternative in the list of logical axis rules."""

    def __repr__(self) -> str:
        return f"in_turn({', '.join(f'{n}: {x!r}' for n, x in zip(self.lines, self.alternatives, strict=True))})"


@dataclasses.dataclass(frozen=True)
class NamesOf:
    """Logical names for the dims of a leaf. Created by `names`."""

    names: tuple[str | None, ...]
    and_more: bool = False
    """Whether more dims may follow (`...`). They are sharded as without this rule."""

    def __repr__(self) -> str:
        return f"names({', '.join([*map(repr, self.names), *['...'] * self.and_more])})"


def names(*dims: Any) -> NamesOf:
    """Return a path rule that gives logical names to the dims of a leaf, for models without names.

    Args:
      *dims: a name or None for each dim. A final `...` matches any number of dims, which keep the names of the model.
        If the model has no names, the strategy shards the largest of these dims.

    Raises:
      ValueError: an argument is not a name.

    Example:
      >>> rules = mp.Rules(paths={r"up/.*": mp.names("embed", ...), r"down/kernel": mp.names("mlp", "embed")})
      >>> mp.shardings(model, mesh, mp.fsdp() | rules)["down/kernel"].leaf.names
      ('mlp', 'embed')
    """
    and_more = dims[-1:] == (...,)
    named_dims = dims[:-1] if and_more else dims
    names_nothing = and_more and not named_dims
    if names_nothing or not all(name is None or isinstance(name, str) for name in named_dims):
        expected = "a logical name is a string, or None for a dim without a name"
        expected += ", and `...` alone names no dim" * names_nothing
        example = 'a name for each dim, names("embed", None), or end with `...`, names("layers", ...)'
        raise _invalid("names", dims, expected, example)
    return NamesOf(named_dims, and_more)


DimRule: TypeAlias = str | tuple[str, ...] | First | _Replicated | None
PathRule: TypeAlias = _Replicated | NamesOf | PartitionSpec | tuple[DimRule, ...]
ModuleRule: TypeAlias = NamesOf | tuple[str | None, ...] | None


@dataclasses.dataclass(frozen=True)
class _Rule:
    key: str
    value: Any
    origin: str = USER
    is_path: bool = False

    def matches(self, path: str) -> bool:
        return re.fullmatch(self.key, path) is not None

    def __str__(self) -> str:
        text = f"{self.key!r}: {self.value!r}" if self.is_path else f"{self.key}={self.value!r}"
        return text if self.origin == USER else f"{self.origin}: {text}"


@dataclasses.dataclass(frozen=True)
class Largest:
    """Rule for leaves without names: shard the largest dim that the axes divide, if the leaf has `min_bytes`."""

    axes: tuple[str, ...]
    min_bytes: int
    origin: str


@dataclasses.dataclass(init=False, repr=False, unsafe_hash=True)
class Rules:
    """An immutable set of sharding rules. `a | b` joins two sets; the rules of `b` take precedence.

    Patterns are regular expressions that must match a full path. The last matching pattern wins.

    Args:
      paths: path pattern of parameters to `replicated`, to `names(...)`, or to one entry per dim as in a PartitionSpec.
      activations: path pattern of modules to a name or None for each dim of their outputs, for models that do not call
        `constrain`. A value of None leaves the outputs to the compiler. If a model has no names, outputs without a rule
        are sharded along the batch.
      precision: path pattern of modules to a dtype, wider than `Precision.compute`. Parameters of these modules are
        cast to it, so the modules compute in it (unless they have their own `dtype=`). Outputs are cast back to
        `Precision.compute`.
      remat: path pattern of modules to the values that the backward pass does not recompute, as in
        `train_step(remat=...)`. None saves everything. Nested modules with rules are recomputed once for each rule.
      inputs: dict from path patterns to a value, for batch leaves whose first dim is not the batch size. "batch":
        the first dim is sharded and divided into micro-steps like the batch (nodes and edges of a graph).
        `replicated`: all devices and micro-steps receive the full leaf.
      **by_name: logical name to a mesh axis, a tuple of axes, `first(...)`, `replicated`, or None for an unsharded dim.

    Raises:
      ValueError: a pattern is not a regular expression, or a value has a wrong type.

    Example:
      >>> rules = mp.Rules(mlp="tensor", embed="fsdp", paths={r".*/scale": mp.replicated})
      >>> rules | mp.Rules(mlp=None)
      Rules(mlp=None, embed='fsdp', paths={'.*/scale': replicated})
    """

    _by_name: dict[str, _Rule] = dataclasses.field(hash=False)
    _by_path: tuple[_Rule, ...] = ()
    by_module: tuple[_Rule, ...] = ()
    precision: tuple[_Rule, ...] = ()
    remat: tuple[_Rule, ...] = ()
    inputs: tuple[_Rule, ...] = ()
    known: frozenset[str] = frozenset()
    everything: str | None = None
    largest: Largest | None = None
    optional_axes: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        paths: Mapping[str, PathRule] | None = None,
        activations: Mapping[str, ModuleRule] | None = None,
        precision: Mapping[str, str] | None = None,
        remat: Mapping[str, str | None] | None = None,
        inputs: Mapping[str, Any] | None = None,
        **by_name: DimRule,
    ) -> None:
        args = {"paths": paths, "activations": activations, "inputs": inputs, "precision": precision, "remat": remat}
        for field, (argument, *_, example) in _PATTERNS.items():
            _check_mapping("Rules", args[argument], argument, example)
            rules = (args[argument] or {}).items()
            vars(self)[field] = tuple(_Rule(key, _checked_value(field, key, x), is_path=True) for key, x in rules)
        vars(self)["_by_name"] = {key: _Rule(key, _checked_dim_rule(key, value)) for key, value in by_name.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("Rules are immutable. Join them instead: rules | Rules(mlp=None)")

    def _with(self, **fields: Any) -> Rules:
        result = type(self).__new__(type(self))
        vars(result).update({**vars(self), **fields})
        return result

    @classmethod
    def preset(
        cls,
        origin: str,
        by_name: Mapping[str, DimRule] | None = None,
        *,
        known: tuple[str, ...] = (),
        everything: bool = False,
        largest: Largest | None = None,
        optional_axes: tuple[str, ...] = (),
    ) -> Rules:
        """Return the rules of a strategy. Unlike rules of a user, they need not match any leaf.

        Args:
          origin: name of the strategy, shown with each of its rules.
          by_name: logical name to mesh axes, as in `Rules`.
          known: names that are valid without a rule.
          everything: whether leaves that no rule shards are replicated on purpose.
          largest: rule for large leaves without names.
          optional_axes: axes that the mesh may lack.
        """
        return cls()._with(
            _by_name={key: _Rule(key, _checked_dim_rule(key, value), origin) for key, value in (by_name or {}).items()},
            known=frozenset(known), everything=origin if everything else None, largest=largest,
            optional_axes=frozenset(optional_axes),
        )  # fmt: skip

    @classmethod
    def from_logical_axis_rules(
        cls, rules: Iterable[Any], *, axes: Mapping[str, str | None] | None = None, batch: str | None = None
    ) -> Rules:
        """Return rules from a list for Flax (`nn.logical_axis_rules`), T5X or MaxText (`logical_axis_rules` in YAML).

        Args:
          rules: pairs of a logical name and a mesh axis, a list of axes or None. If a name is repeated, the first pair
            whose axes are free in the array applies.
          axes: mesh axes to rename ({"model": "tensor"}), or to remove (None).
          batch: the logical name of the batch dim. The default is `batch` or `activation_batch`.

        Returns:
          Rules by name.

        Raises:
          ValueError: an entry is not such a pair, or the list lacks an axis in `axes` or the name `batch`.

        Example:
          >>> rules = mp.Rules.from_logical_axis_rules([("batch", "data"), ("mlp", "model")], axes={"model": "tensor"})
          >>> sorted(rules.axes)
          ['data', 'tensor']
        """
        where = "Rules.from_logical_axis_rules"
        _check_mapping(where, axes, "axes", "{'model': 'tensor'}")
        if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable):
            raise _invalid(where, rules, "`rules` must be a list of pairs", '[("mlp", "tensor"), ("embed", None)]')
        renames = axes or {}
        lines: dict[str, list[tuple[int, Any]]] = {}
        listed_axes: set[str] = set()
        for number, line in enumerate(rules):
            name, value = line if isinstance(line, tuple | list) and len(line) == 2 else (None, None)
            value = (tuple(value) if isinstance(value, list) else value) or None
            if not isinstance(name, str) or not (value is None or isinstance(value, str) or _is_axes(value)):
                expected = "an entry must be a logical name with a mesh axis, a list of different axes, or None"
                raise _invalid(where, line, expected, '("mlp", "tensor")')
            listed_axes.update(spec_axes(value))
            renamed = [renames.get(axis, axis) for axis in spec_axes(value)]
            lines.setdefault(name, []).append((number, tuple(axis for axis in renamed if axis is not None) or None))
        batch = batch or next((name for name in ("batch", "activation_batch") if name in lines), None)
        for name, known, code in (
            *((axis, listed_axes, "unknown-axis") for axis in renames),
            *([] if batch is None else [(batch, lines, "unknown-name")]),
        ):
            if name not in known:
                raise problem(where, f"use `{name}`", "the list does not contain it", near(name, known), code=code)
        if batch is not None:
            lines["batch"] = lines[batch]
        by_name = {}
        for name, pairs in lines.items():
            numbers, values = zip(*pairs, strict=True)
            by_name[name] = _Rule(name, InTurn(values, numbers), "logical_axis_rules")
        return cls()._with(_by_name=by_name)

    def __or__(self, other: Rules) -> Rules:
        if not isinstance(other, Rules):
            return NotImplemented
        joined = {}
        for field in _PATTERNS:  # a repeated pattern moves to the end, so that it wins
            rules, later = getattr(self, field), getattr(other, field)
            replaced = {rule.key for rule in later}
            joined[field] = (*(rule for rule in rules if rule.key not in replaced), *later)
        return self._with(
            **joined, _by_name={**self._by_name, **other._by_name}, known=self.known | other.known,
            everything=other.everything or self.everything, largest=other.largest or self.largest,
            optional_axes=self.optional_axes | other.optional_axes,
        )  # fmt: skip

    def __repr__(self) -> str:
        args = [f"{rule.key}={rule.value!r}" for rule in self._by_name.values()]
        for field, (argument, *_) in _PATTERNS.items():
            if rules := getattr(self, field):
                args.append(f"{argument}={{" + ", ".join(f"{r.key!r}: {r.value!r}" for r in rules) + "}")
        return f"Rules({', '.join(args)})"

    def to_json(self) -> dict[str, Any]:
        """Return the rules as JSON data. `from_json` restores them as rules of a user, without their presets."""
        data = {"by_name": {rule.key: _to_json(rule.value) for rule in self._by_name.values()}}
        for field, (argument, *_) in _PATTERNS.items():
            if (rules := getattr(self, field)) or argument == "paths":
                data[argument] = {rule.key: _to_json(rule.value) for rule in rules}
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rules:
        """Return the rules that `to_json` wrote."""
        fields = ("by_name", *(argument for argument, *_ in _PATTERNS.values()))
        args: dict[str, Any] = {name: {k: _from_json(x) for k, x in data.get(name, {}).items()} for name in fields}
        return Rules(**args.pop("by_name"), **args)

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of all precision rules."""
        return frozenset(rule.value for rule in self.precision)

    def dtype_in(self, path: str) -> str | None:
        """Return the dtype of the precision rule that matches a module around a parameter, or None."""
        keys = path.split("/")
        modules = ["/".join(keys[:end]) for end in range(1, len(keys))]
        return next((rule.value for rule in reversed(self.precision) if any(map(rule.matches, modules))), None)

    def input_rule(self, path: str) -> Any:
        """Return the value of the `inputs` rule for a batch leaf: "batch", `replicated`, or None without a rule."""
        return next((rule.value for rule in reversed(self.inputs) if rule.matches(path)), None)

    @property
    def names(self) -> frozenset[str]:
        """All valid logical names."""
        return self.known | frozenset(self._by_name)

    @property
    def sources(self) -> Iterator[tuple[str, str]]:
        """Yield (origin, key) for each rule: the preset or `USER`, and the logical name or pattern."""
        yield from ((rule.origin, rule.key) for rule in (*self._by_name.values(), *self._by_path))
        if self.largest:
            yield self.largest.origin, LARGEST_DIM

    @property
    def user_names(self) -> tuple[str, ...]:
        """Logical names with a rule that does not belong to a preset."""
        return tuple(rule.key for rule in self._by_name.values() if rule.origin == USER)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The path patterns, in order of increasing precedence."""
        return tuple(rule.key for rule in self._by_path)

    @property
    def axes(self) -> frozenset[str]:
        """All mesh axes in the rules."""
        largest = self.largest.axes if self.largest else ()
        return frozenset(largest).union(*(axes_in(rule.value) for rule in (*self._by_name.values(), *self._by_path)))

    def without_paths(self) -> Rules:
        """Return the same rules without path rules."""
        return self._with(_by_path=())

    def path_rule(self, path: str) -> _Rule | None:
        """Return the path rule that applies to a leaf, or None."""
        return next((rule for rule in reversed(self._by_path) if rule.matches(path)), None)

    def name_rule(self, name: str) -> _Rule | None:
        """Return the rule for a logical name, or None."""
        return self._by_name.get(name)


def axes_in(value: object) -> set[str]:
    """Return the mesh axes in the value of a rule."""
    if isinstance(value, First):
        value = value.alternatives
    if isinstance(value, str):
        return {value}
    return set().union(*map(axes_in, value)) if isinstance(value, tuple) else set()


def _to_json(value: Any) -> Any:
    if isinstance(value, InTurn):
        return {"in_turn": [[n, _to_json(x)] for n, x in zip(value.lines, value.alternatives, strict=True)]}
    if isinstance(value, First):
        return {"first": [_to_json(x) for x in value.alternatives]}
    if isinstance(value, NamesOf):
        return {"names": [*value.names, *["..."] * value.and_more]}
    if isinstance(value, tuple | PartitionSpec):
        return [_to_json(x) for x in value]
    return {"replicated": True} if value is replicated else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        ((kind, args),) = value.items()
        if kind == "replicated":
            return replicated
        if kind == "in_turn":
            lines, alternatives = zip(*args, strict=True)
            return InTurn(tuple(map(_from_json, alternatives)), tuple(lines))
        if kind == "first":
            return first(*map(_from_json, args))
        return names(*[... if name == "..." else name for name in args])
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _checked_dim_rule(key: str, value: Any, where: str = "") -> DimRule:
    if isinstance(value, list):
        value = tuple(value)
    if value is None or isinstance(value, First | _Replicated | str) or _is_axes(value):
        return value
    expected = "a dim maps to a mesh axis, a tuple of different axes, first(...), replicated or None"
    raise _invalid(where or f"rule for `{key}`", value, expected, f'{key}="fsdp"' if key.isidentifier() else '"fsdp"')


def _is_axes(value: Any) -> bool:
    is_tuple = isinstance(value, tuple) and bool(value) and all(isinstance(axis, str) for axis in value)
    return is_tuple and len(set(value)) == len(value)


def _invalid(where: str, value: Any, expected: str, example: str, code: str = "wrong-type") -> MeshparError:
    return problem(where, f"use {value!r}", expected, f"write {example}", code=code)


def _check_mapping(where: str, value: Any, argument: str, example: str) -> None:
    if not (value is None or isinstance(value, Mapping)):
        raise _invalid(where, value, f"{argument} must be a dict", f"{argument}={example}")


def check_pattern(pattern: object) -> None:
    """Raise `ValueError` if a value is not a regular expression."""
    example = "a regular expression for the full path, such as r'.*/kernel'"
    if not isinstance(pattern, str):
        raise _invalid("pattern", pattern, "a pattern must be a string", example)
    try:
        re.compile(pattern)
    except re.error as error:
        reason = f"it is not a regular expression ({error})"
        raise _invalid("pattern", pattern, reason, example, code="bad-syntax") from error


_DTYPES = ("float64", "float32", "bfloat16", "float16")
_PATTERNS: Mapping[str, tuple[str, Callable[[Any], bool], str, str, str]] = {
    "_by_path": (
        "paths", lambda value: isinstance(value, _Replicated | NamesOf | tuple),
        "a path maps to replicated, names(...) or a tuple with one entry per dim", "wrong-type",
        "{r'.*/scale': mp.replicated}",
    ),
    "by_module": (
        "activations", lambda value: value is None or (isinstance(value, NamesOf) and not value.and_more),
        "a module maps to None or to a name or None for each dim", "wrong-type",
        "{r'.*/mlp': ('batch', None, None)}",
    ),
    "inputs": (
        "inputs", lambda value: value is replicated or value == "batch",
        'a leaf of the batch maps to "batch" or to replicated', "unknown-choice", "{r'graph/.*': 'batch'}",
    ),
    "precision": (
        "precision", lambda value: value in _DTYPES,
        f"the dtypes are {', '.join(_DTYPES)}", "unknown-choice", "{r'.*/router': 'float32'}",
    ),
    "remat": (
        "remat", lambda value: value is None or isinstance(value, str),
        "a module maps to the name of a policy or to None", "wrong-type", "{r'.*/mlp': 'full'}",
    ),
}  # fmt: skip
"""The fields of `Rules` with path patterns. Each has an argument of `Rules`, a check of the values, a description of
valid values, an error code and an example."""


def _checked_value(field: str, pattern: Any, value: Any) -> Any:
    """Check a pattern and its value. Lists become tuples, and tuples of names become `names(...)`."""
    check_pattern(pattern)
    argument, is_valid, expected, code, example = _PATTERNS[field]
    where = f"{argument.removesuffix('s')} rule `{pattern}`"
    if isinstance(value, PartitionSpec | tuple | list):
        if field == "by_module":
            value = names(*value)
        elif field == "_by_path":
            value = tuple(_checked_dim_rule(str(dim), x, f"{where} dim {dim}") for dim, x in enumerate(value))
    if not is_valid(value):
        raise _invalid(where, value, expected, f"{argument}={example}", code=code)
    return value


# ---- Resolution: from a leaf and rules to a decision -----------------------------------------------------------------


def resolve(leaf: Leaf, rules: Rules, mesh: MeshLike) -> Decision:
    """Decide how a leaf is sharded.

    The last matching path rule applies. If no path rule matches, the rules for the names of the leaf apply. Leaves
    without names are sharded by the preset's rule for unnamed leaves.

    Args:
      leaf: the leaf; its names may be None.
      rules: the rules to apply.
      mesh: a mesh, or the size of each axis.

    Returns:
      The spec, with the rules that determined it.
    """
    sizes, ndim = axis_sizes(mesh), len(leaf.shape)
    rule = rules.path_rule(leaf.path)
    if rule is None:
        if leaf.names is None:
            return _unnamed(leaf, rules, sizes)
        return _by_names(leaf, rules, sizes, path_rule=None, num_named=ndim)
    if rule.value is replicated:
        return _decision(leaf, str(rule), [None] * ndim, sizes, on_purpose=True, used=[rule])
    is_names = isinstance(rule.value, NamesOf)
    dims = rule.value.names if is_names else rule.value
    if len(dims) > ndim or (is_names and len(dims) < ndim and not rule.value.and_more):
        reason = f"it has {ndim} dims, not {len(dims)}"
        fix = "write a pattern that does not match this leaf"
        fix += f", or {'' if is_names else 'at most '}{ndim} entries" if ndim else ""
        fix += "; if names() ends with `...`, the remaining dims keep their names" * is_names
        where, requested = f"`{leaf.path}` of shape {leaf.shape}", f"apply {rule.value!r} of path rule `{rule.key}`"
        raise problem(where, requested, reason, fix, code="wrong-shape")
    if is_names:
        num_named = len(dims) if leaf.names is None else ndim
        leaf = dataclasses.replace(leaf, names=(*dims, *(leaf.names or (None,) * ndim)[len(dims) :]))
        return _by_names(leaf, rules, sizes, path_rule=rule, num_named=num_named)
    placement = _Placement(leaf, [*dims, *[None] * (ndim - len(dims))], [str(rule)] * ndim, rules, sizes)
    return _decision(leaf, str(rule), placement.entries, sizes, on_purpose=placement.on_purpose, used=[rule])


def _by_names(leaf: Leaf, rules: Rules, sizes: dict[str, int], *, path_rule: _Rule | None, num_named: int) -> Decision:
    assert leaf.names is not None
    dim_rules = [None if name is None else _rule_for(leaf, dim, name, rules) for dim, name in enumerate(leaf.names)]
    values = [None if rule is None else rule.value for rule in dim_rules]
    labels = ["" if rule is None else str(rule) for rule in dim_rules]
    used = [rule for rule in (path_rule, *dim_rules) if rule is not None]
    placement = _Placement(leaf, values, labels, rules, sizes)
    entries, on_purpose = placement.entries, placement.on_purpose
    shown = [label for label, value in zip(labels, values, strict=True) if label and value is not None]
    if num_named < len(values):
        label, largest = _shard_largest(leaf, rules, sizes, entries, num_named)
        shown, used = [*shown, *[label] * bool(largest)], [*used, *largest]
    if rules.everything and num_shards(entries, sizes) == 1:
        shown, on_purpose = shown or [f"{rules.everything}: replicated"], True
    label = "; ".join(shown) or "no rule shards its names"
    label = label if path_rule is None else f"{path_rule} → {label}"
    return _decision(leaf, label, entries, sizes, on_purpose=on_purpose, used=used)


def _rule_for(leaf: Leaf, dim: int, name: str, rules: Rules) -> _Rule | None:
    """Return the rule for a name. If the name refines another (`REFINES`), the axes of the other name come first."""
    rule, coarse = rules.name_rule(name), rules.name_rule(REFINES.get(name, ""))
    if rule is None and coarse is None and name not in (*rules.known, *UNSHARDED_NAMES):
        other = f"write Rules({name}=...) with a mesh axis, or {name}=None to leave the dim unsharded"
        requested, fix = f"apply a rule for the logical name `{name}`", near_or(str(name), rules.names, other)
        raise problem(_dim_text(leaf, dim), requested, "no rule defines this name", fix, code="unknown-name")
    if rule is None or coarse is None:
        return rule or coarse
    return dataclasses.replace(rule, value=_refined(rule.value, coarse.value))


def _refined(value: DimRule, coarse: DimRule) -> DimRule:
    if isinstance(value, First):
        return First(tuple(_refined(x, coarse) for x in value.alternatives))  # type: ignore[misc]
    if not (isinstance(value, str | tuple) and isinstance(coarse, str | tuple)):
        return value
    axes = spec_axes(coarse)
    return (*axes, *(axis for axis in spec_axes(value) if axis not in axes))


def _unnamed(leaf: Leaf, rules: Rules, sizes: dict[str, int]) -> Decision:
    entries: list[Any] = [None] * len(leaf.shape)
    if rules.largest is None or leaf.nbytes < rules.largest.min_bytes:
        origin = rules.largest.origin if rules.largest else rules.everything
        label = f"{origin}: {'small, ' if rules.largest else ''}replicated" if origin else "no names, no rule"
        return _decision(leaf, label, entries, sizes, on_purpose=bool(rules.everything), used=[])
    label, used = _shard_largest(leaf, rules, sizes, entries)
    return _decision(leaf, label, entries, sizes, on_purpose=False, used=used)


def _shard_largest(
    leaf: Leaf, rules: Rules, sizes: dict[str, int], entries: list[Any], start: int = 0
) -> tuple[str, list[_Rule]]:
    """Shard the largest divisible dim from `start` on, by the preset's rule for leaves without names."""
    largest = rules.largest
    if largest is None or leaf.nbytes < largest.min_bytes:
        return "", []
    count = math.prod(
        _size_of(axis, leaf, 0, f"{largest.origin}, which shards the largest dim", sizes) for axis in largest.axes
    )
    is_free = not any(axis in spec_axes(entry) for axis in largest.axes for entry in entries)
    dims = [dim for dim, size in enumerate(leaf.shape) if dim >= start and size and size % count == 0 and is_free]
    if not dims:
        return f"{largest.origin}: no dim is divisible by {count}", []
    dim = max(dims, key=lambda d: (leaf.shape[d], -d))
    entries[dim] = largest.axes[0] if len(largest.axes) == 1 else largest.axes
    return f"{largest.origin}: largest divisible dim ({dim})", [_Rule(LARGEST_DIM, largest.axes, largest.origin)]


class _Placement:
    """Mesh axes for the dims of a leaf.

    Dims with a single alternative are placed first, so that `first` knows which axes are free.
    """

    def __init__(
        self, leaf: Leaf, values: list[DimRule], labels: list[str], rules: Rules, sizes: dict[str, int]
    ) -> None:
        self.leaf, self.labels, self.rules, self.sizes = leaf, labels, rules, sizes
        self.entries: list[Any] = [None] * len(values)
        self.dim_of: dict[str, int] = {}
        """The dim that uses each mesh axis."""
        self.on_purpose = any(isinstance(value, _Replicated) for value in values)
        """Whether a rule says that a dim may be replicated."""
        for dim, value in enumerate(values):
            if isinstance(value, str | tuple):
                self._place(dim, value)
        lines = [
            (line, dim, axes)
            for dim, value in enumerate(values)
            if isinstance(value, InTurn)
            for line, axes in zip(value.lines, value.alternatives, strict=True)
        ]
        placed: set[int] = set()
        for _, dim, axes in sorted(lines, key=lambda line: line[:2]):
            if dim not in placed and self._is_free(axes):
                placed.add(dim)
                self._place(dim, axes)
                self.on_purpose |= axes is None
        for dim, value in enumerate(values):
            if isinstance(value, First) and not isinstance(value, InTurn):
                self._place_first(dim, value)
                self.on_purpose |= None in value.alternatives and num_shards([self.entries[dim]], sizes) == 1

    def _is_free(self, value: Any) -> bool:
        return not any(axis in self.dim_of for axis in spec_axes(value))

    def _place(self, dim: int, value: str | tuple[str, ...] | None) -> None:
        leaf, sizes, label, where = self.leaf, self.sizes, self.labels[dim], _dim_text(self.leaf, dim)
        axes = tuple(a for a in spec_axes(value) if a in sizes or a not in self.rules.optional_axes)
        for axis in axes:
            _size_of(axis, leaf, dim, label, sizes)
            if axis in self.dim_of:
                reason = f"`{axis}` ({sizes[axis]}) already shards dim {self.dim_of[axis]} of the array"
                fix = f"map one dim to None or to a different axis of the mesh, which has {_mesh_text(sizes)}"
                raise problem(where, f"shard over mesh axis `{axis}` ({label})", reason, fix, code="axis-used-twice")
            self.dim_of[axis] = dim
        size, count = leaf.shape[dim], math.prod(sizes[axis] for axis in axes)
        if size % count:
            over = " × ".join(f"`{axis}` ({sizes[axis]})" for axis in axes if sizes[axis] > 1)
            name = leaf.names[dim] if leaf.names else None
            unsharded, both = f"map `{name}` to None" if name else "leave this dim unsharded (None)", ""
            rule = self.rules.name_rule(name or "")
            if name in ACTIVATIONS_OF and rule is not None and rule.origin != USER:
                unsharded, both = f"map `{name}` and `{ACTIVATIONS_OF[name]}` to None", " for both"
            fewer = fewer_devices(size, {axis: sizes[axis] for axis in axes})
            padded, fallback = f"pad it to {-(-size // count) * count}", f"or write the fallback first({value!r}, None)"
            requested, reason = f"shard over mesh axis {over} ({label})", f"{size} is not divisible by {count}"
            fix = ", ".join(filter(None, (padded, unsharded, fewer, fallback)))
            raise problem(where, requested, reason, fix + both, code="indivisible")
        self.entries[dim] = None if not axes else axes[0] if len(axes) == 1 else axes

    def _place_first(self, dim: int, value: First) -> None:
        leaf, sizes, label = self.leaf, self.sizes, self.labels[dim]
        reasons = []
        for axes in value.alternatives:
            count = math.prod(_size_of(axis, leaf, dim, label, sizes) for axis in spec_axes(axes))
            if self._is_free(axes) and leaf.shape[dim] % count == 0:
                return self._place(dim, axes)
            used = next((axis for axis in spec_axes(axes) if axis in self.dim_of), None)
            indivisible = f"{leaf.shape[dim]} is not divisible by {count}, the size of {axes!r}"
            reasons.append(indivisible if used is None else f"`{used}` already shards dim {self.dim_of[used]}")
        reason = " and ".join(dict.fromkeys(reasons))
        fix = f"end with None to allow a replicated dim: first({', '.join(map(repr, value.alternatives))}, None)"
        requested = f"choose from the alternatives ({label})"
        raise problem(_dim_text(leaf, dim), requested, reason, fix, code="indivisible")


def fewer_devices(size: int, axes: Mapping[str, int]) -> str:
    """Return advice to use fewer devices for an indivisible dim, if a smaller axis would divide it, or ""."""
    sharding = {axis: count for axis, count in axes.items() if count > 1}
    axis, count = next(iter(sharding.items()), ("", 1))
    divisor = math.gcd(size, count)
    return f"reduce `{axis}` to {divisor}" if len(sharding) == 1 and 1 < divisor < count else ""


def _size_of(axis: str, leaf: Leaf, dim: int, label: str, sizes: dict[str, int]) -> int:
    if axis not in sizes:
        requested, reason = f"shard over mesh axis `{axis}` ({label})", f"the mesh has {_mesh_text(sizes)}"
        fix = near_or(axis, sizes, f"name an axis of the mesh, or add this one: MeshSpec({axis}=...)", list_known=False)
        raise problem(_dim_text(leaf, dim), requested, reason, fix, code="unknown-axis")
    return sizes[axis]


def _dim_text(leaf: Leaf, dim: int) -> str:
    if not leaf.shape:
        return f"`{leaf.path}` (a scalar)"
    name = leaf.names[dim] if leaf.names else None
    return f"`{leaf.path}` dim {dim} ({f'`{name}`, ' if name else ''}size {leaf.shape[dim]})"


def _mesh_text(sizes: dict[str, int]) -> str:
    return "axes " + ", ".join(f"`{name}` ({size})" for name, size in sizes.items())


def _decision(
    leaf: Leaf, label: str, entries: list[Any], sizes: dict[str, int], *, on_purpose: bool, used: list[_Rule]
) -> Decision:
    return Decision(
        leaf=leaf, rule=label, spec=PartitionSpec(*entries), shards=num_shards(entries, sizes),
        replicated_on_purpose=on_purpose, sources=frozenset((rule.origin, rule.key) for rule in used),
    )  # fmt: skip
