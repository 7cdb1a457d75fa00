# SPDX-License-Identifier: Apache-2.0
"""Evaluates single operations of a compiled program on numbers that are known.

Values have a leading dim of lanes, for each of which the operation is evaluated, or of
one where all lanes have the same value: ``[L, *dims]``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tessera.analysis.hlo import Instruction, Shape

_DTYPES: Final = {
    **{"pred": np.bool_, "f16": np.float32, "bf16": np.float32, "f32": np.float32},
    **{f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Division, which rounds integers towards 0."""
    return x / y if x.dtype.kind == "f" else np.trunc(x / y)


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)


_ELEMENTWISE: Final[Mapping[str, Callable[..., Any]]] = {
    **{"add": np.add, "subtract": np.subtract, "multiply": np.multiply},
    **{"minimum": np.minimum, "maximum": np.maximum, "remainder": np.fmod},
    **{"shift-left": np.left_shift, "shift-right-logical": np.right_shift},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    **{"negate": np.negative, "not": np.invert, "abs": np.abs, "sign": np.sign},
    **{"convert": np.copy, "copy": np.copy, "floor": np.floor},
    **{"divide": _divide, "select": np.where, "clamp": _clamp},
}
_COMPARISONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal},
    **{"GT": np.greater, "GE": np.greater_equal},
}
_REDUCTIONS: Final[Mapping[str, np.ufunc]] = {
    **{"add": np.add, "multiply": np.multiply, "minimum": np.minimum},
    **{"maximum": np.maximum, "and": np.logical_and, "or": np.logical_or},
}
_BOOLEANS: Final = {"true": 1.0, "false": 0.0}
_ORDER: Final = re.compile(r"\]\{([\d,]*)")


def evaluate(
    instruction: Instruction, operands: Sequence[np.ndarray], applied: str = ""
) -> np.ndarray | None:
    """The result of an operation; None where it is not one of those known here.

    Args:
      instruction: The operation.
      operands: Their values, ``[L or 1, *dims]`` each; a bitcast's are row-major.
      applied: For a reduction the opcode that it applies to pairs.

    Example:
      >>> from tessera.analysis.hlo import parse
      >>> module = parse('''HloModule m
      ... ENTRY main {
      ...   x = s32[3] iota(), iota_dimension=0
      ...   ROOT y = s32[3] add(x, x)
      ... }''')
      >>> x, y = module.computations["main"].instructions.values()
      >>> evaluate(y, [evaluate(x, [])] * 2)
      array([[0, 2, 4]], dtype=int32)
    """
    shape = instruction.shapes[0]
    if instruction.is_tuple or shape.dtype not in _DTYPES:
        return None
    with np.errstate(all="ignore"):  # XLA's own arithmetic wraps around
        found = _evaluated(instruction, shape, operands, applied)
    return None if found is None else found.astype(_DTYPES[shape.dtype])


def _evaluated(
    instruction: Instruction,
    shape: Shape,
    operands: Sequence[np.ndarray],
    applied: str,
) -> np.ndarray | None:
    opcode = instruction.opcode
    if opcode in _ELEMENTWISE:
        return _ELEMENTWISE[opcode](*_aligned(operands))
    if opcode == "compare":
        return _COMPARISONS[instruction.attributes["direction"]](*operands)
    if opcode == "reduce" and applied in _REDUCTIONS and len(operands) == 2:
        dims = tuple(dim + 1 for dim in _numbers(instruction, "dimensions"))
        return _REDUCTIONS[applied].reduce(operands[0], axis=dims)
    if opcode in _MOVES:
        return _MOVES[opcode](instruction, shape, operands)
    return None


def _aligned(operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Operands of one rank: those of a clamp or a select may be scalars."""
    rank = max((x.ndim for x in operands), default=0)
    return [x.reshape(len(x), *[1] * (rank - x.ndim), *x.shape[1:]) for x in operands]


def known_array(shape: Shape, value: int) -> np.ndarray | None:
    """An array with one value everywhere, ``[1, *dims]``; None of other dtypes."""
    if shape.dtype not in _DTYPES:
        return None
    return np.full((1, *shape.dims), value).astype(_DTYPES[shape.dtype])


def _constant(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray | None:
    del operands
    (text,) = instruction.operands
    if "..." in text:
        return None  # a printer leaves large ones out
    words = re.findall(r"[^\s{},]+", re.sub(r"/\*.*?\*/", "", text))
    try:
        values = [_BOOLEANS[w] if w in _BOOLEANS else float(w) for w in words]
        return np.array(values).reshape(1, *shape.dims)
    except ValueError:
        return None


def _iota(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    del operands
    (dim,) = _numbers(instruction, "iota_dimension")
    across = [-1 if each == dim else 1 for each in range(len(shape.dims))]
    line = np.arange(shape.dims[dim]).reshape(across)
    return np.broadcast_to(line, shape.dims)[None]


def _broadcast(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    (x,), sizes = operands, [1] * len(shape.dims)
    dims = _numbers(instruction, "dimensions")
    for dim, size in zip(dims, x.shape[1:], strict=True):
        sizes[dim] = size
    return np.broadcast_to(x.reshape(-1, *sizes), (len(x), *shape.dims))


def _reshape(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    del instruction
    return operands[0].reshape(-1, *shape.dims)


def _transpose(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    del shape
    dims = _numbers(instruction, "dimensions")
    return operands[0].transpose(0, *(dim + 1 for dim in dims))


def _slice(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    del shape
    parts = re.findall(r"\[([\d:]+)\]", instruction.attributes["slice"])
    bounds = (slice(*map(int, part.split(":"))) for part in parts)
    return operands[0][(slice(None), *bounds)]


def _dynamic_slice(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    del instruction
    x, *starts = operands
    return x[_places(x, starts, shape.dims)]


def _dynamic_update_slice(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    del instruction, shape
    x, update, *starts = operands
    lanes = max(map(len, operands))
    result = np.array(np.broadcast_to(x, (lanes, *x.shape[1:])))
    result[_places(result, starts, update.shape[1:])] = update
    return result


def _places(
    x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """The index, in each lane, of a slice that begins at indices of its own."""
    rank = len(sizes)
    places: list[np.ndarray] = [np.arange(len(x)).reshape(-1, *[1] * rank)]
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        first = np.clip(start.astype(np.int64), 0, x.shape[dim + 1] - size)
        index = first.reshape(-1, 1) + np.arange(size)
        across = [1] * rank
        across[dim] = size
        places.append(index.reshape(len(index), *across))
    return tuple(places)


def _pad(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray | None:
    """Padding at the ends of dims, ``1_0x0_2``; None of padding between elements."""
    del shape
    x, value = operands
    text = instruction.attributes["padding"]
    sides = re.findall(r"(-?\d+)_(-?\d+)(?:_(\d+))?", text)
    if "-" in text or len(value) > 1 or any(gap.strip("0") for *_, gap in sides):
        return None
    widths = [(0, 0), *((int(low), int(high)) for low, high, _ in sides)]
    return np.pad(x, widths, constant_values=value.item())


def _concatenate(
    instruction: Instruction, shape: Shape, operands: Sequence[np.ndarray]
) -> np.ndarray:
    del shape
    lanes = max(map(len, operands))
    parts = [np.broadcast_to(x, (lanes, *x.shape[1:])) for x in operands]
    return np.concatenate(parts, _numbers(instruction, "dimensions")[0] + 1)


_MOVES: Final[Mapping[str, Callable[..., np.ndarray | None]]] = {
    **{"constant": _constant, "iota": _iota, "broadcast": _broadcast},
    **{"reshape": _reshape, "bitcast": _reshape, "transpose": _transpose},
    **{"slice": _slice, "dynamic-slice": _dynamic_slice, "pad": _pad},
    **{"dynamic-update-slice": _dynamic_update_slice, "concatenate": _concatenate},
}


def is_row_major(instruction: Instruction) -> bool:
    """Whether the elements of a result are in memory in the order of their indices.

    A bitcast between such results keeps that order; others may transpose.
    """
    order = _ORDER.search(instruction.result)
    dims = [int(dim) for dim in order[1].split(",") if dim] if order else []
    sizes = instruction.shapes[0].dims
    large = [dim for dim in dims if sizes[dim] > 1]
    return large == sorted(large, reverse=True)


def _numbers(instruction: Instruction, attribute: str) -> list[int]:
    text = instruction.attributes.get(attribute, "")
    return [int(number) for number in re.findall(r"\d+", text)]
