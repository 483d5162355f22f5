"""`TransformerConfig`: the architecture of a decoder, and the model with this architecture."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from meshpar.models.architecture import Architecture

if TYPE_CHECKING:
    from meshpar.sharding.adapters.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(Architecture):
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU, as in Llama.

    The fields are those of `Architecture`.

    Example:
      >>> config = mp.models.TransformerConfig(
      ...     vocab_size=256, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64
      ... )
      >>> model = config.build()
      >>> config.num_params
      34976
    """

    def build(self) -> Model:
        """Return the NNX `Transformer` with this config, as a `Model`. Imports flax."""
        from meshpar.models.transformer import Transformer
        from meshpar.sharding.adapters.nnx import from_nnx

        return from_nnx(lambda rngs: Transformer(self, rngs=rngs))
