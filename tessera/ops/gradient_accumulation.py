# SPDX-License-Identifier: Apache-2.0
"""``ts.accumulate_gradients``: a step over microbatches, one after the other.

The memory of a step is then that of one microbatch, plus one sum of gradients.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from tessera.errors import BatchSizeError, OperandError
from tessera.foundations.tree import Tree, named_leaves
from tessera.jax_compat import jaxprs
from tessera.ops.operand_checks import nearest_divisors
from tessera.tracing import scope
from tessera.tracing.per_device_checks import check_microbatches

Reduction: TypeAlias = Literal["mean", "sum"]


def accumulate_gradients(
    step: Callable[[Tree], Tree],
    batch: Tree,
    microbatches: int | None = None,
    *,
    reduction: Reduction = "mean",
) -> Tree:
    """Sum or average the results of ``step`` over microbatches, in one ``lax.scan``.

    The mean of the gradients of mean losses is the gradient of the mean loss of the
    whole batch. Where microbatches have different weights, for example because of
    ignored targets, return sums and counts, and divide after ``reduction="sum"``.

    Args:
      step: Maps one microbatch, a tree like ``batch``, to a tree of numbers, such as
        ``(loss, gradients)``. It may call ``ts.grad`` or ``jax.grad``.
      batch: Tree of arrays ``[B, ...]``, which are split into ``microbatches``, or
        without that number ``[microbatches, ...]``; or a list of microbatches. Row r of
        a batch belongs to microbatch ``r % microbatches``, so that each device of a
        sharded batch has rows of every microbatch.
      microbatches: The number of parts of each array's leading dim.
      reduction: ``mean`` or ``sum``.

    Returns:
      A tree with the structure, shapes and dtypes of the result of ``step``;
      floating-point numbers are summed in at least f32. A mean of integers is f32.

    Raises:
      BatchSizeError: [T503] the number of rows is not a multiple of ``microbatches``,
        or differs between arrays.
      OperandError: [T401] there is no such reduction.
      RandomNumbersError: [T211] all microbatches draw the same random numbers.

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
    stacked, count = _microbatches(batch, microbatches)
    leaves, tree = jax.tree.flatten(stacked)
    structure = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal structure
        microbatch = jax.tree.unflatten(tree, arrays)
        results, structure = jax.tree.flatten(scope.resolve_callee(step)(microbatch))
        return [jnp.asarray(leaf) for leaf in results]

    # Traced only once: a second trace would declare the parameters of operations that
    # own some again.
    program = jax.make_jaxpr(flat)(
        *(jaxprs.struct(jax.typeof(leaf[0])) for leaf in leaves)
    )
    if count > 1:
        check_microbatches(program, [True] * len(leaves))
    types = [variable.aval for variable in jaxprs.outputs(program)]
    zeros = [jaxprs.zeros(kind).astype(_sum_dtype(kind.dtype)) for kind in types]

    def add(sums: list[Any], rows: list[Any]) -> tuple[list[Any], None]:
        values = jaxprs.evaluate(program, *rows)
        return [a + b.astype(a.dtype) for a, b in zip(sums, values, strict=True)], None

    sums, _ = jax.lax.scan(add, zeros, leaves, length=count)
    return jax.tree.unflatten(
        structure,
        [
            _reduced(x, t.dtype, count, reduction)
            for x, t in zip(sums, types, strict=True)
        ],
    )


def _sum_dtype(dtype: Any) -> Any:
    """The dtype of sums of numbers of a dtype."""
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


def _microbatches(batch: Tree, microbatches: int | None) -> tuple[Tree, int]:
    """The batch with a leading dim of microbatches, and their number."""
    if microbatches is None and isinstance(batch, list) and batch:
        batch = jax.tree.map(_stack, *batch)
    batch = jax.tree.map(jnp.asarray, batch)
    rows = {name: leaf.shape[:1] for name, leaf in named_leaves(batch).items()}
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
        raise BatchSizeError(
            f"a batch cannot be divided into {microbatches} microbatches",
            got=f"{count} rows"
            + (f", remainder {count % microbatches}" if microbatches > 0 else ""),
            fix=f"use {nearest_divisors(count, microbatches)} microbatches",
        )

    def split(leaf: jax.Array) -> jax.Array:
        # By rows r % microbatches: a device's own rows stay on it.
        parts = leaf.reshape(count // microbatches, microbatches, *leaf.shape[1:])
        return jnp.swapaxes(parts, 0, 1)

    return jax.tree.map(split, batch), microbatches


def _stack(*leaves: Any) -> jax.Array:
    return jnp.stack(leaves)
