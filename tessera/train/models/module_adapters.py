# SPDX-License-Identifier: Apache-2.0
"""Models of flax.nnx, Linen, Equinox and plain functions, as pure functions of arrays.

Each adapter takes the class of a module, or a function, and a configuration. It gives
``init``, from a key to a tree of parameters, and ``bind``, from such a tree to the
model. State that is no parameter, such as the statistics of a batch norm or the key of
a dropout, is refused: a step would neither update nor save it.

A model may name its repeated blocks. ``Blocks`` then separates them from the rest, so
that one of them can run with the parameters of any.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from tessera.errors import ModelDefinitionError
from tessera.foundations.tree import Tree, named_leaves
from tessera.train.models.block_methods import METHODS, forward

Inputs: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    Attributes:
      prefix: Of the names of their parameters, before the number of the block.
      divide: From a tree of parameters, or of their shapes, to the trees of the blocks
        and the tree without them.
      bind: From the latter and the tree of one block to the model and the block.
      forms: What each block is beside its parameters; equal for equal blocks.
      texts: The blocks for messages, in lines.
    """

    prefix: str
    divide: Callable[[Tree], tuple[list[Tree], Tree]]
    bind: Callable[[Tree, Tree], tuple[Any, Any]]
    forms: Sequence[Any]
    texts: Sequence[str]


_NO_BLOCKS: Final = Blocks("", lambda rest: ([], rest), lambda *own: own, (), ())


@dataclass(frozen=True)
class Adapter:
    """A model as pure functions.

    Attributes:
      init: From a key to a tree of parameters.
      bind: From such a tree to the model, which is called with the inputs by name; with
        blocks, from the tree without them to a model with the methods of ``METHODS``.
      blocks: The repeated blocks, none unless the model names them.
    """

    init: Callable[[jax.Array], Tree]
    bind: Callable[[Tree], Any]
    blocks: Blocks = _NO_BLOCKS


def adapt(
    target: Any, init: Any, config: Any, names: Sequence[str], blocks: str | None
) -> Adapter:
    """The adapter of a module's class, or of a function.

    Args:
      target: The class, or a function ``(config, params, **inputs) -> logits``.
      init: The function ``(config, key) -> params`` of a function; else None.
      config: The configuration.
      names: Of the inputs.
      blocks: The attribute, or for functions the entry, that is the list of blocks.

    Raises:
      ModelDefinitionError: [T407] it is neither, keeps state beside parameters, or has
        no such blocks.
    """
    if init is not None:
        return _functions(target, init, config, blocks)
    linen, equinox = sys.modules.get("flax.linen"), sys.modules.get("equinox")
    if isinstance(target, type) and issubclass(target, nnx.Module):
        return _flax_nnx(target, config, blocks)
    if linen and isinstance(target, type) and issubclass(target, linen.Module):
        return _flax_linen(target, config, names, blocks)
    if equinox and isinstance(target, type) and issubclass(target, equinox.Module):
        return _equinox(target, config, equinox, blocks)
    raise ModelDefinitionError(
        "a model is a class of flax.nnx, Linen or Equinox modules, or a function",
        got=f"{target!r}",
        fix="decorate such a class, or give register_model the init= of a function",
    )


def _functions(target: Any, init: Any, config: Any, name: str | None) -> Adapter:
    new = partial(init, config)
    if name is None:
        return Adapter(new, lambda params: partial(target, config, params))
    shapes = jax.eval_shape(lambda: new(jax.random.key(0)))
    each = _sequence(target, name, shapes.get(name) if _is_dict(shapes) else None)

    def divide(params: Tree) -> tuple[list[Tree], Tree]:
        return [*params[name]], {k: v for k, v in params.items() if k != name}

    def bind(rest: Tree) -> Any:
        methods = {key: getattr(target, key) for key in METHODS}
        return SimpleNamespace(
            **{key: partial(method, config, rest) for key, method in methods.items()}
        )

    def bind_block(rest: Tree, block: Tree) -> tuple[Any, Any]:
        return bind(rest), block

    same = [""] * len(each)  # one function runs all of them
    return Adapter(new, bind, Blocks(f"{name}/", divide, bind_block, same, same))


def _is_dict(tree: Tree) -> bool:
    return isinstance(tree, Mapping)


def _flax_nnx(cls: Any, config: Any, name: str | None) -> Adapter:
    def new(key: jax.Array) -> Any:
        return cls(config, rngs=nnx.Rngs(key))

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.split(new(key), nnx.Param, ...)[1])

    def merge(graphdef: Any, params: Tree) -> Any:
        return nnx.merge(graphdef, nnx.State(params))

    module = nnx.eval_shape(lambda: new(jax.random.key(0)))
    graphdef, _, others = nnx.split(module, nnx.Param, ...)
    _refuse(cls, named_leaves(nnx.to_pure_dict(others)))
    if name is None:
        return Adapter(init, partial(merge, graphdef))
    each = _sequence(cls, name, getattr(module, name, None))
    forms, texts = [nnx.graphdef(block) for block in each], [*map(repr, each)]
    delattr(module, name)  # a method that reads other blocks than its own fails
    _check_unshared(cls, [module, *each])
    rest_graphdef = nnx.graphdef(module)

    def divide(params: Tree) -> tuple[list[Tree], Tree]:
        own = params.get(name, {})
        blocks = [own.get(i, {}) for i in range(len(each))]
        return blocks, {k: v for k, v in params.items() if k != name}

    def bind_block(rest: Tree, block: Tree) -> tuple[Any, Any]:
        return merge(rest_graphdef, rest), merge(forms[0], block)

    blocks = Blocks(f"{name}/", divide, bind_block, forms, texts)
    return Adapter(init, partial(merge, rest_graphdef), blocks)


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


def _flax_linen(
    cls: Any, config: Any, names: Sequence[str], name: str | None
) -> Adapter:
    from flax.core import meta

    module = cls(config)

    def run(module: Any, **inputs: Array) -> Array:
        if name is None:
            return module(**inputs)
        return forward(
            module, _sequence(cls, name, getattr(module, name, None)), inputs
        )

    def variables(key: jax.Array) -> Any:
        inputs = {name: jnp.zeros((1, 8), jnp.int32) for name in names}
        return meta.unbox(module.init(key, method=run, **inputs))

    def init(key: jax.Array) -> Tree:
        return variables(key)["params"]

    def bind(params: Tree) -> Any:
        return module.bind({"params": params})

    shapes = dict(jax.eval_shape(lambda: variables(jax.random.key(0))))
    params = shapes.pop("params", {})
    _refuse(cls, named_leaves(shapes))
    if name is None:
        return Adapter(init, bind)
    forms: list[Any] = []

    def read_blocks(params: Tree) -> None:
        blocks = getattr(bind(params), name)
        forms.extend(block.clone(parent=None, name=None) for block in blocks)

    jax.eval_shape(read_blocks, params)
    keys = [f"{name}_{i}" for i in range(len(forms))]

    def divide(params: Tree) -> tuple[list[Tree], Tree]:
        blocks = [params.get(key, {}) for key in keys]
        return blocks, {k: v for k, v in params.items() if k not in keys}

    def bind_block(rest: Tree, block: Tree) -> tuple[Any, Any]:
        model = bind({**rest, keys[0]: block})
        return model, getattr(model, name)[0]

    texts = [*map(repr, forms)]
    return Adapter(init, bind, Blocks(f"{name}_", divide, bind_block, forms, texts))


def _equinox(cls: Any, config: Any, equinox: Any, name: str | None) -> Adapter:
    def new(key: jax.Array) -> Any:
        return cls(config, key=key)

    def init(key: jax.Array) -> Tree:
        return equinox.filter(new(key), equinox.is_inexact_array)

    def is_parameter(leaf: Any) -> bool:
        return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)

    def is_array(leaf: Any) -> bool:
        return hasattr(leaf, "shape")

    shapes = equinox.filter_eval_shape(lambda: new(jax.random.key(0)))
    _, others = equinox.partition(shapes, is_parameter)
    leaves = named_leaves(others)
    _refuse(cls, {name: leaf for name, leaf in leaves.items() if is_array(leaf)})
    if name is None:
        return Adapter(init, lambda params: equinox.combine(params, others))
    each = _sequence(cls, name, getattr(shapes, name, None))

    def divide(params: Tree) -> tuple[list[Tree], Tree]:
        def where(module: Any) -> Any:
            return getattr(module, name)

        def nothing(_: Any) -> None:
            return None

        return [*where(params)], equinox.tree_at(where, params, replace_fn=nothing)

    block_others, rest_others = divide(others)

    def bind(rest: Tree) -> Any:
        return equinox.combine(rest, rest_others)

    def bind_block(rest: Tree, block: Tree) -> tuple[Any, Any]:
        return bind(rest), equinox.combine(block, block_others[0])

    structures = map(jax.tree.structure, each)
    forms = [*zip(structures, map(jax.tree.leaves, block_others), strict=True)]
    texts = [equinox.tree_pformat(block, width=1) for block in each]
    return Adapter(init, bind, Blocks(f"{name}/", divide, bind_block, forms, texts))


def _sequence(cls: Any, name: str, value: Any) -> Sequence[Any]:
    """The blocks, if there are some."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value):
        return value
    raise ModelDefinitionError(
        f"{cls.__name__} has no list of blocks {name!r}",
        got=f"blocks={name!r}: {type(value).__name__} of "
        f"{len(value) if hasattr(value, '__len__') else 'no'} blocks",
        fix="name an attribute, or an entry of the parameters of a function, that is a "
        "list or tuple; a Linen module assigns it in setup",
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
