# SPDX-License-Identifier: Apache-2.0
"""Frozen weights below adapters in 4 or 8 bits: QLoRA.

A block of 64 weights that enter one output has a scale, the largest of them, by which
they are divided and rounded to one of 16 or 255 numbers. Two codes of 4 bits are one
byte, that of a block's first half in the high bits: XLA has 4-bit integers for GPUs,
but NumPy and checkpoints would take a byte for each. Blocks and codes are those of
bitsandbytes, whose bytes have neighbors: a step on TPUs would take a quarter longer.

Source: Dettmers et al., QLoRA, arXiv 2305.14314: NF4, without double quantization.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Integer

from tessera.train.models.decoder.lora import BLOCK

# Quantiles of a normal distribution and an exact zero: appendix E of the paper.
_NF4: Final = (
    "-1 -0.696192801 -0.525073051 -0.394917488 -0.284441382 -0.18477343 "
    "-0.0910500363 0 0.0795802996 0.160930201 0.246112302 0.337915242 "
    "0.440709829 0.562617004 0.722956836 1"
)
NF4: Final = np.array(_NF4.split(), np.float32)
_BOUNDS: Final = (NF4[1:] + NF4[:-1]) / np.float32(2)
_INT8_STEP: Final = np.float32(1 / 127)


def quantize(
    rows: Float[Array, "inputs ..."], kind: str
) -> tuple[Integer[Array, "blocks bytes ..."], Float[Array, "blocks ..."]]:
    """The codes and scales of one matmul's weights.

    Args:
      rows: float32; the number of inputs is a multiple of 64.
      kind: ``nf4`` (uint8, 32 bytes a block) or ``int8`` (64).
    """
    blocks = rows.reshape(-1, BLOCK, *rows.shape[1:])
    scales = jnp.abs(blocks).max(axis=1)
    unit = blocks / jnp.where(scales == 0, 1, scales)[:, None]
    if kind == "int8":
        return jnp.round(127 * unit).astype(jnp.int8), scales
    codes = jnp.zeros(unit.shape, jnp.uint8)
    for bound in _BOUNDS:
        codes += (unit > bound).astype(jnp.uint8)
    return codes[:, : BLOCK // 2] << 4 | codes[:, BLOCK // 2 :], scales


def dequantize(
    codes: Integer[Array, "blocks bytes ..."],
    scales: Float[Array, "blocks ..."],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "inputs ..."]:
    """The weights that codes and scales stand for, rounded once to a dtype."""
    if codes.dtype == jnp.int8:
        unit = codes.astype(jnp.float32) * _INT8_STEP
    else:
        index = jnp.concatenate([codes >> 4, codes & 15], axis=1)
        unit = jnp.asarray(NF4).at[index].get(mode="promise_in_bounds")
    weights = unit * scales[:, None]
    return weights.reshape(-1, *codes.shape[2:]).astype(dtype)
