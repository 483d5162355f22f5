"""Autoregressive sampling from a sharded decoder with a key/value cache.

Shape suffixes: B batch, P positions of the prompt, N new tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from meshpar.models.config import TransformerConfig
from meshpar.models.layers import KVCache
from meshpar.sharding.constraints import with_auto_types
from meshpar.sharding.context import ambient, constrain, use_rules
from meshpar.sharding.rules import Rules, first, resolve
from meshpar.sharding.types import Leaf, problem


def generate(
    model: Callable[..., Any],
    prompt: Integer[Array, "B P"],
    *,
    config: TransformerConfig,
    num_tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "B P+N"]:
    """Continue prompts token by token. Call this function under `jax.jit`, inside `mp.use_rules(mesh, strategy)`.

    Args:
      model: a bound NNX or Linen decoder, from `state.bound()`.
      prompt: token ids.
      config: the config of the decoder.
      num_tokens: the number of tokens to add, N.
      key: random key for the samples.
      temperature: divisor of the logits. 0 means greedy decoding.
      top_k: sample only from the k most likely tokens. `None` means all tokens.
      top_p: sample only from the most likely of these tokens, up to this cumulative probability (nucleus sampling).
        `None` means all of them.

    Returns:
      The prompts with their continuations. The batch is sharded as in the strategy if it is divisible, else replicated.

    Raises:
      ValueError: the prompt is empty, or an option is out of range.

    Example:
      >>> def sample(state, prompt, key):
      ...     with mp.use_rules(mesh, strategy):
      ...         return generate(state.bound(), prompt, config=cfg, num_tokens=100, key=key)
      >>> tokens = jax.jit(sample)(state, prompt, key)
    """
    _check(prompt, config, num_tokens, temperature, top_k, top_p)
    prompt, key = with_auto_types((prompt, key))
    draw = functools.partial(sample_token, temperature=temperature, top_k=top_k, top_p=top_p)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Bound Linen models update their variables in place. Without a copy, tracers would leak from the scan.
        return copy.copy(model)(*args, **kwargs)

    with _decoding_layout():
        dtype = _logits_dtype(run, prompt, config)
        cache = empty_cache(config, prompt.shape[0], prompt.shape[1] + num_tokens, dtype)
        logits_BPV, cache = run(prompt, cache=cache)

        def step(carry: tuple[Array, KVCache], key: jax.Array) -> tuple[tuple[Array, KVCache], Array]:
            logits_BV, cache = carry
            token_B = draw(logits_BV, key)
            logits_B1V, cache = run(token_B[:, None], cache=cache)
            return (logits_B1V[:, -1], cache), token_B

        keys = jax.random.split(key, num_tokens)
        (logits_BV, _), new_NB = lax.scan(step, (logits_BPV[:, -1], cache), keys[:-1])
        last_B = draw(logits_BV, keys[-1])
    return jnp.concatenate([prompt.astype(jnp.int32), new_NB.T, last_B[:, None]], axis=1)


def _logits_dtype(run: Callable[..., Any], prompt: Array, config: TransformerConfig) -> Any:
    """Return the compute dtype. The traced sequence length is a multiple of the number of MoE chunks."""
    chunks = 1 if config.moe is None else config.moe.chunks
    like = jax.ShapeDtypeStruct((prompt.shape[0], chunks * prompt.shape[1]), prompt.dtype)
    return jax.eval_shape(run, like).dtype


def sample_token(
    logits_BV: Float[Array, "B V"], key: jax.Array, *, temperature: float, top_k: int | None, top_p: float | None = None
) -> Int[Array, " B"]:
    """Sample a token for each example.

    Args:
      logits_BV: logits.
      key: random key.
      temperature: as in `generate`.
      top_k: as in `generate`.
      top_p: as in `generate`. This is nucleus sampling (Holtzman et al. 2020, "The Curious Case of Neural Text
        Degeneration").
    """
    if temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32)) / temperature
    if top_k is not None:
        least_B1 = lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if top_p is not None:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        shares_BV = jax.nn.softmax(sorted_BV, axis=-1)
        # Keep the tokens whose preceding probability mass is below `top_p`. The most likely token is always kept.
        before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
        least_B1 = jnp.where(before_BV < top_p, sorted_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)


def empty_cache(config: TransformerConfig, batch_size: int, num_positions: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """Return an empty key/value cache.

    Args:
      config: the config of the decoder.
      batch_size: the number of sequences.
      num_positions: capacity of the cache.
      dtype: dtype of the keys and values.
    """
    latent = config.latent
    if latent is None:
        heads, name, widths = config.num_kv_heads, "act_kv_heads", (config.head_dim, config.head_dim)
    else:  # rotary keys and latents, which all heads share
        heads, name, widths = 1, None, (latent.rope_dim, latent.kv_rank)
    k_LBSKD, v_LBSKW = (
        constrain(
            jnp.zeros((config.num_layers, batch_size, num_positions, heads, width), dtype),
            None, "batch", "seq", name, "act_head_dim",
        )
        for width in widths
    )  # fmt: skip
    return KVCache(k_LBSKD, v_LBSKW, length=jnp.zeros((), jnp.int32))


@contextlib.contextmanager
def _decoding_layout() -> Iterator[None]:
    """Use rules that do not shard the sequence, since it may have a single token."""
    context = ambient()
    if context is None:
        fix = "call it inside `with mp.use_rules(mesh, strategy):`"
        raise problem("generate", "run the model", "no mesh and rules are active", fix, code="not-found")
    batch = Leaf(path="batch", shape=(context.mesh.size,), dtype=np.dtype(np.int32), names=("batch",))
    axes = resolve(batch, context.rules, context.mesh).spec[0]
    with use_rules(context.mesh, context.rules | Rules(batch=first(axes, None), seq=None, norm_seq=None)):
        yield


def _check(
    prompt: Array,
    config: TransformerConfig,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if prompt.ndim != 2 or not prompt.shape[1]:
        where, reason = f"generate(prompt of shape {prompt.shape})", "the shape must be [batch, positions]"
        raise problem(where, "continue the prompt", reason, "use at least one token", code="wrong-shape")
    if num_tokens < 1:
        where = f"generate(num_tokens={num_tokens})"
        raise problem(where, "add tokens", "the number must be positive", "use 1 or more", code="out-of-range")
    if not 0 <= temperature < float("inf"):
        where, reason = f"generate(temperature={temperature})", "the temperature must be finite and at least 0"
        raise problem(where, "divide the logits", reason, "use 0 for greedy decoding", code="out-of-range")
    if top_k is not None and not 1 <= top_k <= config.vocab_size:
        where, reason = f"generate(top_k={top_k})", f"the vocabulary has {config.vocab_size} tokens"
        fix = f"use 1 to {config.vocab_size}, or None for all tokens"
        raise problem(where, "sample from the top tokens", reason, fix, code="out-of-range")
    if top_p is not None and not 0 < top_p <= 1:
        where, reason = f"generate(top_p={top_p})", "the probability must be above 0 and at most 1"
        raise problem(where, "sample from the nucleus", reason, "use 0.9, or None for all tokens", code="out-of-range")
