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
_ELEMENTWISE: Final[Mapping[str, Callable[..., Any]]] = {
    **{"add": np.add, "subtract": np.subtract, "multiply": np.multiply},
    **{"minimum": np.minimum, "maximum": np.maximum, "remainder": np.fmod},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    **{"negate": np.negative, "not": np.invert, "abs": np.abs, "sign": np.sign},
    **{"convert": np.copy, "copy": np.copy, "floor": np.floor},
    "divide": lambda a, b: np.trunc(a / b),
    "select": np.where,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
_COMPARISONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal},
    **{"GT": np.greater, "GE": np.greater_equal},
}
_REDUCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
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
    opcode, rank = instruction.opcode, len(shape.dims)
    if opcode in _ELEMENTWISE:
        return _ELEMENTWISE[opcode](*_aligned(operands))
    match opcode:
        case "constant":
            return _constant(instruction.operands[0], shape)
        case "iota":
            dim = _numbers(instruction, "iota_dimension")[0]
            line = np.arange(shape.dims[dim]).reshape(
                [-1 if d == dim else 1 for d in range(rank)]
            )
            return np.broadcast_to(line, shape.dims)[None]
        case "compare":
            compare = _COMPARISONS[instruction.attributes["direction"]]
            return compare(*operands)
        case "broadcast":
            (x,), dims = operands, _numbers(instruction, "dimensions")
            sizes = [1] * rank
            for dim, size in zip(dims, x.shape[1:], strict=True):
                sizes[dim] = size
            return np.broadcast_to(x.reshape(-1, *sizes), (len(x), *shape.dims))
        case "reshape" | "bitcast":
            return operands[0].reshape(-1, *shape.dims)
        case "transpose":
            dims = _numbers(instruction, "dimensions")
            return operands[0].transpose(0, *(dim + 1 for dim in dims))
        case "slice":
            parts = re.findall(r"\[([\d:]+)\]", instruction.attributes["slice"])
            bounds = (slice(*map(int, part.split(":"))) for part in parts)
            return operands[0][(slice(None), *bounds)]
        case "dynamic-slice":
            return _dynamic_slice(operands[0], operands[1:], shape.dims)
        case "reduce" if applied in _REDUCTIONS and len(operands) == 2:
            dims = tuple(dim + 1 for dim in _numbers(instruction, "dimensions"))
            return _REDUCTIONS[applied].reduce(operands[0], axis=dims)
        case "concatenate":
            lanes = max(map(len, operands))
            parts = [np.broadcast_to(x, (lanes, *x.shape[1:])) for x in operands]
            return np.concatenate(parts, _numbers(instruction, "dimensions")[0] + 1)
    return None


def _aligned(operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Operands of one rank: those of a clamp or a select may be scalars."""
    rank = max((x.ndim for x in operands), default=0)
    return [x.reshape(len(x), *[1] * (rank - x.ndim), *x.shape[1:]) for x in operands]


def _dynamic_slice(
    x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]
) -> np.ndarray:
    lanes = max(map(len, (x, *starts)))
    rank = len(sizes)
    places: list[np.ndarray] = [np.arange(len(x)).reshape(-1, *[1] * rank)]
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        first = np.clip(start.astype(np.int64), 0, x.shape[dim + 1] - size)
        index = first.reshape(-1, 1) + np.arange(size)
        across = [1] * rank
        across[dim] = size
        places.append(index.reshape(len(index), *across))
    return np.broadcast_to(x[tuple(places)], (lanes, *sizes))


def _constant(text: str, shape: Shape) -> np.ndarray | None:
    if "..." in text:
        return None  # a printer leaves large ones out
    words = re.findall(r"[^\s{},]+", re.sub(r"/\*.*?\*/", "", text))
    try:
        values = [_BOOLEANS[w] if w in _BOOLEANS else float(w) for w in words]
        return np.array(values).reshape(1, *shape.dims)
    except ValueError:
        return None


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
