# SPDX-License-Identifier: Apache-2.0
"""Generates text from a model, for the sample at the end of a training run.

Each token recomputes the whole buffer, without a cache of keys and values, so the cost
grows with the square of the length: it is meant for samples, not for serving.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tessera.errors import OperandError
from tessera.models.decoder.model import DecoderModel, Tree


def generate(
    model: DecoderModel,
    params: Tree,
    prompt: Int[Array, "batch prompt"],
    num_tokens: int,
    key: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "batch prompt+num_tokens"]:
    """Continue a prompt by ``num_tokens`` tokens.

    Compiled once for each prompt shape, ``num_tokens`` and ``top_k``. If the parameters
    are sharded, XLA chooses the layout of everything else.

    Args:
      model: The model of the parameters.
      params: As from ``model.init``.
      prompt: int32 ``[B, P]``, P at least 1.
      num_tokens: How many to add, at least 1.
      key: The same key gives the same tokens.
      temperature: Divides the logits; 0 takes the most likely token.
      top_k: Sample from the k most likely tokens; None samples from all.

    Returns:
      int32 ``[B, P + num_tokens]``.

    Raises:
      OperandError: [T401] an empty prompt, or a setting out of range.
      ParameterTreeError: [T306] names or shapes are not those of this model.
    """
    _check(model.config.vocab_size, prompt.shape, num_tokens, temperature, top_k)
    prompt = jnp.asarray(prompt, jnp.int32)
    scale = jnp.float32(temperature)
    return _generate(model, params, prompt, scale, key, num_tokens, top_k)


def _check(
    vocab: int,
    shape: tuple[int, ...],
    num_tokens: int,
    temperature: float,
    top_k: int | None,
) -> None:
    wrong: list[tuple[str, str]] = []
    if len(shape) != 2 or not shape[1]:
        wrong.append((f"prompt of shape {shape}", "a prompt is [batch, length ≥ 1]"))
    if num_tokens < 1:
        wrong.append((f"num_tokens = {num_tokens}", "num_tokens 1 or more"))
    if temperature < 0:
        wrong.append((f"temperature = {temperature}", "temperature 0 or more"))
    if top_k is not None and not 1 <= top_k <= vocab:
        wrong.append((f"top_k = {top_k}", f"top_k from 1 to {vocab}, or None"))
    if wrong:
        raise OperandError(
            "generate cannot sample with these arguments",
            got="\n".join(got for got, _ in wrong),
            fix="\n".join(fix for _, fix in wrong),
        )


@partial(jax.jit, static_argnums=(0, 5, 6))
def _generate(
    model: DecoderModel,
    params: Tree,
    prompt: Array,
    temperature: Array,
    key: jax.Array,
    num_tokens: int,
    top_k: int | None,
) -> Array:
    module = model.module(params)
    start = prompt.shape[1]

    def step(i: Array, tokens: Array) -> Array:
        # Causal attention: no position before i reads the unwritten tokens after it.
        hidden, _ = module.hidden(tokens)
        last = jax.lax.dynamic_slice_in_dim(hidden, i - 1, 1, axis=1)
        logits = module.logits(last)[:, 0]
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        sample = jax.random.categorical(
            jax.random.fold_in(key, i), logits / jnp.maximum(temperature, 1e-6)
        )
        token = jnp.where(temperature == 0, jnp.argmax(logits, axis=-1), sample)
        return jax.lax.dynamic_update_slice_in_dim(
            tokens, token[:, None].astype(tokens.dtype), i, axis=1
        )

    buffer = jnp.pad(prompt, ((0, 0), (0, num_tokens)))
    return jax.lax.fori_loop(start, start + num_tokens, step, buffer)
