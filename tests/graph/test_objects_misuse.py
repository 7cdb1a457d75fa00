# SPDX-License-Identifier: Apache-2.0
"""NNX objects that a program cannot take or change, and what the errors say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import (
    ArgumentError,
    KernelError,
    StrategyError,
    WriteBackError,
)
from tests.graph.nnx_modules import (
    Block,
    X,
    block,
    check_equal,
    state_of,
)


class Unlike:
    """Has no hash, and is not equal to a copy of it."""

    def __eq__(self, other):
        return self is other


def test_a_static_attribute_that_cannot_be_compared_is_refused():
    """One that is changed in place would be taken for what it was."""

    class Holder(nnx.Module):
        def __init__(self):
            self.config = nnx.static(Unlike())

    with pytest.raises(ArgumentError) as caught:
        ts.function(lambda model, x: x)(Holder(), X)
    assert str(caught.value) == (
        "[T301] a static attribute of 'model' cannot be told from others\n"
        "  got: unhashable type: 'Unlike', in a Holder\n"
        "  fix: make it a value that hashes, such as a tuple, or nnx.data(...)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T301.html"
    )


def test_an_object_in_a_users_own_tree_changes_and_the_tree_does_not():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        model: nnx.Module
        steps: jax.Array

    @ts.function
    def step(state, x):
        state.model(x)
        return dataclasses.replace(state, steps=state.steps + 1)

    @ts.function
    def assign(state):
        state.steps = state.steps + 1

    model = block()
    state = State(model, jnp.int32(0))
    new = step(state, X)
    assert new.model is model
    assert (new.steps, state.steps, model.calls.get_value()) == (1, 0, 1)
    with pytest.raises(WriteBackError, match="a State among the arguments was changed"):
        assign(state)


def test_another_variable_in_a_state_is_refused():
    @ts.function
    def body(state):
        state["up"]["bias"] = nnx.Param(jnp.ones(8))

    with pytest.raises(WriteBackError) as caught:
        body(nnx.state(block(), nnx.Param))
    assert str(caught.value) == (
        "[T320] a State among the arguments was changed, and cannot be given back\n"
        "  got: another object in the place of one that it held\n"
        "  fix: return it, or change the objects that it holds\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T320.html"
    )


def test_a_returned_state_is_the_way_that_the_refusal_names():
    @ts.function
    def body(state):
        state = jax.tree.map(lambda leaf: leaf, state)
        state["up"]["bias"] = nnx.Param(jnp.ones(8))
        return state

    state = body(nnx.state(block(), nnx.Param))
    np.testing.assert_array_equal(state["up"]["bias"][...], np.ones(8))


def test_another_object_in_the_place_of_an_entry_is_refused():
    @ts.function
    def body(state):
        state["model"] = nnx.clone(state["model"])

    with pytest.raises(WriteBackError) as caught:
        body({"model": block()})
    assert str(caught.value) == (
        "[T320] 'model' of a dict among the arguments was an object, and is another "
        "one\n"
        "  got: a Block before\n"
        "  fix: return the new object, or change the one that is there\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T320.html"
    )


def test_a_module_that_is_closed_over_is_not_changed():
    model = block()
    before = state_of(model)

    @ts.function
    def forward(x):
        return model(x)

    with pytest.raises(WriteBackError) as caught:
        forward(X)
    line = Block.__call__.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        "[T320] an NNX object was changed, and cannot be given back\n"
        "  got: Cannot mutate Variable from a different trace level\n"
        f"  got: at {Block.__call__.__code__.co_filename}:{line}\n"
        "  fix: pass it to the function as an argument, where it is closed over\n"
        "  fix: in a loop, a branch or a transformation use Flax's own: nnx.scan, "
        "nnx.cond, nnx.vmap\n"
        "  fix: in a stage of a pipeline return what is new\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T320.html"
    )
    check_equal(state_of(model), before)


def test_a_kernel_takes_the_arrays_of_a_module(dp_mesh):
    @ts.op.kernel
    def project(layer, x):
        return x @ layer

    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(KernelError) as caught:
        project(layer, X)
    assert str(caught.value) == (
        "[T208] a kernel is for arrays, and 'layer' holds NNX objects\n"
        "  got: a Linear\n"
        "  fix: pass its arrays: layer.kernel[...]\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T208.html"
    )
    rows = jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp")))
    found = project(layer.kernel[...], rows)
    np.testing.assert_allclose(found, X @ layer.kernel[...], atol=1e-6)


def test_tensor_parallel_takes_the_arrays_of_a_module():
    mesh = ts.Mesh(["tp"], devices=range(2))

    @ts.function(mesh=mesh)
    @ts.distribute("tensor_parallel")
    def whole(x: ts.Tensor["B", "D_in"], layer):  # noqa: F821
        return layer(x)

    layer = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(StrategyError) as caught:
        whole(X, layer)
    assert str(caught.value) == (
        "[T313] strategy 'tensor_parallel' does not know the dims of the arrays in "
        "'layer'\n"
        "  got: a Linear, which no annotation describes\n"
        '  fix: give \'whole\' its arrays: kernel: ts.Tensor["D_in", "D_out"], and '
        "layer.kernel[...] in the call\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T313.html"
    )

    @ts.function(mesh=mesh)
    @ts.distribute("tensor_parallel")
    def of_arrays(
        x: ts.Tensor["B", "D_in"],  # noqa: F821
        kernel: ts.Tensor["D_in", "D_out"],  # noqa: F821
    ) -> ts.Tensor["B", "D_out"]:  # noqa: F821
        return x @ kernel

    np.testing.assert_allclose(of_arrays(X, layer.kernel[...]), layer(X), atol=1e-6)
