"""Architecture of the decoders, with parameter counts and FLOPs in closed form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from meshpar.layers.scan import check_unroll
from meshpar.moe.layer_config import MoEConfig
from meshpar.sharding.errors import check_bool, check_choice, check_int, check_number, check_positive_int, problem

Attention = Literal["auto", "xla", "blockwise", "cudnn", "tokamax"]
TensorMatmul = Literal["xla", "overlapped"]
NormPlacement = Literal["before", "after", "both"]
Activation = Literal["silu", "gelu_tanh"]
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
        check_positive_int("RopeScaling", "a sequence length", original_seq_len=self.original_seq_len)
        factors = {name: value for name, value in vars(self).items() if name != "original_seq_len"}
        check_number("RopeScaling", "1.0", **factors)
        if self.factor < 1 or not 0 < self.low_freq_factor <= self.high_freq_factor:
            reason = "`factor` must be at least 1, and 0 < low_freq_factor <= high_freq_factor"
            raise problem("RopeScaling", f"use {self}", reason, "use the defaults: RopeScaling()", code="out-of-range")


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
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole pairs of dimensions."""
    score_factor: float = 1.0
    """Factor of the attention scores, including the dimensions without rotary embedding. Only with `latent`
    (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        factors = {
            name: getattr(self, name) for name in ("factor", "beta_fast", "rotated_factor", "score_factor", "beta_slow")
        }
        check_number("YarnScaling", "1.0", **factors)
        check_positive_int("YarnScaling", "a sequence length", original_seq_len=self.original_seq_len)
        check_bool("YarnScaling", "the ends of the ramp are rounded", truncate=self.truncate)
        if not (1 <= self.factor < math.inf and self.beta_slow <= self.beta_fast < math.inf):
            reason = "`factor` must be finite and at least 1, and `beta_fast` finite and at least `beta_slow`"
            raise problem("YarnScaling", f"use {self}", reason, "use factor=32.0, beta_fast=32.0", code="out-of-range")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope:
    """Scaling of rotary frequencies with a factor for each pair of dimensions.

    The positions of a sequence or segment, without padding in other segments, select the short or the long factors.
    Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens".
    """

    short_factor: tuple[float, ...]
    """Factors of the wavelengths in sequences of up to `original_seq_len` tokens."""
    long_factor: tuple[float, ...]
    """Factors of the wavelengths in longer sequences."""
    original_seq_len: int
    """Sequence length of pretraining, in tokens."""
    rotated_factor: float = 1.0
    """Factor of the cosines and sines."""

    def __post_init__(self) -> None:
        check_number("LongRope", "1.0", rotated_factor=self.rotated_factor)
        check_positive_int("LongRope", "a sequence length", original_seq_len=self.original_seq_len)
        for name in ("short_factor", "long_factor"):
            if not isinstance(factors := getattr(self, name), tuple):
                reason, fix = "it must be a tuple with a factor for each pair of dimensions", f"use {name}=(1.0, ...)"
                raise problem(f"LongRope({name}={factors!r:.100})", "", reason, fix, code="wrong-type")
            for factor in factors:
                check_number("LongRope", "1.0 for each pair of dimensions", **{name: factor})


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
        sizes = {name: size for name, size in vars(self).items() if name != "q_rank" or size is not None}
        check_positive_int("LatentAttention", "a size", **sizes)
        if self.rope_dim % 2:
            where = f"LatentAttention(rope_dim={self.rope_dim})"
            reason, fix = "rotary embeddings need an even number of dimensions", f"use {self.rope_dim + 1}"
            raise problem(where, "", reason, fix, code="indivisible")

    @property
    def head_dim(self) -> int:
        """Dimensions of a query and key head."""
        return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Factor of the queries in layers without rotary embeddings: `1 + factor * log(1 + floor((p + 1) / interval))`.

    It grows with the position p, because a softmax over more keys is flatter. Nakanishi 2025, "Scalable-Softmax Is
    Superior for Attention"; the formula is that of Llama 4.
    """

    interval: int = 8192
    """Number of positions with equal factors."""
    factor: float = 0.1
    """Growth of the factor."""

    def __post_init__(self) -> None:
        check_positive_int("QueryScaling", "a number of positions", interval=self.interval)
        check_number("QueryScaling", "0.1", factor=self.factor)


def _check_positions(where: str, size: int) -> None:
    if size >= 2**31:
        raise problem(where, f"use {size}", "positions are 32-bit integers", "use None for no limit", "out-of-range")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Attention of a kind of layer, for models whose layers differ."""

    window: int | None = None
    """Sliding window, as `TransformerConfig.attention_window`."""
    chunk: int | None = None
    """Number of positions in a chunk: a position attends only to earlier positions of its chunk (Llama 4). All kinds
    with chunks have the same size. `None` means no chunks."""
    has_rope: bool = True
    """Whether queries and keys have rotary embeddings (Yang et al. 2025, "Rope to Nope and Back Again")."""
    rope_theta: float | None = None
    """Base of the rotary wavelengths, which are then not scaled. `None` means the base and the scaling of the model."""

    def __post_init__(self) -> None:
        check_bool("LayerKind", "queries and keys have rotary embeddings", has_rope=self.has_rope)
        sizes = {name: getattr(self, name) for name in ("window", "chunk") if getattr(self, name) is not None}
        check_positive_int("LayerKind", "a size", **sizes)
        for name, size in sizes.items():
            _check_positions(f"LayerKind({name}=...)", size)
        if self.rope_theta is not None:
            check_number("LayerKind", "10_000.0, or None", rope_theta=self.rope_theta)
            if not self.has_rope:
                where = f"LayerKind(rope_theta={self.rope_theta}, has_rope=False)"
                reason, fix = "without rotary embeddings rope_theta has no effect", "omit it, or use has_rope=True"
                raise problem(where, "", reason, fix, code="conflict")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Fields of `TransformerConfig`, which modules read: a decoder with RMSNorm, rotary embeddings and SwiGLU."""

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
    rope_long: LongRope | None = None
    """Scaling of the rotary frequencies with LongRoPE, as an alternative to `rope_scaling`."""
    rope_linear: float = 1.0
    """Factor of all rotary wavelengths."""
    rotary_dim: int | None = None
    """Number of dimensions of a head with rotary embedding, which precede the others (even). `None` means all."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm, added to the mean square."""
    norm_offset: float = 0.0
    """Number that is added to the scale of each RMSNorm. With 1.0 the parameters are initialized to 0 (Gemma)."""
    norm_placement: NormPlacement = "before"
    """Position of the RMSNorms in a layer: before attention and MLP, after them (OLMo 2), or both (Gemma 2)."""
    activation: Activation = "silu"
    """Activation of the gate in dense MLPs: SiLU, or the tanh approximation of GELU (Gemma)."""
    embed_scale: float = 1.0
    """Factor of the token embeddings."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logits_divisor: float = 1.0
    """Divisor of the logits, before the cap."""
    tied_embeddings: bool = False
    """Whether the output layer uses the embedding table."""
    param_dtype: str = "float32"
    """Dtype of the initial parameters. Computation uses the dtype of the parameters that the model receives."""
    attention: Attention = "auto"
    """Implementation of attention over full sequences.

    - "auto": on GPUs the first of "cudnn" and "tokamax" that supports dtype, head size and options; otherwise
      "blockwise". `train` and `explain` print the choice.
    - "blockwise": on all platforms, with memory linear in the sequence length
      (`meshpar.collectives.blockwise_attention`).
    - "xla": on all platforms; stores all scores.
    - "cudnn": cuDNN's flash attention (GPUs, bfloat16 or float16).
    - "tokamax": the flash attention of that package (GPUs, Python 3.12), with windows, caps and segments.

    A named implementation never falls back to another. Under `context_parallel()`, ring attention computes its tiles
    with cuDNN's kernel for "cudnn" and with matmuls for "xla" and "blockwise"; "tokamax" is an error."""
    attention_window: int | None = None
    """Sliding window of all layers: a position attends to itself and the `attention_window - 1` positions before it.
    `None` means full causal attention. Not supported by ring attention with cuDNN."""
    layer_pattern: tuple[LayerKind, ...] = ()
    """Attention of the layers: layer i has kind `layer_pattern[i % len(layer_pattern)]`. It is an alternative to
    `attention_window`. Empty means that all layers are equal."""
    attention_scale: float | None = None
    """Factor of the attention scores before the cap and the softmax. `None` means `head_dim ** -0.5`."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases (Qwen2). Not with `latent`."""
    qk_l2_norm: bool = False
    """Whether the query and key of each head are divided by their root mean square, with `norm_eps`, in layers with
    rotary embeddings (Llama 4)."""
    query_scaling: QueryScaling | None = None
    """Factor of the queries in layers without rotary embeddings."""
    attention_sinks: bool = False
    """Whether each query head has a learned logit in the softmax of the attention scores, without a value (GPT-OSS).
    Not with `latent`, `attention="cudnn"` (except in ring attention) and `attention="tokamax"`."""
    out_bias: bool = False
    """Whether the output projection of the attention has a bias. Not with `latent`."""
    qk_norm: bool | Literal["all_heads"] = False
    """Whether queries and keys have an RMSNorm before the rotary embedding: over each head (True, Qwen3), or over all
    heads together ("all_heads", OLMo 2). Not with `latent`."""
    attention_cap: float | None = None
    """Soft cap of the attention scores s, `cap tanh(s / cap)` (Gemma Team 2024, "Gemma 2"). Not supported by cuDNN."""
    tensor_matmul: TensorMatmul = "xla"
    """Matmuls of a layer under `tensor_parallel(sequence=True)`. With "xla", the compiler inserts an all-gather before
    and a reduce-scatter after them. With "overlapped", communication overlaps with the matmul of other blocks
    (`meshpar.collectives.all_gather_matmul`, `matmul_reduce_scatter`); without sequence parallelism this is an error.
    If the axis has a single device, or with a cache, ordinary matmuls are used."""
    unroll: int | bool = 1
    """Layers in an iteration of the compiled loop. True runs all layers without a loop, which needs fewer copies
    and more time to compile. Not with `mp.fsdp(prefetch=1)`."""
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
    source: str | None = dataclasses.field(default=None, repr=False, compare=False)
    """Hugging Face folder that the config was read from. Exports keep its family, token ids, tokenizer and dtype."""

    def __post_init__(self) -> None:
        where, caps = "TransformerConfig", ("attention_cap", "logits_cap", "attention_scale")
        sizes = ["vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"]
        sizes += [field for field in ("vocab_chunk", "attention_window") if getattr(self, field) is not None]
        check_positive_int(where, "a size", **{field: getattr(self, field) for field in sizes})
        check_int(where, "the number of initial dense layers", num_dense_layers=self.num_dense_layers)
        check_number(where, "1.0", positive=False, norm_offset=self.norm_offset)
        if self.rotary_dim is not None:
            check_positive_int(where, "the number of rotated dimensions of a head", rotary_dim=self.rotary_dim)
        if self.attention_window is not None:
            _check_positions(f"{where}(attention_window=...)", self.attention_window)
        factors = ("rope_linear", "embed_scale", "residual_scale", "logits_divisor")
        for field in ("rope_theta", "norm_eps", *factors, *(cap for cap in caps if getattr(self, cap) is not None)):
            check_number(where, "50.0, or None" if field in caps else "1e-5", **{field: getattr(self, field)})
        if not isinstance(self.layer_pattern, tuple) or not all(isinstance(x, LayerKind) for x in self.layer_pattern):
            reason, fix = "it must be a tuple of LayerKind", "use (LayerKind(window=512), LayerKind())"
            raise problem(f"{where}(layer_pattern={self.layer_pattern!r})", "", reason, fix, code="wrong-type")
        check_bool(where, "the output layer uses the embedding table", tied_embeddings=self.tied_embeddings)
        if self.qk_norm != "all_heads":
            check_bool(where, "queries and keys have an RMSNorm", qk_norm=self.qk_norm)
        check_choice(where, "the position of the norms", get_args(NormPlacement), norm_placement=self.norm_placement)
        check_choice(where, "the activation of the MLP", get_args(Activation), activation=self.activation)
        check_bool(where, "projections have biases", qkv_bias=self.qkv_bias, out_bias=self.out_bias)
        check_bool(where, "the softmax has sinks", attention_sinks=self.attention_sinks)
        check_bool(where, "queries and keys have equal norms", qk_l2_norm=self.qk_l2_norm)
        check_choice(where, "the dtype of the initial parameters", PARAM_DTYPES, param_dtype=self.param_dtype)
        check_choice(where, "the implementation of attention", get_args(Attention), attention=self.attention)
        check_unroll(where, self.unroll)
        check_choice(where, "the kind of matmul", get_args(TensorMatmul), tensor_matmul=self.tensor_matmul)
        for field, kind in (
            ("rope_scaling", RopeScaling), ("rope_yarn", YarnScaling), ("rope_long", LongRope),
            ("latent", LatentAttention), ("moe", MoEConfig),
            ("query_scaling", QueryScaling),
        ):  # fmt: skip
            if not isinstance(value := getattr(self, field), kind | None):
                reason, fix = f"it must be a {kind.__name__} or None", f"use {field}={kind.__name__}(...), or omit it"
                raise problem(f"{where}({field}={value!r})", "", reason, fix, code="wrong-type")
        for is_wrong, field, reason, fix, code in self._conflicts():
            if is_wrong:
                value = getattr(self, field)
                raise problem(f"{where}({field}=...)", f"use {field}={value!r}", reason, fix, code=code)

    def _conflicts(self) -> tuple[tuple[Any, str, str, str, str], ...]:
        """Return (condition, field, reason, fix, code) of the fields that can contradict each other."""
        heads, latent, moe, dense = self.num_heads, self.latent, self.moe, self.num_dense_layers
        yarn, long = self.rope_yarn, self.rope_long
        return (
            (heads % self.num_kv_heads, "num_kv_heads", f"{heads} is not a multiple of {self.num_kv_heads}",
             f"use a divisor of num_heads={heads}", "indivisible"),
            (self.head_dim % 2, "head_dim", "rotary embeddings need an even number of dimensions",
             f"use {self.head_dim + 1}", "indivisible"),
            (self.norm_eps > 1, "norm_eps", "it is added to a mean square of about 1", "use 1e-5", "out-of-range"),
            (sum((yarn is not None, self.rope_scaling is not None, long is not None, self.rope_linear != 1)) > 1,
             "rope_yarn" if yarn else "rope_long" if long else "rope_linear",
             "rope_scaling, rope_yarn, rope_long and rope_linear are alternatives", "omit all but one", "conflict"),
            (self.rotary_dim and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim), "rotary_dim",
             f"it must be even and at most head_dim={self.head_dim}", f"use {self.head_dim}, or omit it",
             "out-of-range"),
            (self.rotary_dim and latent, "rotary_dim", "latent attention has rope_dim", "omit it", "conflict"),
            (long and {len(long.short_factor), len(long.long_factor)} != {self.num_rotated // 2}, "rope_long",
             f"there must be {self.num_rotated // 2} factors, one for each pair of dimensions", "change their number",
             "wrong-shape"),
            (moe and self.activation != "silu", "activation", "experts have the activation SiLU",
             'use activation="silu"', "unsupported-feature"),
            (yarn and yarn.score_factor != 1 and not latent, "rope_yarn", "score_factor needs latent attention",
             "use rotated_factor, or set latent=LatentAttention(...)", "conflict"),
            (latent and self.qk_norm, "qk_norm", "latent attention normalizes the latents instead", "omit qk_norm",
             "conflict"),
            (latent and (self.qkv_bias or self.out_bias), "qkv_bias" if self.qkv_bias else "out_bias",
             "latent attention has no biases", "omit it", "conflict"),
            (self.attention_sinks and (latent or self.attention == "tokamax"), "attention_sinks",
             "latent attention and tokamax do not support them", 'use attention="blockwise", without latent',
             "unsupported-feature"),
            (len({kind.chunk for kind in self.layer_pattern} - {None}) > 1, "layer_pattern",
             "its chunks have several sizes", "use the same size for all kinds with chunks", "unsupported-feature"),
            (latent and (self.qk_l2_norm or self.query_scaling or self.chunk), "latent",
             "latent attention has no qk_l2_norm, query_scaling or chunks", "omit them", "unsupported-feature"),
            (latent and self.attention_scale, "attention_scale", "latent attention has its own scale", "omit it",
             "conflict"),
            (self.query_scaling and all(kind.has_rope for kind in self.kinds), "query_scaling",
             "all layers have rotary embeddings, so it has no effect", "omit it, or set layer_pattern", "conflict"),
            (self.qk_l2_norm and not any(kind.has_rope for kind in self.kinds), "qk_l2_norm",
             "no layer has rotary embeddings, so it has no effect", "omit it", "conflict"),
            (self.layer_pattern and self.attention_window, "attention_window",
             "the kinds of layer_pattern have their own windows", "omit one of them", "conflict"),
            (latent and self.num_kv_heads != heads, "num_kv_heads", "with latent attention it must equal num_heads",
             f"use num_kv_heads={heads}", "conflict"),
            (latent and self.head_dim != latent.head_dim, "head_dim",
             "with latent attention it must equal nope_dim + rope_dim", f"use head_dim={latent and latent.head_dim}",
             "conflict"),
            (latent and self.tensor_matmul != "xla", "tensor_matmul",
             "overlapped matmuls gather the residual stream, and latent attention gathers the latents",
             'use tensor_matmul="xla"', "unsupported-feature"),
            (dense and not moe, "num_dense_layers", "without `moe` all layers are dense",
             "omit it, or set moe=MoEConfig(...)", "conflict"),
            (moe and dense >= self.num_layers, "num_dense_layers",
             f"there are {self.num_layers} layers, and at least one must be an MoE layer", "use fewer, or omit `moe`",
             "out-of-range"),
            (moe and not dense and self.mlp_dim != moe.mlp_dim, "mlp_dim",
             "there are no dense layers, and the hidden dimension of the experts is moe.mlp_dim",
             f"use mlp_dim={moe and moe.mlp_dim}, or set num_dense_layers", "conflict"),
        )  # fmt: skip

    @property
    def num_rotated(self) -> int:
        """Number of dimensions of a head with rotary embedding."""
        return self.latent.rope_dim if self.latent is not None else self.rotary_dim or self.head_dim

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Widths of the norms of queries and keys."""
        heads = (self.num_heads, self.num_kv_heads) if self.qk_norm == "all_heads" else (1, 1)
        return heads[0] * self.head_dim, heads[1] * self.head_dim

    @property
    def kind_of_layer(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        pattern = self.layer_pattern or (LayerKind(window=self.attention_window),)
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers, in the order of their first layer."""
        return tuple(dict.fromkeys(self.kind_of_layer))

    @property
    def chunk(self) -> int | None:
        """Number of positions in a chunk, if some layers have chunks."""
        return next((kind.chunk for kind in self.layer_pattern if kind.chunk is not None), None)

    @property
    def num_moe_layers(self) -> int:
        """Number of MoE layers."""
        return 0 if self.moe is None else self.num_layers - self.num_dense_layers

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        tables = self.vocab_size * self.embed_dim * (1 if self.tied_embeddings else 2)
        norms = self.embed_dim * ((4 if self.norm_placement == "both" else 2) * self.num_layers + 1)
        norms += sum(self.qk_norm_widths) * self.num_layers * bool(self.qk_norm)
        biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) * self.qkv_bias
        biases += self.embed_dim * self.out_bias + self.num_heads * self.attention_sinks
        if self.latent is not None:
            norms += self.num_layers * ((self.latent.q_rank or 0) + self.latent.kv_rank)
        experts = 0 if self.moe is None else self.num_moe_layers * self.moe.num_params(self.embed_dim)
        return tables + norms + self.num_layers * biases + self._dense_matmul_params + experts

    @property
    def num_active_params(self) -> int:
        """Number of active parameters, with only the experts that process a token."""
        moe, width = self.moe, self.embed_dim
        idle = 0 if moe is None else moe.num_params(width) - moe.active_params(width)
        return self.num_params - self.num_moe_layers * idle

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

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the model FLOPs per training token, forward and backward: `6 N + 12 L H D T`.

        N is the number of matmul parameters per token: all matrices of the layers, with only the active experts, and
        the output layer, but not the embedding lookup or the norms. Each parameter takes a multiply and an add in the
        forward pass, and twice as many in the backward pass. The second term is attention with L layers and H heads of
        dimension D (the mean of the key and value dimensions) over `seq_len` positions T. It includes the half that a
        causal kernel can skip, unless `causal` is set: `6 N + 6 L H D T`. Recomputation is not included. (Chowdhery et
        al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B.)
        """
        experts = 0 if self.moe is None else self.num_moe_layers * self.moe.active_params(self.embed_dim)
        matmul_params = self._dense_matmul_params + experts + self.vocab_size * self.embed_dim
        key_and_value = self.head_dim + (self.head_dim if self.latent is None else self.latent.v_dim)
        attention = self.num_layers * self.num_heads * key_and_value * seq_len
        return 6 * matmul_params + (3 if causal else 6) * attention
