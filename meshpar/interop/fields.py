"""Table entries that map `config.json` fields to `TransformerConfig` fields, for reading and writing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flax import traverse_util

from meshpar.models.architecture import LatentAttention, LongRope, RopeScaling, YarnScaling
from meshpar.models.config import TransformerConfig
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.sharding.errors import problem

RELEASE = "use the config.json of the release"
MOST = {int: 2**22, float: 2.0**60}
"""Upper limits of the numbers in a config, so that untrusted configs cannot cause large allocations."""
_REQUIRED = object()
_TYPES = {int: "an integer", float: "a finite number", bool: "true or false"}


def bad_value(
    where: str, name: str, value: object, reason: str, fix: str = RELEASE, code: str = "unsupported-feature"
) -> Exception:
    """Return the error for an invalid or unsupported value of a field."""
    shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    return problem(f"{where}, `{name[:60]}` = {shown}", "", reason, fix, code)


@dataclasses.dataclass(frozen=True)
class Field:
    """A config.json field with a counterpart in `TransformerConfig`."""

    theirs: str
    """Name of the field in config.json."""
    ours: str
    """Path of the field in `TransformerConfig`, such as `moe.routing.top_k`."""
    kind: type = int
    """Type of the value: int, float or bool."""
    default: Any = _REQUIRED
    """Value for a missing or null field, or a function that computes it from the document."""
    also: str | None = None
    """Alternative name that transformers reads or writes."""

    def read(self, where: str, document: Mapping[str, Any]) -> Any:
        """Return the value of the field in a config.json and check its type."""
        value, other = document.get(self.theirs), document.get(self.also or self.theirs)
        if value is not None and other is not None and value != other:
            raise bad_value(where, self.theirs, value, f"`{self.also}` is {other!r}"[:80], code="conflict")
        value = other if value is None else value
        if value is None:
            if self.default is _REQUIRED:
                raise bad_value(where, self.theirs, None, "the field is missing", code="not-found")
            return self.default(document) if callable(self.default) else self.default
        return typed(where, self.theirs, value, self.kind)

    def write(self, cfg: TransformerConfig) -> Any:
        """Return the value of the field in a `TransformerConfig`."""
        value: Any = cfg
        for part in self.ours.split("."):
            value = getattr(value, part, None)
        return value


def typed(where: str, name: str, value: Any, kind: type) -> Any:
    """Return the value if it has this type and is within `MOST`."""
    kinds: Any = (int, float) if kind is float else kind
    is_kind = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
    if not is_kind or (kind is not bool and not (math.isfinite(value) and abs(value) < MOST[kind])):
        raise bad_value(where, name, value, f"the value must be {_TYPES[kind]}", code="wrong-type")
    return float(value) if kind is float else value


def positive(where: str, name: str, value: Any) -> int:
    """Return the value if it is an integer of at least 1."""
    if typed(where, name, value, int) < 1:
        raise bad_value(where, name, value, "it must be at least 1")
    return value


def same(value: object, supported: object) -> bool:
    """Return whether values are equal. In JSON, `true` differs from 1."""
    return value == supported and isinstance(value, bool) == isinstance(supported, bool)


def built(values: Mapping[str, Any]) -> TransformerConfig:
    """Build a config from its values by path."""
    parts = traverse_util.unflatten_dict(dict(values), sep=".")
    if "moe" in parts:
        parts["moe"] = MoEConfig(**parts["moe"] | {"routing": Routing(**parts["moe"]["routing"])})
    if "latent" in parts:
        parts["latent"] = LatentAttention(**parts["latent"])
    return TransformerConfig(**parts)


# ---- Rotary embeddings -----------------------------------------------------------------------------------------------

ROPES: dict[str, set[str]] = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "attention_factor", "truncate"},
    "linear": {"factor"},
    "longrope": {"short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"},
}  # fmt: skip
"""Supported fields for each type of `rope_scaling`."""


def read_rope(where: str, document: Mapping[str, Any], *, scores: bool = False) -> dict[str, Any]:
    """Return the values of `rope_scaling` and `rope_yarn` for a config.json."""
    scaling = document.get("rope_scaling")
    if scaling is None:
        return {}
    if not isinstance(scaling, Mapping):
        raise bad_value(where, "rope_scaling", scaling, "it must be an object or null", code="wrong-type")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the name in the first Phi-3 releases
    if not isinstance(kind, str) or kind not in ROPES:
        reason, fix = f"the supported types are {', '.join(ROPES)}", "use one, or add it to models/layers.py"
        if kind == "dynamic":
            fix = "set it to null for sequences of up to `max_position_embeddings` tokens, which are not scaled"
        raise bad_value(where, "rope_scaling.rope_type", kind, reason, fix)
    for name in sorted(scaling.keys() - ROPES[kind] - {"rope_type", "type"}):
        if (value := scaling[name]) is not None and not (name == "truncate" and value is True):
            reason = f'for rope type "{kind}" the decoders read {", ".join(sorted(ROPES[kind])) or "no fields"}'
            fix = "use a different checkpoint, or implement it in models/layers.py; without it frequencies may change"
            raise bad_value(where, f"rope_scaling.{name}", value, reason, fix)

    def number(name: str, default: float | None = None) -> float:
        if scaling.get(name) is None and default is not None:
            return default
        return typed(where, f"rope_scaling.{name}", scaling.get(name), float)

    if kind == "default":
        return {}
    if kind == "linear":
        return {"rope_linear": number("factor")}
    name = "original_max_position_embeddings"
    length = scaling.get(name, document.get(name, document.get("max_position_embeddings")))
    length = typed(where, f"rope_scaling.{name}", length, int)
    if kind == "longrope":

        def factors(name: str) -> tuple[float, ...]:
            path, values = f"rope_scaling.{name}", scaling.get(name)
            if not isinstance(values, list):
                raise bad_value(where, path, values, "it must be a list of numbers", code="wrong-type")
            return tuple(typed(where, path, value, float) for value in values)

        longest = positive(where, "max_position_embeddings", document.get("max_position_embeddings", length))
        factor = number("factor", longest / max(length, 1))
        if factor <= 0:
            raise bad_value(where, "rope_scaling.factor", factor, "it must be above 0")
        rotated = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 and length > 1 else 1.0
        long = LongRope(
            short_factor=factors("short_factor"),
            long_factor=factors("long_factor"),
            original_seq_len=length,
            rotated_factor=number("attention_factor", rotated),
        )
        return {"rope_long": long}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {"rope_scaling": RopeScaling(**{name: number(name) for name in names}, original_seq_len=length)}
    factor = number("factor")
    mscale, all_dim = number("mscale", 0.0), number("mscale_all_dim", 0.0)
    rotated = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    yarn = YarnScaling(
        factor=factor,
        original_seq_len=length,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        rotated_factor=number("attention_factor", rotated),
        truncate=typed(
            where, "rope_scaling.truncate", True if scaling.get("truncate") is None else scaling["truncate"], bool
        ),
        score_factor=_mscale(factor, all_dim) ** 2 if scores and all_dim else 1.0,
    )
    return {"rope_yarn": yarn}


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(cfg: TransformerConfig) -> dict[str, Any] | None:
    """Return the `rope_scaling` field of config.json for a `TransformerConfig`."""
    if cfg.rope_scaling is not None:
        kind, fields = "llama3", dataclasses.asdict(cfg.rope_scaling)
    elif cfg.rope_yarn is not None:
        kind, fields = "yarn", dataclasses.asdict(cfg.rope_yarn)
        fields["attention_factor"], score_factor = fields.pop("rotated_factor"), fields.pop("score_factor")
        if score_factor != 1:
            fields["mscale_all_dim"] = round((math.sqrt(score_factor) - 1) / (0.1 * math.log(fields["factor"])), 12)
    elif cfg.rope_long is not None:
        kind, fields = "longrope", dataclasses.asdict(cfg.rope_long)
        fields = {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}
        fields["attention_factor"] = fields.pop("rotated_factor")
    else:
        return {"rope_type": "linear", "factor": cfg.rope_linear} if cfg.rope_linear != 1 else None
    return {"rope_type": kind, "original_max_position_embeddings": fields.pop("original_seq_len"), **fields}
