# SPDX-License-Identifier: Apache-2.0
"""``ts.remat``: rematerialization, with one table of policies for users and models.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import jax
import numpy as np

from tessera import scope
from tessera.errors import SettingValueError, did_you_mean
from tessera.object_arguments import is_object
from tessera.object_arguments import remat as remat_with_objects
from tessera.primitive_properties import CUDNN_ATTENTION, MATMULS
from tessera.tree import partition

NONE: Final = "none"
NAMED: Final = "named"
# The name, for ``jax.ad_checkpoint``, of the residuals of attention.
ATTENTION_RESIDUALS: Final = "attention"


def save_matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that saves the results of matmuls, including those of experts.

    It also saves the output of attention and the log of the sums of its weights, which
    blockwise attention would need its matmuls to recompute.
    """
    if primitive.name == "name":
        return params.get("name") == ATTENTION_RESIDUALS
    return primitive.name in MATMULS | CUDNN_ATTENTION


def save_named(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that saves what ``jax.ad_checkpoint.checkpoint_name`` names.

    Of cuDNN's attention it saves the residuals, which JAX gives no name.
    """
    return primitive.name == "name" or primitive.name in CUDNN_ATTENTION


POLICIES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "full": jax.checkpoint_policies.nothing_saveable,
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
    *,
    policy: str | Callable[..., Any] = "full",
    prevent_cse: bool = True,
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
        everything else is static.
      policy: ``full`` saves nothing, ``dots`` the results of matmuls, ``named`` what
        ``checkpoint_name`` names, ``none`` everything; any other name is that policy
        of ``jax.checkpoint_policies``. A policy function is accepted too.
      prevent_cse: False where the function is the body of a ``lax.scan``: the loop
        already keeps XLA from merging the two computations.

    Returns:
      A function of the same arguments and results.

    Raises:
      SettingValueError: [T502] there is no such policy.

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
    if function is None:
        return functools.partial(remat, policy=policy, prevent_cse=prevent_cse)
    rule = _rule(policy)
    if rule is None:
        return function

    @functools.wraps(function)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        traced, rest = partition((args, kwargs), _is_traced, is_leaf=is_object)
        is_plain = not any(map(is_object, traced))

        # A new function in every call: JAX caches traces by function, and with the
        # trace it would reuse the parameters that the operations inside declared.
        def body(*arrays: Any) -> Any:
            args, kwargs = rest.combine(arrays)
            return scope.resolve_callee(function)(*args, **kwargs)

        transform: Any = jax.checkpoint if is_plain else remat_with_objects
        return transform(body, policy=rule, prevent_cse=prevent_cse)(*traced)

    return rematerialized


checkpoint = remat


def _rule(policy: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """The policy of that name; None for the one that saves everything."""
    if callable(policy):
        return policy
    if policy != NONE and policy not in POLICIES:
        raise SettingValueError(
            f"there is no checkpoint policy {policy!r}",
            got=f"policy={policy!r}",
            fix=did_you_mean(str(policy), (NONE, *POLICIES)),
        )
    return POLICIES.get(policy)


def _is_traced(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array or hasattr(leaf, "__jax_array__") or is_object(leaf)
