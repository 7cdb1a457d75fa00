# SPDX-License-Identifier: Apache-2.0
"""Replaces each pipelined call by a loop over microbatches."""

from tessera.graph.gradient_primitive import refuse_closure
from tessera.graph.ir import Graph
from tessera.graph.pipelining.pipeline_primitive import has_pipeline
from tessera.jax_compat import traces


def schedule_pipelines(graph: Graph) -> Graph:
    """Run each pipelined call by its schedule, with the loss it leads to.

    A call whose output a differentiated loss depends on becomes one loop that computes
    the loss and all its gradients, microbatch by microbatch; the equations from the
    output to the loss go into the last stage. Any other call becomes a forward loop.
    Numerics: reordered. Sums over rows become sums over microbatches.

    Before:  y = pipeline x w; l = sum y; g = gradient l w; out g
    After:   l = custom_vjp[shard_map[scan over ticks]] x w; g = gradient l w; out g

    Raises:
      PipelineFormError: [T312] the loss cannot be computed microbatch by microbatch.
      OutsideTraceError: [T302] a derivative rule in a stage closes over an array.
    """
    if not has_pipeline(graph.program):
        return graph
    # Imported here: most programs have no pipeline, and it is a large part of Tessera.
    from tessera.graph.pipelining.insert_pipeline_loop import insert_pipeline_loops

    try:
        return insert_pipeline_loops(graph)
    except traces.NoGradientByClosure:
        refuse_closure()
