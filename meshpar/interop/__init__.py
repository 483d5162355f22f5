"""Checkpoint conversion for Hugging Face folders and PEFT adapters."""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.interop.hf import config_of, from_hf, load_hf, to_hf
    from meshpar.interop.peft import load_peft, lora_of_peft, to_peft

__getattr__, __dir__ = lazy(__name__)

__all__ = ["config_of", "from_hf", "load_hf", "load_peft", "lora_of_peft", "to_hf", "to_peft"]
