# SPDX-License-Identifier: Apache-2.0
"""``graph.stage`` and ``graph.training_step``: functions that own parameters.

Operations such as ``op.transformer_block`` declare parameters while the function is
traced; a step holds their arrays and passes them to the compiled program besides the
arguments.
"""

import functools
import logging
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import jax

from tessera.annotations import check_call, signature_of
from tessera.errors import ParameterTreeError
from tessera.foundations.tree import named_leaves, nest
from tessera.graph.compile_stages import Traced
from tessera.graph.function import Function
from tessera.graph.ir import Role
from tessera.graph.jit_options import declared_options
from tessera.graph.tracer.arguments import as_names
from tessera.graph.tracer.declared_layouts import Options
from tessera.jax_compat.tracebacks import at_boundary
from tessera.mesh import AnyMesh
from tessera.shard import DistTensor
from tessera.tracing import scope

__all__ = ["Stage", "Step", "stage", "training_step"]

_logger = logging.getLogger("tessera.graph")


class Step(Function):
    """A function with parameters of its own; see ``training_step`` and ``stage``.

    Parameters are known once the step was traced: by a call, by ``trace`` or by
    ``init`` with example arguments.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        options: Options,
        skip_passes: Collection[str] = (),
    ) -> None:
        super().__init__(body, options, skip_passes)
        self._declared: dict[str, DistTensor] | None = None
        self._values: dict[str, Any] = {}
        # The programs that take the parameters as they are, by identity.
        self._placed_for: dict[int, Traced] = {}

    @property
    def params(self) -> dict[str, Any]:
        """The parameters: nested dict by name, of arrays, lazy before ``init``.

        Assign a tree of the same names and shapes, such as the one an optimizer
        returned, to use it in the next call; arrays with another layout are moved to
        the declared one then.

        Raises:
          ParameterTreeError: [T306] the step was not traced yet, or an assigned tree
            does not fit: every difference is listed and nothing is changed.
        """
        declarations = self._declarations()
        return nest(
            {
                name: self._values.get(name, tensor)
                for name, tensor in declarations.items()
            }
        )

    @params.setter
    def params(self, tree: Mapping[str, Any]) -> None:
        declarations, flat = self._declarations(), named_leaves(tree)
        problems = [f"{name}: missing" for name in declarations if name not in flat]
        problems += [
            f"{name}: not a parameter" for name in flat if name not in declarations
        ]
        problems += [
            f"{name}: {_form(value)}, declared {_form(declarations[name])}"
            for name, value in flat.items()
            if name in declarations and _form(value) != _form(declarations[name])
        ]
        if problems:
            raise ParameterTreeError(
                f"these are not the parameters of step {self.options.name!r}",
                got="\n".join(problems),
                fix="assign a tree like step.params",
            )
        self._values = {name: flat[name] for name in declarations}
        self._placed_for = {}

    @at_boundary
    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Create the parameters, each shard on its own device.

        A parameter's numbers depend on the key and its name alone, so they are the same
        on every mesh.

        Args:
          key: A PRNG key.
          *args: Example arguments, needed only before the step was first traced;
            ``jax.ShapeDtypeStruct`` will do.
          **kwargs: The same by name.

        Returns:
          ``step.params``.

        Raises:
          ParameterTreeError: [T306] the step was not traced and no example is given.
        """
        if args or kwargs:
            self.trace(*args, **kwargs)
        for name, tensor in self._declarations().items():
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            self._values[name] = tensor.materialize(own)
        self._placed_for = {}
        return self.params

    def _declarations(self) -> dict[str, DistTensor]:
        if self._declared is None:
            raise ParameterTreeError(
                f"the parameters of step {self.options.name!r} are not known yet",
                fix="give init an example: step.init(key, batch)",
            )
        return self._declared

    def _trace(self, call: Any) -> Traced:
        traced = super()._trace(call)
        declarations = dict(self._declared or {})
        for name, declared in traced.origin.parameters.items():
            if _form(declarations.setdefault(name, declared)) != _form(declared):
                raise ParameterTreeError(
                    f"parameter {name!r} has another shape than in earlier calls",
                    got=f"{_form(declared)}, before {_form(declarations[name])}",
                    fix="call the step with arrays of the feature sizes it was first "
                    "called with",
                )
            declarations[name] = declared  # on the mesh of this call
        self._declared = declarations
        return traced

    def _parameters(self, traced: Traced) -> tuple[Any, ...]:
        if id(traced) not in self._placed_for:
            before = dict(self._values)
            # Even inside a trace, parameters are created and moved as concrete arrays.
            with jax.ensure_compile_time_eval():
                self._place(traced)
            if any(self._values[name] is not before[name] for name in before):
                self._placed_for = {}  # Others may take them in another layout.
            self._placed_for[id(traced)] = traced
        return tuple(self._values[name] for name in traced.origin.parameters)

    def _parameter(self, name: str, declared: DistTensor) -> Any:
        declarations = {**(self._declared or {}), name: declared}
        self._declared = declarations
        value = self._values.get(name, declared)
        self._values[name] = (
            value.materialize() if isinstance(value, DistTensor) else value
        )
        return self._values[name]

    def _place(self, traced: Traced) -> None:
        """Create the missing parameters, and move all to the program's layouts."""
        graph, parameters = traced.origin.graph, traced.origin.parameters
        missing = [name for name in parameters if name not in self._values]
        if missing:
            _logger.info(
                "step %s creates %d parameters from their names; "
                "step.init(key) chooses",
                self.options.name,
                len(missing),
            )
        values = [value for value in graph.inputs if value.role is Role.PARAMETER]
        for (name, declared), value in zip(parameters.items(), values, strict=True):
            current = self._values.get(name, declared)
            sharding = graph.sharding(value)
            array = (
                current.materialize() if isinstance(current, DistTensor) else current
            )
            if sharding is not None and getattr(array, "sharding", None) != sharding:
                array = jax.device_put(array, sharding)
            self._values[name] = array


def _form(value: Any) -> str:
    """Dtype and shape as text; for other values their type."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{value.dtype}{list(value.shape)}"


class Stage(Step):
    """A part of a model that has a name, and may be a stage of a pipeline."""


def stage(name: str) -> Callable[[Callable[..., Any]], Stage]:
    """Name a part of a model; its parameters and operations are found under the name.

    Args:
      name: Path component of the stage's parameters, such as ``encoder``.

    Returns:
      A decorator. The stage is called inside a step, or by itself like a step.

    Example:
      >>> from tessera import op
      >>> @stage("encoder")
      ... def encoder(x):
      ...     return op.transformer_block(x, depth=2, num_heads=2)
      >>> traced = encoder.trace(jax.ShapeDtypeStruct((1, 4, 8), "float32"))
      >>> sorted(encoder.params["encoder"])
      ['block']
    """

    def decorate(body: Callable[..., Any]) -> Stage:
        @functools.wraps(body)
        def named(*args: Any, **kwargs: Any) -> Any:
            check_call(body, len(args), kwargs, name=name)
            with scope.named(name):
                results = scope.resolve_callee(body)(*args, **kwargs)
                return scope.mark_stage_end(name, results)

        return Stage(named, Options(name=name))

    return decorate


@at_boundary
def training_step(
    module: str | Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    batch: str | Collection[str] | None = None,
    skip_passes: Collection[str] = (),
) -> Any:
    """Compile a training step written for one device for the mesh that it runs on.

    The step's arguments are batches, unless it takes gradients by them: arrays without
    a layout of their own are split along their leading dim over the mesh's data axes,
    ``dp`` and ``fsdp``. ``graph.backward`` in its body differentiates by all its
    parameters.

    Args:
      module: What the step is called in traces and compiled modules.
      mesh: Mesh to run on, as for ``ts.function``.
      in_specs: Layouts of the arguments, as for ``ts.function``.
      out_specs: Layouts of the result, as for ``ts.function``.
      batch: Arguments that are batches, where others are none, by name, or paths of
        arrays inside of them: ``inputs/tokens``. By default all of them.
      skip_passes: Names of passes to leave out.

    Returns:
      A decorator that gives a ``Step``.

    Raises:
      ShardDivisibilityError: [T201] (at the call) the data axes do not divide a batch.
    """

    def decorate(body: Callable[..., Any]) -> Step:
        own_name = getattr(body, "__name__", "step")
        options, _ = declared_options(
            module if isinstance(module, str) and module else own_name,
            signature_of(body),
            mesh,
            in_specs=("in_specs", in_specs),
            out_specs=("out_specs", out_specs),
        )
        rows = None if batch is None else frozenset(as_names(batch))
        options = replace(options, split_batch=True, batch=rows)
        return Step(body, options, skip_passes)

    return decorate(module) if callable(module) else decorate
