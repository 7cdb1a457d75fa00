# SPDX-License-Identifier: Apache-2.0
"""``ts.Tensor``, the class of annotations with dims and a dtype in brackets."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tessera.annotations.dims import Dim, dim_of, malformed, texts_of
from tessera.errors import AnnotationError
from tessera.foundations.dtypes import DTYPES, short_name

_ANY_SHAPE: Final = (Dim("..."),)


@dataclass(frozen=True)
class Annotation:
    """The annotation of one array.

    Attributes:
      dims: One for each dim; at most one of them is variadic. ``ts.Tensor`` alone has
        ``...``.
      dtype: The dtype, or None for any.
      dtypes: Names of the allowed dtypes, for jaxtyping's classes of several dtypes,
        such as ``Float``.
    """

    dims: tuple[Dim, ...] = _ANY_SHAPE
    dtype: np.dtype[Any] | None = None
    dtypes: tuple[str, ...] = ()

    @property
    def is_bare(self) -> bool:
        """Whether it is ``ts.Tensor`` alone, which any array matches."""
        return self.dims == _ANY_SHAPE and self.dtype is None and not self.dtypes

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of all dims, each once, in order."""
        symbols = (symbol for dim in self.dims for symbol in dim.symbols)
        return tuple(dict.fromkeys(symbols))

    def allows_dtype(self, dtype: Any) -> bool:
        """Whether this dtype is allowed."""
        if self.dtypes:
            return getattr(dtype, "name", None) in self.dtypes
        return self.dtype is None or self.dtype == dtype

    @property
    def dtype_text(self) -> str:
        """The allowed dtypes, for messages."""
        if self.dtype is not None:
            return short_name(self.dtype)
        return " or ".join(map(short_name, self.dtypes)) or "any"

    def dims_of(self, rank: int) -> tuple[tuple[int, Dim], ...] | None:
        """The fixed dims of an array by number; None if its rank does not match."""
        variadic = next((i for i, d in enumerate(self.dims) if d.is_variadic), None)
        if variadic is None:
            return tuple(enumerate(self.dims)) if rank == len(self.dims) else None
        after = self.dims[variadic + 1 :]
        if rank < variadic + len(after):
            return None
        ends = enumerate(after, start=rank - len(after))
        return (*enumerate(self.dims[:variadic]), *ends)

    def fits(self, value: Any) -> bool:
        """Whether a value is an array of this dtype and rank, whatever the symbols."""
        if not is_array(value) or not self.allows_dtype(value.dtype):
            return False
        dims = self.dims_of(len(value.shape))
        return dims is not None and all(
            dim.size in (None, value.shape[number]) for number, dim in dims
        )

    def names(self, rank: int) -> tuple[str, ...] | None:
        """The dim names of an array of some rank, for ``ShardSpec``."""
        dims = self.dims_of(rank)
        if dims is None:
            return None
        named = dict(dims)
        return tuple(named[i].text if i in named else "..." for i in range(rank))

    def __str__(self) -> str:
        if self.is_bare:
            return "Tensor"
        is_code = [dim.text == "..." or dim.text.isdigit() for dim in self.dims]
        parts = [
            dim.text if code else f'"{dim}"'
            for dim, code in zip(self.dims, is_code, strict=True)
        ]
        if self.dtype is not None or self.dtypes:
            parts.append(self.dtype_text)
        return f"Tensor[{', '.join(parts) or '()'}]"


class TensorType(type):
    """The metaclass of ``ts.Tensor`` and of the classes that its brackets create."""

    annotation: Annotation

    def __getitem__(cls, parts: Any) -> "type[Tensor]":
        if not cls.annotation.is_bare:
            raise malformed(f"{cls!r}[…]", "it already has dims and a dtype")
        return _tensor_type(_read(parts if isinstance(parts, tuple) else (parts,)))

    def __instancecheck__(cls, value: object) -> bool:
        """Whether a value is an array of this dtype and rank, whatever its symbols."""
        return cls.annotation.fits(value)

    def __repr__(cls) -> str:
        return f"ts.{cls.annotation}"


if TYPE_CHECKING:

    class Tensor(Any):
        """Any array; type checkers ignore the contents of the brackets."""

        def __class_getitem__(cls, parts: Any) -> Any: ...

else:

    class Tensor(metaclass=TensorType):
        """An array, in annotations: ``ts.Tensor["B", "S", ts.int32]``.

        The brackets hold dims and, last, a dtype: ``ts.Tensor[ts.f32]`` is a scalar
        and ``ts.Tensor`` alone any array. A dim is a symbol (``"B"``), which has one
        size in all arguments and results of a call; an expression of symbols
        (``"3*D_head*H"``, ``"S+1"``); a size (``8``); ``"_"`` for a dim of any size;
        ``...`` or ``"*batch"`` for any number of dims. ``| None``, or a default of
        None, makes an argument optional; ``dict``, ``list`` and ``tuple`` of tensors
        are checked leaf by leaf.

        Functions that Tessera compiles are checked when they are traced, so repeated
        calls cost nothing. ``ShardSpec(partition=("B",), ...)`` looks up dims by name.

        Raises:
          AnnotationError: [T315] the brackets contain something else.

        Example:
          >>> from tessera.foundations import dtypes
          >>> Tensor["B", "3*D_head*H", dtypes.bf16]
          ts.Tensor["B", "3*D_head*H", bf16]
          >>> isinstance(np.ones((2, 4)), Tensor["B", 4])
          True
        """

        annotation = Annotation()

        def __new__(cls, *_: Any, **__: Any) -> Any:
            """Refuse, whatever the arguments."""
            raise AnnotationError(
                "ts.Tensor is for annotations and creates no arrays",
                fix="use ts.tensor(values) or jnp.asarray(values)",
            )


@functools.cache
def _tensor_type(annotation: Annotation) -> "type[Tensor]":
    subclass: Any = TensorType("Tensor", (Tensor,), {"annotation": annotation})
    return subclass


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _read(parts: tuple[Any, ...]) -> Annotation:
    dims: list[Dim] = []
    dtype: np.dtype[Any] | None = None
    for number, part in enumerate(parts):
        if part is ... or (isinstance(part, int) and not isinstance(part, bool)):
            dims.append(Dim("..." if part is ... else str(part)))
        elif isinstance(part, str):
            dims += [dim_of(text) for text in texts_of(part)]
        elif number == len(parts) - 1 and (last := _dtype(part)) is not None:
            dtype = last
        else:
            raise malformed(repr(part), "it is neither a dim nor a dtype at the end")
    if sum(dim.is_variadic for dim in dims) > 1:
        raise malformed(" ".join(map(str, dims)), "only one dim may be variadic")
    return Annotation(tuple(dims), dtype)


def _dtype(part: Any) -> np.dtype[Any] | None:
    """A dtype object or class; not Python's ``float`` or None, which NumPy accepts."""
    is_dtype = isinstance(part, np.dtype) or (
        isinstance(part, type) and issubclass(part, np.generic)
    )
    if is_dtype or isinstance(getattr(part, "dtype", None), np.dtype):
        return np.dtype(part)
    return DTYPES["bool"] if part is bool else None
