# SPDX-License-Identifier: Apache-2.0
"""op.matmul against NumPy, and errors that show both shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import OperandError
from tessera.ops.matmul import matmul
from tessera.shard import ShardSpec, tensor

SIZES = st.integers(1, 3)


def filled(*shape):
    count = int(np.prod(shape, dtype=int))
    return jnp.linspace(-1.0, 1.0, count, dtype=jnp.float32).reshape(shape)


@st.composite
def shapes(draw):
    """Two shapes that numpy may or may not multiply."""
    return (
        tuple(draw(st.lists(SIZES, max_size=4))),
        tuple(draw(st.lists(SIZES, max_size=4))),
    )


@pytest.mark.full
@given(shapes())
def test_it_multiplies_what_numpy_multiplies_and_refuses_the_rest(shapes):
    a, b = filled(*shapes[0]), filled(*shapes[1])
    try:
        expected = np.matmul(np.asarray(a), np.asarray(b))
    except ValueError:
        with pytest.raises(OperandError, match="T401"):
            matmul(a, b)
        return
    np.testing.assert_allclose(matmul(a, b), expected, rtol=1e-5, atol=1e-6)


def test_numpy_arrays_lists_and_lazy_tensors_are_operands():
    table = tensor((3, 2), init="ones", name="t")
    np.testing.assert_array_equal(matmul(np.ones((2, 3), "f4"), table), 3.0)
    np.testing.assert_array_equal(matmul([[1.0, 2.0]], [[1.0], [2.0]]), [[5.0]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_the_result_has_the_operands_dtype(dtype):
    assert matmul(filled(2, 3).astype(dtype), filled(3, 2).astype(dtype)).dtype == dtype


def test_the_product_of_global_arrays_does_not_depend_on_layouts(grid_mesh):
    a, b = filled(8, 8), filled(8, 4)
    for a_spec, b_spec in [(P("dp"), P(None, "tp")), (P(None, "tp"), P("tp"))]:
        placed = (
            jax.device_put(x, NamedSharding(grid_mesh.jax, spec))
            for x, spec in ((a, a_spec), (b, b_spec))
        )
        np.testing.assert_allclose(matmul(*placed), a @ b, rtol=1e-5, atol=1e-6)


def test_it_is_part_of_a_step(dp_mesh):
    w = tensor((8, 4), ShardSpec(("row",), ("dp",)), dp_mesh, init="ones", name="w")
    step = ts.function(lambda x: ts.grad(jnp.sum(matmul(x, w)), w))
    np.testing.assert_allclose(
        step(filled(2, 8)), jnp.broadcast_to(filled(2, 8).sum(0)[:, None], (8, 4))
    )


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (
            (2, 3),
            (4, 5),
            "[T401] matmul cannot contract dims of different sizes\n"
            "  got: shapes (2, 3) and (4, 5): last dim of the first is 3, second-last "
            "dim of the second is 4\n"
            "  fix: transpose one of them, or check which is the weight\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
        ),
        (
            (2, 3),
            (4,),
            "[T401] matmul cannot contract dims of different sizes\n"
            "  got: shapes (2, 3) and (4,): last dim of the first is 3, only dim of "
            "the second is 4\n"
            "  fix: transpose one of them, or check which is the weight\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
        ),
        (
            (2, 1, 3),
            (3, 3, 5),
            "[T401] matmul cannot broadcast the leading dims\n"
            "  got: shapes (2, 1, 3) and (3, 3, 5): leading dims (2,) and (3,)\n"
            "  fix: make them equal, or 1\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
        ),
        (
            (),
            (3,),
            "[T401] matmul takes no scalars\n"
            "  got: shapes () and (3,)\n"
            "  fix: multiply by a scalar with *\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_shown(a, b, text):
    with pytest.raises(OperandError) as caught:
        matmul(filled(*a), filled(*b))
    assert str(caught.value) == text


def test_the_error_comes_while_a_step_is_traced():
    step = ts.function(lambda a, b: matmul(a, b))
    with pytest.raises(OperandError, match="T401"):
        step.trace(filled(2, 3), filled(4, 5))
