"""The mapping between fields of a `config.json` and of `TransformerConfig`, for reading and writing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshpar.models.config import LatentAttention, RopeScaling, TransformerConfig, YarnScaling
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.sharding.types import problem

MAX_VALUE = {int: 2**22, float: 2.0**60}
"""Limits of the numbers in a config.json, so that a damaged file cannot allocate much memory."""
_REQUIRED = object()
_TYPES = {int: "an integer", float: "a finite number", bool: "true or false"}
RELEASE_CONFIG = "use the config.json of the release"


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a config.json that `TransformerConfig` has too."""

    name: str
    path: str
    """Path in `TransformerConfig`, such as `moe.routing.top_k`."""
    kind: type = int
    """Type of the value: int, float or bool."""
    default: Any = _REQUIRED
    """Value if the field is missing or null, or a function of the document that returns it."""
    alias: str | None = None
    """Another name that transformers reads or writes."""

    def read(self, where: str, document: Mapping[str, Any]) -> Any:
        """Return the checked value."""
        where = f"{where}, `{self.name}`"
        value, other = document.get(self.name), document.get(self.alias or self.name)
        if value is not None and other is not None and value != other:
            reason = f"`{self.alias}` is {other!r}"[:80]
            raise problem(where, f"be {value!r}"[:80], reason, RELEASE_CONFIG, code="conflict")
        value = other if value is None else value
        if value is not None:
            return parse_scalar(where, value, self.kind)
        if self.default is _REQUIRED:
            raise problem(where, "read it", "it is missing", RELEASE_CONFIG, code="missing-argument")
        return self.default(document) if callable(self.default) else self.default

    def write(self, cfg: TransformerConfig) -> Any:
        """Return the value that a config has for this field."""
        value: Any = cfg
        for name in self.path.split("."):
            value = getattr(value, name, None)
        return value


def parse_scalar(where: str, value: Any, kind: type) -> Any:
    """Check the type and range of a value, and return it. Integers are converted if `kind` is float."""
    is_kind = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not is_kind or (kind is not bool and not (math.isfinite(value) and abs(value) < MAX_VALUE[kind])):
        shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
        raise problem(where, f"be {shown}", f"it must be {_TYPES[kind]}", RELEASE_CONFIG, code="wrong-type")
    return float(value) if kind is float else value


def make_config(values: Mapping[str, Any]) -> TransformerConfig:
    """Create a config from values by path."""
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        parent, _, name = path.rpartition(".")
        nested.setdefault(parent, {})[name] = value
    fields = nested[""]
    if "moe.routing" in nested:
        fields["moe"] = MoEConfig(routing=Routing(**nested["moe.routing"]), **nested.get("moe", {}))
    if "latent" in nested:
        fields["latent"] = LatentAttention(**nested["latent"])
    return TransformerConfig(**fields)


# ---- Rotary embeddings -----------------------------------------------------------------------------------------------

ROPE_FIELDS: dict[str, set[str]] = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "attention_factor"},
}  # fmt: skip
"""Supported fields of `rope_scaling` by rope type."""
ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "truncate": True}
"""Fields of `rope_scaling` that are supported only with this value."""


def read_rope(where: str, document: Mapping[str, Any], *, scale_scores: bool = False) -> dict[str, Any]:
    """Return the config fields `rope_scaling` or `rope_yarn` for the `rope_scaling` of a config.json.

    Args:
      where: name of the file, for errors.
      document: the config.json.
      scale_scores: True if `mscale_all_dim` also scales the attention scores, as in DeepSeek-V3.
    """
    rope, where = document.get("rope_scaling"), f"{where}, `rope_scaling"
    if rope is None:
        return {}
    if not isinstance(rope, Mapping):
        requested = f"be a {type(rope).__name__}"
        raise problem(f"{where}`", requested, "it must be an object or null", "write null", code="wrong-type")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        reason = f"the supported types are {', '.join(ROPE_FIELDS)}"
        fix = "use another checkpoint, or implement the type in models/layers.py"
        raise problem(f"{where}.rope_type`", f"be {str(kind)[:60]!r}", reason, fix, code="unsupported-feature")
    for name in sorted(rope.keys() - ROPE_FIELDS[kind] - {"rope_type", "type"}):
        value, default = rope[name], ROPE_DEFAULTS.get(name)
        is_default = default is not None and value == default and isinstance(value, bool) == isinstance(default, bool)
        if value is not None and not is_default:
            reason = f'for rope type "{kind}" the supported fields are {", ".join(sorted(ROPE_FIELDS[kind])) or "none"}'
            reason = reason if default is None else f"only {default!r} is supported"
            fix = "use another checkpoint, or implement it in models/layers.py. Removing it may change the frequencies"
            raise problem(f"{where}.{name[:60]}`", f"be {value!r}"[:80], reason, fix, code="unsupported-feature")

    def number(name: str, default: float | None = None) -> float:
        value = rope.get(name)
        return parse_scalar(f"{where}.{name}`", default if value is None else value, float)

    if kind == "default":
        return {}
    length = rope.get("original_max_position_embeddings", document.get("max_position_embeddings"))
    length = parse_scalar(f"{where}.original_max_position_embeddings`", length, int)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {"rope_scaling": RopeScaling(**{name: number(name) for name in names}, original_seq_len=length)}
    factor, mscale, all_dim = number("factor"), number("mscale", 0.0), number("mscale_all_dim", 0.0)
    rotated = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    yarn = YarnScaling(
        factor=factor,
        original_seq_len=length,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        rotated_factor=number("attention_factor", rotated),
        score_factor=_mscale(factor, all_dim) ** 2 if scale_scores and all_dim else 1.0,
    )
    return {"rope_yarn": yarn}


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(cfg: TransformerConfig) -> dict[str, Any] | None:
    """Return the `rope_scaling` field of a config.json."""
    if cfg.rope_scaling is not None:
        llama = cfg.rope_scaling
        return {
            "rope_type": "llama3",
            "factor": llama.factor,
            "low_freq_factor": llama.low_freq_factor,
            "high_freq_factor": llama.high_freq_factor,
            "original_max_position_embeddings": llama.original_seq_len,
        }
    if cfg.rope_yarn is None:
        return None
    yarn = cfg.rope_yarn
    fields = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "attention_factor": yarn.rotated_factor,
    }
    if yarn.score_factor != 1:
        fields["mscale_all_dim"] = round((math.sqrt(yarn.score_factor) - 1) / (0.1 * math.log(yarn.factor)), 12)
    return fields
