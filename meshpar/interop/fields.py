"""The fields of a `config.json`, as a table: what each is in `TransformerConfig`, read and written by the same line."""

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
"""No number of a config is larger: what is made of it before files are looked at has to stay small."""
_REQUIRED = object()
_TYPES = {int: "a whole number", float: "a finite number", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a config.json that is one of ours."""

    theirs: str
    """Its name there."""
    ours: str
    """Its path in `TransformerConfig`, as `moe.routing.top_k`."""
    kind: type = int
    """Of its value: int, float or bool."""
    default: Any = _REQUIRED
    """Where it is missing or null: a value, or a function of the document."""
    also: str | None = None
    """Another name of the field that transformers reads or writes."""

    def read(self, where: str, document: Mapping[str, Any]) -> Any:
        """Its value, checked."""
        value, other = document.get(self.theirs), document.get(self.also or self.theirs)
        if value is not None and other is not None and value != other:
            exists, fix = f"`{self.also}` is {other!r}"[:80], "take the config.json of the release"
            raise problem(f"{where}, `{self.theirs}`", f"be {value!r}"[:80], exists, fix)
        value = other if value is None else value
        if value is None:
            if self.default is _REQUIRED:
                raise problem(f"{where}, `{self.theirs}`", "read it", "it is missing", "take the whole config.json")
            return self.default(document) if callable(self.default) else self.default
        return typed(f"{where}, `{self.theirs}`", value, self.kind)

    def write(self, cfg: TransformerConfig) -> Any:
        """Its value in a config of ours."""
        value: Any = cfg
        for part in self.ours.split("."):
            value = getattr(value, part, None)
        return value


def typed(where: str, value: Any, kind: type) -> Any:
    """The value, if it is of that kind and no larger than numbers of a config are."""
    kinds: Any = (int, float) if kind is float else kind
    is_kind = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
    if not is_kind or (kind is not bool and not (math.isfinite(value) and abs(value) < MOST[kind])):
        shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
        raise problem(where, f"be {shown}", f"it is {_TYPES[kind]}", "take the config.json of the release")
    return float(value) if kind is float else value


def built(values: Mapping[str, Any]) -> TransformerConfig:
    """A config of values by their paths."""
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
"""What `rope_scaling` may say, by its type."""
ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "truncate": True}
"""Fields of `rope_scaling` that change the frequencies unless they have this value."""


def read_rope(where: str, document: Mapping[str, Any], *, scores: bool = False) -> dict[str, Any]:
    """`rope_scaling` and `rope_yarn` of a config.json; `scores`: whether `mscale_all_dim` scales scores, too."""
    given = document.get("rope_scaling")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise problem(f"{where}, `rope_scaling`", f"be a {type(given).__name__}", "it is an object", "write null")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPES:
        exists, fix = f"the decoders rotate by {', '.join(ROPES)}", "train without, or add it to models/layers.py"
        raise problem(f"{where}, `rope_scaling.rope_type`", f"rotate by {str(kind)[:60]!r}", exists, fix)
    unknown = given.keys() - ROPES[kind] - {"rope_type", "type"}
    for name in sorted(name for name in unknown if given[name] is not None):
        value, only = given[name], ROPE_DEFAULTS.get(name)
        if only is None or value != only or isinstance(value, bool) != isinstance(only, bool):
            exists = f'for rope type "{kind}" the decoders read {", ".join(sorted(ROPES[kind])) or "no fields"}'
            exists = exists if only is None else f"the decoders support {only!r} only"
            fix = "take another checkpoint, or implement it in models/layers.py; removing it may change the frequencies"
            raise problem(f"{where}, `rope_scaling.{name[:60]}`", f"be {value!r}"[:80], exists, fix)

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
    """`rope_scaling` of a config of ours."""
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
"""What a family adds to the values of its fields: (where, document, values by path, which it changes)."""
