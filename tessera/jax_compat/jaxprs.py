# SPDX-License-Identifier: Apache-2.0
"""Wraps JAX's internals and the differences between JAX versions; mostly jaxprs.

Only this module and the other ``_jax*`` modules use ``jax._src``: everything that may
change between JAX 0.10 and 0.13 is here, so that the rest of Tessera is written once. A
jaxpr with its constants is ``ClosedJaxpr`` in 0.10 and ``Jaxpr`` in 0.12: outside this
module its type is ``Program``.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeAlias

import jax
import jax.extend.core as jex
from jax._src import config, core, dtypes, source_info_util
from jax._src.interpreters import ad, batching, partial_eval
from jax._src.named_sharding import UNSPECIFIED
from jax.extend.core.primitives import jit_p
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tessera.jax_compat.equation_lines import source_line as source_line
from tessera.jax_compat.traces import ambient_mesh as ambient_mesh
from tessera.jax_compat.traces import inputs_read, is_reference, varying_over
from tessera.jax_compat.traces import partial_evaluation as partial_evaluation

Program: TypeAlias = Any  # jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr
Equation: TypeAlias = Any  # jax.extend.core.JaxprEqn
Atom: TypeAlias = Any  # jax.extend.core.Var | jax.extend.core.Literal

Primitive = jex.Primitive
Literal = jex.Literal
Tracer = jax.core.Tracer

_PROGRAMS = (jex.ClosedJaxpr, jex.Jaxpr)

# Primitives, or prefixes of several, with a function of two elements as parameter.
_COMBINING = ("reduce", "scatter", "select_and_scatter")

MOST_CPU_DEVICES = 2048
"""Per process: JAX attributes devices with higher ids to another process."""


# --- programs: a jaxpr with its constants


def _body(program: Program) -> Any:
    """The part of a program that has the equations, of whatever type in this JAX."""
    return getattr(program, "jaxpr", program)


def equations(program: Program) -> list[Equation]:
    """The equations of a program, in order."""
    return list(_body(program).eqns)


def inputs(program: Program) -> list[Atom]:
    """The input variables of a program, constants not among them."""
    return list(_body(program).invars)


def outputs(program: Program) -> list[Atom]:
    """The output variables or literals of a program."""
    return list(_body(program).outvars)


def constants(program: Program) -> list[Any]:
    """The arrays that a program closes over, in the order of its constant inputs."""
    return list(getattr(program, "consts", ()))


def constant_inputs(program: Program) -> list[Atom]:
    """The variables of ``constants(program)``."""
    return list(_body(program).constvars)


def pretty(program: Program) -> str:
    """A program as text, each equation with the user's source line."""
    return _body(program).pretty_print(source_info=True, use_color=False)


def check(program: Program) -> None:
    """Raise JAX's own error where ``jax_enable_checks`` finds a program ill formed."""
    if config.enable_checks.value:
        jex.check_jaxpr(_body(program))


def is_program(value: object) -> bool:
    """Whether an equation's parameter is a nested program."""
    return isinstance(value, _PROGRAMS)


def nested(equation: Equation) -> Iterator[tuple[str, Any]]:
    """The programs among an equation's parameters, with the parameter's name."""
    for name, value in equation.params.items():
        if isinstance(value, _PROGRAMS):
            yield name, value
        elif isinstance(value, (tuple, list)):
            for item in value:
                if isinstance(item, _PROGRAMS):
                    yield name, item


def inner_programs(equation: Equation) -> list[Program]:
    """The nested programs of an equation that passes may interpret.

    Neither is a Pallas kernel, which works on references to memory, nor the function of
    two elements by which a reduction or a scatter combines them: it says nothing about
    which elements are combined.
    """
    if not equation.params:  # most equations have none, and passes look at all
        return []
    name = equation.primitive.name
    if name == "pallas_call" or name.startswith(_COMBINING):
        return []
    return [inner for _, inner in nested(equation)]


def replace_nested(
    equation: Equation, rewrite: Callable[[Program], Program]
) -> dict[str, Any]:
    """An equation's parameters with each nested program rewritten.

    A jaxpr without constants stays a plain jaxpr, as the primitive expects.
    """

    def one(value: Any) -> Any:
        if not is_program(value):
            return value
        if hasattr(value, "consts"):
            return rewrite(value)
        return _body(rewrite(jex.ClosedJaxpr(value, ())))

    def each(value: Any) -> Any:
        if not isinstance(value, (tuple, list)) or not any(map(is_program, value)):
            return one(value)
        items = [one(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    return {name: each(value) for name, value in equation.params.items()}


def bind(
    equation: Equation, values: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Apply one equation to values, keeping its source line and name scopes."""
    params = equation.params if params is None else params
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    primitive = equation.primitive
    with (
        source_info_util.user_context(info.traceback, name_stack=stack),
        equation.ctx.manager,
    ):
        result = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(result) if primitive.multiple_results else [result]


def source_context(equation: Equation) -> Any:
    """A context in which new equations carry the source line and scopes of this one."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def line_context(equation: Equation) -> Any:
    """A context in which new equations carry this one's source line, not its scopes."""
    return source_info_util.user_context(
        equation.source_info.traceback, name_stack=source_info_util.current_name_stack()
    )


def evaluate(program: Program, *values: Any) -> list[Any]:
    """Run a program on values, or trace it where they are tracers."""
    return core.eval_jaxpr(_body(program), constants(program), *values)


def retrace(
    function: Callable[..., Sequence[Any]],
    like: Program,
    dtypes: Iterable[Any] = (),
) -> Program:
    """The program of a function of the same inputs as ``like``.

    Args:
      function: The function.
      like: The program.
      dtypes: Of the inputs that have others than in ``like``, and None for the rest.
    """
    pairs = itertools.zip_longest((v.aval for v in inputs(like)), dtypes)
    return jax.make_jaxpr(function)(
        *(
            struct(aval if d is None else aval.update(dtype=d, weak_type=False))
            for aval, d in pairs
        )
    )


def is_shard_map(equation: Equation) -> bool:
    """Whether an equation is a ``shard_map``, an SPMD region."""
    return equation.primitive.name == "shard_map"


def is_transposed(equation: Equation) -> bool:
    """Whether JAX made an equation by transposing one, in a backward pass."""
    return "transpose(" in str(equation.source_info.name_stack)


def is_jit(equation: Equation) -> bool:
    """Whether an equation is a call of a jitted function."""
    return equation.primitive is jit_p


def scan_sizes(equation: Equation) -> tuple[int, int]:
    """The numbers of constants and of carries among a ``scan``'s inputs."""
    params = equation.params
    if "ft_in" in params:  # as newer versions have it
        consts, carries, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carries))
    return params["num_consts"], params["num_carry"]


def jit_params(equation: Equation, inner: Program) -> dict[str, Any]:
    """Parameters of a ``jit`` equation for an inner program with more inputs."""
    params = equation.params
    more = len(inputs(inner)) - len(params["in_shardings"])
    return dict(
        params,
        jaxpr=inner,
        in_shardings=params["in_shardings"] + (UNSPECIFIED,) * more,
        in_layouts=params["in_layouts"] + (None,) * more,
        donated_invars=params["donated_invars"] + (False,) * more,
    )


def lift_constants(program: Program) -> tuple[Program, list[Any]]:
    """A program whose constants are inputs after the others, and those constants."""
    consts = constants(program)
    if not consts:
        return program, []
    count = len(inputs(program))

    def lifted(*values: Any) -> list[Any]:
        return core.eval_jaxpr(_body(program), values[count:], *values[:count])

    types = [struct(variable.aval) for variable in inputs(program)]
    return jax.make_jaxpr(lifted)(*types, *consts), consts


# Created at import, not at first use: adding such a context invalidates all that JAX
# compiled before.
_trace_context = jax.make_user_context(None)
_traces = itertools.count()


def isolated_trace() -> AbstractContextManager[Any]:
    """A context in which JAX reuses no cached trace of a nested function.

    A jitted function that captures a ``dist.tensor`` or declares a parameter refers to
    other values in every trace, and JAX would reuse those of the first.
    """
    return _trace_context(next(_traces))


def sources(program: Program, value: Atom, before: int) -> set[Atom]:
    """All variables that ``value`` depends on in the first ``before`` equations."""
    needed = {value} if isinstance(value, jex.Var) else set()
    for equation in reversed(equations(program)[:before]):
        if not needed.isdisjoint((*equation.outvars, *references(equation))):
            is_needed = [variable in needed for variable in equation.outvars]
            needed.update(inputs_read(equation, is_needed))
    return needed


def dependents(equations: Iterable[Equation], values: Iterable[Atom]) -> set[Atom]:
    """All variables of some equations that depend on some values, these included."""
    reached = set(values)
    for equation in equations:
        if not reached.isdisjoint(v for v in equation.invars if isinstance(v, jex.Var)):
            reached.update(equation.outvars)
    return reached


def references(equation: Equation) -> list[Atom]:
    """The mutable arrays (refs) among an equation's inputs, which it may change."""
    return [v for v in equation.invars if is_reference(v.aval)]


def struct(aval: Any) -> Any:
    """The ``jax.ShapeDtypeStruct`` of an abstract value, for ``jax.make_jaxpr``.

    It keeps the weak type, the layout over Explicit axes, and in an SPMD region the
    axes that the value varies over: JAX takes those only together with the region's
    mesh, which the sharding names. The type of a mutable array is its own.
    """
    if is_reference(aval):
        return aval
    kind = getattr(aval, "manual_axis_type", None)
    varies = kind is not None and bool(kind.varying)
    is_typed = varies or _has_explicit_axes(aval)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=aval.sharding if is_typed else _HOST if on_host(aval) else None,
        weak_type=getattr(aval, "weak_type", False),
        manual_axis_type=kind,
    )


def _has_explicit_axes(aval: Any) -> bool:
    if hasattr(type(aval), "__jax_array__"):
        return False  # lazy, and asking might materialize it
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and bool(mesh.explicit_axes)


HOST_MEMORY = "pinned_host"
_HOST = NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=HOST_MEMORY)


def on_host(value: Any) -> bool:
    """Whether an array or its type is in host memory."""
    if hasattr(type(value), "__jax_array__"):
        return False  # lazy, and asking might materialize it
    kind = getattr(getattr(value, "sharding", None), "memory_kind", None)
    space = getattr(value, "memory_space", None)
    return space == jax.memory.Space.Host or kind == HOST_MEMORY


def zeros(aval: Any) -> jax.Array:
    """Zeros of an abstract value, laid out and varying over axes as its type says."""
    layout = aval.sharding if _has_explicit_axes(aval) else None
    blank = jax.numpy.zeros(aval.shape, aval.dtype, out_sharding=layout)
    kind = getattr(aval, "manual_axis_type", None)
    return varying_over(blank, kind.varying if kind is not None else ())


def without_dead_code(
    program: Program,
    *,
    outputs: Sequence[bool] | bool = True,
    keep_inputs: bool = False,
) -> Program:
    """A program without unused equations, nested ones included.

    Unused inputs are removed too, unless they are kept. Outputs may be selected.
    """
    return partial_eval.dce_jaxpr(_body(program), outputs, instantiate=keep_inputs)[0]


def name_scopes(equation: Equation) -> str:
    """The name scopes and transforms of an equation: ``transpose(jvp(encoder))``."""
    return _as_text(equation.source_info.name_stack)


_as_text = functools.lru_cache(maxsize=4096)(str)  # many equations share few of them


def refuse_transforms(primitive: Primitive, refuse: Callable[[str], NoReturn]) -> None:
    """Let a primitive raise its own error under JAX's transformations.

    Args:
      primitive: The primitive.
      refuse: Takes the name of the transformation, and raises.
    """

    def batch(*_: Any, **__: Any) -> NoReturn:
        refuse("jax.vmap")

    def differentiate(*_: Any, **__: Any) -> NoReturn:
        refuse("jax.grad")

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = differentiate


# --- the state of tracing


def trace_settings() -> Any:
    """All settings of JAX that a trace depends on, such as the matmul precision."""
    return config.trace_context()


def changed_trace_settings(before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """The names of such settings that differ, with both values."""
    settings = zip(config.trace_context_names(), before, now, strict=True)
    return [each for each in settings if each[1] != each[2]]


def underlying(value: Any) -> Any:
    """The primal of a value that is being differentiated; other values themselves."""
    while isinstance(value, Tracer) and hasattr(value, "primal"):
        value = value.primal
    return value


def backend_started() -> bool:
    """Whether JAX has created its devices, after which their number is fixed."""
    return jax._src.xla_bridge.backends_are_initialized()


# --- array-likes that are no jax.Array


def register_array_like(kind: type) -> None:
    """Let JAX accept a class with ``__jax_array__()`` wherever it takes an array.

    Without this, JAX converts such objects in ``jnp`` functions that are not jitted,
    and refuses them as arguments of jitted ones. It needs the abstract value (from
    ``shape`` and ``dtype``), the array to run on, and the tracer that represents the
    object during tracing.
    """

    def abstract_value(x: Any) -> Any:
        return core.ShapedArray(x.shape, x.dtype)

    core.pytype_aval_mappings[kind] = abstract_value
    dtypes.canonicalize_value_handlers[kind] = operator.methodcaller("__jax_array__")
    # The conversion that JAX offers to symbolic dimensions; the name is its own.
    kind.dimension_as_value = kind.__jax_array__  # type: ignore[attr-defined]
