# SPDX-License-Identifier: Apache-2.0
"""One decoder, its first weights and its data: what all peers share. NumPy alone.

A pre-norm decoder: RMSNorm, rotary embedding, causal attention, a GELU between two
matmuls, an output matmul of its own; no biases. Weights and moments are f32; matmuls
are in ``dtype``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

LEARNING_RATE: Final = 1e-3
EPSILON: Final = 1e-6  # of norms
ROTARY_BASE: Final = 10_000.0
CONTESTANTS: Final = (
    "tessera",
    "jax",
    "jax_scanned",
    "flax",
    "torch",
    "torch_compiled",
)


@dataclass(frozen=True)
class Setting:
    """Sizes of the decoder and of a batch.

    Attributes:
      width: Of the residual stream; four times that inside the MLP.
      layers: Decoder blocks.
      heads: Of queries, keys and values alike.
      length: Tokens in a sequence.
      rows: Sequences in a batch.
      vocabulary: Words.
      dtype: Of matmuls and of activations: ``f32`` or ``bf16``; or ``autocast``, which
        is the program of ``f32`` under PyTorch's or Tessera's autocast to bf16.
    """

    width: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 256
    rows: int = 8
    vocabulary: int = 8192
    dtype: str = "f32"

    @property
    def head_width(self) -> int:
        """Numbers in one head."""
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.rows * self.length

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        block = 12 * self.width**2 + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width

    @property
    def flops(self) -> float:
        """Of a step, by the convention of MFU: nothing recomputed, attention causal.

        Six for each parameter that is multiplied and each token, which leaves out the
        looking up of embeddings; and half of ``12 · layers · width · length`` for each
        token, for the half of the scores that a causal mask leaves.
        """
        multiplied = self.parameters - self.vocabulary * self.width
        attention = 6 * self.layers * self.width * self.length
        return float(self.tokens * (6 * multiplied + attention))

    def weights(self) -> dict[str, Any]:
        """The first weights: a list of blocks, and what is around them."""
        draw = np.random.default_rng(0)

        def matrix(rows: int, columns: int) -> np.ndarray:
            values = draw.standard_normal((rows, columns), np.float32)
            return values * np.float32(rows**-0.5)

        width = self.width
        blocks = [
            {
                "norm_1": np.ones(width, np.float32),
                "query": matrix(width, width),
                "key": matrix(width, width),
                "value": matrix(width, width),
                "out": matrix(width, width) * np.float32((2 * self.layers) ** -0.5),
                "norm_2": np.ones(width, np.float32),
                "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width)
                * np.float32((2 * self.layers) ** -0.5),
            }
            for _ in range(self.layers)
        ]
        table = draw.standard_normal((self.vocabulary, width), np.float32)
        return {
            "embedding": table,
            "blocks": blocks,
            "norm": np.ones(width, np.float32),
            "head": matrix(width, self.vocabulary),
        }

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless int32 tokens and targets ``[rows, length]``; a few words are common.

        Word follows word by a rule in half of the places, so that there is something
        to learn.
        """
        draw = np.random.default_rng(1)
        shape = (self.rows, self.length + 1)
        while True:
            words = draw.random(shape) ** 4 * self.vocabulary
            words = words.astype(np.int32)
            follows = draw.random(shape) < 0.5
            for place in range(1, shape[1]):
                after = (words[:, place - 1] * 7 + 1) % self.vocabulary
                words[:, place] = np.where(follows[:, place], after, words[:, place])
            yield words[:, :-1].copy(), words[:, 1:].copy()

    def rotations(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of the rotary embedding, f32 ``[length, head_width / 2]``.

        Source: J. Su et al., RoFormer, arXiv 2104.09864.
        """
        half = self.head_width // 2
        rates = ROTARY_BASE ** (-np.arange(half) / half)
        angles = np.arange(self.length)[:, None] * rates
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


SETTINGS: Final = {
    "tiny": Setting(64, 2, 4, 128, 8, 512),
    "7M": Setting(),
    "270M": Setting(640, 18, 4, 128, 1, 131072),
    "0.3B": Setting(1024, 20, 8, 2048, 8, 32768, "bf16"),
    "1B": Setting(2048, 16, 16, 4096, 4, 32768, "bf16"),
    "1.3B": Setting(2048, 24, 16, 4096, 4, 32768, "bf16"),
}
