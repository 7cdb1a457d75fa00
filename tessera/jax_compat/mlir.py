# SPDX-License-Identifier: Apache-2.0
"""Lets Shardy decide the layouts of a lowered program.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager


def propagated_text(lowered: Any) -> str:
    """A lowered program's module after Shardy has decided every layout in it.

    It is a copy in a separate context: compiling a module whose layouts are already
    propagated crashes the process.
    """
    source = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    with mlir.make_ir_context():
        module = ir.Module.parse(source)
        pipeline = "builtin.module(sdy-propagation-pipeline)"
        passmanager.PassManager.parse(pipeline).run(module.operation)
        return str(module)
