# SPDX-License-Identifier: Apache-2.0
"""Maps the logical dims of a model to mesh axes, by the table in ``axis_rules.py``.

Axes that the mesh does not have are skipped, so one model works on every subset of
``dp``, ``fsdp`` and ``tp``.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import jax
from jax.sharding import PartitionSpec

from tessera.errors import LogicalAxisError, ShardDivisibilityError, did_you_mean
from tessera.mesh import Mesh
from tessera.ops.attention.zigzag import Arrangement
from tessera.shard import ShardSpec
from tessera.tracing import scope
from tessera.tracing.casts import autocast, cast_parameter
from tessera.train.models.axis_rules import RULES as RULES

Method: TypeAlias = Literal["ring", "all_to_all"]

# The rule for a dim that is in ``Placement.whole``.
_FALLBACK: Final = MappingProxyType(
    {"sequence": "context", "table": "embed", "columns": "embed"}
)


@dataclass(frozen=True)
class Placement:
    """A mesh, and the logical dims that are not sharded on it.

    Attributes:
      mesh: The mesh of the model; None leaves every layout to XLA.
      whole: Logical dims that are not sharded although a rule would; ``sequence`` then
        follows the rule of ``context``, ``table`` that of ``embed``. With ``vocab``,
        ``table`` has the rule of ``wide_table``, unless that is here, too.
      vmapped_axes: Mesh axes that shard nothing, because a ``jax.vmap`` runs over them.
      context_parallel: The attention over sequences that ``cp`` shards: ``ring`` or
        ``all_to_all``.
      dtype: Dtype of activations, to which parameters are cast where they are used;
        None is that of the parameters.
      fp8: Whether the projections of blocks multiply 8-bit operands.

    Example:
      >>> from tessera.mesh import Mesh
      >>> Placement(Mesh(("fsdp", "tp"), shape=(2, 4))).axes("batch")
      ('fsdp',)
    """

    mesh: Mesh | None = None
    whole: frozenset[str] = frozenset({"sequence"})
    vmapped_axes: frozenset[str] = frozenset()
    context_parallel: Method = "ring"
    dtype: str | None = None
    fp8: bool = False

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that shard a logical dim, outermost first.

        Raises:
          LogicalAxisError: [T404] the name is not in the rule table.
        """
        if name not in RULES:
            raise LogicalAxisError(
                f"there is no rule for a dim called {name!r}",
                fix=did_you_mean(name, RULES),
            )
        if name == "table" and {"vocab", "wide_table"} & self.whole == {"vocab"}:
            name = "wide_table"
        if name in self.whole:
            name = _FALLBACK.get(name, name)
        if self.mesh is None or name in self.whole:
            return ()
        free = [axis for axis in self.mesh.axes if axis not in self.vmapped_axes]
        return tuple(axis for axis in RULES[name] if axis in free)

    def size(self, name: str) -> int:
        """The number of shards of a logical dim."""
        return 1 if self.mesh is None else self.mesh.axis_size(self.axes(name))

    @property
    def arrangement(self) -> Arrangement | None:
        """The order in which devices hold a sequence; None if it is not sharded."""
        size = self.size("context")
        if size == 1:
            return None
        # Zigzag order balances the ring; all-to-all gives devices whole sequences.
        order = "zigzag" if self.context_parallel == "ring" else "contiguous"
        return Arrangement(order, size)

    def arranged(self, x: jax.Array, dim: int = -1) -> jax.Array:
        """Reorder an array from sequence order to the order of the devices.

        Raises:
          ShardDivisibilityError: [T201] the devices cannot share such a sequence.
        """
        return x if self.arrangement is None else self.arrangement.apply(x, dim)

    def restored(self, x: jax.Array, dim: int = -1) -> jax.Array:
        """Undo :meth:`arranged`."""
        return x if self.arrangement is None else self.arrangement.undo(x, dim)

    def resolve(
        self, names: tuple[str | None, ...], shape: tuple[int, ...], what: str
    ) -> PartitionSpec:
        """The layout of an array with these logical dim names.

        Args:
          names: One for each dim; None keeps the dim whole.
          shape: Global shape.
          what: The array's name in messages.

        Raises:
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
          LogicalAxisError: [T404] a name is not in the rule table.
        """
        entries = tuple(self.axes(name) or None if name else None for name in names)
        if self.mesh is None:
            return PartitionSpec()
        spec = ShardSpec(partition=tuple(range(len(names))), mesh_axes=entries)
        return spec.resolve(shape, self.mesh, what=what)

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Constrain an activation to the layout of its logical dims on the mesh.

        Raises:
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
          LogicalAxisError: [T404] a name is not in the rule table.
        """
        if self.mesh is None or self.mesh.size == 1:
            return x
        what = f"activation [{', '.join(name or '-' for name in names)}]"
        spec = self.resolve(names, x.shape, what)
        return scope.constrain(x, self.mesh, spec)

    def between_stages(self, length: int) -> "Placement":
        """The placement of hidden states on their way between stages of a pipeline.

        Each device of ``tp`` sends its part of a sequence of ``length`` tokens, if they
        divide, and gathers the whole where it arrives, since links between stages are
        slower than those of ``tp`` (scatter and gather of Narayanan et al. 2021, arXiv
        2104.04473).
        """
        split = replace(self, whole=self.whole - {"sequence"})
        return self if length % split.size("sequence") else split

    def cast(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Cast a parameter to the dtype of activations, in its own layout.

        Each device casts its shard, so that what crosses the mesh is in that dtype.
        """
        if self.dtype is None or x.dtype == self.dtype:
            return x
        return self.constrain(cast_parameter(x, self.dtype), *names)

    def autocast(self) -> AbstractContextManager[None]:
        """Do matmuls in the dtype of activations, where code computes in f32 anyhow."""
        return nullcontext() if self.dtype is None else autocast(self.dtype)


NO_MESH: Final = Placement()


def joined(errors: list[ShardDivisibilityError]) -> ShardDivisibilityError:
    """One error for all parameters that cannot be sharded."""
    first, *others = errors
    got = [first.got, *(f"also {error.what}: {error.got}" for error in others)]
    fix = "\n".join(dict.fromkeys(error.fix for error in errors))
    return ShardDivisibilityError(first.what, got="\n".join(got), fix=fix)
