# SPDX-License-Identifier: Apache-2.0
"""Operands of context attention, spread over a mesh, and attention on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tessera import op
from tessera.mesh import Mesh

P = PartitionSpec
BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 48, 8, 4, 8
SEQUENCES = P("dp", "cp")
METHODS = ["ring", "zigzag", "all_to_all"]


def plain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Any = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attention on one device, with a mask as large as the square of the sequence."""
    copies, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) * np.float32(q.shape[-1] ** -0.5)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = np.ones((1, length, length), bool)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhst,bthk->bshk", weights, v)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands(
    batch: int = BATCH,
    length: int = LENGTH,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
) -> list[np.ndarray]:
    """Queries, keys, values and the gradient of what is read."""
    kinds = (heads, kv_heads, kv_heads, heads)
    return [
        drawn(batch, length, kind, WIDTH, seed=seed) for seed, kind in enumerate(kinds)
    ]


def segments(batch: int = BATCH, length: int = LENGTH) -> np.ndarray:
    """Rows of a few documents each, and of padding at the end."""
    draw = np.random.default_rng(0).integers(1, 4, (batch, length))
    ids = np.sort(draw, axis=1).astype(np.int32)
    ids[:, -5:] = 0
    return ids


def mesh_of(size: int) -> Mesh:
    return Mesh(["dp", "cp"], devices=range(8), shape=(8 // size, size))


def spread(x: Any, mesh: Mesh, method: str, spec: PartitionSpec = SEQUENCES) -> Any:
    """An array on the mesh, its sequences in the order that the method takes."""
    x = op.zigzag(x, mesh.shape["cp"]) if method == "zigzag" else x
    return jax.device_put(x, NamedSharding(mesh.jax, spec))


def gathered(x: Any, mesh: Mesh, method: str) -> np.ndarray:
    x = op.unzigzag(x, mesh.shape["cp"]) if method == "zigzag" else x
    return np.asarray(x)
