# SPDX-License-Identifier: Apache-2.0
"""ZeRO owner emulation, for ``zero_redundancy_optimizer``: code with parameter owners.

Programs for other systems assign each parameter's optimizer state to one rank, which
does the update and sends the result:

    if ts.mesh.current().rank == owner:
        new = update(weights[name], gradient, optimizer_state[name])
    else:
        new = ts.distributed.recv_from(owner, name)

Here every array of the state is sharded over all devices, so each device owns a part of
every parameter. The function is traced as the owner: the comparison is true for every
owner, and the partitioner inserts the communication that ``recv_from`` stands for. So
it does not matter either that ``hash`` of a string differs from process to process.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from jax.sharding import Mesh as JaxMesh

from tessera.errors import StrategyError
from tessera.graph.tracer.strategies import Strategy
from tessera.mesh import Mesh
from tessera.tracing import scope


def as_any_owner(body: Callable[..., Any], strategy: Strategy) -> Callable[..., Any]:
    """A function that is traced as if every rank owned every parameter."""

    @functools.wraps(body)
    def as_owner(*args: Any, **kwargs: Any) -> Any:
        with _OwnerMesh(strategy.mesh_here(), strategy.axes):
            return scope.resolve_callee(body)(*args, **kwargs)

    return as_owner


class _OwnerMesh(Mesh):
    """The mesh that the emulation shows: the devices that share the state."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        vars(self).update(vars(mesh))
        self._mesh, self._owners = mesh, mesh.axis_size(axes)

    @property
    def size(self) -> int:
        """How many devices share the state."""
        return self._owners

    @property
    def rank(self) -> Any:
        """The rank of any owner."""
        return OwnerRank(self._owners)

    @property
    def jax(self) -> JaxMesh:
        """The JAX mesh of the mesh itself."""
        return self._mesh.jax

    @property
    def compile_mesh(self) -> JaxMesh:
        """The JAX mesh of the mesh itself."""
        return self._mesh.compile_mesh


class OwnerRank:
    """The rank of any owner: equal to every rank that exists.

    Example:
      >>> rank = OwnerRank(4)
      >>> rank == 3, rank != 0, rank == 4
      (True, False, False)
    """

    __hash__: ClassVar[None] = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return 0 <= other < self._size
        return isinstance(other, OwnerRank) or self._refuse()

    def __repr__(self) -> str:
        return f"the owner's rank, of {self._size}"

    def _refuse(self, *_: object) -> NoReturn:
        raise StrategyError(
            "in zero_redundancy_optimizer a rank can only be compared with an owner's",
            got=f"something else done with {self!r}",
            fix="write 'if ts.mesh.current().rank == owner:' with a Python number\n"
            "or use @op.kernel, where the rank is that of each device",
        )

    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __floordiv__ = __int__ = __index__ = __bool__ = _refuse
    __array__ = __jax_array__ = _refuse
