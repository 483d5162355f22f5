"""Mistral checkpoints: the tensors of Llama, with sliding-window attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import DENSE, GROUPED, MLP, Family, fields, tensors
from meshpar.interop.fields import Field

WINDOW = Field("sliding_window", "attention_window", int, None)
DEFAULT_WINDOW = 4096
"""Default window of transformers if config.json lacks the field. A null value means no window."""


def _window(document: Mapping[str, Any]) -> int | None:
    return None if WINDOW.theirs in document else DEFAULT_WINDOW


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=fields(*GROUPED, *DENSE, dataclasses.replace(WINDOW, default=_window)),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    tensors=tensors(*MLP),
)
