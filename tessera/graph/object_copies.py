# SPDX-License-Identifier: Apache-2.0
"""Copies NNX objects from outside of ``jax.grad`` for a call inside of it.

Flax lets nothing change an object of the trace around a transformation, for a tracer
would leak. A call of a ``jax.jit`` function has copies of all its objects, and its
changes stay in it; here the copies take only the changes that nothing else can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tessera.jax_compat import traces
from tessera.tracing.object_arguments import holds_objects, is_object


@dataclass(frozen=True)
class OwnObjects:
    """The arguments of a call, with objects that it may change.

    Attributes:
      args: Positional arguments.
      kwargs: Keyword arguments.
      copies: The objects that are copies.
      before: Their arrays as they were.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    copies: Sequence[Any] = ()
    before: Sequence[Any] = ()

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "OwnObjects":
        """Copy the objects that a transformation in between keeps from changing."""
        if not (traces.is_transforming() and holds_objects((args, kwargs))):
            return cls(args, kwargs)
        from flax import nnx

        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        outer = [leaf for leaf in leaves if is_object(leaf) and not _may_change(leaf)]
        copies = nnx.clone(outer)  # all at once: what they share stays shared
        copy_of = {id(node): own for node, own in zip(outer, copies, strict=True)}
        leaves = [copy_of.get(id(leaf), leaf) for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return cls(args, kwargs, copies, _arrays(copies))

    @property
    def changed(self) -> str:
        """The class of a copy that the call changed, or nothing."""
        after = _arrays(self.copies)
        pairs = zip(self.before, after, strict=False)
        if len(self.before) == len(after) and all(a is b for a, b in pairs):
            return ""
        return type(self.copies[0]).__name__


def _may_change(node: Any) -> bool:
    """Whether all parts of an object belong to the current trace, as Flax counts it."""
    from flax import nnx

    # Flax has no public name for the trace of a variable, or of a module's attributes.
    for _, part in nnx.iter_graph(node):
        holder = part if isinstance(part, nnx.Variable) else _state_of(part)
        trace = getattr(holder, "_trace_state", None)
        if trace is not None and not trace.is_valid():
            return False
    return True


def _state_of(part: Any) -> Any:
    return getattr(part, "_pytree__state", None)


def _arrays(nodes: Sequence[Any]) -> list[Any]:
    if not nodes:
        return []
    from flax import nnx

    return jax.tree.leaves(nnx.state(nodes))
