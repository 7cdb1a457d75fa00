# SPDX-License-Identifier: Apache-2.0
"""LoRA: matrices of a low rank that are added to frozen weights.

A matmul with an adapter computes ``x W + (alpha / rank) (x A) B``. Only A and B are
trained; B is zero at first, so that training begins with the model as it was.

Source: Hu et al., arXiv 2106.09685.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

# The names that PEFT and the families' tables have for the matmuls of a layer.
ATTENTION_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS: Final = ("gate_proj", "up_proj", "down_proj")
# How the weights below adapters are stored, and how many of them share a scale.
BASES: Final = ("none", "nf4", "int8")
BLOCK: Final = 64


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
      quantize_base: How the weights of attention and MLP are stored: nf4 (QLoRA) or
        int8, each with a scale for every 64 inputs of an output; none is float32.
    """

    rank: int = 0
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    quantize_base: str = "none"

    def __post_init__(self) -> None:
        if self.targets is not None:  # a list is not hashable; a configuration is
            object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def is_quantized(self) -> bool:
        """Whether the weights below the adapters are."""
        return self.quantize_base != "none"

    def base_problems(
        self, projections: Mapping[str, tuple[int, int]], num_experts: int
    ) -> Iterator[tuple[str, str]]:
        """What speaks against quantized weights in a model, and how to mend it."""
        got = f"lora.quantize_base = {self.quantize_base!r}"
        if self.quantize_base not in BASES:
            yield got, f"use {', '.join(BASES)}"
        if self.is_quantized and not self.rank:
            yield f"{got}, lora.rank = 0", "use lora.rank 16: only adapters are trained"
        if self.is_quantized and num_experts:
            yield f"{got}, but experts are not quantized", "leave out quantize_base"
        for name, (inputs, _) in projections.items():
            if self.is_quantized and inputs % BLOCK:
                got = f"{got} takes blocks of {BLOCK} inputs, {name} has {inputs}"
                yield got, "leave out quantize_base"

    @property
    def scale(self) -> float:
        """The factor of (x A) B."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
