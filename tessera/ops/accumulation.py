# SPDX-License-Identifier: Apache-2.0
"""``ts.accumulate_gradients``: a batch in parts, one after the other.

The memory of a step is then that of one part, and of one sum of gradients.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from tessera import _jax, scope
from tessera.errors import BatchSizeError, OperandError
from tessera.tree import Tree

Reduction: TypeAlias = Literal["mean", "sum"]


def accumulate_gradients(
    step: Callable[[Tree], Tree],
    batch: Tree,
    microbatches: int | None = None,
    *,
    reduction: Reduction = "mean",
) -> Tree:
    """What ``step`` gives for each microbatch, summed or averaged in one ``lax.scan``.

    The mean of the gradients of mean losses is the gradient of the whole batch's mean
    loss. Where microbatches weigh differently, as with targets that do not count, let
    ``step`` give sums and their number, and divide after ``reduction="sum"``.

    Args:
      step: Takes one microbatch, a tree like ``batch``, and gives a tree of numbers,
        such as ``(loss, gradients)``. It may call ``ts.grad`` or ``jax.grad``.
      batch: Tree of arrays ``[B, ...]``, of which ``microbatches`` are made, or
        without that number ``[microbatches, ...]``; or a list of microbatches. Row r
        of a batch goes to microbatch ``r % microbatches``: of a batch that is split
        over devices, each then has its rows of every microbatch.
      microbatches: In how many parts to cut each array's leading dim.
      reduction: ``mean`` or ``sum``.

    Returns:
      A tree like that of ``step``: its shapes and dtypes; floating-point numbers are
      summed in f32 at least. Of a mean of integers, f32.

    Raises:
      BatchSizeError: [T503] the rows cannot be divided into so many microbatches, or
        arrays differ in their number.
      OperandError: [T401] there is no such reduction.

    Example:
      >>> import tessera as ts, jax.numpy as jnp
      >>> @ts.function
      ... def gradients_of(weight, x):
      ...     def step(x):
      ...         loss = jnp.mean((x * weight) ** 2)
      ...         return loss, ts.grad(loss, weight)
      ...     return ts.accumulate_gradients(step, x, microbatches=2)
      >>> loss, gradient = gradients_of(jnp.float32(3.0), jnp.arange(4.0))
      >>> float(loss), float(gradient)
      (31.5, 21.0)
    """
    if reduction not in get_args(Reduction):
        raise OperandError(
            f"there is no reduction {reduction!r}", fix="use 'mean' or 'sum'"
        )
    parts, count = _parts(batch, microbatches)
    leaves, tree = jax.tree.flatten(parts)
    results = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal results
        microbatch = jax.tree.unflatten(tree, arrays)
        given, results = jax.tree.flatten(scope.resolve_callee(step)(microbatch))
        return [jnp.asarray(leaf) for leaf in given]

    # Traced once, for the types of its sums: a second time it would declare the
    # parameters of operations that own some anew.
    program = jax.make_jaxpr(flat)(
        *(_jax.struct(jax.typeof(leaf[0])) for leaf in leaves)
    )
    types = [variable.aval for variable in _jax.outputs(program)]
    zeros = [_jax.zeros(kind).astype(_wide(kind.dtype)) for kind in types]

    def add(sums: list[Any], rows: list[Any]) -> tuple[list[Any], None]:
        values = _jax.evaluate(program, *rows)
        return [a + b.astype(a.dtype) for a, b in zip(sums, values, strict=True)], None

    sums, _ = jax.lax.scan(add, zeros, leaves, length=count)
    return jax.tree.unflatten(
        results,
        [
            _reduced(x, t.dtype, count, reduction)
            for x, t in zip(sums, types, strict=True)
        ],
    )


def _stacked(*parts: Any) -> jax.Array:
    return jnp.stack(parts)


def _wide(dtype: Any) -> Any:
    """The dtype that numbers of a dtype are summed in."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_narrow else dtype


def _reduced(
    total: jax.Array, dtype: Any, count: int, reduction: Reduction
) -> jax.Array:
    if reduction == "sum":
        return total.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return total.astype(jnp.float32) / count
    return (total / count).astype(dtype)


def _parts(batch: Tree, microbatches: int | None) -> tuple[Tree, int]:
    """The batch with a leading dim that counts microbatches, and their number."""
    if microbatches is None and isinstance(batch, list) and batch:
        batch = jax.tree.map(_stacked, *batch)
    batch = jax.tree.map(jnp.asarray, batch)
    rows = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape[:1]
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
    }
    counts = set(rows.values())
    if len(counts) != 1 or counts == {()} or counts == {(0,)}:
        raise BatchSizeError(
            "the arrays of a batch do not have the same number of rows",
            got="\n".join(
                f"{name or 'the batch'}: {size[0] if size else 'no dims'}"
                for name, size in rows.items()
            )
            or "no arrays",
            fix="give each of them one row, or more, for each example",
        )
    ((count,),) = counts
    if microbatches is None:
        return batch, count
    if microbatches < 1 or count % microbatches:
        legal = [n for n in range(1, count + 1) if count % n == 0]
        near = [n for n in legal if n < microbatches][-1:]
        near += [n for n in legal if n > microbatches][:1]
        raise BatchSizeError(
            f"a batch cannot be divided into {microbatches} microbatches",
            got=f"{count} rows"
            + (f", remainder {count % microbatches}" if microbatches > 0 else ""),
            fix=f"use {' or '.join(map(str, near))} microbatches",
        )

    def cut(leaf: jax.Array) -> jax.Array:
        # By rows r % microbatches: a device's own rows stay on it.
        parts = leaf.reshape(count // microbatches, microbatches, *leaf.shape[1:])
        return jnp.swapaxes(parts, 0, 1)

    return jax.tree.map(cut, batch), microbatches
