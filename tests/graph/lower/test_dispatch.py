# SPDX-License-Identifier: Apache-2.0
"""A program runs for arrays of the signatures that were accepted, and for no others."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.graph.lower.dispatch import Dispatch
from tessera.graph.tracer.arguments import ProgramMismatch
from tessera.shard import ShardSpec, tensor

X = jnp.ones((8,), jnp.float32)


def dispatch_of(body, *arrays):
    """The dispatch of a program that takes one list of arrays."""
    compiled = jax.jit(lambda arrays, *_: body(*arrays)).lower(list(arrays), (), ())
    return Dispatch(compiled.compile(), len(arrays), 0, 0)


@pytest.fixture(scope="module")
def doubled():
    dispatch = dispatch_of(lambda x: x * 2, X)
    dispatch.accept([X])
    return dispatch


def runs(dispatch, *arrays):
    """Whether the program runs for arrays, the first time and again."""
    found = []
    for _ in range(2):
        try:
            dispatch(list(arrays), (), ())
            found.append(True)
        except ProgramMismatch:
            found.append(False)
    assert found[0] == found[1]
    return found[0]


def test_it_runs_for_accepted_arrays_of_any_values(doubled):
    for array in (X, X + 1, X * 3):
        np.testing.assert_array_equal(doubled([array], (), ()), array * 2)


@pytest.mark.parametrize(
    "array",
    [
        X[:4],
        X[None],
        X.astype(jnp.int32),
        X.astype(jnp.bfloat16),
        np.ones(8, "f4"),
        jax.ShapeDtypeStruct((8,), jnp.float32),
        tensor((8,), init="ones", name="t"),
        1.0,
        None,
        {1},
        "x",
    ],
    ids=lambda value: f"{type(value).__name__}{getattr(value, 'dtype', '')}",
)
def test_it_does_not_run_for_others(doubled, array):
    if array is None:
        return  # part of the tree, not a leaf
    assert not runs(doubled, array)
    assert runs(doubled, X)


def test_layouts_and_devices_are_compared(dp_mesh, doubled):
    for sharding in (
        NamedSharding(dp_mesh.jax, P("dp")),
        NamedSharding(dp_mesh.jax, P()),
        jax.devices()[0],
        jax.devices()[1],
    ):
        assert not runs(doubled, jax.device_put(X, sharding))


@pytest.mark.parametrize(
    ("accepted", "other"),
    [
        (jnp.float32(1), jnp.asarray(1.0)),
        (jnp.asarray(1.0), jnp.float32(1)),
        (jnp.asarray(1.0), 1.0),
        (np.float32(1), 1.0),
        (np.int32(1), 1),
        (np.bool_(1), True),
        (np.complex64(1), 1j),
        (jnp.asarray(True), True),
        (np.float32(1), jnp.float32(1)),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
    ],
    ids=str,
)
def test_numbers_are_arrays_only_as_arrays(accepted, other):
    dispatch = dispatch_of(lambda x: x, accepted)
    dispatch.accept([accepted])
    assert runs(dispatch, accepted)
    assert not runs(dispatch, other)


def test_another_signature_can_be_accepted_too():
    dispatch = dispatch_of(lambda x: x * 2, X)
    for array in (X, np.ones(8, "f4")):
        assert not runs(dispatch, array)
        dispatch.accept([array])
        assert runs(dispatch, array)


def test_tensors_run_as_their_arrays(dp_mesh):
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh, init="ones", name="t")
    dispatch = dispatch_of(lambda x: x * 2, table.materialize())
    dispatch.accept([table])
    assert runs(dispatch, table)
    assert not runs(dispatch, table.materialize())
    assert not runs(dispatch, tensor((8,), init="ones", name="other"))


def test_programs_with_callbacks_check_every_call():
    seen = []
    dispatch = dispatch_of(
        lambda x: jax.debug.callback(lambda total: seen.append(total), x.sum()), X
    )
    dispatch.accept([X])
    assert runs(dispatch, X)
    assert not runs(dispatch, X.astype(jnp.int32))
    jax.effects_barrier()
    assert len(seen) == 2


def test_an_error_of_a_run_is_no_mismatch(doubled):
    deleted = X + 1
    deleted.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        doubled([deleted], (), ())


def test_it_can_be_collected():
    dispatch = dispatch_of(lambda x: x * 2, X)
    dispatch.accept([X])
    dispatch([X], (), ())
    reference = weakref.ref(dispatch)
    del dispatch
    gc.collect()
    assert reference() is None
