"""The shape of a decoder: its sizes, checked, and what follows from them in closed form."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from meshpar.collectives.kernel_checks import check_choice
from meshpar.moe.argument_checks import check_positive, check_whole
from meshpar.moe.layer_config import MoEConfig
from meshpar.sharding.types import problem

if TYPE_CHECKING:
    from meshpar.sharding.adapters import Model

Attention = Literal["xla", "blockwise", "cudnn", "tokamax"]
TensorMatmul = Literal["xla", "overlapped"]
PARAM_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary frequencies to reach past the sequence length it was first trained on.

    Wavelengths shorter than `original_seq_len / high_freq_factor` stay, those longer than
    `original_seq_len / low_freq_factor` are stretched by `factor`, and those between go smoothly from one to the other
    (the `llama3` rope type of Meta's Llama 3.1 release, 2024).
    """

    factor: float = 8.0
    """By how much the longest wavelengths are stretched."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_seq_len` over this are stretched in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_seq_len` over this are left alone."""
    original_seq_len: int = 8192
    """Sequence length before the stretch, in tokens."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise problem(
                "RopeScaling(factor=...)", f"be {self.factor}", "it stretches, so it is at least 1", "use 8.0"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            where = "RopeScaling(low_freq_factor=..., high_freq_factor=...)"
            asked = f"be {self.low_freq_factor} and {self.high_freq_factor}"
            raise problem(where, asked, "both are positive and the first is the smaller", "use 1.0 and 4.0")
        check_whole("RopeScaling", "original_seq_len", self.original_seq_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """How YaRN stretches rotary frequencies: slow pairs by `factor`, fast ones not at all, a ramp between them.

    Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models".
    """

    factor: float
    """By how much the slow pairs are stretched."""
    original_seq_len: int
    """Sequence length before the stretch, in tokens."""
    beta_fast: float = 32.0
    """Pairs that turn more often than this over `original_seq_len` are left alone."""
    beta_slow: float = 1.0
    """Pairs that turn less often than this are stretched in full."""
    rotated_factor: float = 1.0
    """Cosines and sines are multiplied by it (the paper's square root of 1/t)."""
    score_factor: float = 1.0
    """Scores are multiplied by it, those of the part that is not rotated too; with `latent` only (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        for field in ("rotated_factor", "score_factor", "beta_slow"):
            check_positive("YarnScaling", field, getattr(self, field), "1.0")
        check_whole("YarnScaling", "original_seq_len", self.original_seq_len)
        for field, least in (("factor", 1.0), ("beta_fast", self.beta_slow)):
            if not least <= getattr(self, field) < math.inf:
                asked, exists = f"be {getattr(self, field)}", f"it is finite and at least {least}"
                raise problem(f"YarnScaling({field}=...)", asked, exists, f"use {max(least, 32.0)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: queries, keys and values out of narrow vectors that all heads share.

    DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1.
    """

    q_rank: int | None
    """Width of the vector that queries are made of; None: they are made of the residual stream."""
    kv_rank: int
    """Width of the vector that keys and values are made of."""
    nope_dim: int
    """Width of the part of a head's query and key that is not rotated."""
    rope_dim: int
    """Width of the part that is rotated; even. All heads share one such key."""
    v_dim: int
    """Width of a head's value."""

    def __post_init__(self) -> None:
        for field in ("kv_rank", "nope_dim", "rope_dim", "v_dim", *(() if self.q_rank is None else ("q_rank",))):
            check_whole("LatentAttention", field, getattr(self, field))
        if self.rope_dim % 2:
            exists = "rotary embeddings turn pairs, so it is even"
            raise problem("LatentAttention(rope_dim=...)", f"be {self.rope_dim}", exists, f"use {self.rope_dim + 1}")

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU, as in Llama."""

    vocab_size: int
    """Tokens there are."""
    num_layers: int
    """Blocks of attention and MLP."""
    embed_dim: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves `num_heads / num_kv_heads` query heads."""
    head_dim: int
    """Width of one head; even, because rotary embeddings turn pairs."""
    mlp_dim: int
    """Width of the MLP's hidden layer; with experts, of that of the dense layers."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths: they run from 2π to nearly 2π·theta tokens."""
    rope_scaling: RopeScaling | None = None
    """How the rotary frequencies are stretched; None: they are not."""
    rope_yarn: YarnScaling | None = None
    """The other way to stretch them, in place of `rope_scaling`."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = False
    """The output layer is the embedding table, not a matrix of its own."""
    param_dtype: str = "float32"
    """Dtype in which parameters are made. Compute follows the dtype of the parameters the model is given."""
    attention: Attention = "blockwise"
    """Attention over whole sequences: "blockwise" runs anywhere, in memory that grows with the sequence
    (`meshpar.collectives.blockwise_attention`); "xla" runs anywhere, too, and holds all scores; "cudnn" is cuDNN's
    flash attention (GPUs, bfloat16 or float16 compute) and "tokamax" that package's (GPUs, Python 3.12), which takes
    windows, caps and segments, too. None falls back to another. Under `context_parallel()` the sequence is attended to
    round a ring of ranks in tiles, which are cuDNN's kernel with "cudnn" and plain matmuls with the first two;
    "tokamax" is refused there."""
    attention_window: int | None = None
    """A position sees itself and so many less one before it, in every layer; None: all before it. Not round a ring of
    ranks."""
    qk_norm: bool = False
    """Every head's query and key pass an RMSNorm of their own width before they are rotated (Qwen3); not with
    `latent`."""
    attention_cap: float | None = None
    """Scores s of attention become `cap tanh(s / cap)` (Gemma Team 2024, "Gemma 2"); None: they stay. Not by cuDNN."""
    tensor_matmul: TensorMatmul = "xla"
    """Matmuls of a block under `tensor_parallel(sequence=True)`: "xla" leaves what they need to the compiler, as an
    all-gather before and a reduce-scatter behind; "overlapped" sends blocks of rows while it multiplies others
    (`meshpar.collectives.all_gather_matmul`, `matmul_reduce_scatter`). It is an error where the sequence is not split
    between blocks; with one rank on the axis that splits it, and with a cache, matmuls are plain."""
    vocab_chunk: int | None = None
    """Logits for the loss are made of so many tokens of the vocabulary at a time (on each rank that holds a part of
    it), forward and again backward, so that no array holds those of all (`meshpar.models.chunked_cross_entropy`). The model then
    gives an `Unembedding` where it gave logits; with a cache they are plain. 8192 is a good size on GPUs. None: all at
    once."""
    logits_cap: float | None = None
    """Logits l become `cap tanh(l / cap)`, in float32 at the least; None: they stay."""
    latent: LatentAttention | None = None
    """Multi-head latent attention in place of grouped-query attention; every head then has a key and a value of its
    own, and `head_dim` is the width of its query and key."""
    moe: MoEConfig | None = None
    """An MoE layer in place of the MLP, in all layers but the first `num_dense_layers`."""
    num_dense_layers: int = 0
    """How many of the layers, the first, have an MLP where the others have experts."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            check_whole("TransformerConfig", field, getattr(self, field))
        for field in ("vocab_chunk", "attention_window"):
            if getattr(self, field) is not None:
                check_whole("TransformerConfig", field, getattr(self, field))
        for field in ("attention_cap", "logits_cap"):
            if getattr(self, field) is not None:
                check_positive("TransformerConfig", field, getattr(self, field), "50.0, or None")
        self._check_heads()
        self._check_rope()
        self._check_latent()
        self._check_experts()
        for field in ("rope_theta", "norm_eps"):
            check_positive("TransformerConfig", field, getattr(self, field), "1e-5, say")
        if self.norm_eps > 1:
            exists = "it is added to a mean square, which is about 1"
            raise problem("TransformerConfig(norm_eps=...)", f"be {self.norm_eps:g}", exists, "use 1e-5")
        for field in ("tied_embeddings", "qk_norm"):
            if not isinstance(value := getattr(self, field), bool):
                where, fix = f"TransformerConfig({field}=...)", f"write {field}=True, or False"
                raise problem(where, f"be {value!r}", "it is True or False", fix)
        check_choice("TransformerConfig", "param_dtype", self.param_dtype, PARAM_DTYPES)
        check_choice("TransformerConfig", "attention", self.attention, get_args(Attention))
        check_choice("TransformerConfig", "tensor_matmul", self.tensor_matmul, get_args(TensorMatmul))

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            asked = f"share {self.num_kv_heads} key/value heads among {self.num_heads} query heads"
            exists = f"{self.num_heads} is not a multiple of {self.num_kv_heads}"
            raise problem("TransformerConfig(num_kv_heads=...)", asked, exists, f"use a divisor of {self.num_heads}")
        if self.head_dim % 2:
            exists = "rotary embeddings turn pairs, so it is even"
            raise problem("TransformerConfig(head_dim=...)", f"be {self.head_dim}", exists, f"use {self.head_dim + 1}")

    def _check_rope(self) -> None:
        if self.rope_yarn is None:
            return
        _record("rope_yarn", self.rope_yarn, YarnScaling)
        if self.rope_scaling is not None:
            exists, fix = "frequencies are stretched in one way", "leave one of them out"
            raise problem("TransformerConfig(rope_scaling=..., rope_yarn=...)", "stretch by both", exists, fix)
        if self.rope_yarn.score_factor != 1 and self.latent is None:
            where = f"TransformerConfig(rope_yarn=YarnScaling(score_factor={self.rope_yarn.score_factor}))"
            asked, fix = "multiply scores by it", "use rotated_factor, or give latent=LatentAttention(...)"
            raise problem(where, asked, "that is for latent attention, where a part of the keys is not rotated", fix)

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        _record("latent", self.latent, LatentAttention)
        if self.qk_norm:
            exists = "latent attention has norms of its own, of the narrow vectors"
            raise problem("TransformerConfig(qk_norm=True, latent=...)", "norm heads", exists, "leave qk_norm out")
        follows = {"num_kv_heads": self.num_heads, "head_dim": self.latent.head_dim}
        for field, value in follows.items():
            if getattr(self, field) != value:
                raise problem(
                    f"TransformerConfig({field}={getattr(self, field)}, latent=...)",
                    "be that",
                    f"with latent attention it is {value}: every head has a key and a value of its own, of width "
                    "nope_dim + rope_dim",
                    f"use {field}={value}",
                )
        if self.tensor_matmul != "xla":
            where = f"TransformerConfig(tensor_matmul={self.tensor_matmul!r}, latent=...)"
            exists = "it gathers the residual stream; latent attention gathers vectors that are narrower"
            raise problem(where, "hide the messages of attention's matmuls", exists, 'use tensor_matmul="xla"')

    def _check_experts(self) -> None:
        count = self.num_dense_layers
        where = f"TransformerConfig(num_dense_layers={count!r})"
        check_whole("TransformerConfig", "num_dense_layers", count, least=0)
        if self.moe is None and count:
            fix = "leave it out, or give moe=MoEConfig(...)"
            raise problem(where, "have dense layers before those of experts", "without `moe` all layers are dense", fix)
        if self.moe is None:
            return
        _record("moe", self.moe, MoEConfig)
        if count >= self.num_layers:
            exists = f"there are {self.num_layers} layers, and one of experts at least"
            raise problem(where, "have so many dense layers", exists, "use fewer, or leave out `moe`")
        if not count and self.mlp_dim != self.moe.mlp_dim:
            asked = "be the width of the dense layers"
            exists = "there are none: every layer has experts, whose width is moe.mlp_dim"
            fix = f"use mlp_dim={self.moe.mlp_dim}, or some num_dense_layers"
            raise problem(f"TransformerConfig(mlp_dim={self.mlp_dim}, moe=...)", asked, exists, fix)

    @property
    def attention_limits(self) -> dict[str, Any]:
        """What every form of attention is given beside its name."""
        return {"window": self.attention_window, "cap": self.attention_cap}

    @property
    def num_moe_layers(self) -> int:
        """Layers that have experts."""
        return 0 if self.moe is None else self.num_layers - self.num_dense_layers

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        tables = self.vocab_size * self.embed_dim * (1 if self.tied_embeddings else 2)
        norms = self.embed_dim * (2 * self.num_layers + 1)
        norms += 2 * self.head_dim * self.num_layers * self.qk_norm
        if self.latent is not None:
            norms += self.num_layers * ((self.latent.q_rank or 0) + self.latent.kv_rank)
        experts = 0 if self.moe is None else self.num_moe_layers * self.moe.num_params(self.embed_dim)
        return tables + norms + self._dense_matmul_params + experts

    @property
    def num_active_params(self) -> int:
        """Active parameters: of the experts, those of the ones that a token visits."""
        return self.num_params - self.num_moe_layers * self._idle_params

    @property
    def _idle_params(self) -> int:
        """Of an MoE layer, those of the ones that a token does not visit."""
        return 0 if self.moe is None else self.moe.num_params(self.embed_dim) - self.moe.active_params(self.embed_dim)

    @property
    def _dense_matmul_params(self) -> int:
        """Of all layers, without experts."""
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
        """Model FLOPs of one training token, forward and backward: `6 N + 12 L H D T`.

        N counts the parameters that a token is multiplied with: every matrix of every layer and the output layer, but
        not the lookup in the embedding table and not the norms; of experts, those that it visits. Each costs a multiply
        and an add forward, and twice that backward. The second term is attention, L layers of H heads of width D (where
        keys and values differ, the mean of the two) over T positions, the causal half that a kernel may skip included.
        Recomputation is not counted, whatever the remat policy. (Chowdhery et al. 2022, "PaLM: Scaling Language
        Modeling with Pathways", appendix B.)

        Args:
          seq_len: positions that attend to each other, T.
        """
        experts = 0 if self.moe is None else self.num_moe_layers * self.moe.active_params(self.embed_dim)
        matmul_params = self._dense_matmul_params + experts + self.vocab_size * self.embed_dim
        key_and_value = self.head_dim + (self.head_dim if self.latent is None else self.latent.v_dim)
        attention = self.num_layers * self.num_heads * key_and_value * seq_len
        return 6 * matmul_params + 6 * attention

    def build(self) -> Model:
        """The NNX `Transformer` of these sizes, as a `Model`."""
        from meshpar.models.transformer import Transformer
        from meshpar.sharding.adapters import from_nnx

        return from_nnx(lambda rngs: Transformer(self, rngs=rngs))


def _record(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        fix = f"write {field}={kind.__name__}(...), or leave it out"
        raise problem(f"TransformerConfig({field}=...)", f"be {value!r}", f"it is a {kind.__name__}, or None", fix)
