# SPDX-License-Identifier: Apache-2.0
"""op.transformer_block against a reference of loops over layers and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph
from tessera.errors import OperandError, ShardDivisibilityError
from tessera.mesh import Mesh
from tessera.ops.transformer_block import transformer_block

X = jax.random.normal(jax.random.key(0), (4, 4, 8))


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def softmax(x):
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def reference(params, x, causal=False):
    """The same blocks in NumPy and f64, one head of one layer at a time."""
    x = np.asarray(x, np.float64)
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params["block"])
    length = x.shape[1]
    hidden = np.triu(np.full((length, length), -np.inf), 1) if causal else 0.0
    for layer in range(len(params["up"])):
        p = {name: value[layer] for name, value in params.items()}
        y, added = norm(x, p["attention_norm"]), 0.0
        for head in range(p["query"].shape[1]):
            q, k, v = (y @ p[name][:, head] for name in ("query", "key", "value"))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
            added += softmax(scores + hidden) @ v @ p["attention_out"][head]
        x = x + added
        x = x + gelu(norm(x, p["mlp_norm"]) @ p["up"]) @ p["down"]
    return x


def filled(step, *args):
    """A step with parameters from NumPy, which cost no compilation."""
    step.trace(*args)
    rng = np.random.default_rng(0)
    step.params = jax.tree.map(
        lambda p: rng.normal(size=p.shape, scale=0.4).astype("f4"), step.params
    )
    return step


def block_step(mesh=None, **sizes):
    """A step that gives the output, the loss and the gradients."""

    @graph.training_step(mesh=mesh)
    def step(x):
        out = transformer_block(x, **sizes)
        loss = jnp.mean(out**2)
        return out, loss, graph.backward(loss)

    return step


# --- what it computes


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param(
            {"depth": 3, "num_heads": 4, "mlp_ratio": 2}, marks=pytest.mark.full
        ),
        {"depth": 2, "num_heads": 2, "causal": True},
    ],
    ids=str,
)
def test_it_agrees_with_the_reference(sizes):
    step = filled(graph.training_step(lambda x: transformer_block(x, **sizes)), X)
    expected = reference(step.params, X, sizes.get("causal", False))
    np.testing.assert_allclose(step(X), expected, rtol=2e-4, atol=1e-4)


def test_a_causal_block_does_not_look_ahead():
    step = filled(
        graph.training_step(lambda x: transformer_block(x, num_heads=2, causal=True)), X
    )
    before, after = np.asarray(step(X)), np.asarray(step(X.at[:, 2:].add(1.0)))
    np.testing.assert_allclose(before[:, :2], after[:, :2], rtol=1e-6)
    assert not np.allclose(before[:, 2:], after[:, 2:])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_output_has_the_dtype_of_the_input_and_parameters_are_f32(dtype):
    step = graph.training_step(lambda x: transformer_block(x, num_heads=2))
    graph_ = step.trace(X.astype(dtype)).graph
    assert graph_.outputs[0].aval.dtype == dtype
    assert {p.dtype for p in jax.tree.leaves(step.params)} == {jnp.dtype("f4")}


def test_heads_have_64_dims_by_default():
    for size, heads in ((8, 1), (64, 1), (128, 2), (192, 3)):
        step = graph.training_step(lambda x: transformer_block(x))
        step.trace(jax.ShapeDtypeStruct((1, 2, size), jnp.float32))
        assert step.params["block"]["query"].shape == (1, size, heads, size // heads)


@pytest.mark.parametrize(
    ("name", "fan_in"), [("query", 32), ("attention_out", 32), ("down", 128)]
)
def test_parameters_begin_at_the_scale_of_their_fan_in(name, fan_in):
    step = graph.training_step(lambda x: transformer_block(x, num_heads=4))
    step.trace(jax.ShapeDtypeStruct((1, 2, 32), jnp.float32))
    values = step.params["block"][name].materialize(jax.random.key(1))
    np.testing.assert_allclose(values.std(), fan_in**-0.5, rtol=0.05)


def test_norms_begin_as_ones():
    step = graph.training_step(lambda x: transformer_block(x))
    step.trace(X)
    assert (step.params["block"]["mlp_norm"].materialize() == 1).all()


# --- on a mesh


MESHES = [
    ((4, 2), ("fsdp", "tp"), P("fsdp")),
    ((8,), ("dp",), P("dp")),
    ((2, 2, 2), ("tp", "fsdp", "dp"), P(("dp", "fsdp"))),
]
BATCH = jnp.concatenate([X, X + 0.5])


@pytest.fixture(scope="module")
def on_one_device():
    step = filled(block_step(depth=2, num_heads=4), BATCH)
    return jax.device_get(step(BATCH))


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "axes", "batch"), MESHES, ids=str)
def test_outputs_and_gradients_are_the_same_on_every_mesh(
    sizes, axes, batch, on_one_device
):
    mesh = Mesh(axes, devices=range(8), shape=sizes)
    step = filled(block_step(mesh, depth=2, num_heads=4), BATCH)
    found = step(BATCH)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        found,
        on_one_device,
    )
    assert step.last.jax.input_shardings[0][0][0].spec == batch
    gradient = found[2]["block"]["up"]
    spec = P(None, *(axis if axis in axes else None for axis in ("fsdp", "tp")))
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh.jax, spec), 3)


def test_over_tp_each_half_of_a_block_ends_in_one_all_reduce():
    mesh = Mesh(["tp"], devices=range(4))
    step = graph.training_step(mesh=mesh)(lambda x: transformer_block(x, num_heads=4))
    rows = step.compile(X).collectives.rows
    assert [(row.kind, row.axes) for row in rows] == [("all-reduce", ("tp",))] * 2


@pytest.mark.full
def test_the_program_does_not_grow_with_depth():
    def size(depth):
        shape = jax.ShapeDtypeStruct((4, 4, 8), jnp.float32)
        return len(block_step(depth=depth, num_heads=2).lower(shape).as_text())

    assert abs(size(24) - size(2)) < 0.02 * size(2)


# --- mistakes


def traced(x, **sizes):
    return ts.function(lambda x: transformer_block(x, **sizes)).trace(x)


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (jnp.ones((4, 8)), "shape (4, 8), dtype float32"),
        (jnp.ones((1, 4, 8), jnp.int32), "shape (1, 4, 8), dtype int32"),
    ],
)
def test_activations_have_a_batch_a_sequence_and_features(x, got):
    with pytest.raises(OperandError) as caught:
        traced(x)
    assert str(caught.value) == (
        "[T401] transformer_block takes activations of shape [batch, sequence, "
        "features]\n"
        f"  got: {got}\n"
        "  fix: embed token ids first, and add a batch dim to single sequences\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_heads_that_do_not_divide_the_features():
    with pytest.raises(OperandError) as caught:
        traced(X, num_heads=3)
    assert str(caught.value) == (
        "[T401] the heads of transformer_block do not divide its features\n"
        "  got: 8 features, 3 heads, remainder 2\n"
        "  fix: use num_heads=2 or 4\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


@pytest.mark.parametrize("size", ["depth", "num_heads", "mlp_ratio"])
def test_sizes_are_positive(size):
    with pytest.raises(OperandError) as caught:
        traced(X, **{size: 0})
    assert str(caught.value) == (
        f"[T401] {size} of transformer_block is not positive\n"
        f"  got: {size}=0\n"
        f"  fix: use {size}=1 or more\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_heads_that_the_mesh_does_not_divide(grid_mesh):
    with pytest.raises(ShardDivisibilityError) as caught, grid_mesh:
        traced(X, num_heads=2)
    assert str(caught.value) == (
        "[T201] tensor 'block/query' cannot be split evenly over mesh axes ('tp',)\n"
        "  got: shape (1, 8, 2, 4), dim 2 = 2, axis size 4\n"
        "  fix: use 4, or drop 'tp' from the spec\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )
