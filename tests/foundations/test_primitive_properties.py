# SPDX-License-Identifier: Apache-2.0
"""The groups of primitive names do not overlap, and name primitives of JAX."""

import itertools

import jax.extend.core.primitives as jax_primitives

from tessera.foundations import primitive_properties as table

GROUPS = (
    *("ARITHMETIC", "SPECIAL_FUNCTIONS", "COPIES", "PLACEMENTS", "CASTS", "RESHAPES"),
    *("BROADCASTS", "SLICES", "REDUCTIONS", "CUMULATIVE", "SORTS", "MATMULS"),
    *("CONVOLUTIONS", "KERNELS", "CALLS", "DEVICE_SUMS", "OTHER_COLLECTIVES"),
    *("SOURCES", "HOST_CALLBACKS"),
)


def test_every_primitive_is_in_at_most_one_group():
    names = list(itertools.chain(*(getattr(table, group) for group in GROUPS)))
    assert len(names) == len(set(names))


def test_arithmetic_names_are_names_of_jax():
    exported = {getattr(p, "name", "") for p in vars(jax_primitives).values()}
    # Those that only derivatives or other versions of JAX have.
    assert len(table.ARITHMETIC - exported) <= 4


def test_kinds_that_analyses_must_not_confuse():
    """A sum mixes rows, a rounding is no copy, a barrier is not arithmetic."""
    assert "cumsum" not in table.SIZE_PRESERVING
    assert "convert_element_type" not in table.COPIES
    assert "optimization_barrier" not in table.ELEMENTWISE
    assert "reduce_precision" not in table.LINEAR
    assert "max" not in table.LINEAR
    assert not table.EXPENSIVE & table.ELEMENTWISE
