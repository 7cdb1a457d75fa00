# SPDX-License-Identifier: Apache-2.0
"""``ts.remat``: rematerialization, with one table of policies for users and models.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any, Final

import jax
import numpy as np

from tessera.errors import ArgumentError, SettingValueError, did_you_mean
from tessera.foundations.primitive_properties import (
    ARITHMETIC,
    BROADCASTS,
    CUDNN_ATTENTION,
    MATMULS,
    SLICES,
    SOURCES,
    VIEWS,
)
from tessera.foundations.tree import partition
from tessera.jax_compat import jaxprs, primitives
from tessera.tracing import scope
from tessera.tracing.object_arguments import Structure, is_object, split_result

NONE: Final = "none"
NAMED: Final = "named"
FULL: Final = "full"
# The name, for ``jax.ad_checkpoint``, of the residuals of attention.
ATTENTION_RESIDUALS: Final = "attention"
# Options of torch.utils.checkpoint and jax.checkpoint without a meaning here.
# fmt: off
_OPTIONS_OF_TORCH: Final = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug",
    "early_stop",
)
# fmt: on
_OPTIONS_OF_JAX: Final = ("static_argnums", "concrete")

_QUICK: Final = ARITHMETIC | VIEWS | BROADCASTS | SLICES | SOURCES


_save_attention = jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUALS)


def save_matmuls(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy that saves the results of matmuls, including those of experts.

    It also saves the output of attention and the log of the sums of its weights, which
    blockwise attention would need its matmuls to recompute.
    """
    is_matmul = primitive.name in MATMULS | CUDNN_ATTENTION
    return is_matmul or _save_attention(primitive, *avals, **params)


def save_unless_quick(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy that computes again what takes no longer than to read it from memory.

    That is what is elementwise, and what moves data or changes dtypes or layouts.
    """
    return primitive.name not in _QUICK


def names_values(program: jaxprs.Program) -> bool:
    """Whether a program names values, for the policy ``named`` to save."""
    return any(map(names_value, jaxprs.equations(program)))


def names_value(equation: jaxprs.Equation) -> bool:
    """Whether an equation names a value, or has one inside that does."""
    is_name = primitives.checkpoint_name(equation) is not None
    return is_name or any(map(names_values, jaxprs.inner_programs(equation)))


def save_named(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that saves what ``jax.ad_checkpoint.checkpoint_name`` names.

    Of cuDNN's attention it saves the residuals, which JAX gives no name.
    """
    return primitive.name == "name" or primitive.name in CUDNN_ATTENTION


POLICIES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        FULL: jax.checkpoint_policies.nothing_saveable,
        "dots": save_matmuls,
        NAMED: save_named,
        **{
            name: getattr(jax.checkpoint_policies, name)
            for name in (
                "nothing_saveable",
                "everything_saveable",
                "dots_saveable",
                "dots_with_no_batch_dims_saveable",
            )
        },
    }
)


def remat(
    function: Callable[..., Any] | None = None,
    /,
    *args: Any,
    policy: str | Callable[..., Any] | None = None,
    prevent_cse: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Recompute the intermediate values of a function in the backward pass.

    The results are the same. Only the arguments of a call, and the values that the
    policy names, are saved; the memory of the others is free until the backward pass.
    Works under ``ts.grad``, ``graph.backward`` and ``jax.grad``, around a
    ``ts.function``, and around functions whose operations own parameters.
    ``ts.checkpoint`` is an alias.

    Args:
      function: The function; leave it out to use the options as a decorator. Arrays
        among its arguments are traced, and so are NNX objects, as by ``nnx.remat``;
        everything else is static. It may itself be an NNX module, or a method of one.
      *args: Arguments, to call the function at once, as ``torch.utils.checkpoint``
        does: ``ts.checkpoint(layer, x)`` is ``ts.checkpoint(layer)(x)``.
      policy: ``full`` (the default) saves nothing, ``dots`` the results of matmuls,
        ``named`` what ``checkpoint_name`` names, ``none`` everything; any other name is
        that policy of ``jax.checkpoint_policies``. A policy function is accepted too.
      prevent_cse: False where the function is the body of a ``lax.scan``: the loop
        already keeps XLA from merging the two computations.
      **kwargs: Arguments by keyword, to call the function at once.

    Returns:
      A function of the same arguments and results; with arguments, its result.

    Raises:
      ArgumentError: [T301] the first argument is no function.
      SettingValueError: [T502] there is no such policy; or, in a call at once, an
        option could be an argument of the function, or is one of PyTorch's or JAX's.

    Example:
      >>> import tessera as ts, jax.numpy as jnp
      >>> @ts.remat(policy="dots")
      ... def layer(x, weight):
      ...     return jnp.tanh(x @ weight)
      >>> @ts.function
      ... def step(x, weight):
      ...     return ts.grad(layer(layer(x, weight), weight).sum(), weight)
      >>> step(jnp.ones((4, 8)), jnp.ones((8, 8))).shape
      (8, 8)
    """
    options = {"policy": policy, "prevent_cse": prevent_cse}
    rule = rule_of(FULL if policy is None else policy)
    call = functools.partial(_call, rule, prevent_cse is not False)
    if function is None:
        _check_other_options("", kwargs)
        if args or kwargs:
            raise ArgumentError(
                f"no function to call with {[*args, *kwargs]}",
                fix="ts.checkpoint(function, x, ...), or @ts.checkpoint(policy=...)",
            )
        return functools.partial(remat, **options)
    if not callable(function):
        raise ArgumentError(
            "ts.checkpoint takes a function first, then its arguments",
            got=repr(function) if isinstance(function, str) else f"{type(function)}",
            fix="ts.checkpoint(layer, x), or @ts.checkpoint(policy='dots')",
        )
    if args or kwargs:
        given = [name for name, value in options.items() if value is not None]
        _check_keywords(function, args, kwargs, given)
        return call(function, args, kwargs)
    if rule is None:
        return function

    @functools.wraps(function)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        return call(function, args, kwargs)

    return rematerialized


def _call(
    rule: Callable[..., Any] | None,
    prevent_cse: bool,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function; its backward pass recomputes what the policy does not save."""
    if rule is None:
        return scope.resolve_callee(function)(*args, **kwargs)
    if isinstance(function, MethodType) and is_object(function.__self__):
        function, args = function.__func__, (function.__self__, *args)
    # The state of a function that is an object changes as that of an argument does.
    inputs = (function if is_object(function) else None), args, kwargs
    traced, rest = partition(inputs, _is_traced, is_leaf=is_object)
    is_plain = not any(map(is_object, traced))

    # A new function in every call: JAX caches traces by function, and with the trace it
    # would reuse the parameters that the operations inside declared.
    def body(*arrays: Any) -> Any:
        callee, args, kwargs = rest.combine(arrays)
        callee = function if callee is None else callee
        return scope.resolve_callee(callee)(*args, **kwargs)

    options: dict[str, Any] = {"policy": rule, "prevent_cse": prevent_cse}
    if not is_plain:
        return _remat_with_objects(body, **options)(*traced)
    found: list[Any] = []

    def of_arrays(*arrays: Any) -> Any:
        result, restore = split_result(body(*arrays))
        leaves, skeleton = partition(result, _is_no_structure)
        found[:] = restore, skeleton
        return leaves

    leaves = jax.checkpoint(of_arrays, **options)(*traced)
    restore, skeleton = found
    return restore(skeleton.combine(leaves))


def _check_keywords(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Sequence[str],
) -> None:
    """Raise T502 for keywords of which it is not clear, or not true, whose they are."""
    try:
        signature = inspect.signature(function)
        free = signature.parameters.keys() - signature.bind_partial(*args).arguments
    except (TypeError, ValueError):  # without a signature, or with too many arguments
        free = set()
    name = getattr(function, "__name__", type(function).__name__)
    for option in options:
        if option in free:
            raise SettingValueError(
                f"{option!r} is an option of ts.checkpoint and a parameter of {name}",
                got=f"ts.checkpoint({name}, ..., {option}=...)",
                fix=f"for the option: ts.checkpoint({name}, {option}=...)(...)\n"
                f"for the function's: ts.checkpoint({name})(..., {option}=...)",
            )
    others = {name: value for name, value in kwargs.items() if name not in free}
    _check_other_options(f"{name}, ..., ", others)


def _check_other_options(call: str, kwargs: Mapping[str, Any]) -> None:
    """Raise T502 for an option of PyTorch's or JAX's checkpoint."""
    for option in kwargs:
        is_torch = option in _OPTIONS_OF_TORCH
        if not is_torch and option not in _OPTIONS_OF_JAX:
            continue
        raise SettingValueError(
            f"{option!r} is an option of {'PyTorch' if is_torch else 'JAX'}'s "
            "checkpoint",
            got=f"ts.checkpoint({call}{option}={kwargs[option]!r})",
            fix="leave it out: a traced function is recomputed exactly, with the same "
            "random numbers"
            if is_torch
            else "leave it out: arguments that are no arrays are static",
        )


checkpoint = remat


def rule_of(policy: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """The policy of that name; None for the one that saves everything.

    Raises:
      SettingValueError: [T502] there is no such policy.
    """
    if callable(policy):
        return policy
    if policy != NONE and policy not in POLICIES:
        raise SettingValueError(
            f"there is no checkpoint policy {policy!r}",
            got=f"policy={policy!r}",
            fix=did_you_mean(str(policy), (NONE, *POLICIES)),
        )
    return POLICIES.get(policy)


def _is_no_structure(leaf: Any) -> bool:
    return not isinstance(leaf, Structure)


def _is_traced(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array or hasattr(leaf, "__jax_array__") or is_object(leaf)


def _remat_with_objects(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``nnx.remat``, except that variables it does not change keep their values.

    After Flax's own, every variable holds a new value, and a gradient by the parameters
    would not depend on the old ones.
    """
    from flax import nnx

    def again(*args: Any) -> Any:
        objects = [arg for arg in args if is_object(arg)]
        before = _variables(objects)
        unchanged: set[Any] = set()

        def recording(*inner: Any) -> Any:
            variables = _variables([arg for arg in inner if is_object(arg)])
            result = body(*inner)
            unchanged.update(
                p for p, (v, raw) in variables.items() if v.get_raw_value() is raw
            )
            return result

        result = nnx.remat(recording, **options)(*args)
        for path in unchanged:
            variable, raw = before[path]
            variable.set_raw_value(raw)
        return result

    return again


def _variables(objects: list[Any]) -> dict[Any, tuple[Any, Any]]:
    """The variables of some objects and their values, by path."""
    from flax import nnx

    flat = nnx.to_flat_state(nnx.state(objects))
    return {
        path: (leaf, leaf.get_raw_value())
        for path, leaf in flat
        if isinstance(leaf, nnx.Variable)
    }
