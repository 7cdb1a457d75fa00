# SPDX-License-Identifier: Apache-2.0
"""What a variable holds that has no value that a program can compute."""

from collections.abc import Callable
from typing import Any, NoReturn

from tessera.errors import BranchError


class Unusable:
    """The value of a variable that no program can compute; its use is an error.

    Args:
      error: Makes the error where the variable is used.
    """

    def __init__(self, error: Callable[[], BranchError]) -> None:
        self._error = error

    def read(self) -> NoReturn:
        """Raise the error."""
        raise self._error()

    def _used(self, *_: Any) -> Any:
        return self.read()

    # Code that is not converted, such as a generator's, would take it for a value.
    __bool__ = __call__ = __iter__ = __len__ = __getitem__ = __neg__ = _used
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _used
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _used


class NotReturned:
    """The result of a function that has not returned yet."""
