"""Sampling text from a decoder on the mesh it was trained on, with a cache of keys and values.

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
from meshpar.sharding.context import ambient, constrain, use
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
    """Continue prompts, one token after the other. To be called under `jax.jit`, inside `mp.use_rules(mesh, strategy)`.

    Args:
      model: a bound decoder, as `state.bound()` gives it, NNX or Linen.
      prompt: token ids.
      config: of that decoder.
      num_tokens: how many tokens to add, N.
      key: draws the samples.
      temperature: logits are divided by it; 0 takes the likeliest token always.
      top_k: draw among that many likeliest tokens only; None: among all.
      top_p: of these, draw among the likeliest that have that probability together, one at least; None: among all.

    Returns:
      the prompts with their continuations. The batch is split as the strategy says where the mesh divides it, else it
      is whole on every device.

    Raises:
      ValueError: an empty prompt, or an option out of its range.

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
        # What a Linen model keeps is changed on a copy: outside of the loop it would be a value from inside.
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
    """The dtype that the parameters compute in. Asked of whole sequences, whose tokens experts may take in chunks."""
    chunks = 1 if config.moe is None else config.moe.chunks
    like = jax.ShapeDtypeStruct((prompt.shape[0], chunks * prompt.shape[1]), prompt.dtype)
    return jax.eval_shape(run, like).dtype


def sample_token(
    logits_BV: Float[Array, "B V"], key: jax.Array, *, temperature: float, top_k: int | None, top_p: float | None = None
) -> Int[Array, " B"]:
    """One token for each row of logits.

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
        # Those before which less than `top_p` is: the likeliest always is among them.
        before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
        least_B1 = jnp.where(before_BV < top_p, sorted_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)


def empty_cache(config: TransformerConfig, batch_size: int, num_positions: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """A cache with room for that many positions."""
    latent = config.latent
    if latent is None:
        heads, name, widths = config.num_kv_heads, "act_kv_heads", (config.head_dim, config.head_dim)
    else:  # what all heads share
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
    """Rules for sequences of any length, down to one token: only batch, heads and vocabulary may be split."""
    here = ambient()
    if here is None:
        fix = "call it inside `with mp.use_rules(mesh, strategy):`"
        raise problem("generate", "run the model on its mesh", "no mesh and rules are in force", fix)
    whole = Leaf(path="batch", shape=(here.mesh.size,), dtype=np.dtype(np.int32), names=("batch",))
    axes = resolve(whole, here.rules, here.mesh).spec[0]
    with use(here.mesh, here.rules | Rules(batch=first(axes, None), seq=None, norm_seq=None)):
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
        raise problem(
            f"generate(prompt of shape {prompt.shape})", "continue it", "it is [batch, positions], none empty",
            "start with one token at least",
        )  # fmt: skip
    if num_tokens < 1:
        raise problem(f"generate(num_tokens={num_tokens})", "add that many", "it is positive", "use 1 or more")
    if not 0 <= temperature < float("inf"):
        where = f"generate(temperature={temperature})"
        raise problem(where, "divide logits by it", "it is not negative, and finite", "use 0 for the likeliest")
    if top_k is not None and not 1 <= top_k <= config.vocab_size:
        fix = f"use 1 to {config.vocab_size}, or None for all"
        raise problem(f"generate(top_k={top_k})", "draw among that many tokens", f"there are {config.vocab_size}", fix)
    if top_p is not None and not 0 < top_p <= 1:
        raise problem(
            f"generate(top_p={top_p})", "draw among tokens of that probability", "it is above 0 and at most 1",
            "use 0.9, or None for all",
        )  # fmt: skip
