# SPDX-License-Identifier: Apache-2.0
"""Lowers a ``Graph`` to ``jax.jit`` with the declared shardings.

The result is the program that a JAX user would write by hand: one jit of one function
with a ``NamedSharding`` for every input and output. After compilation the layouts that
XLA chose are compared with the declared ones.
"""

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax

from tessera.errors import LayoutMismatchError
from tessera.graph.ir import Graph, Role, Value
from tessera.graph.tracer.arguments import Call
from tessera.graph.tracer.tracer import Trace
from tessera.jax_compat import jaxprs, traces
from tessera.jax_compat.equation_lines import lines_in_cache_key
from tessera.jax_compat.workarounds import correct_options, rounding_options
from tessera.ops.operand_layouts import in_types_of

# Options for GPUs that let more of the collectives' time pass beside computation for
# less than a tenth more of temporary memory; ``benchmarks/overlap.py`` compares. The
# gradients of a layer are sent while those of the one before are computed. Those that
# TPUs have take more memory than that.
_OVERLAP: Final[Mapping[str, bool | str]] = {
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
}
# Gathers a layer ahead. Inside of a host its copies take longer than what it hides.
_PREFETCH: Final = "xla_gpu_enable_pipelined_all_gather"
_UNKNOWN: Final = re.compile(r"No such compile option: '(\w+)'")


def jitted(
    trace: Trace,
    graph: Graph,
    call: Call,
    *,
    is_nested: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, bool | str] = MappingProxyType({}),
) -> jax.stages.Wrapped:
    """A graph, after its passes, as ``jax.jit`` for a call's arguments.

    Args:
      trace: How the call was traced: which arguments it donates.
      graph: Its graph after the passes.
      call: The call.
      is_nested: Whether it is called in a program that JAX traces.
      inline: Whether such a program has no call of it.
      compiler_options: Options of XLA, where it is a program of its own: JAX refuses
        those of a function inside another.

    Returns:
      A jitted function. It takes the list of arrays of each argument, then the
      tuple of parameters, then the tuple of captured arrays, all as devices store
      them; it gives the list of the graph's outputs. What JAX is tracing keeps its
      layout; an argument whose type does not tell that is constrained to the declared
      one.
    """
    traced = {leaf.name for leaf in call.leaves if leaf.of_trace}
    captured = graph.inputs[len(graph.inputs) - len(graph.captured) :]
    pairs = zip(captured, graph.captured, strict=True)
    traced |= {value.name for value, array in pairs if isinstance(array, jaxprs.Tracer)}
    untyped = {leaf.name for leaf in call.leaves if leaf.of_trace and not leaf.layout}
    shardings = [
        None if value.name in traced else graph.sharding(value)
        for value in graph.inputs
    ]
    result_shardings = [graph.sharding(value) for value in graph.outputs]
    # JAX takes no layouts for a nested call with mutable arrays: constrain inside.
    constrains = is_nested and graph.has_references
    if constrains:
        own = (value.name for value in graph.inputs if not value.is_ref)
        untyped |= set(own) - traced

    def step(*parts: Any) -> list[Any]:
        own = [
            _laid_out(graph, value, array) if value.name in untyped else array
            for value, array in zip(graph.inputs, jax.tree.leaves(parts), strict=True)
        ]
        results = zip(graph.outputs, traces.replay(graph.program, *own), strict=True)
        return [
            _laid_out(graph, value, array) if constrains else array
            for value, array in results
        ]

    step.__name__ = step.__qualname__ = graph.name
    donated = [
        index
        for index, argument in enumerate(call.arguments)
        if argument.name in trace.donated
    ]
    # A mutable array of one device has no mesh in its layout, and keeps it.
    is_alone = graph.has_references and graph.mesh is not None and graph.mesh.size == 1
    has_layouts = graph.mesh is not None and not (constrains or is_alone)
    return jax.jit(
        step,
        in_shardings=_parts(call, graph, shardings) if has_layouts else None,
        out_shardings=result_shardings if has_layouts else None,
        donate_argnums=tuple(donated),
        keep_unused=trace.keeps_unused,
        inline=inline,
        compiler_options=dict(compiler_options) or None,
    )


def _laid_out(graph: Graph, value: Value, array: Any) -> Any:
    """An input or output, constrained to the layout that is declared for it."""
    sharding = graph.sharding(value)
    if sharding is None:
        return array
    return jax.lax.with_sharding_constraint(array, sharding)


def lower(trace: Trace, graph: Graph, call: Call) -> jax.stages.Lowered:
    """``jitted``, lowered for the types of the graph's inputs."""
    structs: list[Any] = [value.type_on(graph.mesh) for value in graph.inputs]
    for number, array in enumerate(graph.captured, len(structs) - len(graph.captured)):
        if isinstance(array, jax.Ref):
            structs[number] = array  # JAX has no type for it
    with in_types_of(graph.mesh):
        return jitted(trace, graph, call).lower(*_parts(call, graph, structs))


def traced_for_arrays(trace: Trace, graph: Graph, call: Call) -> jax.stages.Traced:
    """``jax.jit`` of the function's own arguments, all of them arrays, traced."""
    program = jitted(trace, graph, call, is_nested=True)

    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        parts = call.by_argument(jax.tree.leaves((args, kwargs)))
        return trace.unflatten(program(*parts, (), graph.captured))

    of_arrays.__name__ = graph.name
    inputs = graph.inputs[: len(call.leaves)]
    args, kwargs = call.rebuilt([value.type_on(graph.mesh) for value in inputs])
    with in_types_of(graph.mesh):
        return jax.jit(of_arrays).trace(*args, **kwargs)


def compile_lowered(
    graph: Graph,
    lowered: jax.stages.Lowered,
    compiler_options: Mapping[str, bool | str] = MappingProxyType({}),
) -> jax.stages.Compiled:
    """Compile with the options of the graph's schedule, and these.

    Releases of XLA differ in the options that they have: a default that this one lacks
    is left out. One of the user's is an error of XLA.
    """
    chosen = {**dict(graph.plan.compiler_options or ()), **compiler_options}
    options = {**options_of(graph), **compiler_options}
    while True:
        try:
            with lines_in_cache_key():
                return lowered.compile(options or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is None or unknown[1] not in options.keys() - chosen.keys():
                raise
            del options[unknown[1]]


def options_of(graph: Graph) -> dict[str, bool | str]:
    """XLA's options for the step's schedule, on platforms that have them.

    Programs of several GPUs also have those that hide collectives, unless the
    schedule turns overlap off, and those of CPUs one without which XLA computes wrong
    values. What the user sets, for the step or in the environment, holds.
    """
    overlap = graph.plan.all_reduce_overlap
    options: dict[str, bool | str] = dict(graph.plan.compiler_options or ())
    if overlap is not None and graph.platform == "gpu":
        options.setdefault("xla_gpu_enable_latency_hiding_scheduler", overlap)
    if graph.plan.rounds_alike:
        alike, passes = rounding_options(graph.platform), "xla_disable_hlo_passes"
        if passes in alike and (given := options.get(passes)):
            alike[passes] = f"{given},{alike[passes]}"
        options |= alike
    defaults = {} if overlap is False else _overlap_options(graph)
    return {**correct_options(graph.platform), **defaults, **options}


def _overlap_options(graph: Graph) -> dict[str, bool | str]:
    """Those for several GPUs that the environment does not set."""
    if graph.platform != "gpu" or graph.mesh is None or graph.mesh.size == 1:
        return {}
    options = dict(_OVERLAP)
    hosts = {device.process_index for device in graph.mesh.compile_mesh.devices.flat}
    if len(hosts) > 1:
        options[_PREFETCH] = True
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def _parts(call: Call, graph: Graph, entries: Sequence[Any]) -> tuple[Any, ...]:
    """One entry for each input, in the trees that the lowered program takes."""
    rest = entries[len(call.leaves) :]
    count = sum(value.role is Role.PARAMETER for value in graph.inputs)
    return (*call.by_argument(entries), tuple(rest[:count]), tuple(rest[count:]))


def check_layouts(graph: Graph, compiled: jax.stages.Compiled) -> None:
    """Compare the layouts that were compiled with the declared ones.

    Raises:
      LayoutMismatchError: [T205] with every input and output that differs.
    """
    # JAX reports more results of a program with mutable arrays than there are.
    if graph.mesh is None or graph.has_references:
        return
    inputs = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    outputs = compiled.out_tree.flatten_up_to(compiled.output_shardings)
    wrong = [
        f"{value.name}: declared {value.spec}, compiled {getattr(found, 'spec', found)}"
        for values, shardings in ((graph.inputs, inputs), (graph.outputs, outputs))
        for value, found in zip(values, shardings, strict=True)
        if not _agrees(graph, value, found)
    ]
    if wrong:
        raise LayoutMismatchError(
            f"XLA did not compile {graph.name!r} with the declared layouts",
            got="\n".join(wrong),
            fix="lay the arrays out as compiled, or report this with the program",
        )


def _agrees(graph: Graph, value: Value, found: Any) -> bool:
    declared = graph.sharding(value)
    # JAX reports None for an input that the program does not use.
    if declared is None or found is None:
        return True
    return declared.is_equivalent_to(found, len(value.aval.shape))
