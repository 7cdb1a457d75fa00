# SPDX-License-Identifier: Apache-2.0
"""The context of the step being traced: its parameters, mesh, layouts and schedule.

A ``Scope`` is open while Tessera traces a function. Operations that own parameters
declare them in it by name; a captured ``dist.tensor`` is declared when it is first
used. A parameter declared for the first time has no input of the program yet: it is
traced as zeros, and the function is traced once more with inputs for all parameters of
the first trace. Neither trace allocates anything.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import OutsideTraceError, ParameterNameError
from tessera.foundations.context import holding as holding
from tessera.jax_compat import traces
from tessera.mesh import Mesh, opened_or_none
from tessera.shard import DistTensor, ShardSpec, capturing, tensor
from tessera.shard_spec import spec_over

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Layout = tuple[Mesh, PartitionSpec]


@dataclass(frozen=True)
class Plan:
    """The schedule that ``tessera.schedule`` declares for steps traced after it.

    Attributes:
      microbatches: Number of microbatches of a pipeline; None leaves it to the
        pipeline.
      all_reduce_overlap: Whether collectives should overlap with computation; None
        leaves it to the compiler.
      compiler_options: Options of XLA for these steps alone, by name.
      rounds_alike: Whether XLA is to round alike on every mesh.
    """

    microbatches: int | None = None
    all_reduce_overlap: bool | None = None
    compiler_options: tuple[tuple[str, bool | str], ...] | None = None
    rounds_alike: bool | None = None


@dataclass
class Scope:
    """The state of one trace of one function.

    Attributes:
      mesh: The mesh that the step runs on, if one is known.
      values: Traced inputs of the parameters that an earlier trace declared.
      declared: Every parameter of the step by name, in the order of declaration.
      inner: Functions called inside that declare a mesh or layouts, and their meshes.
      unreached: For each ``graph.backward`` in order, parameters its loss ignores.
      plan: The schedule that it is traced under.
      is_whole_batch: Whether it is traced for the batch of the call, and not for a
        microbatch. See ``Graph.microbatch``.
      pipelined: The numbers of rows of each pipelined call's arguments, in order.
      stage_end: Marks a stage's results, from its name and these, in a pipeline.
      stored: Maps the declared layout of a parameter to the one that it is stored in.
      is_eager: Whether operations run at once, and nothing is traced.
    """

    mesh: Mesh | None = None
    values: dict[str, Any] = field(default_factory=dict)
    declared: dict[str, DistTensor] = field(default_factory=dict)
    inner: list[tuple[str, Mesh | None]] = field(default_factory=list)
    unreached: dict[int, frozenset[str]] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    is_whole_batch: bool = True
    pipelined: list[frozenset[int]] = field(default_factory=list)
    stage_end: Callable[[str, Any], Any] | None = None
    stored: Callable[[tuple[int, ...], ShardSpec | None], ShardSpec | None] | None = (
        None
    )
    is_eager: bool = False
    backward_calls: int = 0
    path: tuple[str, ...] = ()
    layouts: dict[int, tuple[Any, Layout]] = field(default_factory=dict)
    gradient_layouts: dict[int, tuple[Any, Layout]] = field(default_factory=dict)
    gradients: dict[int, Any] = field(default_factory=dict)
    counts: dict[tuple[tuple[str, ...], str], int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)  # above parameters, or some more

    def forget_values(self) -> None:
        """Drop the traced values that the trace recorded, which end with it."""
        self.values = {}
        self.layouts.clear()
        self.gradient_layouts.clear()
        self.gradients.clear()

    def value_of(self, name: str) -> Any:
        """The traced value of a declared parameter."""
        if name in self.values:
            return self.values[name]
        # Not cached: the next use may be inside another trace, where these would leak.
        return jnp.zeros(self.declared[name].shape, self.declared[name].dtype)

    def capture(self, captured: DistTensor) -> Any:
        """The traced value of a ``dist.tensor`` that the function closes over."""
        for name, parameter in self.declared.items():
            if parameter is captured:
                return self.value_of(name)
        name = captured.name or "/".join((*self.path, self.fresh("tensor")))
        self.check_free(name, captured.shape, fix="give the dist.tensor another name=")
        self.declared[name] = captured
        return self.value_of(name)

    def check_free(self, name: str, shape: tuple[int, ...], *, fix: str) -> None:
        """Raise [T305] where a name collides with another in the tree of parameters."""
        above = [name[:i] for i, letter in enumerate(name) if letter == "/"]
        if name not in self.folders and self.declared.keys().isdisjoint([name, *above]):
            self.folders.update(above)
            return
        for other, parameter in self.declared.items():
            if other == name:
                raise ParameterNameError(
                    f"two parameters of this step are called {name!r}",
                    got=f"shapes {parameter.shape} and {shape}",
                    fix=fix,
                )
            if other.startswith(f"{name}/") or name.startswith(f"{other}/"):
                raise ParameterNameError(
                    f"{name!r} cannot be a parameter beside {other!r}: the tree of "
                    "parameters would hold a tree and an array in one place",
                    got=f"shapes {shape} and {parameter.shape}",
                    fix=fix,
                )

    def snapshot(self) -> tuple[Any, ...]:
        """The state to restore before a part of the function is traced again."""
        copies = dict(self.declared), dict(self.counts), list(self.inner)
        return *copies, list(self.pipelined), self.backward_calls

    def restore(self, before: tuple[Any, ...]) -> None:
        """Forget everything since ``snapshot``."""
        declared, counts, inner, pipelined, self.backward_calls = before
        self.declared, self.counts = dict(declared), dict(counts)
        self.inner, self.pipelined = list(inner), list(pipelined)

    def fresh(self, stem: str) -> str:
        """``stem``, numbered from its second use under the open path."""
        count = self.counts.get((self.path, stem), 0)
        self.counts[self.path, stem] = count + 1
        return f"{stem}_{count}" if count else stem


_open: ContextVar[Scope | None] = ContextVar("tessera_scope", default=None)
# The mesh of a step that was traced, while passes transform it.
_transformed: ContextVar[Mesh | None] = ContextVar("tessera_mesh", default=None)


def current() -> Scope | None:
    """The scope of the innermost function that Tessera is tracing, if any."""
    return _open.get()


@contextmanager
def transforming(mesh: Mesh | None) -> Iterator[None]:
    """Let what is traced later, such as rules of gradients, know the step's mesh."""
    with holding(_transformed, mesh), _resolving_specs(mesh):
        yield


@contextmanager
def opened(scope: Scope) -> Iterator[Scope]:
    """Make ``scope`` current and let captured tensors be declared in it."""
    with holding(_open, scope), capturing(scope.capture), _resolving_specs(scope.mesh):
        yield scope


def _resolving_specs(mesh: Mesh | None) -> AbstractContextManager[None]:
    """Let a PartitionSpec of a constraint be on the step's mesh."""
    if mesh is None:
        return nullcontext()
    return traces.resolving_specs(lambda: mesh.compile_mesh, mesh)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put the parameters declared inside, and the operations, under ``name``."""
    scope = _open.get() or Scope()  # outside of a trace no parameters are declared
    outer, scope.path = scope.path, (*scope.path, name)
    try:
        with jax.named_scope(name):
            yield
    finally:
        scope.path = outer


def mark_stage_end(name: str, results: Any) -> Any:
    """Mark the results of a stage where a pipeline is being traced."""
    scope = _open.get()
    if scope is None or scope.stage_end is None:
        return results
    return scope.stage_end(name, results)


def fresh_component(stem: str) -> str:
    """A path component for one use of an operation that owns parameters."""
    scope = _open.get()
    return stem if scope is None else scope.fresh(stem)


def parameter(
    name: str,
    shape: tuple[int, ...],
    *,
    init: Init | str,
    layout: ShardSpec | None = None,
) -> Any:
    """Declare a trainable f32 parameter of the step that is being traced.

    Args:
      name: Name under the current path; the full name is ``stage/name``.
      shape: Global shape.
      init: Initializer, as ``dist.tensor`` takes it.
      layout: How it is split over the step's mesh; replicated when not given.

    Returns:
      The traced value, of the global shape.

    Raises:
      OutsideTraceError: [T302] no step is being traced.
      ParameterNameError: [T305] the step has another parameter of that name.
    """
    scope = _open.get()
    if scope is None:
        raise OutsideTraceError(
            f"parameter {name!r} is declared outside a step",
            fix="call it inside @graph.training_step, @graph.stage or @ts.function",
        )
    full = "/".join((*scope.path, name))
    scope.check_free(full, shape, fix="put each use in a @graph.stage of its own")
    layout = layout if scope.stored is None else scope.stored(shape, layout)
    scope.declared[full] = tensor(
        shape, layout, scope.mesh, dtype="f32", init=init, name=full
    )
    return scope.value_of(full)


def record_layout(
    value: Any, mesh: Mesh, spec: PartitionSpec, *, of_gradient: bool = False
) -> None:
    """Record the layout of a traced value, or of the gradient by it.

    The value is kept alive, so that its id stays unique.
    """
    if (scope := _open.get()) is not None:
        layouts = scope.gradient_layouts if of_gradient else scope.layouts
        layouts[id(value)] = (value, (mesh, spec))


def layout_of(value: Any, *, of_gradient: bool = False) -> Layout | None:
    """The recorded layout of a traced value, or of the gradient by it."""
    if (scope := _open.get()) is None:
        return None
    layouts = scope.gradient_layouts if of_gradient else scope.layouts
    record = layouts.get(id(value))
    return record[1] if record is not None else None


def record_gradient(value: Any) -> None:
    """Record that a traced value is a gradient of a loss of whole arrays."""
    if (scope := _open.get()) is not None:
        scope.gradients[id(value)] = value


def is_gradient(value: Any) -> bool:
    """Whether a traced value was recorded to be a gradient."""
    scope = _open.get()
    return scope is not None and scope.gradients.get(id(value)) is value


# The name scope of kernels that compute some pairs of blocks of queries and keys:
# ``tessera_visits_36_of_64``. Compiled programs do not say which ones.
VISITS = "tessera_visits_"
# The name scope of a branch or a loop that data have to demand. Predictions take the
# other branch, and leave out the loop.
FALLBACK = "tessera_fallback"
# The name scope of all that a branch does which is taken in some executions, or in so
# many at most: ``tessera_taken_6_of_16``, ``tessera_taken_at_most_6_of_16``.
TAKEN = "tessera_taken_"
# The name scope of matmuls in which each of several matrices has rows of its own, as
# many as data choose.
GROUPED = "tessera_grouped"


def device() -> jax.Device:
    """A device that the code being traced will run on.

    It is one of the step's mesh, or else of the open mesh, which may be of a target
    that is not here; without a mesh it is JAX's default device.
    """
    if mesh := _step_mesh():
        return mesh.compile_mesh.devices.flat[0]
    default = getattr(jax.config, "jax_default_device", None)
    if isinstance(default, jax.Device):
        return default
    return jax.local_devices(backend=default)[0]


def num_devices() -> int:
    """How many devices the code being traced may be split over."""
    mesh = _step_mesh()
    return jax.device_count() if mesh is None else mesh.size


def num_splits() -> int:
    """Into how many parts the arrays being traced are split over the step's mesh.

    In an SPMD region they are parts already, but for axes left to the compiler.
    Without a mesh it is 1.
    """
    mesh = _step_mesh()
    if mesh is None:
        return 1
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return mesh.size // mesh.axis_size([a for a in mesh.axes if a in manual])


def _step_mesh() -> Mesh | None:
    scope = _open.get()
    mesh = scope.mesh if scope is not None else None
    return mesh or _transformed.get() or opened_or_none()


def constrain(value: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """A traced array constrained to the layout ``spec``, which is recorded.

    Inside an SPMD region (``shard_map``) over some axes, such as a pipeline's stages,
    ``spec`` is over the others.

    Args:
      value: The array.
      mesh: Its mesh.
      spec: Its layout.
    """
    region = jax.sharding.get_abstract_mesh()
    home = region if region.manual_axes else mesh.compile_mesh
    laid_out = _constrained(value, mesh, home, spec)
    record_layout(laid_out, mesh, spec)
    return laid_out


def _constrained(value: Any, mesh: Mesh, home: Any, spec: PartitionSpec) -> Any:
    if not (explicit := mesh.explicit_axes):
        return jax.lax.with_sharding_constraint(value, NamedSharding(home, spec))
    # JAX has a call for each type of axes, which takes those of no other type.
    value = jax.sharding.reshard(value, NamedSharding(home, spec_over(spec, explicit)))
    if automatic := [axis for axis in mesh.axes if axis not in explicit]:
        sharding = NamedSharding(home, spec_over(spec, automatic))
        value = jax.lax.with_sharding_constraint(value, sharding)
    return value


_caller: ContextVar[Callable[[Any], Any] | None] = ContextVar(
    "tessera_caller", default=None
)


def resolve_callee(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the open trace calls in place of a user's function.

    All code that calls users' functions goes through this: where control flow on traced
    values is converted, it returns the converted function.
    """
    caller = _caller.get()
    return function if caller is None else caller(function)


def calling(caller: Callable[[Any], Any] | None) -> AbstractContextManager[None]:
    """Let ``resolve_callee`` apply ``caller``; None leaves functions as they are."""
    return holding(_caller, caller)


_NO_PLAN = Plan()
_plan: ContextVar[Plan] = ContextVar("tessera_plan", default=_NO_PLAN)


def current_plan() -> Plan:
    """The current schedule: of the open step, or declared outside of steps."""
    scope = _open.get()
    return _plan.get() if scope is None else scope.plan


def set_plan(plan: Plan) -> None:
    """Declare the schedule of the open step, or of all steps traced from now on."""
    scope = _open.get()
    if scope is None:
        _plan.set(plan)
    else:
        scope.plan = plan


def plan_of(compiler_options: Sequence[tuple[str, bool | str]]) -> Plan:
    """The current schedule, for one function.

    Args:
      compiler_options: Its own options of XLA, which come before those of the schedule.
    """
    plan = current_plan()
    if not compiler_options:
        return plan
    every = dict(plan.compiler_options or ()) | dict(compiler_options)
    return replace(plan, compiler_options=tuple(every.items()))


def round_alike() -> None:
    """Let XLA round what the open step computes alike on every mesh."""
    if (scope := _open.get()) is not None:
        scope.plan = replace(scope.plan, rounds_alike=True)
