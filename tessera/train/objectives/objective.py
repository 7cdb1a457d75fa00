# SPDX-License-Identifier: Apache-2.0
"""``Objective``: what a training step differentiates, beside the model's own losses.

The trainer knows three: the next token, preferences of pairs, and a policy's rewards.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float

from tessera.foundations.tree import Tree
from tessera.train.models.model import (
    Batch,
    Model,
    Sums,
    num_targets,
)
from tessera.train.models.partition_rules import Placement


@dataclass(frozen=True)
class Objective(ABC):
    """The loss of a batch, as sums over its rows.

    A step adds up the sums of its microbatches and divides them by their counts.
    """

    @property
    @abstractmethod
    def sum_names(self) -> tuple[str, ...]:
        """What ``sums`` reports, ``loss`` first."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The f32 arrays ``[..., S]`` that a batch has beside its tokens."""
        return ()

    @abstractmethod
    def count(self, batch: Batch) -> Float[Array, ""]:
        """What the sums of a batch are divided by; that of a step is the sum."""

    def prepared(self, batch: Batch) -> Batch:
        """The batch of a whole step, ``[accumulation, B, S]``, before it is cut."""
        return batch

    @abstractmethod
    def sums(
        self,
        model: Model,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        chunk: int | str,
    ) -> Sums:
        """The sums of a batch; arguments as for ``Model.head_loss``."""

    def loss(
        self,
        model: Model,
        params: Tree,
        batch: Batch,
        place: Placement,
        chunk: int | str,
    ) -> tuple[Float[Array, ""], Sums]:
        """What is differentiated, and the sums that are reported; see ``Model.loss``.

        Raises:
          ParameterTreeError: [T306] names or shapes are not those of this model.
        """
        return model.loss(
            params,
            batch,
            place,
            chunk=chunk,
            head_sums=self.sums,
            count=self.count(batch),
        )

    def all_sum_names(self, model: Model) -> tuple[str, ...]:
        """The names of the sums of ``loss``."""
        return (*self.sum_names, *model.block_sum_names)


@dataclass(frozen=True)
class NextToken(Objective):
    """The cross-entropy of each target, in nats: of pretraining and fine-tuning."""

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The loss alone."""
        return ("loss",)

    def count(self, batch: Batch) -> Float[Array, ""]:
        """The number of targets."""
        return num_targets(batch)

    def sums(
        self,
        model: Model,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        chunk: int | str,
    ) -> Sums:
        """See ``Objective.sums``."""
        return {"loss": model.head_loss(params, hidden, batch, place, chunk=chunk)}


def log_probs_of_targets(
    model: Model,
    params: Tree,
    hidden: Array,
    batch: Batch,
    place: Placement,
    chunk: int | str,
    temperature: float = 1.0,
) -> Float[Array, "batch seq"]:
    """The log-probability of each target in nats, f32; 0 where there is none.

    Arguments are those of ``Model.head_loss``.
    """
    return -model.head_loss(
        params,
        hidden,
        batch,
        place,
        chunk=chunk,
        reduction="none",
        temperature=temperature,
    )


def sums_of_segments(
    values: Float[Array, "batch seq"], batch: Batch, most: int
) -> Float[Array, "batch segments"]:
    """The sum of each segment 1, 2, … ``most`` of each row, f32.

    A masked sum, and no scatter, whose order on GPUs differs from run to run; XLA makes
    no array of all three dims.
    """
    numbers = jnp.arange(1, most + 1)
    own = batch["segment_ids"][..., None] == numbers
    return jnp.where(own, values[..., None], 0.0).sum(axis=-2)


NEXT_TOKEN: Final = NextToken()
