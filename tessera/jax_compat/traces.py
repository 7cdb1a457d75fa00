# SPDX-License-Identifier: Apache-2.0
"""The state of JAX's traces, and rules for our own primitives.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, TypeAlias

import jax
from jax._src import api, config, core, dtypes, source_info_util
from jax._src import mesh as mesh_lib
from jax._src.api_util import InternalFloatingPointError as InternalFloatingPointError
from jax._src.core import get_referent as get_referent
from jax._src.dtypes import InvalidInputException as InvalidInputException
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax._src.lax import lax

# In newer versions the rules also take which mutable inputs are read later.
_RULES_TAKE_LIVE_INPUTS = partial_eval._default_dce_rule.__code__.co_argcount == 3

# What ``jax.vjp`` returns; a function in older versions.
VJP: Any = getattr(api, "VJP", ())

BatchingRule: TypeAlias = Callable[[Sequence[Any], Sequence[int | None]], Any]


def jit_is_disabled() -> bool:
    """Whether ``jax.disable_jit()`` is open."""
    return bool(config.disable_jit.value)


def is_tracing() -> bool:
    """Whether JAX is tracing or transforming a function, with whatever arguments."""
    return not core.trace_state_clean()


def ambient_mesh() -> jax.sharding.Mesh | None:
    """The mesh of ``jax.set_mesh`` or of ``with mesh:`` with a mesh of JAX."""
    opened = mesh_lib.thread_resources.env
    if (mesh := mesh_of_jit()) is not None or isinstance(opened, _MeshOfSpecs):
        return mesh
    return None if opened.physical_mesh.empty else opened.physical_mesh


def manual_axes() -> Mapping[str, int]:
    """Manual axes of the code being traced, with sizes; empty outside SPMD regions."""
    region = jax.sharding.get_abstract_mesh()
    manual = set(region.manual_axes)
    return {axis: region.shape[axis] for axis in region.axis_names if axis in manual}


def mesh_of_jit() -> jax.sharding.Mesh | None:
    """The mesh of ``jax.set_mesh``, whose devices and axis types ``jax.jit`` takes."""
    mesh = mesh_lib.get_concrete_mesh()
    return None if mesh.empty else mesh


class _MeshOfSpecs:
    """Stands for JAX's record of ``with mesh:``; makes the mesh when it is asked."""

    def __init__(self, mesh: Callable[[], jax.sharding.Mesh]) -> None:
        self._mesh = mesh

    @property
    def physical_mesh(self) -> jax.sharding.Mesh:
        return self._mesh()

    def with_mesh(self, mesh: jax.sharding.Mesh) -> Any:
        return mesh_lib.ResourceEnv(mesh)


@contextmanager
def resolving_specs(
    mesh: Callable[[], jax.sharding.Mesh], key: Hashable
) -> Iterator[None]:
    """In this context ``with_sharding_constraint`` takes a PartitionSpec.

    It is on this mesh, unless the user has opened one of JAX. The types of arrays do
    not name the mesh, as they would under ``jax.set_mesh``.

    Args:
      mesh: Gives the mesh.
      key: Distinguishes it from others, for JAX's caches of traced functions.
    """
    if ambient_mesh() is not None:
        yield
        return
    resources: Any = mesh_lib.thread_resources
    setting = config.mesh_context_manager
    resources.stack.append(_MeshOfSpecs(mesh))
    resources.env = resources.stack[-1]
    before = setting.swap_local((key,))
    try:
        yield
    finally:
        resources.stack.pop()
        resources.env = resources.stack[-1]
        setting.set_local(before)


def is_reference(aval: Any) -> bool:
    """Whether a type is that of a mutable array."""
    return hasattr(aval, "inner_aval")


def varying_axes(value: Any) -> frozenset[str]:
    """The manual mesh axes over which a value may differ from device to device."""
    return varying_axes_of(jax.typeof(value))


def varying_axes_of(aval: Any) -> frozenset[str]:
    """Those of the values of a type."""
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def checks_varying_axes() -> bool:
    """Whether this is an SPMD region that checks which values vary (``check_vma``)."""
    in_region = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return in_region and bool(config._check_vma.value)


def varying_over(value: Any, axes: Iterable[str]) -> Any:
    """The same value, typed as varying over these axes too."""
    missing = tuple(set(axes) - varying_axes(value))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def all_gather_invariant(value: Any, axes: tuple[str, ...], dim: int) -> Any:
    """All-gather whose result is typed as the same on every device of the axes.

    The result of the public ``lax.all_gather`` may vary by type, which a replicated
    output does not accept.
    """
    parallel = jax._src.lax.parallel
    newer = getattr(parallel, "_all_gather_invariant", None)
    gather = newer or parallel.all_gather_invariant
    return gather(value, axes, axis=dim, tiled=True)


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX gives such an array now: 32 bits unless x64 is enabled."""
    return dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def converted(value: Any, dtype: Any, weak: bool) -> Any:
    """A value with another dtype, which is weak or not."""
    return lax._convert_element_type(value, dtype, weak_type=weak)


def in_trace_of(value: Any) -> AbstractContextManager[Any]:
    """A context in which equations are recorded in the trace of a traced value.

    In the body of a loop or a branch this is an outer trace, for a value that the body
    closes over.
    """
    return core.set_current_trace(value._trace)


# Traces of programs and of JAX's transformations, which know what is around them.
_NESTED: Final = (
    partial_eval.DynamicJaxprTrace,
    ad.JVPTrace,
    ad.LinearizeTrace,
    batching.BatchTrace,
)

NoGradientByClosure: TypeAlias = ad.CustomVJPException
"""JAX's error for a gradient by what a function with a derivative rule closes over."""


def is_of_ended_trace(value: Any) -> bool:
    """Whether a value was traced, and the trace has ended: it has no value any more."""
    trace = value._trace if isinstance(value, core.Tracer) else None
    if not isinstance(trace, _NESTED):
        return False
    with core.take_current_trace() as current:
        while current is not None and current is not trace:
            current = getattr(current, "parent_trace", None)
        return current is None


def escaped_tracer_error(value: Any) -> Exception:
    """JAX's error for a traced value that is used after its trace has ended."""
    return core.escaped_tracer_error(value)


def is_known_where(value: Any, home: Any) -> bool:
    """Whether the trace of ``home`` may read a value.

    It may not read values of inner traces, such as the arguments of a loop's body.
    """
    return not isinstance(value, core.Tracer) or value._trace in _around(home)


def _around(value: Any) -> Iterator[Any]:
    """The trace of a value and the outer traces around it."""
    trace = value._trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def inputs_read(equation: Any, is_needed: Sequence[bool]) -> list[Any]:
    """The variables that some results of an equation depend on.

    JAX's rules for dead code look into nested programs: of a loop that carries several
    values, only those that the needed ones depend on are needed.
    """
    variables = [v for v in equation.invars if isinstance(v, core.Var)]
    rule: Any = partial_eval.dce_rules.get(equation.primitive)
    if rule is None or equation.effects:
        return variables
    live = [[True] * len(equation.invars)] * _RULES_TAKE_LIVE_INPUTS
    used, _ = rule(list(is_needed), *live, equation)
    pairs = zip(equation.invars, used, strict=True)
    return [v for v, needed in pairs if needed and isinstance(v, core.Var)]


def register_no_op(primitive: Any) -> None:
    """Register a primitive without results, which compiles to nothing."""

    def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    def again(values: Sequence[Any], _: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*values, **params), ()

    primitive.def_impl(nothing)
    primitive.def_abstract_eval(nothing)
    batching.primitive_batchers[primitive] = again
    ad.primitive_jvps[primitive] = again
    mlir.register_lowering(primitive, nothing)


def register_batching(primitive: Any, rule: BatchingRule) -> None:
    """Register the batching rule of a primitive for ``jax.vmap``.

    Args:
      primitive: One with several results.
      rule: Takes the values, for each the dim that counts examples or None, and the
        parameters; gives the results and such a dim for each.
    """
    batching.primitive_batchers[primitive] = rule


def replay(program: Any, *values: Any) -> list[Any]:
    """Run a program without effects, as ``jax.core.eval_jaxpr`` does.

    A trace of ``jax.jit`` records its equations as they are: their types are known, and
    inferring them again would take as long as tracing the function did.
    """
    body, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    if consts or not can_record(program):
        return core.eval_jaxpr(body, consts, *values)
    env = dict(zip(body.invars, values, strict=True))
    record(body.eqns, env)
    return [
        atom.val if isinstance(atom, core.Literal) else env[atom]
        for atom in body.outvars
    ]


def can_record(program: Any) -> bool:
    """Whether JAX is tracing, and can record a program's equations as they are."""
    body = getattr(program, "jaxpr", program)
    with core.take_current_trace() as trace:
        records = isinstance(trace, partial_eval.DynamicJaxprTrace)
    # Primitives of high-level types (hijax) tell the trace that it has some.
    return records and not body.effects and not getattr(body, "is_high", False)


def record(equations: Iterable[Any], env: dict[Any, Any]) -> None:
    """Record equations as they are.

    Args:
      equations: Of a program for which ``can_record``.
      env: The values of its variables, of the types that it says; those that the
        equations compute are added.
    """
    here = source_info_util.current()
    with core.take_current_trace() as trace:
        for equation in equations:
            source = equation.source_info
            if here.name_stack:
                source = source.replace(name_stack=here.name_stack + source.name_stack)
            operands = [
                partial_eval.DynamicJaxprTracer(trace, atom.aval, atom, source)
                if isinstance(atom, core.Literal)
                else trace.to_jaxpr_tracer(env[atom], source)
                for atom in equation.invars
            ]
            results = trace.emit_eqn(
                operands,
                [variable.aval for variable in equation.outvars],
                equation.primitive,
                equation.params,
                equation.effects,
                source,
                equation.ctx,
            )
            env.update(zip(equation.outvars, results, strict=True))


# --- observing conversions of traced values

_Watcher: TypeAlias = Callable[[FrameType], None]
_watcher: ContextVar[_Watcher | None] = ContextVar("tessera_watcher", default=None)
_CONVERSIONS = ("__bool__", "__int__", "__float__", "__complex__", "__index__")
_CONVERSIONS += ("__str__", "__repr__", "__format__")


@contextmanager
def values_watched(watcher: _Watcher) -> Iterator[None]:
    """Call ``watcher`` when code makes a number or text of a traced value.

    JAX answers with an exception or a description. Its class of traced values is
    patched once and permanently, and checks the context each time.

    Args:
      watcher: Takes the frame of the code that asks.
    """
    for name in _CONVERSIONS:
        method = getattr(core.Tracer, name)
        if not hasattr(method, "_tells_watcher"):
            type.__setattr__(core.Tracer, name, _watched(method))
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ask(self: Any, *args: Any) -> Any:
        watcher = _watcher.get()
        if watcher is not None:
            watcher(sys._getframe(1))
        return method(self, *args)

    ask._tells_watcher = True  # type: ignore[attr-defined]
    return ask


def partial_evaluation(
    program: Any,
    is_unknown: Sequence[bool],
    is_shared: Sequence[bool],
    is_late: Sequence[bool],
    policy: Callable[..., Any],
) -> tuple[Any, Any, int]:
    """Split a program without constants by its outputs.

    Args:
      program: The program.
      is_unknown: For each output, whether it is left to the unknown program.
      is_shared: For each input, whether that program takes it.
      is_late: For each input, whether the known program does not take it.
      policy: As of ``jax.checkpoint``: what is saved, and not computed again.

    Returns:
      The known program, which takes the inputs that are not late and returns the other
      outputs and then residuals; the unknown one, which takes residuals and then the
      shared inputs; and the number of residuals.
    """
    jaxpr, is_unknown = getattr(program, "jaxpr", program), list(is_unknown)
    known, unknown, _, in_unknown, count = partial_eval.partial_eval_jaxpr_custom(
        jaxpr, list(is_late), list(is_shared), is_unknown, is_unknown, policy
    )
    live = [late for late, there in zip(is_unknown, in_unknown, strict=True) if there]
    takes = [False] * count + [True] * sum(is_shared)
    unknown, used = partial_eval.dce_jaxpr(unknown, live, instantiate=takes)
    outputs = [True] * is_unknown.count(False) + used[:count]
    known, _ = partial_eval.dce_jaxpr(known, outputs, instantiate=True)
    return known, unknown, sum(used[:count])
