# SPDX-License-Identifier: Apache-2.0
"""Counts what one operation of a compiled program computes and moves, from its shapes.

Bytes are those that the operation has to read and write at least once: a fusion that
slices an operand reads the slice, and one that updates a slice in place writes it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tessera.analysis.hlo import Computation, Instruction, Module, Shape
from tessera.tracing.scope import VISITS

# Operations that only name values, or that the compiler gives no code.
FREE: Final = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("after-all", "add-dependency", "optimization-barrier", "domain"),
        *("partition-id", "replica-id", "send", "recv"),
    }
)
_FREE_CALLS: Final = frozenset(
    {
        *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"),
        *("AsyncCollectiveStart", "AsyncCollectiveDone"),
    }
)
_TARGET: Final = re.compile(r'custom_call_target="([^"]*)"')
# Of a dot, and of a call of cuBLAS.
_CONTRACTED: Final = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"\s]*)')
_SCORES: Final = re.compile(
    r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)'
)
_IS_CAUSAL: Final = re.compile(r'"mask_type": ?"(?:PADDING_)?CAUSAL"')
# Matmuls over the scores in each of JAX's attention kernels for TPUs.
_SPLASH: Final = re.compile(r"splash_\w+?_(fwd|dq|dkv)_")
_TPU_KERNEL: Final = "tpu_custom_call"
_FLOATS: Final = ("bf16", "f16", "f32")
_SPLASH_MATMULS: Final = {"fwd": 2, "dq": 3, "dkv": 4}
_KERNEL: Final = re.compile(r"dim_labels=\w+_(\w+)->")
_NAMES: Final = dict.fromkeys(("f32", "f64"), "float32") | dict.fromkeys(
    ("f8e4m3fn", "f8e5m2"), "float8"
)
# Operations whose operand is read, or whose result is written, in part.
_SLICES: Final = ("dynamic-slice", "slice", "gather")
_UPDATES: Final = {"dynamic-update-slice": 1, "scatter": 2}  # operand of the update
_MOVES: Final = frozenset(
    {
        *FREE,
        *("broadcast", "concatenate", "copy", "fusion", "gather", "iota", "pad"),
        *("reshape", "reverse", "slice", "transpose", "dynamic-slice"),
        *("dynamic-update-slice", "call", "dot", "convolution", "custom-call"),
    }
)


@dataclass(frozen=True, slots=True)
class Work:
    """What one execution of an operation costs one device.

    Attributes:
      kind: ``matmul``, ``attention`` or ``other``.
      products: FLOPs of matmuls, attention and convolutions, by NumPy's name of the
        dtype of their operands, or ``float8``.
      elementwise: Operations of everything else, one for each element.
      nbytes: Bytes read and written.
    """

    kind: str = "other"
    products: tuple[tuple[str, float], ...] = ()
    elementwise: float = 0.0
    nbytes: float = 0.0


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction only names values, so that it takes no time."""
    if instruction.opcode == "custom-call":
        return call_target(instruction) in _FREE_CALLS
    return instruction.opcode in FREE


def call_target(instruction: Instruction) -> str:
    """The kernel that a custom call runs, such as ``__cublas$gemm``, or ``""``."""
    found = _TARGET.search(instruction.tail)
    return found[1] if found else ""


def work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """The work of an operation that is neither a collective nor control flow.

    Args:
      module: The program.
      computation: The one that contains the instruction.
      instruction: The operation.

    Example:
      >>> from tessera.analysis.hlo import parse
      >>> module = parse('''HloModule m
      ... ENTRY main {
      ...   a = bf16[4,8] parameter(0)
      ...   ROOT c = f32[4,4] dot(a, a), lhs_contracting_dims={1}
      ... }''')
      >>> entry = module.computations["main"]
      >>> work(module, entry, entry.root)
      Work(kind='matmul', products=(('bfloat16', 256.0),), elementwise=0.0, nbytes=192)
    """
    nbytes = _accessed(module, computation, instruction)
    target = call_target(instruction)
    if target.startswith("__cudnn$fmha"):
        flops = _attention_flops(computation, instruction, "Backward" in target)
        dtype = _dtype(computation, instruction)
        return Work("attention", ((dtype, flops),) if flops else (), 0.0, nbytes)
    name = instruction.op_name
    if target == _TPU_KERNEL and (kernel := _SPLASH.search(name)):
        operands = computation.operand_shapes(instruction)
        arrays = [shape for shape in operands if shape.dtype in _FLOATS]
        flops = _splash_flops(kernel[1], arrays)
        flops *= visited_share(name) or 1.0
        dtype = _NAMES.get(arrays[0].dtype, "bfloat16")
        return Work("attention", ((dtype, flops),), 0.0, nbytes)
    inside = list(_operations(module, computation, instruction))
    products: dict[str, float] = {}
    elementwise = 0.0
    for place, each in inside:
        if flops := _product_flops(place, each):
            dtype = _dtype(place, each)
            products[dtype] = products.get(dtype, 0.0) + flops
        elif each.opcode == "reduce":
            elementwise += _size(place.operand_shapes(each)[:1])
        elif each.opcode not in _MOVES:
            elementwise += _size(each.shapes[:1])
    kind = "matmul" if products else "other"
    return Work(kind, tuple(products.items()), elementwise, nbytes)


def visited_share(names: str) -> float | None:
    """The share of blocks that the kernels of a name stack visit, where it says so."""
    found = re.search(rf"{VISITS}(\d+)_of_(\d+)", names)
    return int(found[1]) / int(found[2]) if found else None


def _operations(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """An instruction, or those of the computation that it fuses."""
    if instruction.opcode != "fusion":
        yield computation, instruction
        return
    for inner in module.callees(instruction):
        for each in inner.instructions.values():
            yield from _operations(module, inner, each)


def _product_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a dot or a convolution, or of a call of one; 0 of anything else."""
    target = call_target(instruction)
    if instruction.opcode == "dot" or target.startswith("__cublas$"):
        found = _CONTRACTED.search(instruction.tail)
        left = computation.operand_shapes(instruction)[0].dims
        depth = math.prod(left[d] for d in _numbers(found[1])) if found else 1
        # A call of cuBLAS also returns its workspace.
        return 2.0 * depth * _size(instruction.shapes[:1])
    if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution_flops(computation, instruction, target)
    return 0.0


def _convolution_flops(
    computation: Computation, instruction: Instruction, target: str
) -> float:
    """FLOPs of a convolution: each result sums over the kernel's inputs and window."""
    operands = computation.operand_shapes(instruction)
    result, labels = instruction.shapes[0], _KERNEL.search(instruction.tail)
    # The gradients are called with the other two of the three arrays.
    kernel, image = operands[1], result
    if target.endswith("BackwardInput"):
        image = operands[0]
    elif target.endswith("BackwardFilter"):
        kernel, image = result, operands[1]
    features = kernel.dims[labels[1].index("o")] if labels else 1
    return 2.0 * _size([image]) * _size([kernel]) / max(1, features)


def _attention_flops(
    computation: Computation, instruction: Instruction, is_backward: bool
) -> float:
    """FLOPs of cuDNN's attention: two matmuls over the scores forward, five backward.

    Packed rows count as rows of one segment, which is the most that they may be.

    Source: Dao, FlashAttention-2, arXiv 2307.08691, section 4.1.
    """
    found = _SCORES.search(instruction.tail)
    if not found:
        return 0.0
    # Each number of the queries meets one of every key.
    keys, queries = _numbers(found[1])[-1], computation.operand_shapes(instruction)[:1]
    flops = (10.0 if is_backward else 4.0) * keys * _size(queries)
    return flops / 2 if _IS_CAUSAL.search(instruction.tail) else flops


def _splash_flops(kernel: str, arrays: Sequence[Shape]) -> float:
    """FLOPs of one of JAX's attention kernels for TPUs over all pairs of blocks."""
    queries, keys = arrays[:2]  # [..., heads, length, width]
    return 2.0 * _SPLASH_MATMULS[kernel] * _size([queries]) * keys.dims[-2]


def _dtype(computation: Computation, instruction: Instruction) -> str:
    shapes = computation.operand_shapes(instruction)
    return _NAMES.get(shapes[0].dtype, "bfloat16")


def _accessed(
    module: Module, computation: Computation, instruction: Instruction
) -> float:
    """Bytes that an operation reads and writes."""
    if instruction.opcode == "fusion":
        (inner,) = module.callees(instruction)
        reads = (_read(module, inner, each) for each in inner.parameters.values())
        return sum(reads) + _written(inner, inner.root)
    if instruction.opcode in _SLICES:
        return 2 * _nbytes(instruction.shapes)
    if instruction.opcode in _UPDATES:
        update = computation.sources(instruction)[_UPDATES[instruction.opcode]]
        return 2 * _nbytes(update.shapes)
    operands = computation.operand_shapes(instruction)
    return _nbytes(operands) + _nbytes(instruction.shapes)


def _read(module: Module, inner: Computation, parameter: Instruction) -> float:
    """Bytes that a fusion reads of an operand."""
    whole, total = _nbytes(parameter.shapes), 0.0
    for reader in inner.readers(parameter):
        is_first = reader.operands[0] == parameter.name
        if reader.opcode == "bitcast":
            total += _read(module, inner, reader)
        elif reader.opcode in _SLICES and is_first:
            total += _nbytes(reader.shapes)
        elif reader.opcode == "fusion":
            (nested,) = module.callees(reader)
            index = reader.operands.index(parameter.name)
            total += _read(module, nested, nested.parameters[index])
        elif not (reader.opcode in _UPDATES and is_first):
            return whole
    return min(whole, total)


def _written(inner: Computation, result: Instruction) -> float:
    """Bytes that a fusion writes for a result."""
    sources = inner.sources(result)
    if result.opcode == "tuple":
        return sum(_written(inner, each) for each in sources)
    if result.opcode == "bitcast" and sources:
        return _written(inner, sources[0])
    index = _UPDATES.get(result.opcode)
    if index is None:
        return _nbytes(result.shapes)
    target = sources[0]
    while target.opcode == "bitcast" and inner.sources(target):
        (target,) = inner.sources(target)
    # What an update changes is there already, or the fusion has made it.
    is_there = target.opcode in ("parameter", "get-tuple-element")
    return _nbytes((sources[index] if is_there else result).shapes)


def _nbytes(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _size(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape.dims) for shape in shapes)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
