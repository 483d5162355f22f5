"""Table entries that map `config.json` fields to `TransformerConfig` fields, for reading and writing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from meshpar.models.config import LatentAttention, RopeScaling, TransformerConfig, YarnScaling
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.sharding.types import problem

MOST = {int: 2**22, float: 2.0**60}
"""Upper limits of the numbers in a config, so that untrusted configs cannot cause large allocations."""
_REQUIRED = object()
_TYPES = {int: "an integer", float: "a finite number", bool: "true or false"}


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
        """Return the value of the field in a config.json and check its type.

        Args:
          where: the file, for error messages.
          document: the parsed config.json.

        Raises:
          ValueError: the field is missing, has the wrong type, or differs from its alternative name.
        """
        value, other = document.get(self.theirs), document.get(self.also or self.theirs)
        if value is not None and other is not None and value != other:
            reason, fix = f"`{self.also}` is {other!r}"[:80], "use the config.json of the release"
            raise problem(f"{where}, `{self.theirs}`", f"be {value!r}"[:80], reason, fix, code="conflict")
        value = other if value is None else value
        if value is None:
            if self.default is _REQUIRED:
                field, fix = f"{where}, `{self.theirs}`", "use the complete config.json"
                raise problem(field, "read the field", "it is missing", fix, code="not-found")
            return self.default(document) if callable(self.default) else self.default
        return typed(f"{where}, `{self.theirs}`", value, self.kind)

    def write(self, cfg: TransformerConfig) -> Any:
        """Return the value of the field in a `TransformerConfig`.

        Args:
          cfg: the config to read from.
        """
        value: Any = cfg
        for part in self.ours.split("."):
            value = getattr(value, part, None)
        return value


def typed(where: str, value: Any, kind: type) -> Any:
    """Return the value if it has this type and is within `MOST`.

    Args:
      where: the file and the field, for error messages.
      value: the parsed value.
      kind: int, float or bool.

    Raises:
      ValueError: the value has the wrong type or is too large.
    """
    kinds: Any = (int, float) if kind is float else kind
    is_kind = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
    if not is_kind or (kind is not bool and not (math.isfinite(value) and abs(value) < MOST[kind])):
        shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
        fix = "use the config.json of the release"
        raise problem(where, f"be {shown}", f"the value must be {_TYPES[kind]}", fix, code="wrong-type")
    return float(value) if kind is float else value


def built(values: Mapping[str, Any]) -> TransformerConfig:
    """Build a config from its values.

    Args:
      values: the value for each path, such as `moe.routing.top_k`.
    """
    routing = {name.rpartition(".")[2]: value for name, value in values.items() if name.startswith("moe.routing.")}
    moe = {name[4:]: value for name, value in values.items() if name.startswith("moe.") and name.count(".") == 1}
    latent = {name[7:]: value for name, value in values.items() if name.startswith("latent.")}
    parts: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    if routing:
        parts["moe"] = MoEConfig(routing=Routing(**routing), **moe)
    if latent:
        parts["latent"] = LatentAttention(**latent)
    return TransformerConfig(**parts)


# ---- Rotary embeddings -----------------------------------------------------------------------------------------------

ROPES: dict[str, set[str]] = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "attention_factor"},
}  # fmt: skip
"""Supported fields for each type of `rope_scaling`."""
ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "truncate": True}
"""Fields of `rope_scaling` with their only supported value. Other values would change the frequencies."""


def read_rope(where: str, document: Mapping[str, Any], *, scores: bool = False) -> dict[str, Any]:
    """Return the values of `rope_scaling` and `rope_yarn` for a config.json.

    Args:
      where: the file, for error messages.
      document: the parsed config.json.
      scores: whether `mscale_all_dim` also scales the attention scores.

    Raises:
      ValueError: a type or a field of `rope_scaling` is not supported.
    """
    given = document.get("rope_scaling")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        requested, reason = f"be a {type(given).__name__}", "it must be an object or null"
        raise problem(f"{where}, `rope_scaling`", requested, reason, "set it to null", code="wrong-type")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPES:
        reason, fix = (
            f"the supported types are {', '.join(ROPES)}",
            "use a supported type, or add it to models/layers.py",
        )
        field = f"{where}, `rope_scaling.rope_type`"
        raise problem(field, f"use {str(kind)[:60]!r}", reason, fix, code="unsupported-feature")
    unknown = given.keys() - ROPES[kind] - {"rope_type", "type"}
    for name in sorted(name for name in unknown if given[name] is not None):
        value, only = given[name], ROPE_DEFAULTS.get(name)
        if only is None or value != only or isinstance(value, bool) != isinstance(only, bool):
            reason = f'for rope type "{kind}" the decoders read {", ".join(sorted(ROPES[kind])) or "no fields"}'
            reason = reason if only is None else f"the decoders support {only!r} only"
            fix = "use a different checkpoint, or implement it in models/layers.py; without it frequencies may change"
            field = f"{where}, `rope_scaling.{name[:60]}`"
            raise problem(field, f"be {value!r}"[:80], reason, fix, code="unsupported-feature")

    def number(name: str, default: Any = None) -> float:
        if given.get(name) is None and default is not None:
            return default
        return typed(f"{where}, `rope_scaling.{name}`", given.get(name), float)

    if kind == "default":
        return {}
    most = document.get("max_position_embeddings")
    length = typed(
        f"{where}, `rope_scaling.original_max_position_embeddings`",
        given.get("original_max_position_embeddings", most), int,
    )  # fmt: skip
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
        score_factor=_mscale(factor, all_dim) ** 2 if scores and all_dim else 1.0,
    )
    return {"rope_yarn": yarn}


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(cfg: TransformerConfig) -> dict[str, Any] | None:
    """Return the `rope_scaling` field of config.json for a `TransformerConfig`.

    Args:
      cfg: the config of the decoder.
    """
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
    written = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "attention_factor": yarn.rotated_factor,
    }
    if yarn.score_factor != 1:
        written["mscale_all_dim"] = round((math.sqrt(yarn.score_factor) - 1) / (0.1 * math.log(yarn.factor)), 12)
    return written


Derive = Callable[[str, Mapping[str, Any], dict[str, Any]], None]
"""Function of (where, document, values by path) that updates the values for a family."""
