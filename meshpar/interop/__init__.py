"""Other frameworks' checkpoints in and out: `from_hf` and `to_hf` for folders of Hugging Face's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.sharding.lazy import lazy

if TYPE_CHECKING:
    from meshpar.interop.hf import config_of, from_hf, load_hf, to_hf

__getattr__, __dir__ = lazy(__name__)

__all__ = ["config_of", "from_hf", "load_hf", "to_hf"]
