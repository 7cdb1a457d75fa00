# SPDX-License-Identifier: Apache-2.0
"""Code that asks who owns a parameter, under ``zero_redundancy_optimizer``.

Programs of other systems give each parameter's optimizer state to one rank, which does
the update and sends the result:

    if ts.mesh.current().rank == owner:
        new = update(weights[name], gradient, optimizer_state[name])
    else:
        new = ts.distributed.recv_from(owner, name)

Here every array of the state is split over all devices, so each of them owns a part of
every parameter. The function is traced as the owner sees it: the comparison is true,
whoever the owner is, and the partitioner sends what ``recv_from`` stands for. So it
does not matter either that ``hash`` of a string differs from process to process.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from jax.sharding import Mesh as JaxMesh

from tessera import scope
from tessera.compiler.trace.strategies import Strategy
from tessera.errors import StrategyError
from tessera.mesh import Mesh, opened_or_none


class AsOwner:
    """A function that is traced as the owner of every parameter sees it."""

    def __init__(self, body: Callable[..., Any], strategy: Strategy) -> None:
        functools.update_wrapper(self, body)
        self._body, self._strategy = body, strategy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        here = scope.current()
        mesh = (here.mesh if here is not None else None) or opened_or_none()
        with _OwnersMesh(mesh or self._strategy.default_mesh(), self._strategy.axes):
            return scope.as_called(self._body)(*args, **kwargs)


class _OwnersMesh(Mesh):
    """A mesh as an owner sees it: its devices are those that share the state."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        vars(self).update(vars(mesh))
        self._mesh, self._owners = mesh, mesh.axis_size(axes)

    @property
    def size(self) -> int:
        """How many devices share the state."""
        return self._owners

    @property
    def rank(self) -> Any:
        """The owner, whoever it is."""
        return OwnersRank(self._owners)

    @property
    def jax(self) -> JaxMesh:
        """That of the mesh itself."""
        return self._mesh.jax

    @property
    def compile_mesh(self) -> JaxMesh:
        """That of the mesh itself."""
        return self._mesh.compile_mesh


class OwnersRank:
    """The rank of whoever owns what is asked for: equal to every rank that there is.

    Example:
      >>> rank = OwnersRank(4)
      >>> rank == 3, rank != 0, rank == 4
      (True, False, False)
    """

    __hash__: ClassVar[None] = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return 0 <= other < self._size
        return isinstance(other, OwnersRank) or self._refuse()

    def __repr__(self) -> str:
        return f"the owner's rank, of {self._size}"

    def _refuse(self, *_: object) -> NoReturn:
        raise StrategyError(
            "in zero_redundancy_optimizer a rank can be compared with an owner's, and "
            "nothing else",
            got=f"something else done with {self!r}",
            fix="write 'if ts.mesh.current().rank == owner:' with a Python number\n"
            "or use @op.kernel, where the rank is that of each device",
        )

    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __floordiv__ = __int__ = __index__ = __bool__ = _refuse
    __array__ = __jax_array__ = _refuse
