# SPDX-License-Identifier: Apache-2.0
"""Arguments taken apart: arrays are traced, everything else is static by value."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.errors import ArgumentError
from tessera.graph.tracer.argument_leaves import Leaf, leaf_signature
from tessera.graph.tracer.arguments import flatten_args
from tessera.shard import ShardSpec, tensor

X = jnp.ones((8, 2))


def apart(*args, names=("a", "b", "c"), **kwargs):
    return flatten_args(names[: len(args)], args, kwargs)


def on(mesh, *spec):
    return jax.device_put(X, NamedSharding(mesh.jax, P(*spec)))


@dataclass(frozen=True)
class Config:
    rate: float


# --- what is traced and what is static


@pytest.mark.parametrize(
    "array",
    [
        X,
        np.ones(3),
        np.float32(2),
        jax.ShapeDtypeStruct((3,), jnp.float32),
        tensor((3,)),
        jax.random.key(0),
    ],
    ids=["jax", "numpy", "numpy scalar", "shape", "lazy tensor", "PRNG key"],
)
def test_arrays_are_traced(array):
    (argument,) = apart(array).arguments
    assert [leaf.value is array for leaf in argument.leaves] == [True]
    assert argument.statics == ()


@pytest.mark.parametrize(
    "value", [1, 1.5, True, "relu", jnp.sin, Config(0.1), P("dp"), jnp.float32]
)
def test_everything_else_is_static(value):
    (argument,) = apart(value).arguments
    assert argument.leaves == ()
    assert [s.value for _, s in argument.statics] == [value]


def test_none_is_part_of_the_structure():
    assert apart(None).arguments[0].leaves == apart(None).arguments[0].statics == ()
    assert apart(None).key() != apart(X).key()


def test_leaves_are_named_by_their_path():
    call = apart({"x": X, "deep": [X, 3]}, X, c=X)
    assert [leaf.name for leaf in call.leaves] == ["a/deep/0", "a/x", "b", "c"]


def test_what_is_neither_array_nor_hashable_is_refused_by_its_path():
    with pytest.raises(ArgumentError) as caught:
        apart(X, {"tags": {1, 2}})
    assert str(caught.value) == (
        "[T301] argument 'b/tags' can be neither traced nor held static\n"
        "  got: set, which is no array and has no hash\n"
        "  fix: pass an array, or a value that hashes: a number, a string, a tuple, "
        "a frozen dataclass, a function\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T301.html"
    )


def test_a_dataclass_of_arrays_is_to_be_registered():
    @dataclass
    class State:
        w: jax.Array

    with pytest.raises(ArgumentError, match=r"jax\.tree_util\.register_dataclass"):
        apart(State(X))


# --- when two calls are alike


def test_calls_of_the_same_types_are_alike_whatever_the_numbers():
    assert apart(X, 3, c={"k": X}).key() == apart(X + 1, 3, c={"k": X * 2}).key()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        ("mean", "sum"),
        (X, X.astype(jnp.bfloat16)),
        (X, X[:4]),
        (X, 1.0),
        (jnp.float32(1), jnp.asarray(1.0)),
        ({"a": X}, {"b": X}),
        ((X, X), [X, X]),
    ],
    ids=str,
)
def test_calls_that_need_another_program_are_not_alike(before, after):
    assert apart(before).key() != apart(after).key()


def test_keywords_are_alike_in_any_order():
    assert apart(a=X, b=X[:4]).key() == apart(b=X[:4], a=X).key()
    assert apart(a=X, b=X[:4]).key() != apart(a=X[:4], b=X).key()


def test_a_shape_stands_for_an_array_of_that_shape(dp_mesh):
    shape = jax.ShapeDtypeStruct((8, 2), jnp.float32)
    assert apart(shape).key() == apart(X).key() == apart(np.ones((8, 2), "f4")).key()
    placed = jax.ShapeDtypeStruct(
        (8, 2), jnp.float32, sharding=NamedSharding(dp_mesh.jax, P("dp"))
    )
    assert apart(placed).key() == apart(on(dp_mesh, "dp")).key() != apart(X).key()


def test_layouts_tell_calls_apart_by_what_they_split(dp_mesh):
    assert apart(on(dp_mesh, "dp")).key() != apart(on(dp_mesh)).key()
    assert apart(on(dp_mesh, "dp")).key() == apart(on(dp_mesh, ("dp",), None)).key()


def test_a_call_without_its_numbers_is_alike_and_keeps_no_array():
    call = apart(X, tensor((8, 2), name="t"), {"n": np.ones(3), "k": 3})
    bare = call.abstract()
    assert bare.key() == call.key()
    kinds = [type(leaf.value).__name__ for leaf in bare.leaves]
    assert kinds == ["ShapeDtypeStruct", "DistTensor", "ShapeDtypeStruct"]


# --- parts for the compiled program


def test_the_program_takes_the_arrays_of_an_argument_and_those_of_tensors():
    table = tensor((2,), init="ones", name="table")
    (argument,) = apart((X, 3, table)).arguments
    first, second = argument.own_part()
    assert first is X
    assert isinstance(second, jax.Array)


def test_leaves_of_one_signature_have_one_key(dp_mesh, grid_mesh):
    shapes = [jax.ShapeDtypeStruct((8, 2), dtype) for dtype in (jnp.float32, jnp.int32)]
    leaves = [
        *(X, X + 1, X[:4], X.astype(jnp.bfloat16), jax.device_put(X, jax.devices()[0])),
        *(jax.device_put(X, jax.devices()[1]), on(dp_mesh), on(dp_mesh, "dp")),
        *(on(dp_mesh, ("dp",), None), on(grid_mesh, "dp"), on(grid_mesh, None, "dp")),
        *(np.ones((8, 2), "f4"), np.ones((8, 2), "i4"), np.float32(1), np.int32(1)),
        *(jnp.float32(1), jnp.asarray(1.0), 1.0, -1.0, 0.0, -0.0, 1, True, "1"),
        *(tensor((8, 2)), tensor((8, 2), ShardSpec((0,), ("dp",)), dp_mesh), *shapes),
        *(tensor((6, 2)), tensor((6, 2), dtype="i4")),
        *(jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")),
    ]
    signatures = list(map(leaf_signature, leaves))
    keys = [apart(leaf).key() for leaf in leaves]
    for one, key in zip(signatures, keys, strict=True):
        for other, other_key in zip(signatures, keys, strict=True):
            assert one != other or key == other_key
    assert leaf_signature(X) == leaf_signature(X + 1)
    assert leaf_signature(0.5) == leaf_signature(0.25 * 2)


def test_arguments_are_put_together_again_around_other_arrays():
    call = apart({"x": X, "k": 3}, X, c=X)
    args, kwargs = call.rebuilt([10, 11, 12])
    assert args == ({"x": 10, "k": 3}, 11)
    assert kwargs == {"c": 12}


# --- the mesh that the arrays live on


def test_an_array_carries_the_layout_it_was_given(dp_mesh):
    assert Leaf("x", on(dp_mesh, "dp", None)).layout == (dp_mesh, P("dp"))
    table = tensor((8, 2), ShardSpec(("row",), ("dp",)), dp_mesh)
    assert Leaf("t", table).layout == (dp_mesh, P("dp"))


def test_an_array_that_nobody_placed_carries_none():
    assert Leaf("x", X).layout is None
    assert Leaf("x", np.ones(3)).layout is None
    assert Leaf("x", tensor((3,))).layout is None


def test_an_array_that_was_put_on_a_device_lives_there():
    there = jax.device_put(X, jax.devices()[3])
    mesh, spec = Leaf("x", there).layout
    assert (mesh.device_ids, spec) == ((3,), P())


def test_a_shape_on_a_mesh_without_devices_carries_its_layout(large_mesh):
    sharding = NamedSharding(large_mesh.abstract, P("tp"))
    shape = jax.ShapeDtypeStruct((12, 2), jnp.float32, sharding=sharding)
    assert Leaf("x", shape).layout == (large_mesh, P("tp"))
