# SPDX-License-Identifier: Apache-2.0
"""Models of flax.nnx, Equinox and plain functions, as pure functions of arrays.

Each adapter takes the class of a module, or a function, and a configuration. It gives
``init``, from a key to a tree of parameters, and ``open``, from such a tree to the
model. State that is no parameter, such as the statistics of a batch norm or the key of
a dropout, is refused: a step would neither update nor save it.

A model may name the list of its repeated blocks. ``open`` takes it out of the model, so
that a method which reads other blocks than its own fails.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from tessera.errors import ModelDefinitionError
from tessera.foundations.tree import Tree, named_leaves
from tessera.train.models.block_methods import METHODS

Inputs: TypeAlias = Mapping[str, Array]


def _alike(block: Any) -> tuple[Any, str]:
    del block
    return "", ""


@dataclass(frozen=True)
class Adapter:
    """A model as pure functions.

    Attributes:
      init: From a key to a tree of parameters.
      open: From such a tree to the model and the list of its blocks. The model is
        called with the inputs by name; with blocks, it has the methods of ``METHODS``.
        Parameters of blocks that are not used may be None.
      describe: What a block is beside its parameters, which is equal for equal blocks;
        and the block for messages, in lines.
    """

    init: Callable[[jax.Array], Tree]
    open: Callable[[Tree], tuple[Any, Sequence[Any]]]
    describe: Callable[[Any], tuple[Any, str]] = _alike


def adapt(target: Any, init: Any, config: Any, blocks: str | None) -> Adapter:
    """The adapter of a module's class, or of a function.

    Args:
      target: The class, or a function ``(config, params, **inputs) -> logits``.
      init: The function ``(config, key) -> params`` of a function; else None.
      config: The configuration.
      blocks: The attribute, or for functions the entry, that is the list of blocks.

    Raises:
      ModelDefinitionError: [T407] it is neither, keeps state beside parameters, or has
        no such blocks.
    """
    if init is not None:
        return _functions(target, init, config, blocks)
    equinox = sys.modules.get("equinox")
    if isinstance(target, type) and issubclass(target, nnx.Module):
        return _flax_nnx(target, config, blocks)
    if equinox and isinstance(target, type) and issubclass(target, equinox.Module):
        return _equinox(target, config, equinox, blocks)
    raise ModelDefinitionError(
        "a model is a class of flax.nnx or Equinox modules, or a function",
        got=f"{target!r}",
        fix="decorate such a class, or give register_model the init= of a function",
    )


def _functions(target: Any, init: Any, config: Any, name: str | None) -> Adapter:
    new = partial(init, config)
    if name is None:
        return Adapter(new, lambda params: (partial(target, config, params), ()))

    def open_functions(params: Tree) -> tuple[Any, Sequence[Any]]:
        is_dict = isinstance(params, Mapping)
        blocks = _sequence(target, name, params.get(name) if is_dict else None)
        rest = {key: part for key, part in params.items() if key != name}
        methods = {key: partial(getattr(target, key), config, rest) for key in METHODS}
        return SimpleNamespace(**methods), blocks

    return Adapter(new, open_functions)


def _flax_nnx(cls: Any, config: Any, name: str | None) -> Adapter:
    def new(key: jax.Array) -> Any:
        return cls(config, rngs=nnx.Rngs(key))

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.split(new(key), nnx.Param, ...)[1])

    module = nnx.eval_shape(lambda: new(jax.random.key(0)))
    graphdef, _, others = nnx.split(module, nnx.Param, ...)
    _refuse(cls, named_leaves(nnx.to_pure_dict(others)))

    def take_blocks(module: Any) -> tuple[Any, Sequence[Any]]:
        if name is None:
            return module, ()
        blocks = _sequence(cls, name, getattr(module, name, None))
        delattr(module, name)
        return module, blocks

    def open_module(params: Tree) -> tuple[Any, Sequence[Any]]:
        return take_blocks(nnx.merge(graphdef, nnx.State(params)))

    def describe(block: Any) -> tuple[Any, str]:
        return nnx.graphdef(block), repr(block)

    rest, blocks = take_blocks(module)
    _check_unshared(cls, [rest, *blocks])
    return Adapter(init, open_module, describe)


def _check_unshared(cls: Any, nodes: Sequence[Any]) -> None:
    """Refuse a variable of two blocks, or of a block and the rest: it would be two."""
    owners: dict[int, int] = {}
    for number, node in enumerate(nodes):
        for path, part in nnx.iter_graph(node):
            if not isinstance(part, nnx.Variable):
                continue
            owner = owners.setdefault(id(part), number)
            if owner != number:
                before = f"block {owner - 1}" if owner else "the rest of the model"
                raise ModelDefinitionError(
                    f"a block of {cls.__name__} shares a parameter",
                    got=f"{'/'.join(map(str, path))} of block {number - 1} is one of "
                    f"{before}",
                    fix="make it an attribute of the model alone, and read it from "
                    "self in the method block",
                )


def _equinox(cls: Any, config: Any, equinox: Any, name: str | None) -> Adapter:
    def new(key: jax.Array) -> Any:
        return cls(config, key=key)

    def init(key: jax.Array) -> Tree:
        return equinox.filter(new(key), equinox.is_inexact_array)

    def is_parameter(leaf: Any) -> bool:
        return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)

    shapes = equinox.filter_eval_shape(lambda: new(jax.random.key(0)))
    _, others = equinox.partition(shapes, is_parameter)
    state = {n: leaf for n, leaf in named_leaves(others).items() if _is_array(leaf)}
    _refuse(cls, state)

    def open_module(params: Tree) -> tuple[Any, Sequence[Any]]:
        module = equinox.combine(params, others)
        if name is None:
            return module, ()
        blocks = _sequence(cls, name, getattr(module, name, None))
        return equinox.tree_at(attrgetter(name), module, None), blocks

    def describe(block: Any) -> tuple[Any, str]:
        static = equinox.filter(block, _is_array, inverse=True)
        form = jax.tree.structure(block), jax.tree.leaves(static)
        return form, equinox.tree_pformat(block, width=1)

    return Adapter(init, open_module, describe)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


def _sequence(cls: Any, name: str, value: Any) -> Sequence[Any]:
    """The blocks, if there are some."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value):
        return value
    raise ModelDefinitionError(
        f"{cls.__name__} has no list of blocks {name!r}",
        got=f"blocks={name!r}: {type(value).__name__} of "
        f"{len(value) if hasattr(value, '__len__') else 'no'} blocks",
        fix="name an attribute, or an entry of the parameters of a function, that is a "
        "list or tuple",
    )


def _refuse(cls: Any, state: Mapping[str, Any]) -> None:
    if not state:
        return
    raise ModelDefinitionError(
        f"{cls.__name__} keeps state that is no parameter, which training would lose",
        got=", ".join(state),
        fix="leave out batch statistics and dropout, or compute these arrays in the "
        "call",
    )
