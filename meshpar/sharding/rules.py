"""Rules: from the names and the path of a leaf to its PartitionSpec, strictly.

A rule maps a logical name to mesh axes, or a path pattern to a layout. `resolve` applies a `Rules` to one leaf and
returns the `Decision`; `use` and `constrain` apply the rules for activations inside a model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from meshpar.sharding.types import Decision, Leaf, MeshLike, axis_sizes, near, near_or, num_shards, problem, spec_axes

PARAMETER_NAMES = ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "expert", "layers")
ACTIVATION_NAMES = (
    "batch", "seq", "norm_seq", "act_embed", "act_heads", "act_kv_heads", "act_head_dim", "act_mlp", "act_vocab",
    "act_expert", "attn_seq", "attn_heads", "attn_kv_heads",
)  # fmt: skip
REFINES = {"norm_seq": "seq", "attn_seq": "seq", "attn_heads": "act_heads", "attn_kv_heads": "act_kv_heads"}
"""A name whose dim is split as another's, and then further over the axes of its own rule: the sequence of the residual
stream is that of its layer, cut finer where sequence parallelism cuts it. Names with `attn` are of attention itself,
between queries, keys and values and the heads' output: there a rule may keep whole what is split around it."""
ACTIVATIONS_OF = {"vocab": "act_vocab", "heads": "act_heads", "kv_heads": "act_kv_heads", "mlp": "act_mlp"}
"""Names of parameters, and of the activations that presets shard over the same axis."""
BATCH_AXES = ("data", "fsdp", "expert")
"""The axes over which the presets split the batch: every one that does not split a layer's own work."""

LARGEST_DIM = "largest dim"
"""Key of the rule for leaves without names."""

USER = "user"
"""Origin of a rule that no preset brought."""


class _Replicated:
    """The value of `replicated`: replicated on purpose."""

    def __repr__(self) -> str:
        return "replicated"

    def __reduce__(self) -> str:
        return "replicated"


replicated = _Replicated()
"""Says that a leaf, or a dim, is meant to be replicated."""


@dataclasses.dataclass(frozen=True)
class First:
    """Alternatives for one dim, the first that fits is taken. Made by `first`."""

    alternatives: tuple[str | tuple[str, ...] | None, ...]

    def __repr__(self) -> str:
        return f"first({', '.join(map(repr, self.alternatives))})"


def first(*alternatives: str | tuple[str, ...] | None) -> First:
    """A fallback written by the author of a rule: the first alternative whose axes are free and divide the dim.

    `first("tensor", None)` shards over `tensor` where that goes and leaves the dim replicated where it does not.
    """
    choices = tuple(tuple(choice) if isinstance(choice, list) else choice for choice in alternatives)
    if not choices or not all(choice is None or isinstance(choice, str) or _is_axes(choice) for choice in choices):
        asked = f"choose among {'these' if choices else 'nothing'}"
        exists = "an alternative is a mesh axis, a tuple of different axes, or None for a replicated dim"
        raise problem(f"first({', '.join(map(repr, choices))})", asked, exists, 'write first("tensor", None)')
    return First(choices)


@dataclasses.dataclass(frozen=True)
class InTurn(First):
    """Alternatives as Flax's lists of rules have them. Made by `Rules.from_logical_axis_rules`.

    The lines of a list take their turn, whatever dim they are about: a dim gets the axes of the first line for its name
    whose axes no line before has taken, and is not split where there is none.
    """

    lines: tuple[int, ...] = ()
    """The line of each alternative."""

    def __repr__(self) -> str:
        return f"in_turn({', '.join(f'{n}: {x!r}' for n, x in zip(self.lines, self.alternatives, strict=True))})"


@dataclasses.dataclass(frozen=True)
class NamesOf:
    """Logical names given to a leaf by its path. Made by `names`."""

    names: tuple[str | None, ...]
    and_more: bool = False
    """Whether dims behind these go as they would without the rule."""

    def __repr__(self) -> str:
        return f"names({', '.join([*map(repr, self.names), *['...'] * self.and_more])})"


def names(*dims: Any) -> NamesOf:
    """Give a leaf logical names by its path, for a model that carries none.

    `Rules(paths={r".*/up/kernel": names("embed", "mlp")})` lets every strategy treat the leaf as annotated. With `...`
    as the last, dims that are left keep the leaf's own names; without any, the strategy splits the largest of them, as
    in leaves without names: `Rules(paths={r"blocks/.*": names("layers", ...)})` says of a whole stack of layers, with
    arrays of any rank, which dim is the layers'.

    Raises:
      ValueError: what is no name.
    """
    and_more = dims[-1:] == (...,)
    given = dims[:-1] if and_more else dims
    if not all(name is None or isinstance(name, str) for name in given):
        exists = "a logical name is a string, or None for a dim that has none"
        fix = 'write one for each dim, names("embed", None), or `...` for all that are left, names("layers", ...)'
        raise problem(f"names({', '.join(map(repr, dims))})", "give these names to dims", exists, fix)
    return NamesOf(given, and_more)


DimRule: TypeAlias = str | tuple[str, ...] | First | _Replicated | None
PathRule: TypeAlias = _Replicated | NamesOf | PartitionSpec | tuple[DimRule, ...]
ModuleRule: TypeAlias = NamesOf | tuple[str | None, ...] | None


@dataclasses.dataclass(frozen=True)
class _Rule:
    """One rule, its place of origin, and what it says."""

    key: str
    value: Any
    origin: str = USER
    is_path: bool = False

    def matches(self, path: str) -> bool:
        """Whether a path, of a leaf or a module, is one of those it is about."""
        return re.fullmatch(self.key, path) is not None

    def __str__(self) -> str:
        text = f"{self.key!r}: {self.value!r}" if self.is_path else f"{self.key}={self.value!r}"
        return text if self.origin == USER else f"{self.origin}: {text}"


@dataclasses.dataclass(frozen=True)
class Largest:
    """What to do with leaves without names: shard the largest dim that divides, when the leaf has this many bytes."""

    axes: tuple[str, ...]
    min_bytes: int
    origin: str


@dataclasses.dataclass(init=False, repr=False, unsafe_hash=True)
class Rules:
    """An immutable set of sharding rules; two join with `|`, the later one wins.

    Args:
      paths: path pattern (a regular expression that must match the whole path) to `replicated`, to `names(...)`, or to
        one entry per dim as in a PartitionSpec. A pattern that stands later wins over one before it.
      activations: path pattern of modules to one name or None for each dim of what they give, for models that do not
        call `constrain`; None leaves it to the compiler. Without a rule, what modules of a model without names give is
        split along the batch.
      precision: path pattern of modules to the dtype, wider than `Precision.compute`, that parameters in them are cast
        to: such a module computes in it (unless it has a `dtype=` of its own) and hands on what it gives in
        `Precision.compute`. A pattern that stands later wins.
      remat: path pattern of modules in the model to what each keeps for the backward pass, which makes the rest again,
        in the words of `train_step(remat=...)`; None: all. A pattern that stands later wins. Where modules stand inside
        each other what the inner one gives is made as often as both rules say.
      inputs: path pattern of the batch's leaves that are no rows like the others: "batch" has a first dim of its own
        that is split as the batch is, and cut into micro-steps (a graph's nodes and edges); `replicated` is whole on
        every device and in every micro-step.
      **by_name: logical name to a mesh axis, a tuple of axes, `first(...)`, `replicated` or None (not split).

    Example:
      >>> Rules(mlp="tensor", embed="fsdp", batch=("data", "fsdp"), paths={r".*/scale": replicated})
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
        given = {"paths": paths, "activations": activations, "inputs": inputs, "precision": precision, "remat": remat}
        made: dict[str, tuple[_Rule, ...]] = {}
        for field, (argument, checked, example) in _PATTERNS.items():
            _check_mapping(argument, given[argument], example)
            made[field] = tuple(_Rule(key, checked(key, x), is_path=True) for key, x in (given[argument] or {}).items())
        vars(self).update(
            _by_name={key: _Rule(key, _checked_dim_rule(key, value)) for key, value in by_name.items()}, **made
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("Rules do not change; join them: rules | Rules(mlp=None)")

    def _with(self, **fields: Any) -> Rules:
        changed = type(self).__new__(type(self))
        vars(changed).update({**vars(self), **fields})
        return changed

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
        """Rules that a strategy brings: they may idle, and they know the whole vocabulary.

        Args:
          origin: name of the strategy, shown beside every rule that fires.
          known: names that may stand on a leaf without being split.
          everything: leaves that no rule shards are meant to be replicated.
          largest: how to split big leaves that carry no names.
          optional_axes: mesh axes that are left out where the mesh has no such axis.
        """
        return cls()._with(
            _by_name={key: _Rule(key, _checked_dim_rule(key, value), origin) for key, value in (by_name or {}).items()},
            known=frozenset(known),
            everything=origin if everything else None,
            largest=largest,
            optional_axes=frozenset(optional_axes),
        )

    @classmethod
    def from_logical_axis_rules(
        cls, rules: Iterable[Any], *, axes: Mapping[str, str | None] | None = None, batch: str | None = None
    ) -> Rules:
        """Rules as Flax (`nn.logical_axis_rules`), T5X and MaxText (`logical_axis_rules` of its YAML) write them.

        Args:
          rules: pairs of a logical name and a mesh axis, several or None. A name may stand in several; the first one
            whose axes are free in an array counts, line by line.
          axes: their mesh axes by other names of yours ({"model": "tensor"}), or None to leave one out.
          batch: the logical name of the batch's rows; by default `batch`, or else `activation_batch`.

        Raises:
          ValueError: an entry that is no such pair, or an axis to rename or a name for the batch that the list lacks.

        Example:
          >>> Rules.from_logical_axis_rules([("batch", "data"), ("mlp", "model")], axes={"model": "tensor"}).axes
          frozenset({'data', 'tensor'})
        """
        _check_mapping("axes", axes, "{'model': 'tensor'}", of="Rules.from_logical_axis_rules")
        if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable):
            where, exists = "Rules.from_logical_axis_rules", f"`rules` is a {type(rules).__name__}"
            raise problem(where, "read a list of rules", exists, 'write [("mlp", "tensor"), ("embed", None)]')
        lines: dict[str, list[tuple[int, Any]]] = {}
        found_axes: set[str] = set()
        for number, line in enumerate(rules):
            name, choice = _checked_line(line)
            found_axes.update(spec_axes(choice))
            named = tuple((axes or {}).get(axis, axis) for axis in spec_axes(choice))
            kept = tuple(axis for axis in named if axis is not None)
            lines.setdefault(name, []).append((number, kept or None))
        for axis in axes or {}:
            if axis not in found_axes:
                where = f"from_logical_axis_rules(axes={{{axis!r}: {axes[axis]!r}}})"  # type: ignore[index]
                raise problem(
                    where, "call it otherwise", "no line of the list has such an axis", near(axis, found_axes)
                )
        rows = batch or next((name for name in ("batch", "activation_batch") if name in lines), None)
        if rows is not None and rows not in lines:
            where = f"from_logical_axis_rules(batch={batch!r})"
            raise problem(where, "split the batch by its rule", "the list has no such name", near(rows, lines))
        if rows is not None:
            lines["batch"] = lines[rows]
        values = {
            name: InTurn(tuple(choice for _, choice in found), tuple(number for number, _ in found))
            for name, found in lines.items()
        }
        return cls()._with(_by_name={name: _Rule(name, value, "logical_axis_rules") for name, value in values.items()})

    def __or__(self, other: Rules) -> Rules:
        if not isinstance(other, Rules):
            return NotImplemented
        return self._with(
            _by_name={**self._by_name, **other._by_name},
            **{field: _behind(getattr(self, field), getattr(other, field)) for field in _PATTERNS},
            known=self.known | other.known,
            everything=other.everything or self.everything,
            largest=other.largest or self.largest,
            optional_axes=self.optional_axes | other.optional_axes,
        )

    def __repr__(self) -> str:
        parts = [f"{rule.key}={rule.value!r}" for rule in self._by_name.values()]
        for field, (argument, *_) in _PATTERNS.items():
            if rules := getattr(self, field):
                parts.append(f"{argument}={{" + ", ".join(f"{r.key!r}: {r.value!r}" for r in rules) + "}")
        return f"Rules({', '.join(parts)})"

    def to_json(self) -> dict[str, Any]:
        """Names and paths as plain data, which `from_json` reads as rules of a user's."""
        by_name = {rule.key: _to_plain(rule.value) for rule in self._by_name.values()}
        patterns = {
            name: {r.key: _to_plain(r.value) for r in getattr(self, of)} for of, (name, *_) in _PATTERNS.items()
        }
        return {"by_name": by_name} | {name: said for name, said in patterns.items() if said or name == "paths"}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rules:
        """The rules that `to_json` gave."""
        arguments = ("by_name", *(argument for argument, *_ in _PATTERNS.values()))
        said: dict[str, Any] = {of: {key: _from_plain(x) for key, x in data.get(of, {}).items()} for of in arguments}
        return Rules(**said.pop("by_name"), **said)

    @property
    def dtypes(self) -> frozenset[str]:
        """Those that `precision` gives to modules."""
        return frozenset(rule.value for rule in self.precision)

    def dtype_in(self, path: str) -> str | None:
        """The dtype that `precision` gives a parameter, by the modules that it stands in; None: no rule is about it."""
        parts = path.split("/")
        modules = ["/".join(parts[:end]) for end in range(1, len(parts))]
        return next((rule.value for rule in reversed(self.precision) if any(map(rule.matches, modules))), None)

    def input_rule(self, path: str) -> Any:
        """What `inputs` says of a leaf of the batch: "batch", `replicated`, or None: it is rows like the others."""
        return next((rule.value for rule in reversed(self.inputs) if rule.matches(path)), None)

    @property
    def names(self) -> frozenset[str]:
        """Every logical name these rules have heard of."""
        return self.known | frozenset(self._by_name)

    @property
    def sources(self) -> Iterator[tuple[str, str]]:
        """(origin, key) of every rule, as decisions record them."""
        yield from ((rule.origin, rule.key) for rule in (*self._by_name.values(), *self._by_path))
        if self.largest:
            yield self.largest.origin, LARGEST_DIM

    @property
    def user_names(self) -> tuple[str, ...]:
        """The logical names that a user, not a preset, wrote a rule for."""
        return tuple(rule.key for rule in self._by_name.values() if rule.origin == USER)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The path patterns, in order; the last that matches wins."""
        return tuple(rule.key for rule in self._by_path)

    @property
    def axes(self) -> frozenset[str]:
        largest = self.largest.axes if self.largest else ()
        return frozenset(largest).union(*(axes_in(rule.value) for rule in (*self._by_name.values(), *self._by_path)))

    def without_paths(self) -> Rules:
        return self._with(_by_path=())

    def path_rule(self, path: str) -> _Rule | None:
        """The path rule that fires on a path, None when there is none."""
        return next((rule for rule in reversed(self._by_path) if rule.matches(path)), None)

    def name_rule(self, name: str) -> _Rule | None:
        """The rule for a logical name, None when the name is unknown or known and not split."""
        return self._by_name.get(name)


def _behind(mine: tuple[_Rule, ...], theirs: tuple[_Rule, ...]) -> tuple[_Rule, ...]:
    """A pattern said again takes its new place, so that the later one wins."""
    return (*(rule for rule in mine if rule.key not in {one.key for one in theirs}), *theirs)


def axes_in(value: Any) -> set[str]:
    """Mesh axes in the value of a rule."""
    if isinstance(value, First):
        value = value.alternatives
    if isinstance(value, str):
        return {value}
    return set().union(*map(axes_in, value)) if isinstance(value, tuple) else set()


def _to_plain(value: Any) -> Any:
    if isinstance(value, InTurn):
        return {"in_turn": [[n, _to_plain(one)] for n, one in zip(value.lines, value.alternatives, strict=True)]}
    if isinstance(value, First):
        return {"first": [_to_plain(one) for one in value.alternatives]}
    if isinstance(value, NamesOf):
        return {"names": [*value.names, *["..."] * value.and_more]}
    if isinstance(value, tuple | PartitionSpec):
        return [_to_plain(one) for one in value]
    return {"replicated": True} if value is replicated else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        ((kind, given),) = value.items()
        if kind == "replicated":
            return replicated
        if kind == "in_turn":
            lines, choices = zip(*given, strict=True)
            return InTurn(tuple(map(_from_plain, choices)), tuple(lines))
        if kind == "first":
            return first(*map(_from_plain, given))
        return names(*[... if name == "..." else name for name in given])
    return tuple(map(_from_plain, value)) if isinstance(value, list) else value


def _checked_line(line: Any) -> tuple[str, DimRule]:
    if isinstance(line, tuple | list) and len(line) == 2 and isinstance(line[0], str):
        choice = tuple(line[1]) if isinstance(line[1], list) else line[1]
        if choice in (None, ()) or isinstance(choice, str) or _is_axes(choice):
            return line[0], choice or None
    exists = "an entry is a logical name and a mesh axis, several different ones, or None"
    raise problem(f"from_logical_axis_rules, entry {line!r}", "read it", exists, 'write ("mlp", "tensor")')


def _checked_dim_rule(key: str, value: Any, where: str = "rule for") -> DimRule:
    if isinstance(value, list):
        value = tuple(value)
    if value is None or isinstance(value, First | _Replicated | str) or _is_axes(value):
        return value
    exists = "a dim maps to a mesh axis, a tuple of different axes, first(...), replicated or None"
    fix = f'write {key}="fsdp"' if key.isidentifier() else "name mesh axes as strings"
    raise problem(f"{where} {key}" if key.isdigit() else f"{where} `{key}`", f"map to {value!r}", exists, fix)


def _is_axes(value: Any) -> bool:
    named = isinstance(value, tuple) and bool(value) and all(isinstance(axis, str) for axis in value)
    return named and len(set(value)) == len(value)


def _check_mapping(field: str, given: Any, example: str, of: str = "Rules") -> None:
    if not (given is None or isinstance(given, Mapping)):
        raise problem(
            f"{of}({field}={given!r})",
            "match paths" if of == "Rules" else "name axes otherwise",
            f"`{field}` is a {type(given).__name__}, and must map each "
            + ("pattern to a layout" if of == "Rules" else "axis of theirs to one of yours"),
            f"write {field}={example}",
        )


def check_pattern(pattern: Any) -> None:
    """Raises `ValueError` for what is no pattern of paths."""
    try:
        re.compile(str(pattern))
    except re.error as error:
        fix = "write one that matches the whole path, say r'.*/kernel', with what is literal escaped"
        raise problem(f"path rule `{pattern}`", "match paths", f"it is no regular expression ({error})", fix) from error
    if not isinstance(pattern, str):
        where, exists = f"path rule {pattern!r}", f"a pattern is a string, and this is of type {type(pattern).__name__}"
        raise problem(where, "match paths", exists, "write a regular expression for the whole path, say r'.*/kernel'")


def _checked_module_rule(pattern: str, value: Any) -> NamesOf | None:
    check_pattern(pattern)
    if isinstance(value, tuple | list):
        value = names(*value)
    if value is None or (isinstance(value, NamesOf) and not value.and_more):
        return value
    exists = "a module maps to one name or None for each dim of what it gives, or to None: as the compiler likes"
    raise problem(f"activation rule `{pattern}`", f"mean {value!r}", exists, 'write ("batch", "seq", "act_mlp")')


def _checked_dtype(pattern: str, value: Any) -> str:
    check_pattern(pattern)
    known = ("float64", "float32", "bfloat16", "float16")
    if value not in known:
        where, exists = f"precision rule `{pattern}`", f"it is no dtype of {', '.join(known)}"
        raise problem(where, f"compute in {value!r}", exists, 'write "float32"')
    return value


def _checked_remat(pattern: str, value: Any) -> str | None:
    check_pattern(pattern)
    if value is not None and not isinstance(value, str):
        where, exists = f"remat rule `{pattern}`", f"it is a {type(value).__name__}"
        raise problem(where, f"keep what {value!r} says", exists, 'write "full", "dots" or "save:NAMES", or None')
    return value


def _checked_input(pattern: str, value: Any) -> Any:
    check_pattern(pattern)
    if not isinstance(value, _Replicated) and value != "batch":
        exists = 'a leaf of the batch is "batch", split by its own rows, or replicated'
        raise problem(f"inputs rule `{pattern}`", f"lay it as {value!r}", exists, "write one of these")
    return value


def _checked_path_rule(pattern: str, value: Any) -> PathRule:
    check_pattern(pattern)
    if isinstance(value, _Replicated | NamesOf):
        return value
    if isinstance(value, PartitionSpec | tuple | list):
        where = f"path rule `{pattern}` dim"
        return tuple(_checked_dim_rule(str(dim), entry, where) for dim, entry in enumerate(value))
    raise problem(
        f"path rule `{pattern}`",
        f"mean {value!r}",
        "a path maps to replicated, names(...) or a tuple with one entry per dim",
        f'write ({value!r}, None), or names("embed", "mlp")'
        if isinstance(value, str)
        else 'write mp.replicated to replicate it, or split a dim: ("fsdp", None)',
    )


_PATTERNS: Mapping[str, tuple[str, Callable[[str, Any], Any], str]] = {
    "_by_path": ("paths", _checked_path_rule, "{r'.*/scale': mp.replicated}"),
    "by_module": ("activations", _checked_module_rule, "{r'.*/mlp': ('batch', None, None)}"),
    "inputs": ("inputs", _checked_input, "{r'graph/.*': 'batch'}"),
    "precision": ("precision", _checked_dtype, "{r'.*/router': 'float32'}"),
    "remat": ("remat", _checked_remat, "{r'.*/mlp': 'full'}"),
}
"""Fields of rules by patterns: the argument of each, what looks at its values, and an example."""


# ---- From a leaf and rules to a decision -----------------------------------------------------------------------------


def resolve(leaf: Leaf, rules: Rules, mesh: MeshLike) -> Decision:
    """Decide how one leaf lies on the mesh.

    Order: the last path rule that matches, else the leaf's own names, else the preset's rule for unnamed leaves.

    Raises:
      ValueError: an unknown name or mesh axis, one mesh axis on two dims, a dim that does not divide.
    """
    sizes = axis_sizes(mesh)
    rule = rules.path_rule(leaf.path)
    if rule is not None and not isinstance(rule.value, NamesOf):
        return _by_path(leaf, rule, rules, sizes)
    if rule is None and leaf.names is None:
        return _unnamed(leaf, rules, sizes)
    num_named = len(leaf.shape)
    if rule is not None:
        num_named = len(rule.value.names) if leaf.names is None else num_named
        leaf = dataclasses.replace(leaf, names=_fitting_names(leaf, rule))
    return _by_names(leaf, rules, sizes, via=rule, num_named=num_named)


def _fitting_names(leaf: Leaf, rule: _Rule) -> tuple[str | None, ...]:
    given = rule.value.names
    num_left = len(leaf.shape) - len(given)
    if num_left == 0 or (num_left > 0 and rule.value.and_more):
        return (*given, *(leaf.names or (None,) * len(leaf.shape))[len(given) :])
    where = f"`{leaf.path}` of shape {leaf.shape}"
    exists = f"it has {len(leaf.shape)} dims, {'fewer than' if rule.value.and_more else 'not'} {len(given)}"
    fix = "narrow the pattern, or give one name or None to each dim, `...` behind the first to leave others as they are"
    raise problem(where, f"carry {rule.value!r} by the path rule `{rule.key}`", exists, fix)


def _by_path(leaf: Leaf, rule: _Rule, rules: Rules, sizes: dict[str, int]) -> Decision:
    if isinstance(rule.value, _Replicated):
        return _decision(leaf, str(rule), [None] * len(leaf.shape), sizes, replicated_on_purpose=True, used=[rule])
    if len(rule.value) > len(leaf.shape):
        where, asked = f"`{leaf.path}` of shape {leaf.shape}", f"lie as {rule.value!r} by the path rule `{rule.key}`"
        exists = f"it has {len(leaf.shape)} dims, fewer than the {len(rule.value)} of the rule"
        raise problem(where, asked, exists, "give at most one entry per dim, or narrow the pattern")
    wanted = [*rule.value, *[None] * (len(leaf.shape) - len(rule.value))]
    entries, replicated_on_purpose = _fit(leaf, wanted, [str(rule)] * len(wanted), rules, sizes)
    return _decision(leaf, str(rule), entries, sizes, replicated_on_purpose=replicated_on_purpose, used=[rule])


def _by_names(leaf: Leaf, rules: Rules, sizes: dict[str, int], *, via: _Rule | None, num_named: int) -> Decision:
    assert leaf.names is not None
    wanted: list[DimRule] = []
    labels: list[str] = []
    used: list[_Rule] = [] if via is None else [via]
    for dim, name in enumerate(leaf.names):
        rule = None if name is None else _rule_for(leaf, dim, name, rules)
        wanted.append(None if rule is None else rule.value)
        labels.append("" if rule is None else str(rule))
        if rule is not None:
            used.append(rule)
    entries, replicated_on_purpose = _fit(leaf, wanted, labels, rules, sizes)
    said = [label for label, value in zip(labels, wanted, strict=True) if label and value is not None]
    if num_named < len(wanted):
        label, more = _split_largest(leaf, rules, sizes, entries, num_named)
        said, used = [*said, *[label] * bool(more)], [*used, *more]
    if rules.everything and num_shards(entries, sizes) == 1:
        said, replicated_on_purpose = said or [f"{rules.everything}: replicated"], True
    label = "; ".join(said) or "named, not split"
    return _decision(
        leaf,
        label if via is None else f"{via} → {label}",
        entries,
        sizes,
        replicated_on_purpose=replicated_on_purpose,
        used=used,
    )


def _rule_for(leaf: Leaf, dim: int, name: str, rules: Rules) -> _Rule | None:
    rule = _refined(name, rules)
    if rule is None and name not in rules.known:
        where = f"`{leaf.path}` dim {dim} (`{name}`, size {leaf.shape[dim]})"
        fix = near_or(str(name), rules.names, f"write Rules({name}=...) with a mesh axis, or {name}=None: not split")
        raise problem(where, f"split by the rule for `{name}`", f"no rule knows the logical name `{name}`", fix)
    return rule


def _refined(name: str, rules: Rules) -> _Rule | None:
    """The rule for a name; for one that refines another, with the axes of that one in front."""
    own, coarser = rules.name_rule(name), rules.name_rule(REFINES.get(name, ""))
    if own is None or coarser is None:
        return own or coarser
    return dataclasses.replace(own, value=_finer(own.value, coarser.value))


def _finer(own: DimRule, coarser: DimRule) -> DimRule:
    if isinstance(own, First):
        return First(tuple(_finer(one, coarser) for one in own.alternatives))  # type: ignore[misc]
    if not (isinstance(own, str | tuple) and isinstance(coarser, str | tuple)):
        return own
    axes = spec_axes(coarser)
    return (*axes, *(axis for axis in spec_axes(own) if axis not in axes))


def _unnamed(leaf: Leaf, rules: Rules, sizes: dict[str, int]) -> Decision:
    whole: list[Any] = [None] * len(leaf.shape)
    if rules.largest is None or leaf.nbytes < rules.largest.min_bytes:
        origin = rules.largest.origin if rules.largest else rules.everything
        label = f"{origin}: {'small, ' if rules.largest else ''}replicated" if origin else "no names, no rule"
        return _decision(leaf, label, whole, sizes, replicated_on_purpose=bool(rules.everything), used=[])
    label, used = _split_largest(leaf, rules, sizes, whole)
    return _decision(leaf, label, whole, sizes, replicated_on_purpose=False, used=used)


def _split_largest(
    leaf: Leaf, rules: Rules, sizes: dict[str, int], entries: list[Any], first: int = 0
) -> tuple[str, list[_Rule]]:
    """Split the largest dim, from a first one on, by the preset's rule for leaves without names, where it can.

    Returns: what is to be told, and the rule, where it did something: where that is so of no leaf, the preset is idle.
    """
    largest = rules.largest
    if largest is None or leaf.nbytes < largest.min_bytes:
        return "", []
    for axis in largest.axes:
        _size_of(axis, leaf, 0, f"{largest.origin}: largest dim", sizes)
    count = math.prod(sizes[axis] for axis in largest.axes)
    is_free = not any(axis in spec_axes(entry) for axis in largest.axes for entry in entries)
    fits = [dim for dim, size in enumerate(leaf.shape) if dim >= first and size and size % count == 0 and is_free]
    if not fits:
        return f"{largest.origin}: no dim divides by {count}", []
    dim = max(fits, key=lambda d: (leaf.shape[d], -d))
    entries[dim] = largest.axes[0] if len(largest.axes) == 1 else largest.axes
    return f"{largest.origin}: largest dim that divides ({dim})", [_Rule(LARGEST_DIM, largest.axes, largest.origin)]


def _fit(
    leaf: Leaf, wanted: list[DimRule], labels: list[str], rules: Rules, sizes: dict[str, int]
) -> tuple[list[Any], bool]:
    """Entries of the spec, and whether a rule's author said that dims stay replicated.

    Dims with one choice are placed before those with alternatives, so that `first` sees which axes are free.
    """
    entries: list[Any] = [None] * len(wanted)
    taken: dict[str, int] = {}
    replicated_on_purpose = any(isinstance(value, _Replicated) for value in wanted)
    for dim, value in enumerate(wanted):
        if isinstance(value, str | tuple):
            entries[dim] = _place(leaf, dim, value, labels[dim], rules, sizes, taken)
    turns = [
        (line, dim, choice)
        for dim, value in enumerate(wanted)
        if isinstance(value, InTurn)
        for line, choice in zip(value.lines, value.alternatives, strict=True)
    ]
    settled: set[int] = set()
    for _, dim, choice in sorted(turns, key=lambda turn: turn[:2]):
        if dim not in settled and not any(axis in taken for axis in spec_axes(choice)):
            settled.add(dim)
            entries[dim] = None if choice is None else _place(leaf, dim, choice, labels[dim], rules, sizes, taken)
            replicated_on_purpose = replicated_on_purpose or choice is None
    for dim, value in enumerate(wanted):
        if isinstance(value, First) and not isinstance(value, InTurn):
            entries[dim] = _first_that_fits(leaf, dim, value, labels[dim], rules, sizes, taken)
            replicated_on_purpose = replicated_on_purpose or (
                None in value.alternatives and num_shards([entries[dim]], sizes) == 1
            )
    return entries, replicated_on_purpose


def _place(
    leaf: Leaf,
    dim: int,
    value: str | tuple[str, ...],
    label: str,
    rules: Rules,
    sizes: dict[str, int],
    taken: dict[str, int],
) -> Any:
    axes = tuple(a for a in spec_axes(value) if a in sizes or a not in rules.optional_axes)
    count = 1
    for axis in axes:
        count *= _size_of(axis, leaf, dim, label, sizes)
        if axis in taken:
            exists = f"`{axis}` ({sizes[axis]}) already splits dim {taken[axis]} of the same array"
            fix = f"map one of the two dims to None, or to another of the mesh's {_mesh_text(sizes)}"
            raise problem(f"{_dim_of(leaf, dim)}", f"split over mesh axis `{axis}` ({label})", exists, fix)
        taken[axis] = dim
    size = leaf.shape[dim]
    if size % count:
        over = " × ".join(f"`{axis}` ({sizes[axis]})" for axis in axes if sizes[axis] > 1)
        name = leaf.names[dim] if leaf.names else None
        keep = f"map `{name}` to None" if name else "leave this dim unsplit (None)"
        fewer = filter(None, [fewer_devices(size, {axis: sizes[axis] for axis in axes})])
        fallback = f"or write the fallback first({value!r}, None)"
        rule = rules.name_rule(name or "")
        if name in ACTIVATIONS_OF and rule is not None and rule.origin != USER:
            keep = f"map `{name}` and `{ACTIVATIONS_OF[name]}` to None"
            fallback += " for both"
        where, fix = _dim_of(leaf, dim), ", ".join((f"pad it to {-(-size // count) * count}", keep, *fewer, fallback))
        raise problem(where, f"split over mesh axis {over} ({label})", f"{size} is not a multiple of {count}", fix)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def fewer_devices(size: int, over: Mapping[str, int]) -> str:
    """How many devices of the one axis that a size is split over divide it, as what to do; empty where none do."""
    split = {axis: count for axis, count in over.items() if count > 1}
    axis, count = next(iter(split.items()), ("", 1))
    divides = math.gcd(size, count)
    return f"give `{axis}` {divides} of its {count} devices" if len(split) == 1 and 1 < divides < count else ""


def _first_that_fits(
    leaf: Leaf, dim: int, value: First, label: str, rules: Rules, sizes: dict[str, int], taken: dict[str, int]
) -> Any:
    for choice in value.alternatives:
        for axis in spec_axes(choice):
            _size_of(axis, leaf, dim, label, sizes)
        free = not any(axis in taken for axis in spec_axes(choice))
        if free and leaf.shape[dim] % math.prod(sizes[axis] for axis in spec_axes(choice)) == 0:
            return None if choice is None else _place(leaf, dim, choice, label, rules, sizes, taken)
    exists = f"none of them is free and divides {leaf.shape[dim]} on {_mesh_text(sizes)}"
    fix = f"end it with None to allow a replicated dim: first({', '.join(map(repr, value.alternatives))}, None)"
    raise problem(_dim_of(leaf, dim), f"take the first that fits of {value.alternatives} ({label})", exists, fix)


def _size_of(axis: str, leaf: Leaf, dim: int, label: str, sizes: dict[str, int]) -> int:
    if axis not in sizes:
        asked = f"split over mesh axis `{axis}` ({label})"
        fix = near_or(axis, sizes, f"name an axis of the mesh, or give it this one: MeshSpec({axis}=...)")
        raise problem(_dim_of(leaf, dim), asked, f"the mesh has {_mesh_text(sizes)}", fix)
    return sizes[axis]


def _dim_of(leaf: Leaf, dim: int) -> str:
    if not leaf.shape:
        return f"`{leaf.path}` (a scalar)"
    name = leaf.names[dim] if leaf.names else None
    return f"`{leaf.path}` dim {dim} ({f'`{name}`, ' if name else ''}size {leaf.shape[dim]})"


def _mesh_text(sizes: dict[str, int]) -> str:
    return "axes " + ", ".join(f"`{name}` ({size})" for name, size in sizes.items())


def _decision(
    leaf: Leaf, rule: str, entries: list[Any], sizes: dict[str, int], *, replicated_on_purpose: bool, used: list[_Rule]
) -> Decision:
    return Decision(
        leaf=leaf,
        rule=rule,
        spec=PartitionSpec(*entries),
        shards=num_shards(entries, sizes),
        replicated_on_purpose=replicated_on_purpose,
        sources=frozenset((rule.origin, rule.key) for rule in used),
    )
