# SPDX-License-Identifier: Apache-2.0
"""Reads the MLIR module of a lowered program: its propagated layouts, its source lines.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

from collections.abc import Iterator
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager


def propagated_module(lowered: Any) -> Any:
    """A lowered program's module after Shardy has decided every layout in it.

    It is a copy in a separate context: compiling a module whose layouts are already
    propagated crashes the process.
    """
    source = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    with mlir.make_ir_context():
        module = ir.Module.parse(source)
        pipeline = "builtin.module(sdy-propagation-pipeline)"
        passmanager.PassManager.parse(pipeline).run(module.operation)
    return module


def operation_place(operation: Any) -> tuple[str, list[tuple[str, int, str]]]:
    """Where an MLIR operation comes from: its name stack and its Python stack.

    Returns:
      JAX's name stack, such as ``jit(step)/mul``, and the (file, line, function) of
      each Python frame, innermost first.
    """
    location = operation.location
    match location:
        case ir.NameLoc(child_loc=ir.FileLineColLoc()):  # a frame's function
            return "", list(_python_stack(location))
        case ir.NameLoc(child_loc=inner):
            return location.name_str, list(_python_stack(inner))
    return "", list(_python_stack(location))


def _python_stack(location: Any) -> Iterator[tuple[str, int, str]]:
    match location:
        case ir.CallSiteLoc():
            yield from _python_stack(location.callee)
            yield from _python_stack(location.caller)
        case ir.NameLoc(child_loc=ir.FileLineColLoc() as line):
            yield line.filename, line.start_line, location.name_str
        case ir.NameLoc():
            yield from _python_stack(location.child_loc)
        case ir.FileLineColLoc():
            yield location.filename, location.start_line, ""
        case ir.FusedLoc():
            yield from _python_stack(location.locations[0])
