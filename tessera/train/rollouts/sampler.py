# SPDX-License-Identifier: Apache-2.0
"""``Sampler``: completions of prompts, in continuous batches.

A fixed number of slots is computed together. A dispatch draws some tokens of the row in
each; the host then reads them, and gives the slot of a finished row to the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from tessera.errors import OperandError
from tessera.foundations.dtypes import as_dtype
from tessera.foundations.tree import Tree
from tessera.mesh import AnyMesh, as_mesh
from tessera.train.models.decoding import Decoding
from tessera.train.models.model import Model
from tessera.train.rollouts.batch_part import BatchPart, Row
from tessera.train.rollouts.completions import Completion, RolloutStopped
from tessera.train.rollouts.dispatch_inputs import chunks_of_fills, inputs_of_rows
from tessera.train.rollouts.draws import Draws
from tessera.train.rollouts.programs import (
    NO_TOKEN,
    FixedParts,
    decode,
    decode_parts,
    empty_cache,
    fill,
    fill_parts,
)
from tessera.train.rollouts.resharding import reshard

# Token ids: an array [prompts, length], or prompts of different lengths.
Prompts: TypeAlias = Array | np.ndarray | Sequence[Sequence[int] | np.ndarray]

# Tokens of rows whose cache has room for all of them.
_SHORT: Final = 512


@dataclass(frozen=True)
class Sampler:
    """Writes completions of prompts.

    It holds no parameters. Three programs compute prompts and one draws tokens,
    whatever the prompts and the parameters are.

    Attributes:
      model: The model of the parameters.
      mesh: Where to run: slots are sharded over the data axes, heads over ``tp``. None
        leaves every layout to XLA.
      num_tokens: The most tokens of a completion.
      max_length: The most tokens of a prompt and its completion.
      slots: Rows that are computed at a time.
      temperature: Divides the logits; 0 takes the most likely token.
      top_k: Sample from the k most likely tokens; None samples from all.
      top_p: Sample from the most likely tokens that together have this probability,
        after ``top_k``; at least one. None samples from all.
      stop_tokens: A completion ends with the first of these.
      cache_dtype: Dtype of keys and values in the cache; None is that of the model.
      cache_tokens: Tokens of all slots that are cached at a time; when they do not
        suffice, a row waits and is computed again. None is half of what rows of
        ``max_length`` would take, and all of that up to 512 tokens.
      block: Tokens of a block of the cache.
      dispatch_tokens: Tokens of each row in one dispatch.
      parts: With a number, no mesh changes a bit of the completions, as with
        ``training.numerics=deterministic``: the slots are cut into so many parts,
        which the devices of all axes share, and each computes its own by itself.

    Raises:
      HeadCountError: [T402] the heads cannot be divided over ``tp``.
      OperandError: [T401] a setting is out of range.
    """

    model: Model
    mesh: AnyMesh | None = None
    _: KW_ONLY
    num_tokens: int
    max_length: int
    slots: int = 64
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop_tokens: Sequence[int] = ()
    cache_dtype: Any = None
    cache_tokens: int | None = None
    block: int = 32
    dispatch_tokens: int = 32
    parts: int | None = None

    def __post_init__(self) -> None:
        _refuse(_setting_problems(self))
        assert self._decoding

    @cached_property
    def _decoding(self) -> Decoding:
        dtype = None if self.cache_dtype is None else as_dtype(self.cache_dtype)
        decoding = self.model.decoding(as_mesh(self.mesh), dtype)
        return decoding if self.parts is None else decoding.alone()

    @property
    def _num_parts(self) -> int:
        return self.parts or self._decoding.place.size("batch")

    @property
    def _programs(self) -> tuple[Any, Any]:
        """What computes prompts, and what draws tokens."""
        steps = self.dispatch_tokens
        if self.parts is None:
            return partial(fill, self._decoding), partial(decode, self._decoding, steps)
        fixed = FixedParts(self.model, as_mesh(self.mesh), self.parts)
        return (
            partial(fill_parts, fixed, self._decoding),
            partial(decode_parts, fixed, self._decoding, steps),
        )

    @property
    def _pools(self) -> tuple[int, ...]:
        """Blocks of a part, by kind of layer."""
        slots, block = -(-self.slots // self._num_parts), self.block
        tokens = self.cache_tokens
        if tokens is None:
            is_short = self.max_length <= _SHORT
            tokens = self.slots * (self.max_length + block)
            tokens = tokens if is_short else tokens // 2
        few = self.dispatch_tokens // block + 2

        def pool(window: int | None) -> int:
            most = -(-tokens // (self._num_parts * block))
            if window is not None:
                most = min(most, slots * (-(-window // block) + few))
            # One row has room, beside the block of its prompt that it copies.
            return 1 + max(most, -(-self.max_length // block) + few)

        return tuple(map(pool, self._decoding.windows))

    def complete(
        self,
        params: Tree,
        prompts: Prompts,
        keys: jax.Array,
        *,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[Completion]:
        """The completion of each prompt.

        Args:
          params: As from ``model.init``, in the layout of training. Those of another
            mesh over the same devices are resharded for the call.
          prompts: Token ids, at least one each. Equal ones are computed once.
          keys: The same key gives the same tokens. Row i uses ``fold_in(key, i)``; an
            array ``[len(prompts)]`` has the key of each. A completion depends on its
            own prompt and key alone, up to tokens whose logits differ in the last bit.
          should_continue: Asked after each dispatch.

        Raises:
          OperandError: [T401] a prompt is empty, has tokens that the model lacks, or
            is too long.
          ParameterTreeError: [T306] names or shapes are not those of this model.
          RolloutStopped: ``should_continue`` said no.
        """
        rows, draws, data = self._checked(params, prompts, keys)

        def is_ended(_: int) -> bool:
            return False

        for _ in self._run(params, rows, draws, data, is_ended, should_continue):
            pass
        return [
            Completion(
                np.array(row.tokens, np.int32),
                np.array(row.log_probs, np.float32),
                row.last in self.stop_tokens,
            )
            for row in rows
        ]

    def stream(
        self,
        params: Tree,
        prompts: Prompts,
        keys: jax.Array,
        *,
        is_ended: Callable[[int], bool] = lambda _: False,
    ) -> Iterator[tuple[int, int]]:
        """The index of a prompt and the next token of its completion, as they come.

        Arguments and errors are those of ``complete``.

        Args:
          params: See ``complete``.
          prompts: See ``complete``.
          keys: See ``complete``.
          is_ended: Whether the prompt of an index needs no more tokens, by what the
            caller read of its completion; asked after each dispatch.
        """
        rows, draws, data = self._checked(params, prompts, keys)
        return self._run(params, rows, draws, data, is_ended)

    def _checked(
        self, params: Tree, prompts: Prompts, keys: jax.Array
    ) -> tuple[list[Row], Draws, np.ndarray]:
        """The rows of prompts, how they are drawn, and the data of their keys."""
        self.model.check_params(params)
        rows = [np.asarray(row, np.int64).reshape(-1) for row in prompts]
        if not keys.shape:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, np.arange(len(rows)))
        vocab, most = self.model.vocab_size, self.max_length - self.num_tokens
        _refuse(_prompt_problems(rows, vocab, most, keys.shape))
        # Nothing reads the last token.
        longest = max(map(len, rows), default=0)
        self._decoding.check_length(longest + self.num_tokens - 1)
        draws = Draws(
            self.temperature, self.top_p, self.top_k, str(jax.random.key_impl(keys))
        )
        data = np.asarray(jax.random.key_data(keys))
        ids = (tuple(row.tolist()) for row in rows)
        made = [Row(number, row, self.num_tokens) for number, row in enumerate(ids)]
        return made, draws, data

    def _run(
        self,
        params: Tree,
        rows: list[Row],
        draws: Draws,
        keys: np.ndarray,
        is_ended: Callable[[int], bool],
        should_continue: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[int, int]]:
        parts, decoding = self._new_parts(rows), self._decoding
        params = self._placed(params)
        fill_cache, draw = self._programs
        sizes = len(decoding.windows), -(-self.max_length // self.block), self.block
        cache = empty_cache(decoding, params, len(parts), self._pools, self.block)
        stops = np.array([*self.stop_tokens] or [NO_TOKEN], np.int32)
        while any(part.waiting or any(part.slots) for part in parts):
            _share_waiting(parts)
            for fills in zip(*(part.admit() for part in parts), strict=True):
                for pages, tokens in chunks_of_fills(fills, *sizes):
                    cache = fill_cache(params, cache, pages, tokens)
            for part in parts:
                part.trim()
                part.grow()
            pages, slots = inputs_of_rows(parts, keys, *sizes, self.dispatch_tokens)
            cache, *made = draw(params, cache, pages, slots, draws, stops)
            tokens, log_probs = map(np.asarray, made)
            yield from self._read(parts, tokens, log_probs, is_ended)
            if not should_continue():
                raise RolloutStopped

    def _placed(self, params: Tree) -> Tree:
        """Parameters that are on another mesh, in the layout of the sampler's."""
        mesh, first = as_mesh(self.mesh), jax.tree.leaves(params)[0]
        sharding = first.sharding if isinstance(first, jax.Array) else None
        if mesh is None or not isinstance(sharding, NamedSharding):
            return params
        if sharding.mesh == mesh.jax:
            return params
        return reshard(self.model, params, mesh)

    def _new_parts(self, rows: Sequence[Row]) -> list[BatchPart]:
        """The parts of the batch, each with its share of the rows."""
        # Those of one prompt are neighbors.
        first = dict[tuple[int, ...], int]()
        for row in rows:
            first.setdefault(row.prompt, row.number)
        ordered = sorted(rows, key=lambda row: first[row.prompt])
        slots = -(-self.slots // self._num_parts)
        sizes = slots, self._pools, self._decoding.windows
        parts = list[BatchPart]()
        for own in np.array_split(np.arange(len(rows)), self._num_parts):
            part = BatchPart(*sizes, self.block, self.dispatch_tokens)
            part.waiting.extend(ordered[index] for index in own)
            parts.append(part)
        return parts

    def _read(
        self,
        parts: Sequence[BatchPart],
        tokens: np.ndarray,
        log_probs: np.ndarray,
        is_ended: Callable[[int], bool],
    ) -> Iterator[tuple[int, int]]:
        """Give the rows what was drawn, and free the slots of those that end."""
        drawn = list[tuple[int, int, int]]()
        for number, part in enumerate(parts):
            for slot, row in enumerate(part.slots):
                if row is not None:
                    own = tokens[number, :, slot]
                    count = int((own != NO_TOKEN).sum())
                    row.tokens += own[:count].tolist()
                    row.log_probs += log_probs[number, :count, slot].tolist()
                    drawn += [(i, row.number, int(own[i])) for i in range(count)]
        yield from ((row, token) for _, row, token in sorted(drawn))
        for part in parts:
            for row in [row for row in part.slots if row is not None]:
                is_cut = len(row.tokens) == row.limit
                if is_cut or row.last in self.stop_tokens or is_ended(row.number):
                    part.finish(row)


def _share_waiting(parts: Sequence[BatchPart]) -> None:
    """Let parts that have free slots and no rows take rows of others."""
    for part in parts:
        for _ in range(part.slots.count(None) - len(part.waiting)):
            longest = max(parts, key=lambda other: len(other.waiting))
            if len(longest.waiting) <= longest.slots.count(None):
                return
            part.waiting.append(longest.waiting.pop())


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
      key: As for ``Sampler.complete``.
      mesh: As for ``Sampler``.
      **options: ``temperature``, ``top_k``, ``top_p`` and ``stop_tokens`` of
        ``Sampler``.

    Returns:
      int32 ``[B, P + num_tokens]``, P the longest prompt. It is -1 before a shorter
      prompt, and after a row's stop token.

    Raises:
      OperandError: [T401] a prompt that is empty or has tokens that the model lacks,
        or a setting out of range.
      ParameterTreeError: [T306] names or shapes are not those of this model.
    """
    rows = [np.asarray(row, np.int64).reshape(-1) for row in prompt]
    width = max(map(len, rows), default=0)
    length = width + num_tokens
    sampler = Sampler(
        model,
        mesh,
        num_tokens=num_tokens,
        # Programs serve all prompts up to the next power of two.
        max_length=1 << (length - 1).bit_length(),
        slots=min(len(rows), 64),
        **options,
    )
    result = np.full((len(rows), length), NO_TOKEN, np.int32)
    for row, known, own in zip(
        result, rows, sampler.complete(params, rows, key), strict=True
    ):
        row[width - len(known) : width] = known
        row[width : width + len(own.tokens)] = own.tokens
    return result


def _setting_problems(sampler: Sampler) -> Iterator[tuple[str, str]]:
    """What a sampler cannot be made with, and what it can."""
    for name in (
        "num_tokens",
        "max_length",
        "slots",
        "block",
        "dispatch_tokens",
        "parts",
    ):
        value = getattr(sampler, name)
        if value is not None and value < 1:
            yield f"{name} = {value}", f"{name} 1 or more"
    vocab, temperature = sampler.model.vocab_size, sampler.temperature
    top_k, top_p = sampler.top_k, sampler.top_p
    if not 0 <= temperature < np.inf:
        yield f"temperature = {temperature}", "temperature 0 or more"
    if top_k is not None and not 1 <= top_k <= vocab:
        yield f"top_k = {top_k}", f"top_k from 1 to {vocab}, or None"
    if top_p is not None and not 0 < top_p <= 1:
        yield f"top_p = {top_p}", "top_p above 0 and up to 1, or None"
    if stops := [token for token in sampler.stop_tokens if not 0 <= token < vocab]:
        yield f"stop_tokens = {stops}", f"stop tokens from 0 to {vocab - 1}"


def _prompt_problems(
    rows: Sequence[np.ndarray], vocab: int, most: int, keys: tuple[int, ...]
) -> Iterator[tuple[str, str]]:
    """What speaks against prompts, and how to mend it."""
    lengths = [len(row) for row in rows]
    if min(lengths, default=1) < 1:
        yield f"prompts of lengths {lengths}", "prompts of one token or more"
    if max(lengths, default=0) > most:
        got = f"a prompt of {max(lengths)} tokens, max_length less num_tokens = {most}"
        yield got, f"prompts of {most} tokens or less, or another max_length"
    tokens = np.concatenate([*rows, np.zeros(0, np.int64)])
    if len(outside := tokens[(tokens < 0) | (tokens >= vocab)]):
        got = f"token {outside[:1].tolist()} in a prompt"
        yield got, f"tokens from 0 to {vocab - 1}"
    if keys != (len(rows),):
        got = f"keys of shape {keys} for {len(rows)} prompts"
        yield got, "one key, or one for each prompt"


def _refuse(problems: Iterator[tuple[str, str]]) -> None:
    """Raise an error that lists the problems, if there are any."""
    if wrong := [*problems]:
        raise OperandError(
            "these prompts cannot be completed",
            got="\n".join(got for got, _ in wrong),
            fix="\n".join(fix for _, fix in wrong),
        )
