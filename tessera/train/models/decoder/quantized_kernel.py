# SPDX-License-Identifier: Apache-2.0
"""Frozen weights below adapters in 4 or 8 bits: QLoRA.

A block of 64 weights that enter one output has a scale, the largest of them, by which
they are divided and rounded to one of 16 or 255 numbers. Two codes of 4 bits are one
byte, the first in its high bits: XLA has 4-bit integers for GPUs, but NumPy and
checkpoints would take a byte for each. Blocks, codes and bytes are those of
bitsandbytes, if the inputs of a matmul are the last dim.

Source: Dettmers et al., QLoRA, arXiv 2305.14314: NF4, without double quantization.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Integer

from tessera.train.models.decoder.lora import BLOCK

# Quantiles of a normal distribution, an even number on each side of an exact zero; the
# paper's appendix E.
NF4: Final = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
        *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)
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
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def dequantize(
    codes: Integer[Array, "blocks bytes ..."],
    scales: Float[Array, "blocks ..."],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "inputs ..."]:
    """The weights that codes and scales stand for, rounded once to a dtype."""
    if codes.dtype == jnp.int8:
        unit = codes.astype(jnp.float32) * _INT8_STEP
    else:
        pairs = jnp.stack([codes >> 4, codes & 15], axis=2)
        index = pairs.reshape(len(codes), BLOCK, *codes.shape[2:])
        unit = jnp.asarray(NF4).at[index].get(mode="promise_in_bounds")
    weights = unit * scales[:, None]
    return weights.reshape(-1, *codes.shape[2:]).astype(dtype)
