# SPDX-License-Identifier: Apache-2.0
"""Models of flax.nnx, Linen, Equinox and plain functions, as pure functions of arrays.

Each adapter takes the class of a module, or a function, and a configuration. It gives
``init``, from a key to a tree of parameters, and ``apply``, from such a tree and the
inputs by name to logits. State that is no parameter, such as the statistics of a batch
norm or the key of a dropout, is refused: a step would neither update nor save it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tessera.errors import ModelDefinitionError
from tessera.tree import Tree, named_leaves

Inputs: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class Adapter:
    """A model as two pure functions.

    Attributes:
      init: From a key to a tree of parameters.
      apply: From such a tree and the inputs to logits ``[B, S, V]``.
    """

    init: Callable[[jax.Array], Tree]
    apply: Callable[[Tree, Inputs], Float[Array, "batch seq vocab"]]


def adapt(target: Any, init: Any, config: Any, names: Sequence[str]) -> Adapter:
    """The adapter of a module's class, or of a function.

    Args:
      target: The class, or a function ``(config, params, **inputs) -> logits``.
      init: The function ``(config, key) -> params`` of a function; else None.
      config: The configuration.
      names: Of the inputs.

    Raises:
      ModelDefinitionError: [T407] it is neither, or keeps state beside parameters.
    """
    if init is not None:
        return Adapter(
            lambda key: init(config, key),
            lambda params, inputs: target(config, params, **inputs),
        )
    linen, equinox = sys.modules.get("flax.linen"), sys.modules.get("equinox")
    if isinstance(target, type) and issubclass(target, nnx.Module):
        return _flax_nnx(target, config)
    if linen and isinstance(target, type) and issubclass(target, linen.Module):
        return _flax_linen(target, config, names)
    if equinox and isinstance(target, type) and issubclass(target, equinox.Module):
        return _equinox(target, config, equinox)
    raise ModelDefinitionError(
        "a model is a class of flax.nnx, Linen or Equinox modules, or a function",
        got=f"{target!r}",
        fix="decorate such a class, or give register_model the init= of a function",
    )


def _flax_nnx(cls: Any, config: Any) -> Adapter:
    def new(key: jax.Array) -> Any:
        return cls(config, rngs=nnx.Rngs(key))

    module = nnx.eval_shape(lambda: new(jax.random.key(0)))
    graphdef, _, others = nnx.split(module, nnx.Param, ...)
    _refuse(cls, named_leaves(nnx.to_pure_dict(others)))

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.split(new(key), nnx.Param, ...)[1])

    def apply(params: Tree, inputs: Inputs) -> Array:
        return nnx.merge(graphdef, nnx.State(params))(**inputs)

    return Adapter(init, apply)


def _flax_linen(cls: Any, config: Any, names: Sequence[str]) -> Adapter:
    from flax.core import meta

    module = cls(config)

    def variables(key: jax.Array) -> Any:
        inputs = {name: jnp.zeros((1, 8), jnp.int32) for name in names}
        return meta.unbox(module.init(key, **inputs))

    shapes = dict(jax.eval_shape(lambda: variables(jax.random.key(0))))
    shapes.pop("params", None)
    _refuse(cls, named_leaves(shapes))

    def apply(params: Tree, inputs: Inputs) -> Array:
        return module.apply({"params": params}, **inputs)

    return Adapter(lambda key: variables(key)["params"], apply)


def _equinox(cls: Any, config: Any, equinox: Any) -> Adapter:
    def new(key: jax.Array) -> Any:
        return cls(config, key=key)

    def is_parameter(leaf: Any) -> bool:
        return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)

    def is_array(leaf: Any) -> bool:
        return hasattr(leaf, "shape")

    shapes = equinox.filter_eval_shape(lambda: new(jax.random.key(0)))
    _, others = equinox.partition(shapes, is_parameter)
    leaves = named_leaves(others)
    _refuse(cls, {name: leaf for name, leaf in leaves.items() if is_array(leaf)})

    def init(key: jax.Array) -> Tree:
        return equinox.filter(new(key), equinox.is_inexact_array)

    def apply(params: Tree, inputs: Inputs) -> Array:
        return equinox.combine(params, others)(**inputs)

    return Adapter(init, apply)


def _refuse(cls: Any, state: Mapping[str, Any]) -> None:
    if not state:
        return
    raise ModelDefinitionError(
        f"{cls.__name__} keeps state that is no parameter, which training would lose",
        got=", ".join(state),
        fix="leave out batch statistics and dropout, or compute these arrays in the "
        "call",
    )
