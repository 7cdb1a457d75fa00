# SPDX-License-Identifier: Apache-2.0
"""The rows of the ledger: one collective of a compiled program, and sums of them."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from tessera.analysis.hlo import Shape
from tessera.analysis.replica_groups import UNKNOWN

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True, slots=True)
class Advice:
    """A layout to declare, so that an unplanned collective is not in the program.

    Attributes:
      where: Whether it is that of a ``result``, an ``argument``, or a ``value`` inside.
      names: The results or arguments; none of a value, which has a line.
      spec: The layout.
      saved_bytes: What each device need not receive then, in one execution.
    """

    where: str
    names: tuple[str, ...]
    spec: PartitionSpec
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
      kind: XLA's name, such as ``all-reduce``; asynchronous forms have the same.
      axes: The mesh axes it runs over, in the mesh's order; ``("?",)`` for devices that
        the mesh does not have.
      group_size: Devices that communicate with each other. Fewer than the axes have
        means a part of them: XLA may split an axis of four in two groups of two.
      arrays: What it moves, as shapes on one device: the result of an all-gather, the
        operands of every other kind. Several where XLA combined collectives into one.
      calls: How often one execution of the program runs it; None inside a loop whose
        length is known only at run time.
      conditional: Whether a branch may skip it, so that ``calls`` is an upper bound.
      op_name: JAX's name stack of the operation, such as ``jit(step)/dot_general``.
      source: ``file:line`` of the user's line, or ``""``.
      instruction: XLA's name of it in the compiled program, which profilers show.
      reason: Which declared layout implies it, as in ``collective_reasons.py``:
        ``written``, ``sum``, ``sharded storage``, ``layout``; ``""`` where none does.
      copies_whole: Whether it replicates an array that each device slices again: what
        XLA calls an involuntary full rematerialization.
      is_async: Whether the program may compute while it is under way.
      keeps_slice: Whether each device keeps only its part of an all-reduce's sum, as of
        a reduce-scatter, which XLA on CPU does not have.
      advice: What avoids it, where it is unplanned and that is known.
      sent: The levels of the target's links, fastest first, and the bytes that a device
        sends over each in one call.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    arrays: tuple[Shape, ...]
    calls: int | None
    conditional: bool
    op_name: str
    source: str
    instruction: str = ""
    reason: str = ""
    copies_whole: bool = False
    is_async: bool = False
    keeps_slice: bool = False
    advice: Advice | None = None
    sent: tuple[tuple[str, float], ...] = ()

    @property
    def is_planned(self) -> bool:
        """Whether a declared layout implies it, or the program calls it."""
        return bool(self.reason)

    @property
    def is_unknown(self) -> bool:
        """Whether its kind, or the syntax of its groups, is one of a newer XLA."""
        return self.kind not in KINDS or self.axes == UNKNOWN

    @property
    def nbytes(self) -> int:
        """Bytes of ``arrays``: of one device in one call.

        It is the size of the arrays, not what a ring algorithm sends of them: a ring
        all-reduce over n devices sends 2 (n - 1) / n times as much, all-gather and
        reduce-scatter (n - 1) / n times.
        """
        return sum(shape.nbytes for shape in self.arrays)

    @property
    def total_bytes(self) -> int:
        """Bytes of one device in one execution, over all ``counted_calls``."""
        return self.nbytes * self.counted_calls

    @property
    def counted_calls(self) -> int:
        """Calls as they are summed: a loop of unknown length counts once."""
        return 1 if self.calls is None else self.calls


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over rows of a ledger: operations, their calls, and bytes per device."""

    operations: int
    calls: int
    nbytes: int
