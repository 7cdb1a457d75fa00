# SPDX-License-Identifier: Apache-2.0
"""``ts.function``, which is ``ts.jit``: makes a ``Function`` of a Python function."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tessera.annotations import refuse_options, signature_of
from tessera.errors import ArgumentError
from tessera.graph.function import Function
from tessera.graph.jit_options import by_either_name, declared_options, listed
from tessera.graph.tracer.declared_layouts import Options
from tessera.jax_compat.tracebacks import at_boundary
from tessera.mesh import AnyMesh

__all__ = ["function"]

# Options of jax.jit, and what takes their place.
_ON_A_DEVICE = "put the arguments there: jax.device_put(x, device)"
_ELSEWHERE: Final = {"device": _ON_A_DEVICE, "backend": _ON_A_DEVICE}


@at_boundary
def function(  # noqa: PLR0913 - the options of jax.jit, too
    body: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: str | Sequence[str] = (),
    skip_passes: Collection[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Iterable[str] = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, bool | str] | None = None,
    **others: Any,
) -> Any:
    """Compile a function written for one device for the mesh that it is used on.

    It takes what ``jax.jit`` takes, and the options of both.

    Args:
      body: The function; leave it out to use the options as a decorator. One that is
        compiled already keeps its options, where no others are declared.
      mesh: Mesh to run on, which may be one of JAX. By default the innermost that is
        open (by ``with mesh:`` or ``jax.set_mesh``), or the mesh that the arguments
        live on, or the default device.
      in_specs: Layouts of the arguments: a dict by name, a tuple by position without
        the static ones, or one for all. Each is a ``PartitionSpec``, ``ShardSpec`` or
        ``NamedSharding``, whose mesh is that to run on, or a tree of them that is a
        prefix of the argument. Arguments without one, or with None, keep the layout
        that they come with; without that they are replicated.
      out_specs: Layouts of the result: one, or a tree that is a prefix of the result.
        The partitioner decides where none is given.
      donate: Names of arguments whose memory the results may take over.
      skip_passes: Names of passes to leave out. Inside another traced function this
        one is part of that program, whose own ``donate`` and ``skip_passes`` apply.
      in_shardings: Another name of ``in_specs``, that of ``jax.jit``.
      out_shardings: Another name of ``out_specs``.
      static_argnums: Positions of arguments that are static as a whole, though there
        are arrays in them or they are trees: they have a hash, and are compared by it.
        Other Python values are static anyway.
      static_argnames: The same by name.
      donate_argnums: ``donate`` by position.
      donate_argnames: ``donate``, as ``jax.jit`` calls it.
      keep_unused: Whether the program takes arguments that it does not use.
      inline: Whether the function is inlined where ``jax.jit`` traces it; Tessera
        always does so.
      compiler_options: Options of XLA for this program, by name.
      **others: None: those of ``jax.jit`` that are left say what takes their place.

    Returns:
      A ``Function``: call it, or stop at a stage: ``trace``, ``lower``, ``compile``.

    Raises:
      ArgumentError: [T301] it is no function, or one that returns before it has run,
        or there is no such option.
      UnknownPassError: [T307] there is no such pass.
      SpecFormError: [T204] a layout is declared for an argument that does not exist, or
        in a form that is none.
      SettingConflictError: [T507] two options declare the same in different ways.

    Example:
      >>> import jax.numpy as jnp
      >>> @function
      ... def scaled_sum(x, factor):
      ...     return jnp.sum(x) * factor
      >>> print(scaled_sum(jnp.arange(4.0), 2))
      12.0
    """
    refuse_options(others, function, _ELSEWHERE)

    @at_boundary
    def compiled(given: Callable[..., Any]) -> Function:
        _check_function(given)
        inner = given if isinstance(given, Function) else None
        body = given if inner is None else inner.body
        name = getattr(body, "__name__", type(body).__name__)
        before = Options(name=name) if inner is None else inner.options
        declared, static = declared_options(
            name,
            signature_of(body),
            mesh,
            in_specs=by_either_name("in", in_specs, in_shardings),
            out_specs=by_either_name("out", out_specs, out_shardings),
            static=(static_argnums, static_argnames),
            donated=(donate_argnums, [*listed(donate_argnames), *listed(donate)]),
        )
        is_laid_out = bool(declared.in_specs) or declared.in_spec is not None
        options = replace(
            before,
            name=name,
            mesh=declared.mesh or before.mesh,
            in_specs=declared.in_specs if is_laid_out else before.in_specs,
            in_spec=declared.in_spec if is_laid_out else before.in_spec,
            out_specs=before.out_specs
            if declared.out_specs is None
            else declared.out_specs,
            donate=declared.donate | before.donate,
            keeps_unused=keep_unused or before.keeps_unused,
            is_inlined=inline or before.is_inlined,
            compiler_options=tuple(
                (dict(before.compiler_options) | dict(compiler_options or {})).items()
            ),
        )
        static = static if inner is None else static | inner.static
        passes = skip_passes if inner is None else {*skip_passes, *inner.skip_passes}
        return Function(body, options, tuple(passes), static)

    return compiled if body is None else compiled(body)


def _check_function(body: Any) -> None:
    """Raise [T301] where there is no function whose calls return its result."""
    if isinstance(body, (staticmethod, classmethod)) or not callable(body):
        raise ArgumentError(
            "what is to be compiled is not a function",
            got=f"a {type(body).__name__}",
            fix="give a function; a decorator stands below @staticmethod and "
            "@classmethod",
        )
    if inspect.isgeneratorfunction(body) or inspect.iscoroutinefunction(body):
        raise ArgumentError(
            f"{body.__name__!r} returns before its body runs",
            got="a generator function or a coroutine function",
            fix="return the arrays, in a list for example",
        )
