# SPDX-License-Identifier: Apache-2.0
"""Passes Flax NNX objects and mutable arrays through a program, updating the caller's.

A program takes arrays. In place of an object it takes a dict of the object's arrays by
path, with the object's structure as a static value beside them. The function gets an
object made of these, and after the call the caller's object is updated to its state. A
trace never sees the caller's object, so a function may be traced any number of times.
Objects that a function creates and returns are split and merged as well.

``nnx.jit`` does the same for NNX objects, in the same four steps of
``nnx.update_context``: split the caller's objects, merge them in the trace, split them
there, merge them for the caller. It only works on a call that it makes itself, while
Tessera needs the arrays for layouts and for several traces. Arguments that share an
object share it in the trace, and a result that is one of the caller's objects is that
object.
"""

import copy
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from tessera.errors import WriteBackError
from tessera.tracing import scope
from tessera.tracing.mutable_arrays import check_results, given, is_reference
from tessera.tracing.static_attributes import with_snapshots, without_snapshots

STRUCTURE = "<structure>"
_TAG = "tessera"

Arrays: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Structure:
    """The static part of an object, which stands beside the object's arrays.

    Attributes:
      graphdef: Flax's description of the object; None for a mutable array.
      names: Of its arrays, in Flax's order.
      kind: The name of its class.
      role: The role of such an argument under ``ts.distribute``.
      semantics: The ``kind`` that a mutable array was made with.
    """

    graphdef: Any
    names: tuple[str, ...]
    kind: str
    role: str | None
    semantics: str | None = None


def is_object(node: Any) -> bool:
    """Whether a value is an object of NNX: a module, an optimizer, a variable."""
    nnx: Any = sys.modules.get("flax.nnx")  # a user who has not imported it has none
    if nnx is None or isinstance(node, jax.Ref):  # for NNX, this is one as well
        return False
    return nnx.graphlib.is_graph_node(node)


def holds_objects(tree: Any) -> bool:
    """Whether there is an object of NNX anywhere in a tree."""
    return "flax.nnx" in sys.modules and any(
        map(is_object, jax.tree.leaves(tree, is_leaf=is_object))
    )


def changes_in_place(tree: Any) -> bool:
    """Whether there is an object of NNX or a mutable array in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=is_object)
    return any(is_reference(leaf) or is_object(leaf) for leaf in leaves)


def parameters_of(weights: Any) -> Any:
    """A tree of weights, with the state of its ``nnx.Param`` for each object."""
    if not holds_objects(weights):
        return weights
    from flax import nnx

    def one(node: Any) -> Any:
        is_whole = is_object(node) and not isinstance(node, nnx.Variable)
        return nnx.state(node, nnx.Param) if is_whole else node

    return jax.tree.map(one, weights, is_leaf=is_object)


def hint_of_parameters(weights: Any) -> str:
    """A hint for weights among which there are NNX variables that are no parameters."""
    if not holds_objects(weights):
        return ""
    from flax import nnx

    leaves = jax.tree.leaves(weights, is_leaf=is_object)
    if all(isinstance(leaf, nnx.Param) for leaf in leaves if is_object(leaf)):
        return ""
    return "by a model's parameters alone: ts.grad(loss, nnx.state(model, nnx.Param))"


def _is_unit(node: Any, changes: Callable[[Any], bool] = holds_objects) -> bool:
    """Whether a node is an object, or a tree of objects that is no plain container."""
    return not isinstance(node, (dict, list, tuple)) and changes(node)


def _is_split(node: Any) -> bool:
    return isinstance(node, dict) and STRUCTURE in node


def _split(context: Any, node: Any) -> Arrays:
    """The arrays of an object by name, and its structure."""
    if isinstance(node, jax.Ref):
        structure = Structure(None, (), "Ref", None, jax.typeof(node).kind)
        return {"value": node[...], STRUCTURE: structure}
    if is_reference(node):
        structure = Structure(None, (), "Ref", None)
        return {"value": node.update(is_ref=False), STRUCTURE: structure}
    from flax import nnx

    graphdef, flat = context.flatten(node if is_object(node) else (node,))
    arrays: Arrays = {}
    for path, leaf in flat:
        own = path if is_object(node) else path[1:]
        name = "/".join(map(str, own)) or "value"
        name = repr(own) if name in arrays else name
        is_variable = isinstance(leaf, nnx.Variable)
        arrays[name] = leaf.get_raw_value() if is_variable else leaf
    names = tuple(arrays)
    roles = {nnx.Module: "params", nnx.Optimizer: "optimizer_state"}
    role = next((role for kind, role in roles.items() if isinstance(node, kind)), None)
    graphdef = with_snapshots(graphdef)
    arrays[STRUCTURE] = Structure(graphdef, names, type(node).__name__, role)
    return arrays


def _merged(context: Any, arrays: Arrays, given: Structure | None = None) -> Any:
    """The object made of some arrays: a new one, or that which was given, updated."""
    structure: Structure = arrays[STRUCTURE]
    if structure.graphdef is None:
        return jax.new_ref(arrays["value"], kind=structure.semantics)
    leaves = [arrays[name] for name in structure.names]
    graphdef = without_snapshots(structure.graphdef, given and given.graphdef)
    node = context.unflatten(graphdef, leaves)
    return node if is_object(node) else node[0]


def _with_each(
    is_one: Callable[[Any], bool], change: Callable[[Any], Any], tree: Any
) -> Any:
    """A tree with ``change`` applied to each node of a kind."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=is_one)
    return jax.tree.unflatten(
        structure, [change(node) if is_one(node) else node for node in nodes]
    )


# --- outside of the trace


class ObjectCall:
    """A call whose arguments have arrays in place of objects.

    Attributes:
      args: Positional arguments.
      kwargs: Keyword arguments.
      references: The mutable arrays among them.
      has_objects: Whether there were any objects.
      units: Each object, its arrays, its structure, and its arrays before the call.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        keeps_references: bool = False,
    ) -> None:
        self.args, self.kwargs = tuple(args), dict(kwargs)
        self.units: list[tuple[Any, Arrays, Structure, Arrays]] = []
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._changes = holds_objects if keeps_references else changes_in_place
        self.has_objects = self._changes((args, kwargs))
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_object)
        self.references = [leaf for leaf in leaves if isinstance(leaf, jax.Ref)]

    def split(self) -> None:
        """Put arrays in place of the objects; in an update context of NNX."""
        with _nnx("split_context") as context:
            inside = functools.partial(self._without_objects, context)
            self.args = _mapped(inside, self.args)
            self.kwargs = _mapped(inside, self.kwargs)

    def _without_objects(self, context: Any, node: Any) -> Any:
        """A part of the arguments: a copy, where it is a container with objects."""
        if _is_unit(node, self._changes):
            arrays = _split(context, node)
            # A number in a variable becomes an array, as for nnx.jit.
            arrays.update(
                (name, jnp.asarray(leaf))
                for name, leaf in arrays.items()
                if isinstance(leaf, (bool, int, float, complex))
            )
            self.units.append((node, arrays, arrays[STRUCTURE], dict(arrays)))
            return arrays
        if not self._changes(node):
            return node
        if id(node) not in self._copies:
            inside = functools.partial(self._without_objects, context)
            self._copies[id(node)] = node, _mapped(inside, node)
        return self._copies[id(node)][1]

    def finish(self, result: Any, read: Collection[int] = ()) -> Any:
        """Update the caller's objects; the result with its objects.

        Args:
          result: What the call gave, with arrays in place of objects.
          read: The ids of objects to leave as they are.
        """
        if not self.has_objects:
            return result
        with _nnx("merge_context", inner=False) as context:
            for unit, arrays, given, _ in self.units:
                if id(unit) in read:
                    continue
                if isinstance(unit, jax.Ref):
                    unit[...] = arrays["value"]
                elif _merged(context, arrays, given) is not unit and is_object(unit):
                    raise WriteBackError(
                        f"a {type(unit).__name__} among the arguments is not updated",
                        got="another object in its place",
                        fix="pass it to the call itself, and not by another function",
                    )
            result = _with_each(_is_split, functools.partial(_merged, context), result)
        pairs = (*(unit[:2] for unit in self.units), *self._copies.values())
        originals = {id(stand_in): node for node, stand_in in pairs}
        for node, copied in self._copies.values():
            _give_entries(copied, node, originals)
        return result


@contextmanager
def objects_split(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, keeps_references: bool = False
) -> Iterator[ObjectCall]:
    """The arguments of a call without their objects, for as long as the call runs.

    Args:
      args: Positional arguments.
      kwargs: Keyword arguments.
      keeps_references: Whether the mutable arrays among them stay what they are.
    """
    call = ObjectCall(args, kwargs, keeps_references=keeps_references)
    if not (call.has_objects or call.references):
        yield call
        return
    with given(call.references), _nnx("update_context"):
        call.split()
        yield call


def _nnx(name: str, **options: Any) -> AbstractContextManager[Any]:
    """A context of NNX for the objects of one call; null if Flax is not imported."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nullcontext() if nnx is None else getattr(nnx, name)(_TAG, **options)


def _mapped(function: Callable[[Any], Any], container: Any) -> Any:
    """A container of the same kind with ``function`` applied to each item."""
    if isinstance(container, tuple):
        items = map(function, container)
        is_named = hasattr(container, "_fields")
        return type(container)(*items) if is_named else tuple(items)
    copied = copy.copy(container)
    for key in copied if isinstance(copied, dict) else range(len(copied)):
        copied[key] = function(copied[key])
    return copied


def _give_entries(copied: Any, node: Any, originals: Mapping[int, Any]) -> None:
    """Give the caller's dict or list the present entries of its copy."""
    if isinstance(node, list):
        node[:] = [originals.get(id(item), item) for item in copied]
    elif isinstance(node, dict):
        for key in node.keys() - copied.keys():
            del node[key]
        for key, item in copied.items():
            node[key] = originals.get(id(item), item)


# --- in the trace


def with_objects(body: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes and returns arrays in place of objects.

    The dicts of objects get their new arrays.

    Raises:
      WriteBackError: [T320] (at the call) what holds the objects was changed, and not
        they.
    """

    @functools.wraps(body)
    def on_arrays(*args: Any, **kwargs: Any) -> Any:
        restored = _MergedObjects()
        with _nnx("merge_context", inner=True) as context:
            inside = functools.partial(restored.objects_of, context)
            values, named = _mapped(inside, args), _mapped(inside, kwargs)
        result = scope.resolve_callee(body)(*values, **named)
        with _nnx("split_context") as context:
            restored.split(context)
            return _result_split(context, result)

    return on_arrays


def as_it_is(result: Any) -> Any:
    """What puts objects into a result without any."""
    return result


def split_result(result: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A result with arrays in place of the objects that the function created.

    Returns:
      The result, and a function that puts objects in the place of such arrays. What
      objects of the result share, these share too.

    Raises:
      WriteBackError: [T320] there is a mutable array in it.
    """
    if not holds_objects(result):
        check_results(jax.tree.leaves(result))
        return result, as_it_is
    from flax import nnx

    with nnx.split_context() as context:
        return _result_split(context, result), _merge_result


def _result_split(context: Any, result: Any) -> Any:
    check_results(jax.tree.leaves(result, is_leaf=is_object))
    split = _with_each(_is_unit, functools.partial(_split, context), result)
    check_results(jax.tree.leaves(split))
    return split


def _merge_result(result: Any) -> Any:
    from flax import nnx

    with nnx.merge_context() as context:
        return _with_each(_is_split, functools.partial(_merged, context), result)


class _MergedObjects:
    """The objects of one trace, and the dicts that their arrays came in."""

    def __init__(self) -> None:
        self._units: list[tuple[Any, Arrays, list[int]]] = []
        self._entries: list[tuple[Any, Any, Any, Any]] = []

    def objects_of(self, context: Any, node: Any) -> Any:
        """An argument with its objects, in the argument's own containers."""
        if _is_split(node):
            unit = _merged(context, node)
            self._units.append((unit, node, _identities(unit)))
            return unit
        if isinstance(node, tuple):
            items = [self.objects_of(context, item) for item in node]
            if all(map(operator.is_, items, node)):
                return node
            return type(node)(*items) if hasattr(node, "_fields") else tuple(items)
        for key, item in _content(node):
            objects = self.objects_of(context, item)
            if objects is not item:
                node[key] = objects
                self._entries.append((node, key, item, objects))
        return node

    def split(self, context: Any) -> None:
        """Put the arrays back in place of the objects, with their new values."""
        for unit, arrays, before in self._units:
            if _identities(unit) != before:
                raise WriteBackError(
                    f"a {arrays[STRUCTURE].kind} among the arguments was changed, and "
                    "cannot be given back",
                    got="another object in the place of one that it held",
                    fix="return it, or change the objects that it holds",
                )
            now = _split(context, unit)
            for name in arrays.keys() - now.keys():
                del arrays[name]
            arrays.update(now)
        for node, key, item, objects in self._entries:
            if dict(_content(node)).get(key) is not objects:
                raise WriteBackError(
                    f"{key!r} of a {type(node).__name__} among the arguments was an "
                    "object, and is another one",
                    got=f"a {type(objects).__name__} before",
                    fix="return the new object, or change the one that is there",
                )
            node[key] = item


def _content(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    return list(enumerate(node)) if isinstance(node, list) else []


def _identities(unit: Any) -> list[int]:
    """The identities of the objects in a tree."""
    return [id(leaf) for leaf in jax.tree.leaves(unit, is_leaf=is_object)]
