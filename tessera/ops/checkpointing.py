# SPDX-License-Identifier: Apache-2.0
"""``ts.checkpoint``: what the backward pass computes again instead of keeping.

One table of policies, for functions of users and for the layers of models.

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
from tessera.objects import is_object, remat
from tessera.primitive_properties import MATMULS

NONE: Final = "none"
# The name, for ``jax.ad_checkpoint``, of what attention keeps for its gradient.
KEPT_BY_ATTENTION: Final = "attention"


def keep_matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that keeps the results of matmuls, those of experts among them.

    And what queries read and the sums of their weights, for which attention by blocks
    would do its matmuls again.
    """
    if primitive.name == "name":
        return params.get("name") == KEPT_BY_ATTENTION
    return primitive.name in MATMULS


POLICIES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": keep_matmuls,
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


def checkpoint(
    function: Callable[..., Any] | None = None,
    *,
    policy: str | Callable[..., Any] = "full",
    prevent_cse: bool = True,
) -> Any:
    """A function whose inner values are computed again in the backward pass.

    The results are the same. Of the call only its arguments are kept, and what the
    policy names; the memory of the rest is free until its gradient is due. Works under
    ``ts.grad``, ``graph.backward`` and ``jax.grad``, around a ``ts.function``, and
    around functions whose operations own parameters.

    Args:
      function: The function; leave it out to use the options as a decorator. Arrays
        among its arguments are traced, and so are NNX objects, as by ``nnx.remat``;
        everything else is static.
      policy: ``full`` keeps nothing, ``dots`` the results of matmuls, ``none``
        everything; any other name is that policy of ``jax.checkpoint_policies``, which
        a function of that kind may be in place of a name.
      prevent_cse: False where the function is the body of a ``lax.scan``: a loop keeps
        the two computations apart by itself, and the compiler has a free hand.

    Returns:
      A function of the same arguments and results.

    Raises:
      SettingValueError: [T502] there is no such policy.

    Example:
      >>> import tessera as ts, jax.numpy as jnp
      >>> @ts.checkpoint(policy="dots")
      ... def layer(x, weight):
      ...     return jnp.tanh(x @ weight)
      >>> @ts.function
      ... def step(x, weight):
      ...     return ts.grad(layer(layer(x, weight), weight).sum(), weight)
      >>> step(jnp.ones((4, 8)), jnp.ones((8, 8))).shape
      (8, 8)
    """
    if function is None:
        return functools.partial(checkpoint, policy=policy, prevent_cse=prevent_cse)
    rule = _rule(policy)
    if rule is None:
        return function

    @functools.wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        traced = [i for i, x in enumerate(leaves) if _is_array(x) or is_object(x)]
        is_plain = not any(map(is_object, leaves))

        # A function of its own in every call: JAX would remember the trace of the first
        # one, and with it the parameters that the operations inside declared.
        def body(*arrays: Any) -> Any:
            filled = dict(zip(traced, arrays, strict=True))
            given = [filled.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, given)
            return scope.resolve_callee(function)(*args, **kwargs)

        transform: Any = jax.checkpoint if is_plain else remat
        again = transform(body, policy=rule, prevent_cse=prevent_cse)
        return again(*(leaves[i] for i in traced))

    return checkpointed


def _rule(policy: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """The policy of a name; None for the one that keeps everything."""
    if callable(policy):
        return policy
    if policy != NONE and policy not in POLICIES:
        raise SettingValueError(
            f"there is no checkpoint policy {policy!r}",
            got=f"policy={policy!r}",
            fix=did_you_mean(str(policy), (NONE, *POLICIES)),
        )
    return POLICIES.get(policy)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) or hasattr(leaf, "__jax_array__")
