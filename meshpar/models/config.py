"""Configuration of the decoders, with parameter counts and FLOPs in closed form."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from meshpar.moe.layer_config import MoEConfig
from meshpar.sharding.errors import check_bool, check_choice, check_int, check_number, check_positive_int
from meshpar.sharding.types import problem

if TYPE_CHECKING:
    from meshpar.sharding.adapters import Model

Attention = Literal["xla", "blockwise", "cudnn", "tokamax"]
TensorMatmul = Literal["xla", "overlapped"]
PARAM_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies in Llama 3.1, for sequences longer than in pretraining.

    Wavelengths below `original_seq_len / high_freq_factor` are unchanged, and wavelengths above
    `original_seq_len / low_freq_factor` are multiplied by `factor`, with a smooth transition (the `llama3` rope type of
    Meta's Llama 3.1 release, 2024).
    """

    factor: float = 8.0
    """Factor of the longest wavelengths."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_seq_len / low_freq_factor` are multiplied by `factor`."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_seq_len / high_freq_factor` are unchanged."""
    original_seq_len: int = 8192
    """Sequence length of pretraining, in tokens."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            where, reason = "RopeScaling(factor=...)", "it must be at least 1"
            raise problem(where, f"be {self.factor}", reason, "use 8.0", code="out-of-range")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            where = "RopeScaling(low_freq_factor=..., high_freq_factor=...)"
            requested = f"be {self.low_freq_factor} and {self.high_freq_factor}"
            reason = "both must be positive, and the first must be smaller"
            raise problem(where, requested, reason, "use 1.0 and 4.0", code="out-of-range")
        check_positive_int("RopeScaling", "a number of positions", original_seq_len=self.original_seq_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Scaling of rotary frequencies with YaRN: low frequencies are divided by `factor`, high frequencies unchanged.

    A linear ramp connects both ranges. Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language
    Models".
    """

    factor: float
    """Factor of the longest wavelengths."""
    original_seq_len: int
    """Sequence length of pretraining, in tokens."""
    beta_fast: float = 32.0
    """Frequencies with more rotations than this over `original_seq_len` are unchanged."""
    beta_slow: float = 1.0
    """Frequencies with fewer rotations than this over `original_seq_len` are divided by `factor`."""
    rotated_factor: float = 1.0
    """Factor of the cosines and sines (the square root of 1/t in the paper)."""
    score_factor: float = 1.0
    """Factor of the attention scores, including the dimensions without rotary embedding. Only with `latent`
    (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        for field in ("rotated_factor", "score_factor", "beta_slow"):
            check_number("YarnScaling", "1.0", **{field: getattr(self, field)})
        check_positive_int("YarnScaling", "a number of positions", original_seq_len=self.original_seq_len)
        for field, least in (("factor", 1.0), ("beta_fast", self.beta_slow)):
            if not least <= getattr(self, field) < math.inf:
                requested, reason = f"be {getattr(self, field)}", f"it must be finite and at least {least}"
                fix = f"use {max(least, 32.0)}"
                raise problem(f"YarnScaling({field}=...)", requested, reason, fix, code="out-of-range")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Options of multi-head latent attention, with low-rank projections that all heads share.

    DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1.
    """

    q_rank: int | None
    """Rank of the query projection. `None` means a full-rank projection of the residual stream."""
    kv_rank: int
    """Rank of the key and value projections."""
    nope_dim: int
    """Dimensions of a query and key head without rotary embedding."""
    rope_dim: int
    """Dimensions of a query and key head with rotary embedding (even). All heads share these key dimensions."""
    v_dim: int
    """Dimensions of a value head."""

    def __post_init__(self) -> None:
        for field in ("kv_rank", "nope_dim", "rope_dim", "v_dim", *(() if self.q_rank is None else ("q_rank",))):
            check_positive_int("LatentAttention", "a size", **{field: getattr(self, field)})
        if self.rope_dim % 2:
            where, reason = "LatentAttention(rope_dim=...)", "rotary embeddings need an even number of dimensions"
            raise problem(where, f"be {self.rope_dim}", reason, f"use {self.rope_dim + 1}", code="indivisible")

    @property
    def head_dim(self) -> int:
        """Dimensions of a query and key head."""
        return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU, as in Llama."""

    vocab_size: int
    """Size of the vocabulary."""
    num_layers: int
    """Number of layers."""
    embed_dim: int
    """Dimension of the residual stream."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key/value heads. Each serves `num_heads / num_kv_heads` query heads."""
    head_dim: int
    """Dimension of a head, an even number because of the rotary embeddings."""
    mlp_dim: int
    """Hidden dimension of the MLP. In an MoE model: hidden dimension of the dense layers."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths, which range from 2π to almost 2π·theta tokens."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies as in Llama 3.1."""
    rope_yarn: YarnScaling | None = None
    """Scaling of the rotary frequencies with YaRN, as an alternative to `rope_scaling`."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm, added to the mean square."""
    tied_embeddings: bool = False
    """Whether the output layer uses the embedding table."""
    param_dtype: str = "float32"
    """Dtype of the initial parameters. Computation uses the dtype of the parameters that the model receives."""
    attention: Attention = "blockwise"
    """Implementation of attention over full sequences. "blockwise" runs on all platforms with memory linear in the
    sequence length (`meshpar.collectives.blockwise_attention`). "xla" runs on all platforms and stores all scores.
    "cudnn" is cuDNN's flash attention (GPUs, bfloat16 or float16). "tokamax" is the flash attention of that package
    (GPUs, Python 3.12), which supports windows, caps and segments. There is no fallback to another implementation.
    Under `context_parallel()`, ring attention computes its tiles with cuDNN's kernel for "cudnn" and with matmuls for
    "xla" and "blockwise"; "tokamax" is an error."""
    attention_window: int | None = None
    """Sliding window of all layers: a position attends to itself and the `attention_window - 1` positions before it.
    `None` means full causal attention. Not supported by ring attention with cuDNN."""
    qk_norm: bool = False
    """Whether the query and key of each head have an RMSNorm before the rotary embedding (Qwen3). Not with `latent`."""
    attention_cap: float | None = None
    """Soft cap of the attention scores s, `cap tanh(s / cap)` (Gemma Team 2024, "Gemma 2"). Not supported by cuDNN."""
    tensor_matmul: TensorMatmul = "xla"
    """Matmuls of a layer under `tensor_parallel(sequence=True)`. With "xla", the compiler inserts an all-gather before
    and a reduce-scatter after them. With "overlapped", communication overlaps with the matmul of other blocks
    (`meshpar.collectives.all_gather_matmul`, `matmul_reduce_scatter`); without sequence parallelism this is an error.
    If the axis has a single device, or with a cache, ordinary matmuls are used."""
    vocab_chunk: int | None = None
    """Number of vocabulary tokens in a chunk of logits for the loss, on each device. The logits are computed in chunks
    and recomputed in the backward pass, so that the full logits are never stored
    (`meshpar.models.chunked_cross_entropy`). The model then returns an `Unembedding` instead of logits, except with a
    cache. 8192 is a good size on GPUs. `None` disables chunking."""
    logits_cap: float | None = None
    """Soft cap of the logits l, `cap tanh(l / cap)`, computed in float32 or higher precision."""
    latent: LatentAttention | None = None
    """Multi-head latent attention instead of grouped-query attention. `num_kv_heads` must then equal `num_heads`, and
    `head_dim` the dimension of a query and key head."""
    moe: MoEConfig | None = None
    """MoE layer that replaces the MLP in all but the first `num_dense_layers` layers."""
    num_dense_layers: int = 0
    """Number of initial layers of an MoE model that have an ordinary MLP."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            check_positive_int("TransformerConfig", "a size", **{field: getattr(self, field)})
        for field in ("vocab_chunk", "attention_window"):
            if getattr(self, field) is not None:
                check_positive_int("TransformerConfig", "a size", **{field: getattr(self, field)})
        for field in ("attention_cap", "logits_cap"):
            if getattr(self, field) is not None:
                check_number("TransformerConfig", "50.0, or None", **{field: getattr(self, field)})
        self._check_heads()
        self._check_rope()
        self._check_latent()
        self._check_experts()
        for field in ("rope_theta", "norm_eps"):
            check_number("TransformerConfig", "1e-5", **{field: getattr(self, field)})
        if self.norm_eps > 1:
            where, reason = "TransformerConfig(norm_eps=...)", "it is added to a mean square of about 1"
            raise problem(where, f"be {self.norm_eps:g}", reason, "use 1e-5", code="out-of-range")
        check_bool(
            "TransformerConfig", "the output layer uses the embedding table", tied_embeddings=self.tied_embeddings
        )
        check_bool("TransformerConfig", "queries and keys have an RMSNorm", qk_norm=self.qk_norm)
        check_choice("TransformerConfig", "the dtype of parameters", PARAM_DTYPES, param_dtype=self.param_dtype)
        check_choice("TransformerConfig", "the kind of attention", get_args(Attention), attention=self.attention)
        check_choice("TransformerConfig", "the matmul", get_args(TensorMatmul), tensor_matmul=self.tensor_matmul)

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            requested = f"share {self.num_kv_heads} key/value heads among {self.num_heads} query heads"
            reason = f"{self.num_heads} is not a multiple of {self.num_kv_heads}"
            where, fix = "TransformerConfig(num_kv_heads=...)", f"use a divisor of {self.num_heads}"
            raise problem(where, requested, reason, fix, code="indivisible")
        if self.head_dim % 2:
            where, reason = "TransformerConfig(head_dim=...)", "rotary embeddings need an even number of dimensions"
            raise problem(where, f"be {self.head_dim}", reason, f"use {self.head_dim + 1}", code="indivisible")

    def _check_rope(self) -> None:
        if self.rope_yarn is None:
            return
        _check_type("rope_yarn", self.rope_yarn, YarnScaling)
        if self.rope_scaling is not None:
            where, reason = "TransformerConfig(rope_scaling=..., rope_yarn=...)", "they are alternatives"
            raise problem(where, "use both", reason, "omit one of them", code="conflict")
        if self.rope_yarn.score_factor != 1 and self.latent is None:
            where = f"TransformerConfig(rope_yarn=YarnScaling(score_factor={self.rope_yarn.score_factor}))"
            reason = "score_factor is supported only with latent attention"
            fix = "use rotated_factor, or set latent=LatentAttention(...)"
            raise problem(where, "scale the attention scores", reason, fix, code="conflict")

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        _check_type("latent", self.latent, LatentAttention)
        if self.qk_norm:
            where, reason = (
                "TransformerConfig(qk_norm=True, latent=...)",
                "latent attention normalizes the latents instead",
            )
            raise problem(where, "normalize queries and keys", reason, "omit qk_norm", code="conflict")
        sizes = {
            "num_kv_heads": (self.num_heads, "num_heads"),
            "head_dim": (self.latent.head_dim, "nope_dim + rope_dim"),
        }
        for field, (value, formula) in sizes.items():
            if getattr(self, field) != value:
                where = f"TransformerConfig({field}={getattr(self, field)}, latent=...)"
                reason = f"with latent attention it must equal {formula}, {value}"
                raise problem(where, "use this value", reason, f"use {field}={value}", code="conflict")
        if self.tensor_matmul != "xla":
            where = f"TransformerConfig(tensor_matmul={self.tensor_matmul!r}, latent=...)"
            reason = "it gathers the residual stream, and latent attention gathers the latents"
            fix = 'use tensor_matmul="xla"'
            raise problem(where, "overlap the matmuls of attention", reason, fix, code="unsupported-feature")

    def _check_experts(self) -> None:
        count = self.num_dense_layers
        where = f"TransformerConfig(num_dense_layers={count!r})"
        check_int("TransformerConfig", "a number of layers", num_dense_layers=count)
        if self.moe is None and count:
            reason, fix = "without `moe` all layers are dense", "omit it, or set moe=MoEConfig(...)"
            raise problem(where, "add dense layers before the MoE layers", reason, fix, code="conflict")
        if self.moe is None:
            return
        _check_type("moe", self.moe, MoEConfig)
        if count >= self.num_layers:
            reason = f"there are {self.num_layers} layers, and at least one must be an MoE layer"
            raise problem(where, "use this value", reason, "use fewer, or omit `moe`", code="out-of-range")
        if not count and self.mlp_dim != self.moe.mlp_dim:
            where = f"TransformerConfig(mlp_dim={self.mlp_dim}, moe=...)"
            reason = "there are no dense layers, and the hidden dimension of the experts is moe.mlp_dim"
            fix = f"use mlp_dim={self.moe.mlp_dim}, or set num_dense_layers"
            raise problem(where, "set the size of the dense layers", reason, fix, code="conflict")

    @property
    def attention_limits(self) -> dict[str, Any]:
        """Keyword arguments for all implementations of attention."""
        return {"window": self.attention_window, "cap": self.attention_cap}

    @property
    def num_moe_layers(self) -> int:
        """Number of MoE layers."""
        return 0 if self.moe is None else self.num_layers - self.num_dense_layers

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        tables = self.vocab_size * self.embed_dim * (1 if self.tied_embeddings else 2)
        norms = self.embed_dim * (2 * self.num_layers + 1)
        norms += 2 * self.head_dim * self.num_layers * self.qk_norm
        if self.latent is not None:
            norms += self.num_layers * ((self.latent.q_rank or 0) + self.latent.kv_rank)
        experts = 0 if self.moe is None else self.num_moe_layers * self.moe.num_params(self.embed_dim)
        return tables + norms + self._dense_matmul_params + experts

    @property
    def num_active_params(self) -> int:
        """Number of active parameters, with only the experts that process a token."""
        return self.num_params - self.num_moe_layers * self._idle_params

    @property
    def _idle_params(self) -> int:
        """Number of inactive expert parameters in an MoE layer."""
        return 0 if self.moe is None else self.moe.num_params(self.embed_dim) - self.moe.active_params(self.embed_dim)

    @property
    def _dense_matmul_params(self) -> int:
        """Number of matmul parameters in all layers, without experts."""
        mlp = 3 * self.embed_dim * self.mlp_dim
        return self.num_layers * self._attention_matmul_params + (self.num_layers - self.num_moe_layers) * mlp

    @property
    def _attention_matmul_params(self) -> int:
        width, heads, latent = self.embed_dim, self.num_heads, self.latent
        if latent is None:
            return 2 * width * self.head_dim * (heads + self.num_kv_heads)
        into_query = heads * latent.head_dim
        query = width * into_query if latent.q_rank is None else latent.q_rank * (width + into_query)
        key_value = width * (latent.kv_rank + latent.rope_dim)
        key_value += latent.kv_rank * heads * (latent.nope_dim + latent.v_dim)
        return query + key_value + heads * latent.v_dim * width

    def flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs per training token, forward and backward: `6 N + 12 L H D T`.

        N is the number of matmul parameters per token: all matrices of the layers, with only the active experts, and
        the output layer, but not the embedding lookup or the norms. Each parameter takes a multiply and an add in the
        forward pass, and twice as many in the backward pass. The second term is attention with L layers and H heads of
        dimension D (the mean of the key and value dimensions) over T positions. It includes the half that a causal
        kernel can skip. Recomputation is not included. (Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with
        Pathways", appendix B.)

        Args:
          seq_len: sequence length T.
        """
        experts = 0 if self.moe is None else self.num_moe_layers * self.moe.active_params(self.embed_dim)
        matmul_params = self._dense_matmul_params + experts + self.vocab_size * self.embed_dim
        key_and_value = self.head_dim + (self.head_dim if self.latent is None else self.latent.v_dim)
        attention = self.num_layers * self.num_heads * key_and_value * seq_len
        return 6 * matmul_params + 6 * attention

    def build(self) -> Model:
        """Return the NNX `Transformer` with this config, as a `Model`."""
        from meshpar.models.transformer import Transformer
        from meshpar.sharding.adapters import from_nnx

        return from_nnx(lambda rngs: Transformer(self, rngs=rngs))


def _check_type(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        where, reason = f"TransformerConfig({field}=...)", f"it must be a {kind.__name__} or None"
        raise problem(
            where, f"be {value!r}", reason, f"use {field}={kind.__name__}(...), or omit it", code="wrong-type"
        )
