# SPDX-License-Identifier: Apache-2.0
"""LoRA: matrices of a low rank that are added to frozen weights.

A matmul with an adapter computes ``x W + (alpha / rank) (x A) B``. Only A and B are
trained; B is zero at first, so that training begins with the model as it was.

Source: Hu et al., arXiv 2106.09685.
"""

from dataclasses import dataclass
from typing import Final

# The names that PEFT and the families' tables have for the matmuls of a layer.
ATTENTION_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    """The adapters of a decoder; ``DecoderConfig`` validates them.

    Attributes:
      rank: Columns of A and rows of B of each adapter; 0 is no adapters. With adapters,
        nothing else is trained unless training.trainable says so.
      alpha: What an adapter adds is scaled by alpha / rank; null is the rank, a scale
        of 1.
      targets: The matmuls with an adapter: any of q_proj, k_proj, v_proj, o_proj,
        gate_proj, up_proj and down_proj; null is all. Experts have none.
    """

    rank: int = 0
    alpha: float | None = None
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.targets is not None:  # a list is not hashable; a configuration is
            object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scale(self) -> float:
        """The factor of (x A) B."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
