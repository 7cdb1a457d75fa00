# SPDX-License-Identifier: Apache-2.0
"""DistTensor: sharded arrays that are declared first and created on first use.

A :class:`ShardSpec` maps dims to mesh axes. A :class:`DistTensor` is lazy, so a table
larger than this machine's memory can be declared, inspected and planned.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import (
    NoMeshError,
    TensorFormError,
    did_you_mean,
)
from tessera.foundations.context import holding
from tessera.foundations.dtypes import as_dtype as as_dtype
from tessera.jax_compat import jaxprs
from tessera.jax_compat.tracebacks import at_boundary
from tessera.mesh import AnyMesh, Mesh, as_mesh, opened_or_none
from tessera.shard_spec import ShardSpec as ShardSpec
from tessera.shard_spec import local_shape as local_shape

__all__ = ("DistTensor", "ShardSpec", "tensor")

Init: TypeAlias = str | Callable[[jax.Array, tuple[int, ...], Any], Any] | None


# --- lazy tensors

_capture: ContextVar[Callable[["DistTensor"], jax.Array] | None] = ContextVar(
    "tessera_capture", default=None
)


def capturing(
    callback: Callable[["DistTensor"], jax.Array],
) -> AbstractContextManager[None]:
    """In this context, using a lazy tensor calls ``callback(tensor)`` instead.

    Tracing uses it to turn the tensors that a function closes over into inputs.
    """
    return holding(_capture, callback)


class DistTensor:
    """An array that is declared now and created on first use, by :func:`tensor`.

    It can be used wherever JAX takes an array. Equality is identity, so tensors can be
    dict keys; compare values by ``W[:]``.

    Attributes:
      shape: Global shape.
      dtype: NumPy dtype.
      layout: The declared ShardSpec, or None for replicated.
      mesh: Its mesh, or None for one default device.
      init: Its initializer.
      trainable: Whether a training step differentiates by it; integers never are.
      name: Its name in messages and parameter trees, or None.
      spec: Its PartitionSpec on the mesh.
    """

    # NumPy defers to an operand of higher priority instead of converting it.
    __array_priority__ = 100

    def __init__(
        self,
        shape: tuple[int, ...],
        layout: ShardSpec | None,
        mesh: Mesh | None,
        dtype: np.dtype[Any],
        init: Init,
        trainable: bool,
        name: str | None,
    ) -> None:
        self.shape, self.dtype, self.layout, self.mesh = shape, dtype, layout, mesh
        self.init, self.name = init, name
        self.trainable = trainable and jnp.issubdtype(dtype, jnp.inexact)
        self.spec = PartitionSpec()
        if mesh is not None and layout is not None:
            self.spec = layout.resolve(shape, mesh, what=self.described)
        self._array: jax.Array | None = None

    @property
    def described(self) -> str:
        """The tensor's name in messages."""
        return "tensor" if self.name is None else f"tensor {self.name!r}"

    @property
    def is_materialized(self) -> bool:
        """Whether the array exists already."""
        return self._array is not None

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, all devices together."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return self.size * self.dtype.itemsize

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's block."""
        if self.mesh is None:
            return self.shape
        return local_shape(self.shape, self.spec, self.mesh)

    @property
    def local_nbytes(self) -> int:
        """Bytes of one device's block."""
        return math.prod(self.local_shape) * self.dtype.itemsize

    def materialize(self, key: jax.Array | None = None) -> jax.Array:
        """Create the array, each shard on its own device.

        Args:
          key: A PRNG key for the initializer; each call with one creates a new array.
            Without one it is created once, from a key derived from the tensor's name.

        Raises:
          AbstractMeshError: [T105] the mesh has devices that this machine lacks.
        """
        if key is None and self._array is not None:
            return self._array
        # If used while tracing, it must still create a concrete array.
        with jax.ensure_compile_time_eval():
            if key is None:
                seed = zlib.crc32((self.name or "").encode())
                key = jax.random.fold_in(jax.random.key(0), seed)
            sharding = None
            if self.mesh is not None:
                sharding = NamedSharding(self.mesh.jax, self.spec)
            kind = (self.init, self.shape, self.dtype, sharding)
            self._array = _creator(*kind)(key)
        return self._array

    def __jax_array__(self) -> jax.Array:
        if (callback := _capture.get()) is not None:
            return callback(self)
        return self.materialize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        # T, reshape, sum, addressable_shards and the rest of an array.
        if not hasattr(jax.Array, name) or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.__jax_array__(), name)

    def block_until_ready(self) -> jax.Array:
        """Wait until the array is computed, and return it."""
        return self.__jax_array__().block_until_ready()

    def __getitem__(self, index: Any) -> jax.Array:
        return self.__jax_array__()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        layout = "" if self.mesh is None else f", {self.mesh.topology}"
        state = "lazy" if self._array is None else "materialized"
        shape = f"{self.dtype.name}{list(self.shape)}"
        return f"DistTensor({name}{shape}, {self.spec}{layout}, {state})"


def _forward(name: str) -> Callable[..., Any]:
    def forwarded(self: DistTensor, *operands: Any) -> Any:
        return getattr(self.__jax_array__(), name)(*operands)

    forwarded.__name__ = name
    return forwarded


# fmt: off
_OPERATORS: Final = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
    "radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul",
    "neg", "pos", "abs", "lt", "le", "gt", "ge", "float", "int", "bool",
)
# fmt: on
for _name in _OPERATORS:
    setattr(DistTensor, f"__{_name}__", _forward(f"__{_name}__"))

jaxprs.register_array_like(DistTensor)


@at_boundary
def tensor(
    shape: Sequence[int] | int,
    layout: ShardSpec | PartitionSpec | None = None,
    mesh: AnyMesh | None = None,
    dtype: Any = "f32",
    init: Init = None,
    trainable: bool = True,
    name: str | None = None,
) -> DistTensor:
    """Declare an array; nothing is allocated until it is used.

    Args:
      shape: Global shape.
      layout: How it is sharded; None is replicated.
      mesh: Its mesh, which may be one of JAX; None is the innermost that is open (by
        ``with mesh:`` or ``jax.set_mesh``), or else one default device.
      dtype: ``f32``, ``bf16``, ``i32``, … or a NumPy or JAX dtype.
      init: None or ``zeros``, ``ones``, ``normal`` (variance 1 / fan-in, where fan-in
        is the second-last dim, or 1 for vectors), or a callable of (key, shape,
        dtype) that returns an array, as those of ``jax.nn.initializers``.
      trainable: Whether a training step differentiates by it; integers never are.
      name: Its name in messages and parameter trees.

    Returns:
      A lazy tensor with a checked layout.

    Raises:
      TensorFormError: [T207] shape, dtype or init is illegal.
      NoMeshError: [T106] a layout without a mesh.
      SpecFormError: [T204] the layout is no spec, or names a dim twice.
      ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
      DimError: [T203] the layout names a dim that the shape does not have.
      UnknownAxisError: [T103] the layout names an axis that the mesh does not have.

    Example:
      >>> mesh = Mesh(["tp", "dp"], devices=range(8), shape=(4, 2))
      >>> rows = ShardSpec(partition=("row",), mesh_axes=("tp",))
      >>> table = tensor((10_000_000, 4096), rows, mesh, dtype="bf16")
      >>> table.local_shape, table.local_nbytes
      ((2500000, 4096), 20480000000)
    """
    what = "tensor" if name is None else f"tensor {name!r}"
    layout = None if layout is None else ShardSpec.of(layout, what)
    mesh = as_mesh(mesh) or opened_or_none()
    if mesh is None and layout is not None and any(layout.mesh_axes):
        raise NoMeshError(
            f"{what} has a layout and no mesh",
            got=f"{layout}",
            fix="pass mesh=, or declare it inside 'with mesh:'",
        )
    sizes = _checked_shape(what, shape)
    kind = _checked_dtype(what, dtype)
    _check_init(what, init, sizes, kind)
    return DistTensor(sizes, layout, mesh, kind, init, trainable, name)


def _fan_in_normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    fan_in = max(1, shape[-2]) if len(shape) > 1 else 1
    return jax.random.normal(key, shape, dtype) * jnp.asarray(fan_in**-0.5, dtype)


_INITS: dict[str, Callable[..., jax.Array]] = {
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
    "normal": _fan_in_normal,
}


@functools.lru_cache(maxsize=1024)
def _creator(
    init: Init,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding | None,
) -> Callable[[jax.Array], jax.Array]:
    """A compiled initializer, cached for all tensors of one kind."""
    fill = init if callable(init) else _INITS[init or "zeros"]

    def create(key: jax.Array) -> jax.Array:
        return fill(key, shape, dtype)

    return jax.jit(create, out_shardings=sharding)


def _checked_shape(what: str, shape: Sequence[int] | int) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    for size in sizes:
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not whole or size < 0:
            raise TensorFormError(
                f"the shape of {what} is not a list of sizes",
                got=f"shape {sizes!r}: {size!r} is not a whole number from 0 up",
                fix="write a shape such as (1024, 512)",
            )
    return tuple(int(size) for size in sizes)


def _checked_dtype(what: str, dtype: Any) -> np.dtype[Any]:
    kind = as_dtype(dtype)
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        raise TensorFormError(
            f"{what} has a dtype of 64 bits, which JAX is set to cut to 32",
            got=f"dtype {kind.name}, jax_enable_x64 off",
            fix=f"use {jax.dtypes.canonicalize_dtype(kind).name}, "
            'or jax.config.update("jax_enable_x64", True)',
        )
    return kind


def _check_init(
    what: str, init: Init, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    if isinstance(init, str) and init not in _INITS:
        raise TensorFormError(
            f"{what} has an init that does not exist",
            got=f"init {init!r}",
            fix=did_you_mean(init, _INITS) + ", or a callable of (key, shape, dtype)",
        )
    if init == "normal" and not jnp.issubdtype(dtype, jnp.floating):
        raise TensorFormError(
            f"{what} cannot be filled with normal numbers",
            got=f"init 'normal', dtype {dtype.name}",
            fix="use a floating-point dtype, or init='zeros' or a callable",
        )
    if init is None or isinstance(init, str):
        return
    if not callable(init):
        raise TensorFormError(
            f"{what} has an init of the wrong kind",
            got=f"{init!r}",
            fix=f"pass one of {', '.join(map(repr, _INITS))}, or a callable of "
            "(key, shape, dtype)",
        )
    key = jax.eval_shape(jax.random.key, 0)

    def fill(key: jax.Array) -> Any:
        return init(key, shape, dtype)

    result = jax.eval_shape(fill, key)
    form = getattr(result, "shape", None), getattr(result, "dtype", None)
    if form != (shape, dtype):
        raise TensorFormError(
            f"the init of {what} returns something else than was declared",
            got=f"declared {dtype.name}{list(shape)}, init returns {result}",
            fix="return an array of the shape and dtype that init is called with",
        )


# The types that Tessera takes for arrays.
ARRAYS: Final = (jax.Array, np.ndarray, np.generic, DistTensor)


def is_tensor(value: object) -> bool:
    """Whether a value is a ``DistTensor``, which is one leaf of a tree."""
    return isinstance(value, DistTensor)
