# SPDX-License-Identifier: Apache-2.0
"""One array on one mesh: how it is split, and tensors that are declared before use.

A :class:`ShardSpec` says which dims are split over which mesh axes. A
:class:`DistTensor` is an array that exists only once it is used, so a table larger
than this machine can be declared, inspected and planned. No jaxprs here.
"""

import functools
import math
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import (
    AxisReusedError,
    DimError,
    NoMeshError,
    ShardDivisibilityError,
    SpecFormError,
    TensorFormError,
    TesseraError,
    UnknownAxisError,
    did_you_mean,
)
from tessera.mesh import Mesh, opened_or_none

Axes: TypeAlias = str | tuple[str, ...] | None
Init: TypeAlias = str | Callable[[jax.Array, tuple[int, ...], Any], Any] | None


@dataclass(frozen=True)
class ShardSpec:
    """Which dims of an array are split over which mesh axes.

    Args:
      partition: The dims to split: numbers (negative ones count from the end) or
        names. ``row`` and ``col`` are the second-last and the last dim; of a vector,
        ``row`` is its one dim. Other names come from the array's annotation.
      mesh_axes: For each of them a mesh axis, a tuple of axes (outer first), or None
        to leave the dim whole.

    Raises:
      SpecFormError: [T204] the two differ in length, or an entry is no dim or axis.
      AxisReusedError: [T202] one mesh axis is to split two dims.

    Example:
      >>> spec = ShardSpec(partition=("row", "col"), mesh_axes=("tp", "dp"))
      >>> spec.resolve((1024, 512), Mesh(["tp", "dp"], devices=range(16)))
      PartitionSpec('tp', 'dp')
    """

    partition: Sequence[int | str]
    mesh_axes: Sequence[Axes]

    def __post_init__(self) -> None:
        dims = _entries(self.partition)
        axes = tuple(_axes_entry(entry) for entry in _entries(self.mesh_axes))
        object.__setattr__(self, "partition", dims)
        object.__setattr__(self, "mesh_axes", axes)
        if len(dims) != len(axes):
            raise SpecFormError(
                "a ShardSpec pairs every dim with mesh axes",
                got=f"{len(dims)} dims {dims!r}, {len(axes)} mesh axes {axes!r}",
                fix="give as many mesh axes as dims; None leaves a dim whole",
            )
        for dim in dims:
            if isinstance(dim, bool) or not isinstance(dim, (int, str)):
                raise SpecFormError(
                    "a partition entry is a dim number or a dim name",
                    got=f"{dim!r} in {dims!r}",
                    fix='write partition=("row", "col") or partition=(0, 1)',
                )
        used = [axis for entry in axes for axis in _axis_names(entry)]
        if reused := [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]:
            raise AxisReusedError(
                f"mesh axis {reused[0]!r} is used twice in one ShardSpec",
                got=f"mesh_axes {axes!r}",
                fix="an axis splits one dim only: drop one of its uses",
            )

    @classmethod
    def replicated(cls) -> "ShardSpec":
        """The spec that splits nothing: every device holds the whole array."""
        return cls((), ())

    def resolve(
        self,
        shape: Sequence[int],
        mesh: Mesh,
        *,
        dim_names: Sequence[str] | None = None,
        what: str = "tensor",
    ) -> PartitionSpec:
        """This spec for an array of one shape on one mesh, every check made.

        Args:
          shape: The global shape.
          mesh: The mesh whose axes the spec names.
          dim_names: The array's own dim names, one per dim.
          what: What messages call the array, such as ``parameter 'up'``.

        Returns:
          A PartitionSpec without trailing None.

        Raises:
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
          DimError: [T203] the array has no such dim.
          SpecFormError: [T204] two entries name the same dim.
          UnknownAxisError: [T103] the mesh has no such axis.
        """
        entries: list[Axes] = [None] * len(shape)
        taken: dict[int, int | str] = {}
        problems: list[_Problem] = []
        for name, axes in zip(self.partition, self.mesh_axes, strict=True):
            dim = _dim_number(name, len(shape), dim_names)
            if dim is None:
                problems.append(_no_such_dim(what, name, shape, dim_names))
            elif dim in taken:
                problems.append(_dim_named_twice(what, dim, (taken[dim], name)))
            else:
                taken[dim], entries[dim] = name, axes
                problems += _misfits(what, shape, dim, _axis_names(axes), mesh)
        _raise_all(problems)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def named(
        self,
        shape: Sequence[int],
        mesh: Mesh,
        *,
        dim_names: Sequence[str] | None = None,
        what: str = "tensor",
    ) -> NamedSharding:
        """Like :meth:`resolve`, as a sharding on the devices of the mesh.

        Raises:
          AbstractMeshError: [T105] this machine lacks some of the devices.
        """
        spec = self.resolve(shape, mesh, dim_names=dim_names, what=what)
        return NamedSharding(mesh.jax, spec)


def local_shape(
    shape: Sequence[int], spec: PartitionSpec, mesh: Mesh
) -> tuple[int, ...]:
    """Shape of one device's block of an array that ``spec`` fits.

    Example:
      >>> mesh = Mesh(["tp", "dp"], devices=range(16))
      >>> local_shape((8, 6), PartitionSpec("tp"), mesh)
      (2, 6)
    """
    sizes = [mesh.axis_size(_axis_names(entry)) for entry in spec]
    sizes += [1] * (len(shape) - len(sizes))
    return tuple(n // size for n, size in zip(shape, sizes, strict=True))


# --- tensors that are declared before use

_DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(jnp.bfloat16),
    "f16": np.dtype(np.float16),
    "f64": np.dtype(np.float64),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
    "u16": np.dtype(np.uint16),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
}

_capture: ContextVar[Callable[["DistTensor"], jax.Array] | None] = ContextVar(
    "tessera_capture", default=None
)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype from a short name such as ``bf16``, or from NumPy's and JAX's own.

    Raises:
      TensorFormError: [T207] there is no such dtype.

    Example:
      >>> as_dtype("bf16"), as_dtype(jnp.float32)
      (dtype(bfloat16), dtype('float32'))
    """
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    try:
        return np.dtype(jnp.dtype(dtype))
    except TypeError:
        raise TensorFormError(
            f"there is no dtype {dtype!r}", fix=did_you_mean(str(dtype), _DTYPES)
        ) from None


@contextmanager
def capturing(callback: Callable[["DistTensor"], jax.Array]) -> Iterator[None]:
    """While open, a lazy tensor that is used becomes ``callback(tensor)``.

    A trace uses it to turn the tensors that a function closes over into its inputs.
    """
    token = _capture.set(callback)
    try:
        yield
    finally:
        _capture.reset(token)


class DistTensor:
    """An array that is declared now and created when it is first used.

    It stands wherever JAX takes an array. Made by :func:`tensor`.

    Attributes:
      shape: Global shape.
      dtype: NumPy dtype.
      layout: The declared ShardSpec, or None for replicated.
      mesh: The mesh it is split over, or None for one default device.
      init: How it is filled.
      trainable: Whether a training step differentiates by it; integers never are.
      name: What messages and parameter trees call it, or None.
      spec: The layout for this shape and mesh.
    """

    # NumPy gives way to an operand of higher priority instead of converting it.
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
        """What messages call this tensor."""
        return "tensor" if self.name is None else f"tensor {self.name!r}"

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
        """The array itself, each shard created on its own device.

        Args:
          key: A PRNG key to fill it from, anew each time one is given. Without one the
            array is made once, from a key that depends on the tensor's name alone.

        Raises:
          AbstractMeshError: [T105] the mesh has devices that this machine lacks.
        """
        if key is None and self._array is not None:
            return self._array
        # A use inside someone's trace must still create a real array, to be kept.
        with jax.ensure_compile_time_eval():
            if key is None:
                seed = zlib.crc32((self.name or "").encode())
                key = jax.random.fold_in(jax.random.key(0), seed)
            sharding = None
            if self.mesh is not None:
                sharding = NamedSharding(self.mesh.jax, self.spec)
            self._array = _creator(self.init, self.shape, self.dtype, sharding)(key)
        return self._array

    def __jax_array__(self) -> jax.Array:
        callback = _capture.get()
        return self.materialize() if callback is None else callback(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.materialize(), dtype=dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        # T, reshape, sum, addressable_shards and the rest of an array.
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.__jax_array__(), name)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.__jax_array__()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        place = "" if self.mesh is None else f", {self.mesh.topology}"
        state = "lazy" if self._array is None else "materialized"
        shape = f"{self.dtype.name}{list(self.shape)}"
        return f"DistTensor({name}{shape}, {self.spec}{place}, {state})"


def _forward(name: str) -> Callable[..., Any]:
    method = getattr(operator, f"__{name.removeprefix('r')}__", None)

    def forwarded(self: DistTensor, *operands: Any) -> Any:
        return getattr(self.__jax_array__(), f"__{name}__")(*operands)

    forwarded.__name__ = f"__{name}__"
    forwarded.__doc__ = getattr(method, "__doc__", None)
    return forwarded


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("neg", "pos", "abs", "lt", "le", "gt", "ge", "float", "int", "bool"),
):
    setattr(DistTensor, f"__{_name}__", _forward(_name))


def tensor(
    shape: Sequence[int] | int,
    layout: ShardSpec | None = None,
    mesh: Mesh | None = None,
    dtype: Any = "f32",
    init: Init = None,
    trainable: bool = True,
    name: str | None = None,
) -> DistTensor:
    """Declare an array; nothing is allocated until it is used.

    Args:
      shape: Global shape.
      layout: How it is split; None is replicated.
      mesh: Where; None is the mesh of the innermost ``with mesh:``, or else one
        default device.
      dtype: ``f32``, ``bf16``, ``i32``, … or a NumPy or JAX dtype.
      init: None or ``zeros``, ``ones``, ``normal`` (variance 1 / fan-in, where fan-in
        is the second-last dim, or 1 for vectors), or a callable of (key, shape,
        dtype) that gives an array, as those of ``jax.nn.initializers``.
      trainable: Whether a training step differentiates by it; integers never are.
      name: What messages and parameter trees call it.

    Returns:
      A lazy tensor, its layout checked.

    Raises:
      TensorFormError: [T207] shape, dtype or init is not one.
      NoMeshError: [T106] a layout without a mesh.
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
    mesh = mesh if mesh is not None else opened_or_none()
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
    fan_in = shape[-2] if len(shape) > 1 else 1
    return jax.random.normal(key, shape, dtype) * jnp.asarray(fan_in**-0.5, dtype)


_INITS: dict[str, Callable[..., jax.Array]] = {
    "zeros": lambda key, shape, dtype: jnp.zeros(shape, dtype),
    "ones": lambda key, shape, dtype: jnp.ones(shape, dtype),
    "normal": _fan_in_normal,
}


@functools.lru_cache(maxsize=1024)
def _creator(
    init: Init, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None
) -> Callable[[jax.Array], jax.Array]:
    """Compiled once for all tensors of one kind."""
    fill = _INITS[init or "zeros"] if init is None or isinstance(init, str) else init
    return jax.jit(lambda key: fill(key, shape, dtype), out_shardings=sharding)


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
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = jax.eval_shape(lambda k: init(k, shape, dtype), key)
    met = getattr(made, "shape", None), getattr(made, "dtype", None)
    if met != (shape, dtype):
        raise TensorFormError(
            f"the init of {what} gives something else than was declared",
            got=f"declared {dtype.name}{list(shape)}, init gives {made}",
            fix="return an array of the shape and dtype that init is called with",
        )


# --- what can be wrong with a spec


@dataclass(frozen=True)
class _Problem:
    kind: type[TesseraError]
    what: str
    got: str
    fix: str


def _raise_all(problems: list[_Problem]) -> None:
    """Raise the first problem, with the others in its message."""
    if not problems:
        return
    first, *others = problems
    got = [first.got]
    for other in others:
        got.append(f"also [{other.kind.code}] {other.what}: {other.got}")
    fix = "\n".join(dict.fromkeys(problem.fix for problem in problems))
    raise first.kind(first.what, got="\n".join(got), fix=fix)


def _misfits(
    what: str, shape: Sequence[int], dim: int, axes: tuple[str, ...], mesh: Mesh
) -> list[_Problem]:
    """What is wrong with splitting one dim over some axes: nothing, if all is well."""
    if unknown := [axis for axis in axes if axis not in mesh.axes]:
        return [
            _Problem(
                UnknownAxisError,
                f"{what} is split over {axis!r}, an axis that the mesh lacks",
                f"dim {dim}, {mesh.topology}",
                did_you_mean(axis, mesh.axes),
            )
            for axis in unknown
        ]
    if shape[dim] % mesh.axis_size(axes) == 0:
        return []
    return [_indivisible(what, shape, dim, axes, mesh)]


def _indivisible(
    what: str, shape: Sequence[int], dim: int, axes: tuple[str, ...], mesh: Mesh
) -> _Problem:
    factor = mesh.axis_size(axes)
    product = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
    low, high = shape[dim] // factor * factor, -(-shape[dim] // factor) * factor
    near = f"{low} or {high}" if low else f"{high}"
    return _Problem(
        ShardDivisibilityError,
        f"{what} cannot be split evenly over mesh axes {axes!r}",
        f"shape {tuple(shape)}, dim {dim} = {shape[dim]}, axis size {factor}"
        + (f" ({product})" if len(axes) > 1 else ""),
        f"use {near}, or drop {' or '.join(map(repr, axes))} from the spec",
    )


def _no_such_dim(
    what: str, name: int | str, shape: Sequence[int], dim_names: Sequence[str] | None
) -> _Problem:
    rank = len(shape)
    if isinstance(name, int):
        numbers = f"use a dim from {-rank} to {rank - 1}" if rank else "drop it"
        fix = f"{numbers}: the array has {rank} dims"
    else:
        known = [*(dim_names or ()), *("row", "col")[: min(rank, 2)]]
        fix = f"{did_you_mean(name, known)}, or a dim number"
    return _Problem(
        DimError, f"{what} has no dim {name!r}", f"shape {tuple(shape)}", fix
    )


def _dim_named_twice(what: str, dim: int, names: tuple[int | str, ...]) -> _Problem:
    return _Problem(
        SpecFormError,
        f"the spec of {what} names dim {dim} twice",
        f"{names[0]!r} and {names[1]!r} are the same dim",
        "join their mesh axes into one tuple, or drop one of them",
    )


def _dim_number(
    name: int | str, rank: int, dim_names: Sequence[str] | None
) -> int | None:
    """The dim that an entry means, counted from the front; None where there is none."""
    if isinstance(name, str):
        if dim_names is not None and name in dim_names:
            return list(dim_names).index(name)
        if rank == 1:
            return 0 if name == "row" else None
        name = {"row": -2, "col": -1}.get(name, rank)
    return name % rank if -rank <= name < rank else None


def _entries(entries: Any) -> tuple[Any, ...]:
    """A sequence of entries as a tuple; one entry by itself is a sequence of one."""
    return (entries,) if isinstance(entries, (str, int)) else tuple(entries)


def _axes_entry(entry: Any) -> Axes:
    if entry is None or isinstance(entry, str):
        return entry
    names = tuple(entry) if isinstance(entry, (tuple, list)) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise SpecFormError(
            "a mesh_axes entry is an axis name, a tuple of them, or None",
            got=f"{entry!r}",
            fix='write mesh_axes=("tp", None) or mesh_axes=(("dp", "tp"),)',
        )
    return names[0] if len(names) == 1 else names


def _axis_names(entry: Axes) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
