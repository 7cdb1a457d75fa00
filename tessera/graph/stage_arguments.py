# SPDX-License-Identifier: Apache-2.0
"""What each stage of a program says of its arguments and result."""

from typing import Any

import jax

from tessera.jax_compat import jaxprs


class OfArguments:
    """The attributes that ``Traced``, ``Lowered`` and ``Compiled`` share.

    They are those of ``jax.stages``; a static value stands for itself.
    """

    @property
    def _traced(self) -> Any:
        """The ``Traced`` that it was made from, or is."""
        return getattr(self, "traced", self)

    @property
    def fun_name(self) -> str:
        """The name of the function."""
        return self._traced.origin.graph.name

    @property
    def in_avals(self) -> Any:
        """``(args, kwargs)``, with the type of each array."""
        call = self._traced.call
        return call.rebuilt([jax.typeof(leaf.aval) for leaf in call.leaves])

    @property
    def args_info(self) -> Any:
        """``(args, kwargs)`` with a ``jax.stages.ArgInfo`` for each array."""
        call, origin = self._traced.call, self._traced.origin
        return call.rebuilt(
            [
                jax.stages.ArgInfo(
                    jaxprs.struct(leaf.aval), argument.name in origin.donated
                )
                for argument in call.arguments
                for leaf in argument.leaves
            ]
        )

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The donated arrays, by their number among the leaves of the arguments."""
        infos = enumerate(jax.tree.leaves(self.args_info))
        return tuple(i for i, info in infos if getattr(info, "donated", False))

    @property
    def in_tree(self) -> Any:
        """The tree of ``(args, kwargs)``."""
        return jax.tree.structure(self.in_avals)

    @property
    def out_info(self) -> Any:
        """The result, with a ``jax.ShapeDtypeStruct`` for each array.

        It has the layout of an array for which one is declared.
        """
        origin = self._traced.origin
        graph, found = origin.graph, list[Any]()
        for value in graph.outputs:
            struct, sharding = jaxprs.struct(value.aval), graph.sharding(value)
            found.append(struct.update(sharding=sharding) if sharding else struct)
        return origin.unflatten(found)

    @property
    def out_tree(self) -> Any:
        """The tree of the result."""
        return jax.tree.structure(self.out_info)
