# SPDX-License-Identifier: Apache-2.0
"""Tensors that devices store padded: steps compute with their own numbers alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph, op
from tessera.errors import ShardDivisibilityError
from tessera.mesh import Mesh
from tessera.shard import stored_tensor

ROWS = dist.ShardSpec(("row",), ("dp",), uneven="pad")
# Below zero, so that a zero of the padding would be the largest.
NUMBERS = -1 - np.random.default_rng(0).random((10, 3), np.float32)


def tensor(mesh, values=NUMBERS, spec=ROWS, name="W"):
    def init(key, shape, dtype):
        return jnp.asarray(values, dtype)

    return dist.tensor(values.shape, spec, mesh, init=init, name=name)


def poisoned(mesh, spec, values=NUMBERS):
    """A tensor with nan in the place of its padding."""
    layout = spec.resolve(values.shape, mesh)
    whole = dist.tensor(values.shape, spec, mesh).stored_shape
    more = [(0, to - size) for size, to in zip(values.shape, whole, strict=True)]
    filled = np.pad(values, more, constant_values=np.nan)
    array = jax.device_put(filled, NamedSharding(mesh.jax, layout))
    return stored_tensor(array, values.shape, layout, mesh)


# --- what is computed

COMPUTED = {
    "sum": lambda w: w.sum(),
    "sum of rows": lambda w: w.sum(0),
    "mean": lambda w: w.mean(),
    "mean of rows": lambda w: w.mean(0),
    "max": lambda w: w.max(0),
    "min": lambda w: (-w).min(0),
    "prod": lambda w: w.prod(0),
    "norm": jnp.linalg.norm,
    "std": lambda w: w.std(0),
    "softmax": lambda w: jax.nn.softmax(w, 0),
    "logsumexp": lambda w: jax.nn.logsumexp(w, 0),
    "argmax": lambda w: w.argmax(0),
    "sort": lambda w: jnp.sort(w, 0),
    "cumsum": lambda w: jnp.cumsum(w, 0),
    "reversed": lambda w: w[::-1],
    "rolled": lambda w: jnp.roll(w, 3, 0),
    "transposed product": lambda w: w.T @ w,
    "product": lambda w: w @ w.T,
    "flat": lambda w: w.reshape(-1),
    "joined": lambda w: jnp.concatenate([w, w]),
    "count": lambda w: (w < 0).sum(),
    "rows by number": lambda w: w[jnp.array([9, 0])],
    "scanned": lambda w: lax.scan(lambda c, row: (c + row, row), w[0], w),
    "gradient": jax.grad(lambda w: (jax.nn.softmax(w, 0) * w).sum()),
}


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("axes", "sizes"),
    [(("dp", None), (8,)), ((("y", "x"), None), (4, 2)), (("x", "y"), (4, 2))],
)
def test_padding_is_in_no_value_that_a_step_computes(axes, sizes):
    names = ["dp"] if len(sizes) == 1 else ["x", "y"]
    mesh = Mesh(names, devices=range(8), shape=sizes)
    spec = dist.ShardSpec((0, 1), axes, uneven="pad")

    @ts.function
    def step(w):
        return {name: compute(w) for name, compute in COMPUTED.items()}

    found = step(poisoned(mesh, spec))
    for name, compute in COMPUTED.items():
        wanted = compute(jnp.asarray(NUMBERS))
        jax.tree.map(
            lambda a, b, name=name: np.testing.assert_allclose(
                a, b, rtol=1e-4, atol=1e-5, err_msg=name
            ),
            found[name],
            wanted,
        )


def test_a_padded_tensor_is_not_taken_for_an_array_of_the_padding_s_shape(dp_mesh):
    """Devices store both alike, so that one program would take either."""
    small, large = tensor(dp_mesh), tensor(dp_mesh, NUMBERS[:9])
    array = jax.device_put(
        np.ones((16, 3), np.float32), NamedSharding(dp_mesh.jax, P("dp"))
    )
    wanted = {10: NUMBERS.sum(), 9: NUMBERS[:9].sum(), 16: 48.0}
    for order in ((small, array, large, small), (array, small, array), (large, small)):
        total = ts.function(lambda x: x.sum())
        for given in order:
            np.testing.assert_allclose(total(given), wanted[len_of(given)], rtol=1e-6)


def len_of(given):
    return given.shape[0]


def test_a_captured_tensor_trains_as_on_one_device(dp_mesh):
    weight = tensor(dp_mesh)
    rng = np.random.default_rng(1)
    batch = {
        "input": rng.standard_normal((8, 10)).astype(np.float32),
        "labels": np.arange(8, dtype=np.int32) % 3,
    }

    @graph.training_step
    def step(batch):
        loss = op.cross_entropy(op.matmul(batch["input"], weight), batch["labels"])
        return graph.backward(loss), {"loss": loss}

    def plain(w):
        logs = jax.nn.log_softmax(batch["input"] @ w)
        return -jnp.take_along_axis(logs, batch["labels"][:, None], 1).mean()

    @ts.function(out_specs=ROWS)
    def update(params, gradients):
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)

    own = jnp.asarray(NUMBERS)
    for _ in range(3):
        gradients, metrics = step(batch)
        loss, slope = jax.value_and_grad(plain)(own)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(gradients["W"], slope, rtol=1e-4, atol=1e-6)
        assert gradients["W"].stored_shape == (16, 3)
        step.params = update(step.params, gradients)
        own = own - 0.5 * slope
    np.testing.assert_allclose(step.params["W"], own, rtol=1e-5)
    assert step.num_programs() == 1


def test_assigned_parameters_are_stored_padded(dp_mesh):
    weight = tensor(dp_mesh)

    @graph.training_step
    def step(x):
        return x @ weight

    x = np.eye(8, 10, dtype=np.float32)
    step(x)
    other = NUMBERS * 2
    for assigned in (other, jnp.asarray(other), tensor(dp_mesh, other)):
        step.params = {"W": assigned}
        np.testing.assert_allclose(step(x), other[:8], rtol=1e-6)
        assert step.params["W"].is_padded
    first = np.asarray(step.init(jax.random.key(0))["W"])
    assert first.shape == (10, 3)


# --- results


def test_a_result_that_is_declared_so_is_a_tensor_and_goes_on(dp_mesh):
    doubled = ts.function(lambda w: w * 2.0, out_specs=ROWS)
    once = doubled(tensor(dp_mesh))
    assert isinstance(once, dist.DistTensor)
    assert (once.shape, once.stored_shape, once.local_shape) == (
        (10, 3),
        (16, 3),
        (2, 3),
    )
    np.testing.assert_array_equal(doubled(once), NUMBERS * 4)
    assert doubled.num_programs() == 1
    assert jax.block_until_ready({"w": once})["w"] is once


def test_a_result_beside_others_is_a_tensor(dp_mesh):
    def body(w):
        return {"w": w - 1.0, "sum": w.sum(), "name": "w"}

    step = ts.function(body, out_specs={"w": ROWS, "sum": P(), "name": None})
    found = step(tensor(dp_mesh))
    np.testing.assert_array_equal(found["w"], NUMBERS - 1)
    np.testing.assert_allclose(found["sum"], NUMBERS.sum(), rtol=1e-6)
    assert found["name"] == "w"


def test_what_is_handed_through_or_written_back_stays_padded(dp_mesh):
    weight = tensor(dp_mesh)
    state = {"w": weight}

    def write(state):
        state["w"] = state["w"] * 2.0

    ts.function(write)(state)
    np.testing.assert_array_equal(state["w"], NUMBERS * 2)
    assert state["w"].is_padded
    assert ts.function(lambda w: w)(weight).is_padded


def test_inside_a_function_that_jax_traces_values_are_arrays(dp_mesh):
    weight = tensor(dp_mesh)
    product = ts.function(
        lambda x: {"y": x @ weight, "w": weight * 2.0}, out_specs={"y": P(), "w": ROWS}
    )
    x = jnp.ones((2, 10))
    found = jax.jit(lambda x: jax.tree.map(jnp.sum, product(x)))(x)
    np.testing.assert_allclose(found["y"], 2 * NUMBERS.sum(), rtol=1e-6)
    np.testing.assert_allclose(found["w"], 2 * NUMBERS.sum(), rtol=1e-6)


# --- what it looks like


def test_the_block_of_each_device_and_the_padding_are_shown(dp_mesh):
    weight = tensor(dp_mesh)
    text = str(dist.inspect(weight))
    assert "padded      stored as float32[16, 3]" in text
    assert "4       4   [8:10, 0:3]" in text
    assert "7       7   [10:10, 0:3]" in text
    assert "120 B global, 24 B per device" in text
    assert "stored as [16, 3]" in repr(weight)
    traced = ts.function(lambda w: w.sum()).trace(weight).as_text()
    assert "w: float32[10,3] over P('dp',), stored as [16, 3]" in traced


def test_a_tensor_is_planned_for_devices_that_do_not_divide_it():
    mesh = Mesh(["tp", "pp", "dp"], devices=range(72), shape=(6, 4, 3))
    spec = dist.ShardSpec(("row", "col"), ("tp", "pp"), uneven="pad")
    weight = dist.tensor((100_000, 100_001), spec, mesh)
    assert weight.local_shape == (16_667, 25_001)
    step = ts.function(lambda x: (x @ weight).sum(), mesh=mesh, in_specs={"x": P("dp")})
    compiled = step.compile(jax.ShapeDtypeStruct((36, 100_000), jnp.float32))
    assert compiled.memory.arguments == 4 * (16_667 * 25_001 + 12 * 100_000)
    assert {row.kind for row in compiled.collectives.rows} == {"all-reduce"}


def test_a_loss_over_a_vocabulary_that_does_not_divide(dp_mesh):
    table = np.random.default_rng(2).standard_normal((11, 4)).astype(np.float32)
    weight = tensor(dp_mesh, table, name="table")
    hidden, labels = jnp.ones((8, 4)), jnp.arange(8) % 11

    @graph.training_step
    def step(hidden, labels):
        return op.fused_linear_cross_entropy(hidden, weight, labels)

    logs = jax.nn.log_softmax(hidden @ table.T)
    wanted = -logs[jnp.arange(8), labels].mean()
    np.testing.assert_allclose(step(hidden, labels), wanted, rtol=1e-5)


def test_what_divides_is_stored_as_it_is(dp_mesh):
    even = dist.tensor((16, 3), ROWS, dp_mesh, init="ones")
    assert not even.is_padded
    assert even.materialize().sharding.spec == P("dp")
    doubled = ts.function(lambda w: w * 2.0, out_specs=ROWS)(even)
    assert isinstance(doubled, jax.Array)


# --- where nothing can be padded

GOT = "  got: shape (10, 3), dim 0 = 10, axis size 8\n"
SIZES = "  fix: use 8 or 16, or drop 'dp' from the spec\n  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"


def with_constraint(w, mesh):
    return lax.with_sharding_constraint(w * 2.0, NamedSharding(mesh.jax, P("dp")))


REFUSED = {
    "a sum outside of a step": (
        lambda w, mesh: w.sum(),
        "tensor 'W' is stored padded, as no jax.Array can be",
        "  fix: use it in a step, or take its numbers to the host: np.asarray(…)\n",
    ),
    "an operand outside of a step": (
        lambda w, mesh: w + 1.0,
        "tensor 'W' is stored padded, as no jax.Array can be",
        "  fix: use it in a step, or take its numbers to the host: np.asarray(…)\n",
    ),
    "an argument of jit": (
        lambda w, mesh: jax.jit(jnp.sin)(w),
        "tensor 'W' is stored padded, as no jax.Array can be",
        "  fix: use it in a step, or take its numbers to the host: np.asarray(…)\n",
    ),
    "a collective": (
        lambda w, mesh: dist.all_reduce(w, "dp"),
        "a collective takes blocks of one size, and an array is stored padded",
        "",
    ),
    "a collective in a step": (
        lambda w, mesh: ts.function(lambda w: dist.all_gather(w, "dp"))(w),
        "a collective takes blocks of one size, and an array is stored padded",
        "",
    ),
    "a kernel": (
        lambda w, mesh: op.kernel(lambda w: w.sum())(w),
        "a kernel takes blocks of one size, and an array is stored padded",
        "",
    ),
    "a kernel with layouts": (
        lambda w, mesh: op.kernel(lambda x: x.sum(), layouts={"x": ROWS})(NUMBERS),
        "a kernel takes blocks of one size",
        "",
    ),
    "a sharding for JAX": (
        lambda w, mesh: ROWS.named((10, 3), mesh),
        "no jax.Array can be stored padded",
        "",
    ),
    "an argument that is an array": (
        lambda w, mesh: ts.function(jnp.sin, mesh=mesh, in_specs={"x": ROWS})(NUMBERS),
        "'x' cannot be stored padded, as a dist.tensor can",
        "  fix: pass a dist.tensor that has the layout\n",
    ),
    "a result that a constraint lays out": (
        lambda w, mesh: ts.function(lambda w: with_constraint(w, mesh))(w),
        "a constraint lays out output 'result', and pads nothing",
        "  fix: declare it: out_specs=ShardSpec(…, uneven='pad')\n",
    ),
}


@pytest.mark.parametrize(("call", "what", "fix"), REFUSED.values(), ids=REFUSED)
def test_where_nothing_can_be_padded_it_is_refused(dp_mesh, call, what, fix):
    with dp_mesh, pytest.raises(ShardDivisibilityError) as caught:
        call(tensor(dp_mesh), dp_mesh)
    assert str(caught.value) == f"[T201] {what}\n{GOT}{fix}{SIZES}"


def test_explicit_axes_pad_nothing():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ShardDivisibilityError, match="cannot be split evenly"):
        dist.tensor((10, 3), ROWS, Mesh.of(mesh))


def test_a_pipeline_takes_no_padded_weights():
    mesh = Mesh(["pp", "dp"], devices=range(8), shape=(2, 4))
    weight = dist.tensor((6, 6), dist.ShardSpec((0,), ("dp",), "pad"), mesh, name="w")

    @graph.stage("first")
    def first(x):
        return x @ weight

    @graph.stage("second")
    def second(x):
        return jnp.tanh(x)

    @graph.pipeline(stages=[first, second], mesh=mesh)
    def model(x):
        return second(first(x))

    with pytest.raises(ShardDivisibilityError, match="a pipeline takes even blocks"):
        model.trace(jax.ShapeDtypeStruct((8, 6), jnp.float32))
