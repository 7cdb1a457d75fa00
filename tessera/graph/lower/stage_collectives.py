# SPDX-License-Identifier: Apache-2.0
"""Checks that the stages of a compiled pipeline can run at different times.

At any time some devices of a pipeline run a stage and others do not, so a collective
inside a stage may only be among devices that run it together. XLA's collective-permute
on CPU is not: it waits for every device of the program, so it would wait forever. The
partitioner inserts one where arrays change their layout in certain ways; the program is
refused before it runs.
"""

import jax

from tessera.errors import StageCollectiveError
from tessera.graph.ir import Graph
from tessera.graph.pipelining.pipeline_primitive import SCOPE

_KIND = "collective-permute"


def check_stages(graph: Graph, compiled: jax.stages.Compiled) -> None:
    """Refuse a pipeline that would deadlock.

    Raises:
      StageCollectiveError: [T314] with the lines that cause it.
    """
    if graph.mesh is None or graph.platform != "cpu":
        return
    text = compiled.as_text() or ""
    if f"/{SCOPE}/" not in text or _KIND not in text:
        return
    # Imported here, because few programs have a pipeline.
    from tessera.analysis import hlo
    from tessera.analysis.hlo_walk import executions
    from tessera.analysis.ledger import collectives

    # The ledger takes longer than this, and hardly any program needs it.
    if not any(
        node.is_conditional and node.instruction.opcode.startswith((_KIND, "send"))
        for node in executions(hlo.parse(text))
    ):
        return
    found = [
        f"over {'×'.join(row.axes)}, caused at {row.source or row.op_name}"
        for row in collectives(compiled, graph.mesh).rows
        if row.kind == _KIND and row.conditional and f"/{SCOPE}/" in row.op_name
    ]
    if found:
        raise StageCollectiveError(
            f"a stage of a pipeline has a {_KIND}, for which XLA on CPU waits for "
            "devices that run another stage",
            got="\n".join(dict.fromkeys(found)),
            fix="keep the layout of activations inside a stage as it is, or use a mesh "
            "whose other axes split nothing there",
        )
