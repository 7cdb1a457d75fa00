# SPDX-License-Identifier: Apache-2.0
"""Drawn options of ``jax.jit`` mean in Tessera what they mean there.

One call is made by ``jax.jit``, by ``ts.jit`` with the same options, and by
``ts.function`` with the layouts as ``in_specs`` and ``out_specs`` on a mesh of JAX.
Numbers and layouts of all results are the same, and nothing is gone that was kept.
"""

import warnings
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts

X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
SPECS = (P(), P("dp"), P(None, "tp"), P("dp", "tp"), P(("dp", "tp")), P("tp"))
STATIC = ({}, {"static_argnums": 1}, {"static_argnames": "count"})
DONATED = {
    (): {},
    (0,): {"donate_argnums": 0},
    (2,): {"donate_argnames": ["x"]},
    (0, 2): {"donate_argnums": (0, 2)},
}


def body(tree, count, x, bias=1.0):
    return {"sum": tree["a"] * count + x + bias, "rest": [jnp.sum(x), tree["b"]]}


@dataclass
class Case:
    """Layouts are specs, or None where none is declared."""

    mesh: Any
    options: dict[str, Any]
    donated: tuple[int, ...]
    layouts: dict[str, Any]
    arrays: tuple[Any, ...]
    is_placed: bool

    def declared(self, of_specs):
        """The layouts as options: by ``in_specs``, or as ``jax.jit`` takes them."""
        if of_specs:
            return {f"{name}_specs": value for name, value in self.layouts.items()}
        return {
            f"{name}_shardings": jax.tree.map(self.named, value, is_leaf=is_layout)
            for name, value in self.layouts.items()
        }

    def named(self, spec):
        return None if spec is None else NamedSharding(self.mesh, spec)

    def arguments(self):
        (tree, x), *bias = self.arrays

        def put(array, spec):
            sharding = self.named(spec) if self.is_placed else None
            return jax.device_put(array, sharding)

        both = tree if isinstance(tree, dict) else {"a": tree, "b": tree}
        arrays = {name: put(X * 2, spec) for name, spec in both.items()}
        return arrays, 3, put(X + 1, x), *bias

    def run(self, compiled):
        """The results of a call."""
        args = self.arguments()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no result takes over what is donated
            results = jax.tree.leaves(compiled(*args))
        kept = [value for i, value in enumerate(args) if i not in self.donated]
        arrays = [x for x in jax.tree.leaves(kept) if isinstance(x, jax.Array)]
        assert not any(array.is_deleted() for array in arrays)
        return results


def is_layout(node):
    return node is None or isinstance(node, P)


def drawn(seed):
    random = Random(f"jit/{seed}")
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def layout():
        return random.choice((None, *SPECS))

    static, donated = random.choice(STATIC), random.choice(list(DONATED))
    bias = random.choice([[], [np.float32(0.5)]])
    tree, x = random.choice([layout(), {"a": layout(), "b": layout()}]), layout()
    ins = [tree, *([] if static else [None]), x, *[None for _ in bias]]
    layouts = {"in": random.choice([tuple, list])(ins)}
    if random.random() < 0.7:
        rest = random.choice([None, [None, layout()]])
        layouts["out"] = {"sum": layout(), "rest": rest}
    options = {**static, **DONATED[donated]}
    return Case(
        mesh, options, donated, layouts, ((tree, x), *bias), random.random() < 0.5
    )


@pytest.mark.fuzz(sample=25, whole=1000)
def test_options_of_jit_mean_what_they_mean_in_jax(seed):
    case = drawn(seed)
    shardings = case.options | case.declared(of_specs=False)
    # XLA refuses some layouts of results that take over an argument.
    kept = {name: x for name, x in shardings.items() if "donate" not in name}
    wanted = case.run(jax.jit(body, **kept))
    specs = case.options | case.declared(of_specs=True)
    for compiled in (
        ts.jit(body, **shardings),
        ts.function(body, mesh=case.mesh, **specs),
    ):
        for one, other in zip(case.run(compiled), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
