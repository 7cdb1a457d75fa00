# SPDX-License-Identifier: Apache-2.0
"""``op.transformer_block``: a stack of transformer blocks that owns its parameters."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.ops.norms import rms_norm
from tessera.ops.operand_checks import (
    check_activations,
    check_positive,
    nearest_divisors,
)
from tessera.ops.operand_layouts import as_array
from tessera.shard import ShardSpec
from tessera.tracing import scope

_HEAD_SIZE = 64

# The mesh axis of each named dim, and the dims of each parameter after the stacked
# layers: columns of the first matmul and rows of the second are split over tp, so that
# each half of a block ends in one all-reduce (Shoeybi et al., arXiv 1909.08053).
_AXIS_OF = {"embed": "fsdp", "heads": "tp", "mlp": "tp"}
_DIMS = {
    "attention_norm": ("embed",),
    "query": ("embed", "heads", None),
    "key": ("embed", "heads", None),
    "value": ("embed", "heads", None),
    "attention_out": ("heads", None, "embed"),
    "mlp_norm": ("embed",),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}


def transformer_block(
    x: Any,
    *,
    depth: int = 1,
    num_heads: int | None = None,
    mlp_ratio: int = 4,
    causal: bool = False,
) -> jax.Array:
    """Apply ``depth`` pre-norm transformer blocks with parameters of their own.

    Each block adds multi-head attention and then a GELU MLP to its input, each after an
    RMSNorm. The parameters are declared in the step being traced, stacked over depth;
    the blocks are scanned, so compile time does not grow with depth. On a mesh with a
    ``tp`` axis, heads and MLP columns are split over it; with an ``fsdp`` axis, the
    embedding dim of every parameter is.

    Args:
      x: ``[B, S, D]`` floating-point activations.
      depth: Number of blocks.
      num_heads: Heads of ``D / num_heads`` dims; by default of 64 dims, or one head.
      mlp_ratio: Hidden size of the MLP divided by ``D``.
      causal: Whether a position attends only to itself and earlier positions.

    Returns:
      ``[B, S, D]`` in the dtype of ``x``.

    Raises:
      OutsideTraceError: [T302] no step is being traced.
      OperandError: [T401] ``x`` has another rank, a size is not positive, or the
        heads do not divide ``D``.
      ShardDivisibilityError: [T201] the mesh does not divide a parameter.

    Source: Vaswani et al., arXiv 1706.03762; pre-norm after Xiong et al., 2002.04745.
    """
    x = as_array(x)
    heads = _checked_heads(x, num_heads)
    for name, size in (("depth", depth), ("mlp_ratio", mlp_ratio)):
        check_positive("transformer_block", name, size)
    params = _declare(depth, x.shape[-1], heads, mlp_ratio)
    layer = {name: p.astype(x.dtype) for name, p in params.items()}

    def block(h_BSD: jax.Array, layer: Mapping[str, jax.Array]) -> tuple[Any, None]:
        inner_BSD = rms_norm(h_BSD) * layer["attention_norm"]
        h_BSD = h_BSD + _attention(inner_BSD, layer, causal)
        return h_BSD + _mlp(rms_norm(h_BSD) * layer["mlp_norm"], layer), None

    return jax.lax.scan(block, x, layer)[0]


def _checked_heads(x: jax.Array, num_heads: int | None) -> int:
    check_activations("transformer_block", x)
    size = x.shape[-1]
    heads = max(1, size // _HEAD_SIZE) if num_heads is None else num_heads
    check_positive("transformer_block", "num_heads", heads)
    if size % heads:
        raise OperandError(
            "the heads of transformer_block do not divide its features",
            got=f"{size} features, {heads} heads, remainder {size % heads}",
            fix=f"use num_heads={nearest_divisors(size, heads)}",
        )
    return heads


def _declare(depth: int, size: int, heads: int, ratio: int) -> dict[str, Any]:
    sizes = {
        "attention_norm": (size,),
        "query": (size, heads, size // heads),
        "key": (size, heads, size // heads),
        "value": (size, heads, size // heads),
        "attention_out": (heads, size // heads, size),
        "mlp_norm": (size,),
        "up": (size, ratio * size),
        "down": (ratio * size, size),
    }
    here = scope.current()
    axes = here.mesh.axes if here is not None and here.mesh is not None else ()
    with scope.named(scope.fresh_component("block")):
        return {
            name: scope.parameter(
                name,
                (depth, *shape),
                init="ones" if name.endswith("norm") else _fan_in(name),
                layout=_layout(_DIMS[name], axes),
            )
            for name, shape in sizes.items()
        }


def _layout(dims: tuple[str | None, ...], axes: tuple[str, ...]) -> ShardSpec | None:
    axis_of_dim = {
        index + 1: _AXIS_OF[dim]
        for index, dim in enumerate(dims)
        if dim is not None and _AXIS_OF[dim] in axes
    }
    if not axis_of_dim:
        return None
    return ShardSpec(tuple(axis_of_dim), tuple(axis_of_dim.values()))


@functools.cache
def _fan_in(name: str) -> jax.nn.initializers.Initializer:
    """Normal of variance 1 / fan-in; dim 0 counts layers, and layers share no input.

    Cached: an initializer is compiled once for all its uses.
    """
    inputs = 2 if name == "attention_out" else 1  # heads and their dims
    in_axis = tuple(range(1, 1 + inputs))
    # All other dims, or the initializer would count heads among the inputs.
    out_axis = tuple(range(1 + inputs, 1 + len(_DIMS[name])))
    return jax.nn.initializers.variance_scaling(
        1.0, "fan_in", "normal", in_axis=in_axis, out_axis=out_axis, batch_axis=0
    )


def _attention(x_BSD: jax.Array, layer: Mapping[str, Any], causal: bool) -> jax.Array:
    q_BSNH, k_BSNH, v_BSNH = (
        jnp.einsum("bsd,dnh->bsnh", x_BSD, layer[name])
        for name in ("query", "key", "value")
    )
    # The f32 scores of narrow operands are a promotion, which may be disabled.
    with jax.numpy_dtype_promotion("standard"):
        mixed_BSNH = jax.nn.dot_product_attention(
            q_BSNH, k_BSNH, v_BSNH, is_causal=causal
        )
    return jnp.einsum("bsnh,nhd->bsd", mixed_BSNH, layer["attention_out"])


def _mlp(x_BSD: jax.Array, layer: Mapping[str, Any]) -> jax.Array:
    return jax.nn.gelu(x_BSD @ layer["up"]) @ layer["down"]
