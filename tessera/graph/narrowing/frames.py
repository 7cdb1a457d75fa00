# SPDX-License-Identifier: Apache-2.0
"""What the analysis of ``ts.autocast`` knows about the values of a program."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tessera.graph.narrowing.rules import autocast_dtype, is_f32
from tessera.jax_compat import jaxprs


@dataclass(frozen=True)
class Narrow:
    """A value that may be narrow.

    Attributes:
      dtype: The dtype.
      is_product: Whether it is what a matmul gave, at most moved.
      is_forward: Whether it was computed in the forward pass.
    """

    dtype: Any
    is_product: bool = False
    is_forward: bool = True


@dataclass(frozen=True)
class Scalar:
    """One number, or an array of it. It takes the dtype of the other operands.

    Attributes:
      value: None if it is computed from others.
    """

    value: float | None

    def fits(self, dtype: Any) -> bool:
        """Whether rounding makes it neither infinite nor zero."""
        if self.value is None:
            return False
        rounded = self._rounded(dtype)
        is_finite = np.isfinite(rounded) == np.isfinite(self.value)
        return bool(is_finite and (rounded == 0) == (self.value == 0))

    def is_exact(self, dtype: Any) -> bool:
        """Whether it is a number of the dtype."""
        return self.value is not None and bool(self._rounded(dtype) == self.value)

    def _rounded(self, dtype: Any) -> np.float32:
        with np.errstate(over="ignore", under="ignore"):
            return np.float32(np.float32(self.value).astype(dtype))


@dataclass(frozen=True)
class Vector:
    """A parameter of one dim, broadcast to more: a bias, if added to a product."""


State: TypeAlias = Narrow | Scalar | Vector | None
"""None is an f32 value of any other kind."""


@dataclass
class CallFrame:
    """One call of a program, and what is known about its variables.

    Attributes:
      program: The program.
      scopes: The path of name scopes that it is called in.
      states: What may be narrow, and how.
      computed: What is more than an input, moved.
      narrow: The dtype of each variable that is stored in a narrow one.
      outputs: The dtype of each output that is returned in a narrow one, or None.
      frames: Those of the equations that call programs, by the equations' ids.
    """

    program: jaxprs.Program
    scopes: str
    states: dict[jaxprs.Atom, State] = field(default_factory=dict)
    computed: set[jaxprs.Atom] = field(default_factory=set)
    narrow: dict[jaxprs.Atom, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    frames: dict[int, "CallFrame"] = field(default_factory=dict)

    def path(self, equation: jaxprs.Equation) -> str:
        """The name scopes that an equation is in."""
        return f"{self.scopes}/{jaxprs.name_scopes(equation)}"

    def dtype_inside(self, equation: jaxprs.Equation) -> Any:
        """The dtype of the autocast that an equation is in, or None."""
        return autocast_dtype(self.path(equation))

    def is_backward(self, equation: jaxprs.Equation) -> bool:
        """Whether an equation is of the backward pass."""
        return "transpose(" in self.path(equation)

    def state(self, atom: jaxprs.Atom) -> State:
        """What is known about a value."""
        if isinstance(atom, jaxprs.Literal):
            is_number = is_f32(atom) and np.ndim(atom.val) == 0
            return Scalar(float(atom.val)) if is_number else None
        return self.states.get(atom)

    def is_computed(self, atom: jaxprs.Atom) -> bool:
        """Whether a value is more than an input, moved."""
        return not isinstance(atom, jaxprs.Literal) and atom in self.computed

    def stored(self, atom: jaxprs.Atom) -> Any:
        """The narrow dtype that a value is stored in, or None."""
        return None if isinstance(atom, jaxprs.Literal) else self.narrow.get(atom)

    def moved_dtype(self, equation: jaxprs.Equation) -> Any:
        """The dtype that all results of an equation are stored in, if a narrow one."""
        dtypes = {self.stored(variable) for variable in equation.outvars}
        return dtypes.pop() if len(dtypes) == 1 else None

    def runs_narrow(self, equation: jaxprs.Equation) -> bool:
        """Whether an equation has narrow results because its operands are narrow.

        The results of others are computed in f32, and rounded if all readers do that.
        """
        return any(
            isinstance(state := self.state(v), Narrow) and self.stored(v) == state.dtype
            for v in equation.outvars
        )
