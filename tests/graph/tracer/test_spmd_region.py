# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F821 - dims are strings, which ruff takes for names
"""tensor_parallel: layers whose devices have blocks of weights, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist
from tessera.errors import (
    ShardDivisibilityError,
    StrategyError,
    UnknownAxisError,
)
from tessera.graph.tracer.spmd_region import Split, split_of

DRAW = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(DRAW.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


X, WEIGHT, BIAS = normal(2, 3, 8), normal(8, 12), normal(12)
HIDDEN, QKV, OUT = normal(2, 6, 16), normal(16, 48), normal(16, 16)
HEADS = 4

split = ts.distribute(strategy="tensor_parallel", mesh_axes=["tp"])


@split
def linear(
    x: ts.Tensor["B", "S", "D_in", ts.f32],
    weight: ts.Tensor["D_in", "D_out", ts.f32],
    bias: ts.Tensor["D_out", ts.f32] = None,
) -> ts.Tensor["B", "S", "D_out", ts.f32]:
    part = x @ weight
    if bias is not None:
        part = part + bias
    return dist.all_gather(part, axis="tp")


def attention_on(x, w_qkv, w_out, heads, devices):
    rows, length, width = x.shape
    own, size = heads // devices, width // heads
    q, k, v = (
        part.reshape(rows, length, own, size).swapaxes(1, 2)
        for part in jnp.split(x @ w_qkv, 3, axis=-1)
    )
    scores = q @ k.swapaxes(-1, -2) / jnp.float32(size) ** 0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    out = jax.nn.softmax(scores) @ v
    return out.swapaxes(1, 2).reshape(rows, length, -1) @ w_out


@split
def attention(
    x: ts.Tensor["B", "S", "D", ts.f32],
    w_qkv: ts.Tensor["D", "3*D_head*H", ts.f32],
    w_out: ts.Tensor["D_head*H", "D", ts.f32],
    num_heads: int,
) -> ts.Tensor["B", "S", "D", ts.f32]:
    part = attention_on(x, w_qkv, w_out, num_heads, ts.mesh.current().size)
    return dist.all_reduce(part, axis="tp")


def tp_mesh(size):
    return dist.Mesh(axes=["tp"], devices=range(size))


def assert_alike(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5),
        found,
        expected,
    )


def test_the_array_whose_dims_are_whole_may_be_named():
    """By its place, the weight's dims would be, and rows would be added up."""

    @ts.distribute("tensor_parallel", batch="x")
    def mean_of(
        weight: ts.Tensor["F", "D", ts.f32], x: ts.Tensor["B", "D", ts.f32]
    ) -> ts.Tensor["F", ts.f32]:
        return (x @ weight.T).mean(0)

    weight, x = normal(6, 4), normal(8, 4)
    with tp_mesh(2):
        assert_alike(mean_of(weight, x), (x @ weight.T).mean(0))
        traced = mean_of.trace(weight, x)
    assert [v.spec for v in traced.graph.inputs] == [P("tp"), P()]


def test_roles_that_it_does_not_use_are_refused():
    with pytest.raises(StrategyError, match="goes by annotations, and by one array"):
        ts.distribute("tensor_parallel", params="weight")(linear.body)


# --- the results and gradients of one device


def in_jax(x, weight, bias=None):
    return x @ weight if bias is None else x @ weight + bias


FULL = pytest.mark.full
SIZES = [pytest.param(1, marks=FULL), 2, pytest.param(4, marks=FULL)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given", [(X, WEIGHT), (X, WEIGHT, BIAS)])
def test_columns_of_a_layer(size, given):
    def trained(function):
        @ts.function
        def step(*given):
            out = function(*given)
            return out, ts.grad(jnp.sum(jnp.sin(out)), given)

        return step

    with tp_mesh(size):
        found = trained(linear)(*given)
        assert_alike(linear(*given), in_jax(*given))
    assert_alike(found, trained(in_jax)(*given))


@pytest.mark.full
@pytest.mark.parametrize("size", SIZES)
def test_heads_of_attention(size):
    @ts.function
    def step(function, *given):
        out = function(*given, HEADS)
        return out, ts.grad(jnp.sum(jnp.sin(out)), given)

    def alone(x, w_qkv, w_out, heads):
        return attention_on(x, w_qkv, w_out, heads, 1)

    given = HIDDEN, QKV, OUT
    with tp_mesh(size):
        assert_alike(attention(*given, HEADS), alone(*given, HEADS))
        found = step(attention, *given)
    assert_alike(found, step(alone, *given))


def test_a_layer_sends_what_it_says_and_nothing_else():
    with tp_mesh(4):
        kinds = [
            c.kind for c in attention.compile(HIDDEN, QKV, OUT, HEADS).collectives.rows
        ]
        assert kinds == ["all-reduce"]
        kinds = [c.kind for c in linear.compile(X, WEIGHT).collectives.rows]
        assert kinds == ["all-gather"]


@pytest.mark.full
def test_beside_an_axis_that_splits_the_batch(grid_mesh):
    def step(x, w_qkv, w_out):
        loss = jnp.mean(attention(x, w_qkv, w_out, HEADS) ** 2)
        return loss, ts.grad(loss, (w_qkv, w_out))

    def in_jax(x, w_qkv, w_out):
        def loss(w_qkv, w_out):
            return jnp.mean(attention_on(x, w_qkv, w_out, HEADS, 1) ** 2)

        return jax.value_and_grad(loss, (0, 1))(w_qkv, w_out)

    step = ts.function(mesh=grid_mesh, in_specs={"x": P("dp")})(step)
    assert_alike(step(HIDDEN, QKV, OUT), in_jax(HIDDEN, QKV, OUT))


def test_columns_then_rows_need_no_gather():
    @split
    def mlp(
        x: ts.Tensor["B", "D"],
        up: ts.Tensor["D", "F"],
        down: ts.Tensor["F", "D"],
    ) -> ts.Tensor["B", "D"]:
        assert up.shape == (8, 3)
        return dist.all_reduce(jnp.tanh(x @ up) @ down, axis="tp")

    with tp_mesh(4):
        found = mlp(X[0], WEIGHT, WEIGHT.T)
    assert_alike(found, jnp.tanh(X[0] @ WEIGHT) @ WEIGHT.T)


@pytest.mark.slow(reason="the one whole step in an SPMD region")
def test_a_whole_step_on_blocks():
    @split
    def step(
        x: ts.Tensor["B", "D"],
        up: ts.Tensor["D", "F"],
        down: ts.Tensor["F", "D"],
    ) -> tuple[ts.Tensor[()], ts.Tensor["D", "F"], ts.Tensor["F", "D"]]:
        out = dist.all_reduce(jnp.tanh(x @ up) @ down, axis="tp")
        loss = jnp.mean(out**2)
        slopes = ts.grad(loss, (up, down))
        return loss, up - 0.1 * slopes[0], down - 0.1 * slopes[1]

    def loss_of(weights):
        return jnp.mean((jnp.tanh(X[0] @ weights[0]) @ weights[1]) ** 2)

    weights = WEIGHT, WEIGHT.T
    loss, slopes = jax.value_and_grad(loss_of)(weights)
    with tp_mesh(4):
        found = step(X[0], *weights)
        step(X[0], *found[1:])  # which are laid out as they are taken
    trained = [w - 0.1 * s for w, s in zip(weights, slopes, strict=True)]
    assert_alike(found, (loss, *trained))
    assert [w.sharding.spec for w in found[1:]] == [P(None, "tp"), P("tp")]
    assert step.num_programs() == 1


def test_results_that_are_split_are_put_together_by_their_annotation():
    @split
    def projected(
        x: ts.Tensor["B", "D"], w: ts.Tensor["D", "3*F"]
    ) -> tuple[ts.Tensor["B", "3*F"], ts.Tensor["F"], str]:
        part = x @ w
        assert part.shape[1] == 3
        return part, part[0, :1], "name"

    with tp_mesh(4):
        whole, row, name = projected(X[0], WEIGHT)
    assert_alike(whole, X[0] @ WEIGHT)
    assert_alike(row, (X[0] @ WEIGHT)[0, :4])
    assert name == "name"


def test_trees_of_arrays_are_annotated_by_their_containers():
    @split
    def summed(x: ts.Tensor["D"], weights: dict[str, ts.Tensor["D", "F"]]):
        parts = [x @ weight for weight in weights.values()]
        return {"sum": dist.all_gather(sum(parts), axis="tp")}

    with tp_mesh(2):
        found = summed(X[0, 0], {"a": WEIGHT, "b": WEIGHT})
    assert_alike(found["sum"], 2 * X[0, 0] @ WEIGHT)


def test_the_mesh_inside_is_that_of_the_strategys_axes(grid_mesh):
    @split
    def ranked(x: ts.Tensor["B"], w: ts.Tensor["F"]) -> ts.Tensor["F"]:
        mesh = ts.mesh.current()
        assert mesh.axes == ("tp",)
        assert mesh.size == 4
        return jnp.full_like(w, mesh.rank)

    with grid_mesh:
        assert ranked(X[0, 0], BIAS)[::3].tolist() == [0, 1, 2, 3]


def test_a_condition_on_what_is_traced_is_taken_per_device():
    @split
    def stepped(x: ts.Tensor["B"], w: ts.Tensor["F"]) -> ts.Tensor["F"]:
        out = w
        if ts.mesh.current().rank > 1:
            out = w * 2.0
        return out + jnp.sum(x)

    x = X[0, 0]
    with tp_mesh(4):
        found = ts.function(stepped)(x, BIAS)
    expected = jnp.concatenate([BIAS[:6], BIAS[6:] * 2.0]) + jnp.sum(x)
    assert_alike(found, expected)


# --- layouts and meshes


def test_weights_lie_as_the_devices_need_them(dp_mesh):
    with tp_mesh(4):
        graph = linear.trace(X, WEIGHT, BIAS).graph
    specs = {value.name: value.spec for value in graph.inputs}
    assert specs == {"x": P(), "weight": P(None, "tp"), "bias": P("tp")}


def test_an_array_keeps_the_layout_that_it_comes_with():
    mesh = tp_mesh(2)
    rows = jax.device_put(WEIGHT, NamedSharding(mesh.jax, P("tp")))
    traced = linear.trace(X, rows)
    assert traced.graph.inputs[1].spec == P("tp")
    assert_alike(linear(X, rows), X @ WEIGHT)


def test_without_a_mesh_it_takes_every_device():
    weight = normal(8, 16)
    assert linear(X, weight).sharding.mesh.shape == {"tp": 8}
    outer = ts.function(lambda x, w: linear(x, w) * 2.0)
    assert_alike(outer(X, weight), 2.0 * (X @ weight))
    assert outer.last.traced.graph.mesh.shape == {"tp": 8}


def test_inside_of_a_kernel_it_runs_on_the_blocks_there():
    mesh = tp_mesh(2)

    @ts.op.kernel(layouts={"w": dist.ShardSpec((1,), ("tp",))})
    def doubled(x, w):
        @split
        def columns(x: ts.Tensor["B", "D"], w: ts.Tensor["D", "F"]):
            return dist.all_gather(x @ w, axis="tp")

        return columns(x, w) * 2.0

    with mesh:
        assert_alike(doubled(X[0], WEIGHT), 2.0 * (X[0] @ WEIGHT))


@pytest.mark.parametrize(
    ("names", "common", "expected"),
    [
        (("D", "F"), ("B", "D"), Split(1)),
        (("H", "D_head", "D"), ("B", "D"), Split(0)),
        (("D", "2*F"), ("D",), Split(1, 2)),
        (("D", "D+1", "8", "_", "..."), ("D",), None),
        (("...", "F"), ("D",), Split(1)),
    ],
)
def test_the_first_dim_with_symbols_of_its_own_is_split(names, common, expected):
    assert split_of(names, common) == expected


# --- mistakes


def message_of(kind, function, *args):
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


def test_a_mesh_without_the_axis_is_refused(dp_mesh):
    with dp_mesh:
        text = message_of(UnknownAxisError, linear, X, WEIGHT)
    assert (
        "strategy 'tensor_parallel' is for an axis 'tp', which the mesh lacks" in text
    )
    with dp_mesh:
        outer = ts.function(lambda x, w: linear(x, w))
        assert "which the mesh lacks" in message_of(UnknownAxisError, outer, X, WEIGHT)


def test_a_dim_that_the_axis_does_not_divide_is_refused():
    @split
    def fused(x: ts.Tensor["S", "D"], w_qkv: ts.Tensor["D", "3*D_head*H"]):
        return dist.all_gather(x @ w_qkv, axis="tp")

    with tp_mesh(8):
        text = message_of(ShardDivisibilityError, linear, X, WEIGHT)
        assert "argument 'weight' cannot be split evenly" in text
        qkv = QKV[:, :36]
        text = message_of(ShardDivisibilityError, fused, HIDDEN[0], qkv)
    assert text == (
        "[T201] argument 'w_qkv' cannot be split evenly over mesh axes ('tp',)\n"
        "  got: shape (16, 36), dim 1 = 36 in 3 blocks, axis size 8\n"
        "  fix: use 24 or 48, or a smaller axis\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )


def test_arrays_without_named_dims_are_refused():
    @split
    def loose(x: ts.Tensor["B", "D"], weight, scale):
        return x @ weight * scale

    with tp_mesh(2):
        text = message_of(StrategyError, loose, X[0], WEIGHT, jnp.float32(1))
    assert text == (
        "[T313] strategy 'tensor_parallel' does not know the dims of 'weight'\n"
        "  got: arguments of 'loose' without an annotation\n"
        '  fix: annotate every array: weight: ts.Tensor["D_in", "D_out"]\n'
        "  fix: a dim whose symbol the first array lacks is split, others are not\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T313.html"
    )


def test_a_function_without_anything_to_split_is_refused():
    @split
    def square(x: ts.Tensor["B", "D"], weight: ts.Tensor["D", "D"]):
        return x @ weight

    with tp_mesh(2):
        text = message_of(StrategyError, square, X[0], normal(8, 8))
    assert "finds nothing to split in 'square'\n  got: x: B D, weight: D D" in text


def test_parts_that_nobody_adds_up_are_refused():
    @split
    def forgetful(
        x: ts.Tensor["B", "F"], weight: ts.Tensor["E", "F"]
    ) -> ts.Tensor["B"]:
        return jnp.sum(x @ weight.T, axis=1)

    with tp_mesh(2):
        assert message_of(StrategyError, forgetful, X[0], WEIGHT.T) == (
            "[T313] 'result' of 'forgetful' differs from device to device along 'tp'\n"
            "  got: a block of shape (3,), annotated with B\n"
            "  fix: add the devices' parts up with ts.distributed.all_reduce, or join "
            "them with all_gather\n"
            "  fix: or annotate the result with the dim that is split\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T313.html"
        )


def test_writing_into_an_argument_is_refused():
    @split
    def writing(x: ts.Tensor["B", "D"], state: dict[str, ts.Tensor["D", "F"]]):
        state["w"] = state["w"] * 2.0
        return x

    with tp_mesh(2):
        text = message_of(StrategyError, writing, X[0], {"w": WEIGHT})
    assert "'writing' writes into its arguments" in text
