# SPDX-License-Identifier: Apache-2.0
"""What the arguments of a function with a strategy are, from what the function does.

Where it takes gradients by ``ts.grad``, these are by the parameters; what its losses
read beside them is the batch, if it is one argument; and what they do not read is
optimizer state. An update takes no gradient: its parameters are what its results are
new values of, and its optimizer state has their paths and shapes. Names are not asked,
and what none of this decides is an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from tessera import _jax
from tessera.compiler.ir import Graph, Role, Value
from tessera.compiler.pipelining.pipeline_primitive import first_of
from tessera.compiler.rewriting import without_jits
from tessera.compiler.trace.argument_roles import Uses, updated, uses_of
from tessera.errors import UndecidedRoleError

PARAMS, GRADIENTS, STATE, BATCH = "params", "gradients", "optimizer_state", "batch"
ROLES: Final = (PARAMS, GRADIENTS, STATE, BATCH)


def find_roles(
    name: str, stage: int, said: Mapping[str, str], graph: Graph
) -> dict[str, str]:
    """The role of each array of the arguments of which the user says none, by path.

    Args:
      name: The strategy.
      stage: The stage of ZeRO that it is.
      said: For each array of which the user says it, its role.
      graph: The function, as it was traced.

    Raises:
      UndecidedRoleError: [T324] nothing decides it.
    """
    return _Finding(name, stage, said, graph).roles()


class _Finding:
    def __init__(
        self, name: str, stage: int, said: Mapping[str, str], graph: Graph
    ) -> None:
        self.name, self.stage, self.said, self.graph = name, stage, said, graph
        self.program = without_jits(graph.program)
        inputs = zip(graph.inputs, _jax.inputs(self.program), strict=True)
        self.arrays: dict[str, tuple[Value, Any]] = {
            value.name: (value, variable)
            for value, variable in inputs
            if value.role is Role.ARGUMENT and value.aval.shape
        }
        self.unsaid = [path for path in self.arrays if path not in said]
        self.says_batch = BATCH in said.values()

    def roles(self) -> dict[str, str]:
        if not self.unsaid:
            return {}
        return self._of_step() if self.uses.read else self._of_update()

    @cached_property
    def uses(self) -> Uses:
        return uses_of(self.program)

    def _of_step(self) -> dict[str, str]:
        """The roles of a function that takes gradients."""
        roles: dict[str, str] = {}
        data: list[str] = []
        for path in self.unsaid:
            variable = self.arrays[path][1]
            if variable in self.uses.differentiated:
                roles[path] = PARAMS
            elif variable not in self.uses.read:
                roles[path] = STATE
            else:
                data.append(path)
        if self.says_batch:
            return roles | dict.fromkeys(data, PARAMS)
        arguments = _arguments(data)
        weights = _arguments(path for path in roles if roles[path] == PARAMS)
        if len(arguments) > 1 or arguments & weights:
            raise self._undecided(
                data, "a loss reads them, and no gradient is taken by them", BATCH
            )
        return roles | dict.fromkeys(data, BATCH)

    def _of_update(self) -> dict[str, str]:
        """The roles of a function that takes no gradient that Tessera knows of."""
        if not self.stage or (self.stage == 3 and self.says_batch):
            if self.says_batch:
                return dict.fromkeys(self.unsaid, PARAMS)
            raise self._undecided(
                self.unsaid, "no gradient is taken by ts.grad, which shows it", BATCH
            )
        params = {p for p, role in self.said.items() if role == PARAMS}
        params = params or self._replaced()
        others = [path for path in self.unsaid if path not in params]
        if not params:
            why = "no gradient is taken by ts.grad, and no argument is replaced alone"
            raise self._undecided(self.unsaid, why, PARAMS)
        alien = [path for path in others if not self._is_like(path, params)]
        if alien and not self.says_batch:
            why = "no loss shows what they are, and they are not like the parameters"
            raise self._undecided(alien, why, BATCH)
        if others and self.stage == 1:
            why = "stage 1 splits optimizer state, and no gradients"
            raise self._undecided(others, why, GRADIENTS)
        found = dict.fromkeys((p for p in self.unsaid if p in params), PARAMS)
        return found | dict.fromkeys(others, STATE)

    def _replaced(self) -> set[str]:
        """The arrays of the one argument of which every result is a new value."""
        new = [found.of for found in updated(self.program) if len(found.of) == 1]
        replaced = {variable for found in new for variable in found}
        arguments: dict[str, list[str]] = {}
        for path in self.unsaid:
            arguments.setdefault(path.partition("/")[0], []).append(path)
        found = [
            paths
            for paths in arguments.values()
            if all(self.arrays[path][1] in replaced for path in paths)
        ]
        return set(found[0]) if len(found) == 1 else set()

    def _is_like(self, path: str, params: set[str]) -> bool:
        """Whether an array has the path and the shape of a parameter."""
        shape = self._shapes[path]
        return any(is_like(path, shape, p, self._shapes[p]) for p in params)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: tuple(v.aval.shape) for path, (v, _) in self.arrays.items()}

    def _undecided(
        self, paths: Sequence[str], why: str, role: str
    ) -> UndecidedRoleError:
        names = sorted(_arguments(paths))
        listed = ", ".join(map(repr, names))
        return UndecidedRoleError(
            f"strategy {self.name!r} cannot tell what the arguments {listed} of "
            f"{self.graph.name!r} are",
            got=f"{first_of(paths)}: {why}",
            fix=f"say it: ts.distribute({self.name!r}, {role}=[{listed}])\n"
            f"and likewise {', '.join(f'{r}=' for r in ROLES if r != role)}",
        )


def is_like(
    path: str, shape: Sequence[int], weight: str, weight_shape: Sequence[int]
) -> bool:
    """Whether an array is what an optimizer keeps for a weight.

    It has the weight's shape, and the weight's path in its argument is part of its own.

    Example:
      >>> is_like("state/0/mu/up/w", (4, 8), "weights/up/w", (4, 8))
      True
      >>> is_like("state/0/mu/down/w", (4, 8), "weights/up/w", (4, 8))
      False
    """
    own, of_weight = (f"/{name}/".split("/", 2)[2] for name in (path, weight))
    return tuple(shape) == tuple(weight_shape) and f"/{of_weight}" in f"/{own}"


def _arguments(paths: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in paths}
