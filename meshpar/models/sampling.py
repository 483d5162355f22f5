"""Autoregressive sampling from a sharded decoder with a key/value cache.

Shape suffixes: B batch, P positions of the prompt, N new tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Integer

from meshpar.models.attention import KVCache
from meshpar.models.config import TransformerConfig
from meshpar.sharding.constraints import with_auto_types
from meshpar.sharding.context import ambient, constrain, use_rules
from meshpar.sharding.errors import problem
from meshpar.sharding.rules import Rules, first, resolve
from meshpar.sharding.types import Leaf

SHORT_PROMPT = 16
"""Longest prompt that is processed token by token. Without a second copy of the model, the program compiles faster."""


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
      ...         return mp.models.generate(state.bound(), prompt, config=config, num_tokens=100, key=key)
      >>> tokens = jax.jit(sample)(state, prompt, key)  # doctest: +SKIP
    """
    vocab = config.vocab_size
    for is_valid, argument, reason, code in (
        (prompt.ndim == 2 and prompt.shape[-1], f"prompt of shape {prompt.shape}",
         "the shape must be [batch, positions] with at least one position", "wrong-shape"),
        (num_tokens >= 1, f"num_tokens={num_tokens}", "the number must be positive", "out-of-range"),
        (0 <= temperature < math.inf, f"temperature={temperature}", "it must be finite and at least 0", "out-of-range"),
        (top_k is None or 1 <= top_k <= vocab, f"top_k={top_k}", f"it must be 1 to {vocab}, or None", "out-of-range"),
        (top_p is None or 0 < top_p <= 1, f"top_p={top_p}", "it must be in (0, 1], or None", "out-of-range"),
    ):  # fmt: skip
        if not is_valid:
            raise problem(f"generate({argument})", "continue the prompt", reason, "correct this argument", code=code)
    prompt, key = with_auto_types((prompt, key))
    draw = functools.partial(sample_token, temperature=temperature, top_k=top_k, top_p=top_p)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Bound Linen models update their variables in place. Without a copy, tracers would leak from the scan.
        return copy.copy(model)(*args, **kwargs)

    with _decoding_layout():
        # The length of a sequence must be a multiple of the number of MoE chunks.
        length = prompt.shape[1] * (1 if config.moe is None else config.moe.chunks)
        dtype = jax.eval_shape(run, jax.ShapeDtypeStruct((prompt.shape[0], length), prompt.dtype)).dtype

        def continued(tokens_BP: Array, keys: Array) -> Array:
            """Append a token for each key."""
            num_known, num_positions = tokens_BP.shape[1], tokens_BP.shape[1] + len(keys)
            cache = empty_cache(config, tokens_BP.shape[0], num_positions, dtype)
            start_BS = tokens_BP[:, :1]
            if num_known > SHORT_PROMPT or config.rope_long is not None:
                logits_BPV, cache = run(tokens_BP, cache=cache)
                start_BS = jnp.concatenate([tokens_BP, draw(logits_BPV[:, -1], keys[0])[:, None]], axis=1)

            def step(carry: tuple[Array, KVCache], position: Array) -> tuple[tuple[Array, KVCache], Array]:
                token_B, cache = carry
                logits_B1V, cache = run(token_B[:, None], cache=cache)
                drawn_B = draw(logits_B1V[:, -1], keys[jnp.maximum(position - num_known, 0)])
                known_B = jnp.take(tokens_BP, position, axis=1, mode="clip")
                next_B = jnp.where(position < num_known, known_B, drawn_B)
                return (next_B, cache), next_B

            positions = jnp.arange(start_BS.shape[1], num_positions)
            _, next_NB = lax.scan(step, (start_BS[:, -1], cache), positions)
            return jnp.concatenate([start_BS, next_NB.T], axis=1)

        tokens, keys = prompt.astype(jnp.int32), jax.random.split(key, num_tokens)
        if config.rope_long is not None:
            # Longer sequences have other rotary factors, so the cache of all their tokens is computed again in a pass.
            num_short = max(config.rope_long.original_seq_len + 1 - prompt.shape[1], 0)
            if 0 < num_short < num_tokens:
                tokens, keys = continued(tokens, keys[:num_short]), keys[num_short:]
        return continued(tokens, keys)


def sample_token(
    logits_BV: Array, key: jax.Array, *, temperature: float, top_k: int | None, top_p: float | None = None
) -> Array:
    """Sample a token for each example, with the options of `generate`.

    `top_p` is nucleus sampling (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration").
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
    """Return an empty key/value cache."""
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
        raise problem("generate", "run the model", "no mesh or rules are active", fix, code="not-found")
    batch = Leaf(path="batch", shape=(context.mesh.size,), dtype=np.dtype(np.int32), names=("batch",))
    axes = resolve(batch, context.rules, context.mesh).spec[0]
    with use_rules(context.mesh, context.rules | Rules(batch=first(axes, None), seq=None, norm_seq=None)):
        yield
