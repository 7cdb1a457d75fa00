# SPDX-License-Identifier: Apache-2.0
"""Generates text from a model.

Two programs are compiled: the prefill computes a batch of prompts, and the step, which
is called once for each token, reads and updates the model's cache in place. Tokens are
yielded as they are computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from tessera.errors import OperandError
from tessera.foundations.dtypes import as_dtype
from tessera.foundations.tree import Tree
from tessera.jax_compat.workarounds import CorrectJit
from tessera.mesh import AnyMesh, as_mesh
from tessera.train.models.decoding import Decoding, Logits, Pads
from tessera.train.models.model import Model

# Token ids of each row: an array [B, P], or rows of different lengths.
Prompts: TypeAlias = Int[Array, "batch prompt"] | Sequence[Sequence[int]] | np.ndarray

NO_TOKEN: Final = -1


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "temperature", "top_p"),
    meta_fields=("top_k",),
)
@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits; ``Sampler.stream`` describes the fields."""

    keys: jax.Array
    temperature: Any
    top_p: Any = None
    top_k: int | None = None

    def draw(self, logits: Logits, index: Int[Array, ""]) -> Int[Array, " batch"]:
        """The token of each row after ``index`` others."""

        def sampled() -> Array:
            keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys, index)
            scaled = logits / jnp.maximum(self.temperature, 1e-6)
            if self.top_k is None and self.top_p is None:
                return jax.vmap(jax.random.categorical)(keys, scaled)
            scaled, ids = jax.lax.top_k(scaled, self.top_k or logits.shape[-1])
            if self.top_p is not None:
                shares = jax.nn.softmax(scaled)
                before = jnp.cumsum(shares, axis=-1) - shares
                scaled = jnp.where(before < self.top_p, scaled, -jnp.inf)
            ranks = jax.vmap(jax.random.categorical)(keys, scaled)
            return jnp.take_along_axis(ids, ranks[:, None], axis=1)[:, 0]

        tokens = jax.lax.cond(
            self.temperature == 0, lambda: jnp.argmax(logits, axis=-1), sampled
        )
        return tokens.astype(jnp.int32)


def generate(
    model: Model,
    params: Tree,
    prompt: Prompts,
    num_tokens: int,
    key: jax.Array,
    *,
    mesh: AnyMesh | None = None,
    **options: Any,
) -> np.ndarray:
    """Continue prompts by ``num_tokens`` tokens.

    Args:
      model: The model of the parameters.
      params: As from ``model.init``.
      prompt: Token ids ``[B, P]``, or rows of different lengths, each at least 1.
      num_tokens: How many to add, at least 1.
      key: As for ``Sampler.stream``.
      mesh: As for ``Sampler``.
      **options: ``temperature``, ``top_k``, ``top_p`` and ``stop_tokens`` of
        ``Sampler.stream``.

    Returns:
      int32 ``[B, P + num_tokens]``, P the longest prompt. It is -1 before a shorter
      prompt, and after a row's stop token.

    Raises:
      OperandError: [T401] a prompt that is empty or has tokens that the model lacks,
        or a setting out of range.
      ParameterTreeError: [T306] names or shapes are not those of this model.
    """
    sampler = Sampler(model, params, mesh)
    tokens, pads = _padded(prompt)
    steps = list(sampler.stream(prompt, num_tokens, key, **options))
    missing = num_tokens - len(steps)
    steps += [np.full(len(tokens), NO_TOKEN, np.int32)] * missing
    is_padding = np.arange(tokens.shape[1]) < pads[:, None]
    rows = np.where(is_padding, NO_TOKEN, tokens)
    return np.column_stack([rows, *steps]).astype(np.int32)


class Sampler:
    """A model and its parameters, laid out to generate text.

    It holds a copy of the layers' parameters, each layer in arrays of its own.

    Args:
      model: The model of the parameters.
      params: As from ``model.init``.
      mesh: Where to run: the batch is sharded over the data axes, heads over ``tp``.
        None leaves every layout to XLA.
      cache_dtype: Dtype of keys and values in the cache; None is that of the model.

    Raises:
      HeadCountError: [T402] the heads cannot be divided over ``tp``.
      ParameterTreeError: [T306] names or shapes are not those of this model.
    """

    def __init__(
        self,
        model: Model,
        params: Tree,
        mesh: AnyMesh | None = None,
        *,
        cache_dtype: Any = None,
    ) -> None:
        model.check_params(params)
        dtype = None if cache_dtype is None else as_dtype(cache_dtype)
        self._decoding = model.decoding(as_mesh(mesh), dtype)
        self._vocab_size = model.vocab_size
        self._given: tuple[Model, Tree] | None = (model, params)

    @cached_property
    def _weights(self) -> Any:
        assert self._given is not None
        weights = _unstack(self._decoding, *self._given)
        self._given = None  # a caller may free them
        return weights

    def stream(
        self,
        prompt: Prompts,
        num_tokens: int,
        key: jax.Array,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] = (),
        length: int = 0,
    ) -> Iterator[np.ndarray]:
        """Continue prompts, and yield tokens as they are computed.

        Programs are compiled once for each shape of prompts, sum of their length and
        ``num_tokens``, and ``top_k``.

        Args:
          prompt: Token ids ``[B, P]``, or rows of different lengths, each at least 1.
          num_tokens: The most tokens that are added, at least 1.
          key: The same key gives the same tokens. Row i uses ``fold_in(key, i)``; an
            array ``[B]`` has the key of each row. A row's tokens depend on its own
            prompt and key alone.
          temperature: Divides the logits; 0 takes the most likely token.
          top_k: Sample from the k most likely tokens; None samples from all.
          top_p: Sample from the most likely tokens that together have this probability,
            after ``top_k``; at least one. None samples from all.
          stop_tokens: A row ends with the first of these; the iterator ends with the
            last row.
          length: Pad prompts to this length, so that a program serves all shorter ones.

        Returns:
          An iterator of int32 ``[B]``, one array for each token; -1 for a row that has
          ended.

        Raises:
          OperandError: [T401] a prompt that is empty or has tokens that the model
            lacks, or a setting out of range.
        """
        tokens, pads = _padded(prompt, length)
        rows = len(tokens)
        if not key.shape:
            key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
        sampling = Sampling(key, temperature, top_p, top_k)
        vocab = self._vocab_size
        wrong = [*_problems(vocab, tokens, pads, num_tokens, sampling, stop_tokens)]
        if wrong:
            raise OperandError(
                "generate cannot sample with these arguments",
                got="\n".join(got for got, _ in wrong),
                fix="\n".join(fix for _, fix in wrong),
            )
        # Every device of the data axes has as many rows: what is added is dropped.
        extra = -rows % self._decoding.place.size("batch")
        wide = np.minimum(np.arange(rows + extra), rows - 1)
        sampling = replace(sampling, keys=key[wide])
        steps = self._steps(tokens[wide], pads[wide], num_tokens, sampling)
        return _until_stopped(steps, rows, num_tokens, stop_tokens)

    def _steps(
        self, tokens: np.ndarray, pads: np.ndarray, num_tokens: int, sampling: Sampling
    ) -> Iterator[Array]:
        """The tokens of each step, without waiting for them."""
        start, padding = tokens.shape[1], pads if pads.any() else None
        length = start + num_tokens - 1  # nothing attends to the last token
        last, cache = _prefill(
            self._decoding, self._weights, tokens, padding, sampling, length
        )
        yield last
        for index in range(1, num_tokens):
            numbers = np.int32(start + index - 1), np.int32(index)
            last, cache = _step(
                self._decoding, self._weights, cache, last, padding, sampling, *numbers
            )
            yield last


@partial(CorrectJit, static_argnums=(0, 1))
def _unstack(decoding: Decoding, model: Model, params: Tree) -> Any:
    return decoding.unstack(model.plain(params))


@partial(CorrectJit, static_argnums=(0, 5))
def _prefill(
    decoding: Decoding,
    weights: Any,
    tokens: Array,
    pads: Pads,
    sampling: Sampling,
    length: int,
) -> tuple[Array, Any]:
    logits, cache = decoding.prefill(weights, tokens, pads, length)
    return _sampled(decoding, logits, sampling, jnp.int32(0)), cache


@partial(CorrectJit, static_argnums=0, donate_argnums=2)
def _step(
    decoding: Decoding,
    weights: Any,
    cache: Any,
    tokens: Array,
    pads: Pads,
    sampling: Sampling,
    slot: Array,
    index: Array,
) -> tuple[Array, Any]:
    logits, cache = decoding.step(weights, cache, tokens, slot, pads)
    return _sampled(decoding, logits, sampling, index), cache


def _sampled(
    decoding: Decoding, logits: Logits, sampling: Sampling, index: Array
) -> Array:
    # On every device and in every process, which read them.
    return decoding.place.constrain(sampling.draw(logits, index), None)


def _until_stopped(
    steps: Iterator[Array], rows: int, num_tokens: int, stop_tokens: Sequence[int]
) -> Iterator[np.ndarray]:
    """The tokens on the host; a step ahead of them is being computed."""
    is_ended = np.zeros(rows, bool)
    following = next(steps)
    for _ in range(num_tokens):
        current, following = following, next(steps, following)
        tokens = np.where(is_ended, NO_TOKEN, np.asarray(current)[:rows])
        yield tokens.astype(np.int32)
        is_ended |= np.isin(tokens, stop_tokens)
        if is_ended.all():
            return


def _padded(prompt: Prompts, length: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The prompts padded on the left, and how much padding each one has."""
    rows = [np.asarray(row, np.int64).reshape(-1) for row in prompt]
    pads = max(length, *map(len, rows), 0) - np.array([*map(len, rows)], np.int32)
    padded = [np.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)]
    return np.array(padded), pads.astype(np.int32)


def _problems(
    vocab: int,
    tokens: np.ndarray,
    pads: np.ndarray,
    num_tokens: int,
    sampling: Sampling,
    stop_tokens: Sequence[int],
) -> Iterator[tuple[str, str]]:
    """What cannot be sampled with, and what can."""
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    lengths = (tokens.shape[1] - pads).tolist() if tokens.size else []
    if not lengths or min(lengths) < 1:
        yield f"prompts of lengths {lengths}", "prompts of one token or more"
    outside = tokens[(tokens < 0) | (tokens >= vocab)]
    if outside.size:
        got = f"token {outside[:1].tolist()} in a prompt"
        yield got, f"tokens from 0 to {vocab - 1}"
    if num_tokens < 1:
        yield f"num_tokens = {num_tokens}", "num_tokens 1 or more"
    if not 0 <= temperature < np.inf:
        yield f"temperature = {temperature}", "temperature 0 or more"
    if top_k is not None and not 1 <= top_k <= vocab:
        yield f"top_k = {top_k}", f"top_k from 1 to {vocab}, or None"
    if top_p is not None and not 0 < top_p <= 1:
        yield f"top_p = {top_p}", "top_p above 0 and up to 1, or None"
    if stops := [token for token in stop_tokens if not 0 <= token < vocab]:
        yield f"stop_tokens = {stops}", f"stop tokens from 0 to {vocab - 1}"
    if sampling.keys.shape != (len(tokens),):
        got = f"keys of shape {sampling.keys.shape} for {len(tokens)} prompts"
        yield got, "one key, or one for each prompt"
