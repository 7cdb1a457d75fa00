# SPDX-License-Identifier: Apache-2.0
"""Infers the roles of a function's arguments from what the function does.

Parameters are what ``ts.grad`` differentiates by; what losses read besides them is the
batch, if it is one argument; and what losses do not read is optimizer state. In an
update, which takes no gradient, the parameters are the arguments that results are new
values of, and optimizer state has their paths and shapes. Names of arguments do not
count, and an undecided role is an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from tessera.errors import UndecidedRoleError
from tessera.graph.ir import Graph, Role, Value
from tessera.graph.pipelining.pipeline_primitive import first_of
from tessera.graph.rewriting import inline_jits
from tessera.graph.tracer.argument_roles import (
    GradientUses,
    gradient_uses,
    updated_inputs,
)
from tessera.jax_compat import jaxprs

PARAMS, GRADIENTS, STATE, BATCH = "params", "gradients", "optimizer_state", "batch"
ROLES: Final = (PARAMS, GRADIENTS, STATE, BATCH)


class RoleInference:
    """What the arguments of a function are that have no declared role.

    Args:
      name: The strategy.
      stage: Its ZeRO stage.
      declared: The role of each array for which the user declares one.
      graph: The function, as it was traced.
    """

    def __init__(
        self, name: str, stage: int, declared: Mapping[str, str], graph: Graph
    ) -> None:
        self.name, self.stage, self.declared, self.graph = name, stage, declared, graph
        self.program = inline_jits(graph.program)
        inputs = zip(graph.inputs, jaxprs.inputs(self.program), strict=True)
        self.arrays: dict[str, tuple[Value, Any]] = {
            value.name: (value, variable)
            for value, variable in inputs
            if value.role is Role.ARGUMENT and value.aval.shape
        }
        self.undeclared = [path for path in self.arrays if path not in declared]
        self.declares_batch = BATCH in declared.values()

    def roles(self) -> dict[str, str]:
        """The role of each array without a declared role, by path.

        Raises:
          UndecidedRoleError: [T324] a role is undecided.
        """
        if not self.undeclared:
            return {}
        return self._of_step() if self.uses.read else self._of_update()

    @cached_property
    def uses(self) -> GradientUses:
        """What gradients are taken by, and what losses read."""
        return gradient_uses(self.program)

    def _of_step(self) -> dict[str, str]:
        """The roles of a function that takes gradients."""
        roles: dict[str, str] = {}
        data: list[str] = []
        for path in self.undeclared:
            variable = self.arrays[path][1]
            if variable in self.uses.differentiated:
                roles[path] = PARAMS
            elif variable not in self.uses.read:
                roles[path] = STATE
            else:
                data.append(path)
        if self.declares_batch:
            return roles | dict.fromkeys(data, PARAMS)
        arguments = _arguments(data)
        weights = _arguments(path for path in roles if roles[path] == PARAMS)
        if len(arguments) > 1 or arguments & weights:
            raise self._undecided(
                data, "a loss reads them, and no gradient is taken by them", BATCH
            )
        return roles | dict.fromkeys(data, BATCH)

    def _of_update(self) -> dict[str, str]:
        """The roles of a function without ``ts.grad``."""
        if not self.stage or (self.stage == 3 and self.declares_batch):
            if self.declares_batch:
                return dict.fromkeys(self.undeclared, PARAMS)
            raise self._undecided(
                self.undeclared,
                "no gradient is taken by ts.grad, which shows it",
                BATCH,
            )
        declared = {p for p, role in self.declared.items() if role == PARAMS}
        params = declared & self.arrays.keys() or self._replaced()
        others = [path for path in self.undeclared if path not in params]
        if not params:
            why = "no gradient is taken by ts.grad, and no argument is replaced alone"
            raise self._undecided(self.undeclared, why, PARAMS)
        alien = [path for path in others if not self._is_like(path, params)]
        if alien and not self.declares_batch:
            why = "no loss shows what they are, and they are not like the parameters"
            raise self._undecided(alien, why, BATCH)
        if others and self.stage == 1:
            why = "stage 1 splits optimizer state, and no gradients"
            raise self._undecided(others, why, GRADIENTS)
        found = dict.fromkeys((p for p in self.undeclared if p in params), PARAMS)
        return found | dict.fromkeys(others, STATE)

    def _replaced(self) -> set[str]:
        """The arrays of the only argument that results are new values of."""
        new = [found.of for found in updated_inputs(self.program) if len(found.of) == 1]
        replaced = {variable for found in new for variable in found}
        arguments: dict[str, list[str]] = {}
        for path in self.undeclared:
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
        return any(matches_weight(path, shape, p, self._shapes[p]) for p in params)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: tuple(v.aval.shape) for path, (v, _) in self.arrays.items()}

    def _undecided(
        self, paths: Sequence[str], why: str, role: str
    ) -> UndecidedRoleError:
        names = sorted(_arguments(paths))
        # What may be raw PRNG keys is never split in what an error says to write.
        raw = {path for path in paths if self.arrays[path][0].aval.dtype == "uint32"}
        keys = sorted(_arguments(raw) - _arguments(set(paths) - raw))
        named = [name for name in names if name not in keys] or names
        listed = ", ".join(map(repr, names))
        split = ", ".join(map(repr, named))
        declare, known = f"ts.distribute({self.name!r}, ", [role]
        say = f"say it: {declare}{role}=[{split}])"
        if len(named) > 1 and len(paths) == len(self.undeclared):  # of several roles
            say = f"say which of {split} are what: {declare}params=[…], batch=[…])"
            known = [PARAMS, BATCH]
        advice = "".join(
            f"\n{key!r} looks like a raw PRNG key: pass a typed one, jax.random.key(0)"
            for key in keys
        )
        return UndecidedRoleError(
            f"strategy {self.name!r} cannot tell what the arguments {listed} of "
            f"{self.graph.name!r} are",
            got=f"{first_of(paths)}: {why}",
            fix=f"{say}\nand likewise "
            f"{', '.join(f'{r}=' for r in ROLES if r not in known)}{advice}",
        )


def matches_weight(
    path: str, shape: Sequence[int], weight: str, weight_shape: Sequence[int]
) -> bool:
    """Whether an array matches a weight, as an optimizer's state for it does.

    It has the weight's shape, and the weight's path in its argument is part of its own.

    Example:
      >>> matches_weight("state/0/mu/up/w", (4, 8), "weights/up/w", (4, 8))
      True
      >>> matches_weight("state/0/mu/down/w", (4, 8), "weights/up/w", (4, 8))
      False
    """
    own, of_weight = (f"/{name}/".split("/", 2)[2] for name in (path, weight))
    return tuple(shape) == tuple(weight_shape) and f"/{of_weight}" in f"/{own}"


def _arguments(paths: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in paths}
