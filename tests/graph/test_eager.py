# SPDX-License-Identifier: Apache-2.0
"""``jax.disable_jit()`` and ``jax.debug_nans``: as with ``jax.jit``, op by op."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph, op
from tessera.errors import OutsideTraceError, UnconnectedGradientError, WriteBackError
from tessera.shard import ShardSpec, tensor
from tessera.tracing import scope

pytestmark = pytest.mark.usefixtures("optimized")

X = jnp.linspace(-1.0, 1.5, 8, dtype=jnp.float32)


def check_alike(function, *args):
    """A function gives op by op what its program gives."""
    expected = function(*args)
    with jax.disable_jit():
        found = function(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6),
        found,
        expected,
    )
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(found))
    return found


# --- the body runs once, and sees numbers


@pytest.mark.full
def test_the_body_runs_once_with_numbers_that_python_and_numpy_take(capsys):
    seen = []

    @ts.function
    def body(x, power):
        print("x is", x[:2], f"{x.sum():.1f}", repr(x[0]))  # noqa: T201
        seen.append((np.asarray(x * 2), float(x[-1]), int(x[-1]), (x > 0).tolist()))
        seen.append([x.max().item(), bool(x[0] > 0), list(range(jnp.int32(2)))])
        return x**power if x.sum() > 0 else -x

    with jax.disable_jit():
        found = body(X, 2)
    text = f"x is {X[:2]} {X.sum():.1f} {X[0]!r}\n"
    assert capsys.readouterr().out == text
    np.testing.assert_array_equal(found, X**2)
    np.testing.assert_array_equal(seen[0][0], 2 * X)
    assert seen[0][1:] == (1.5, 1, (X > 0).tolist())
    assert seen[1] == [1.5, False, [0, 1]]
    assert body.num_programs() == 0


def test_the_body_sees_what_jax_jit_shows_it():
    def body(x):
        return x.shape, x.dtype, x.ndim, x.sharding, len(x), x.weak_type

    with jax.disable_jit():
        expected = jax.jit(body)(X)
        found = []
        ts.function(lambda x: found.append(body(x)))(X)
    assert found == [expected]


def test_an_array_that_was_kept_can_be_used_afterwards():
    kept = []

    @ts.function
    def body(x):
        kept.append(jnp.sin(x))
        return x

    with jax.disable_jit():
        body(X)
    np.testing.assert_allclose(kept[0] + 1, jnp.sin(X) + 1, rtol=1e-6)


@pytest.mark.full
def test_loops_branches_transformations_and_rules_of_jax_run():
    @ts.function
    def body(x):
        total = jax.lax.scan(lambda c, a: (c + a, c), 0.0, x)
        chosen = jax.lax.cond(x[0] > 0, lambda: x, lambda: -x)
        grown = jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 2, x + 2)
        slope = jax.grad(lambda x: jax.nn.silu(x).sum())(x)
        many = jax.vmap(jax.nn.softmax)(x.reshape(2, 4))
        noise = jax.random.normal(jax.random.key(0), (3,))
        again = jax.checkpoint(jnp.tanh)(x)
        return total, chosen, grown, slope, many, noise, again

    check_alike(body, X)


# --- gradients


def test_value_and_grad_is_taken_of_a_program():
    @ts.function
    def body(weights, x):
        def loss(weights):
            hidden = jax.nn.gelu(weights["up"] * x)
            return jnp.mean((hidden @ weights["down"]) ** 2)

        value, slope = ts.value_and_grad(loss)(weights)
        return value, slope, jax.grad(loss)(weights)

    check_alike(body, {"up": X + 1, "down": X}, X)
    cubes = ts.value_and_grad(lambda x, y: jnp.sum(x**3))
    with jax.disable_jit(), pytest.raises(UnconnectedGradientError, match="T303"):
        ts.value_and_grad(lambda x, y: jnp.sum(x**3), (0, 1))(X, X)
    check_alike(cubes, X, X)


def test_a_gradient_of_a_value_needs_its_program():
    @graph.training_step
    def step(x):
        weight = scope.parameter("weight", (8,), init="normal")
        return graph.backward(jnp.sum(x * weight))

    slope = ts.function(lambda x: ts.grad(jnp.sum(x**2), x))
    for call in (lambda: step(X[None]), lambda: slope(X), lambda: jax.vmap(slope)(X)):
        with jax.disable_jit(), pytest.raises(OutsideTraceError) as caught:
            call()
    assert str(caught.value) == (
        "[T302] ts.grad and graph.backward need the program that computes a loss\n"
        "  got: jax.disable_jit(): operations run one by one\n"
        "  fix: leave jax.disable_jit() out: print, jax.debug.print and "
        "jax.debug.breakpoint work in a program\n"
        "  fix: or use ts.value_and_grad(function)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


def test_a_step_has_its_parameters():
    @graph.training_step
    def step(x):
        weight = scope.parameter("weight", (8,), init="normal")
        return jnp.sum(jnp.tanh(x * weight)) ** 2

    with jax.disable_jit():
        found = step(X[None])
    assert step.params.keys() == {"weight"}
    np.testing.assert_allclose(found, step(X[None]), rtol=1e-5)


# --- arguments, results and layouts


def test_what_is_assigned_into_arguments_is_given_back():
    @ts.function
    def body(state, x):
        state["sum"] = state["sum"] + x.sum()
        state["seen"].append(x * 2)
        del state["old"]
        return {"count": 3, "name": "a", "x": x}

    def given():
        return {"sum": jnp.float32(1), "seen": [], "old": jnp.zeros(2)}

    program, eager = given(), given()
    expected = body(program, X)
    with jax.disable_jit():
        found = body(eager, X)
    assert found.keys() == expected.keys()
    assert found["name"] == "a"
    assert eager.keys() == program.keys() == {"sum", "seen"}
    np.testing.assert_allclose(eager["sum"], program["sum"], rtol=1e-6)
    np.testing.assert_array_equal(eager["seen"][0], 2 * X)
    assert not isinstance(eager["seen"][0], jax.core.Tracer)

    @ts.function
    def fail(state):
        state["sum"] = jnp.float32(7)
        raise KeyError("mine")

    with jax.disable_jit(), pytest.raises(KeyError):
        fail(eager)
    np.testing.assert_allclose(eager["sum"], program["sum"], rtol=1e-6)
    with jax.disable_jit(), pytest.raises(WriteBackError, match="T320"):
        ts.function(lambda a, b: a.update(x=b["x"] + 1))(d := {"x": X}, d)


def test_modules_and_mutable_arrays_change_as_in_a_program():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.int32(0))
            self.scale = nnx.Param(X)

    @ts.function
    def body(counter, total, x):
        counter.count.set_value(counter.count.get_value() + 1)
        total[...] = total[...] + x
        return counter.scale[...] ** 2

    counter, total = Counter(), jax.new_ref(X)
    with jax.disable_jit():
        squares = body(counter, total, X)
    assert counter.count.get_value() == 1
    np.testing.assert_array_equal(total[...], 2 * X)
    np.testing.assert_allclose(squares, X**2)


def test_arguments_results_and_tensors_lie_as_declared(dp_mesh):
    rows = ShardSpec((0,), ("dp",))
    table = tensor((8,), rows, dp_mesh, init="ones")
    seen = []

    @ts.function(mesh=dp_mesh, in_specs={"x": rows}, out_specs=P("dp"))
    def body(x):
        seen.append(x.sharding)
        return x * table

    with jax.disable_jit():
        found = body(X)
    laid_out = NamedSharding(dp_mesh.jax, P("dp"))
    assert found.sharding.is_equivalent_to(laid_out, 1)
    assert seen[0].is_equivalent_to(laid_out, 1)
    np.testing.assert_array_equal(found, X)
    rows = ts.function(mesh=dp_mesh, out_specs=P("dp"))(lambda: jnp.arange(8.0))
    with jax.disable_jit():
        assert rows().sharding.is_equivalent_to(laid_out, 1)


def test_a_kernel_gives_what_its_program_gives(dp_mesh):
    halved = op.kernel(lambda x: ts.dist.all_reduce(x.sum(), "dp") * x)

    @ts.function(mesh=dp_mesh, in_specs={"x": P("dp")})
    def body(x):
        return halved(x) ** 2

    check_alike(body, X)


def test_a_function_inside_others_runs_op_by_op_as_well():
    inner = ts.function(lambda x: x * 2 if x[0] > 0 else x)

    def outer(x):
        return inner(x) + ts.function(jax.grad(lambda x: jnp.sum(x**2)))(x)

    with jax.disable_jit():
        for wrapped in (outer, ts.function(outer), jax.jit(outer)):
            np.testing.assert_allclose(wrapped(X), 3 * X, rtol=1e-6)
        many = jax.vmap(lambda x: ts.function(jnp.sin)(x))(X)
        slope = jax.grad(lambda x: ts.function(jnp.sin)(x).sum())(X)
    np.testing.assert_allclose(many, jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(slope, jnp.cos(X), rtol=1e-6)


# --- what needs a whole program


def test_autocast_strategies_and_pipelines_are_refused(dp_mesh):
    @ts.function
    def narrow(x):
        with ts.autocast("bf16"):
            return x @ x

    with jax.disable_jit(), pytest.raises(OutsideTraceError) as caught:
        narrow(X)
    assert str(caught.value) == (
        "[T302] ts.autocast is a pass over a program, "
        "and here operations run one by one\n"
        "  got: ts.autocast('bfloat16') and jax.disable_jit()\n"
        "  fix: leave jax.disable_jit() out, or ts.autocast(..., enabled=False)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )
    with jax.disable_jit(), ts.autocast("bf16"), pytest.raises(OutsideTraceError):
        ts.function(jnp.sin)(X)

    first = graph.stage("first")(lambda x: x * 2)
    second = graph.stage("second")(lambda x: x + 1)

    @graph.training_step(mesh=ts.Mesh(["pp"], devices=range(2)))
    def step(x):
        piped = graph.pipeline([first, second])(lambda x: second(first(x)))
        return jnp.sum(piped(x))

    with jax.disable_jit(), pytest.raises(OutsideTraceError) as caught:
        step(X[:, None])
    assert str(caught.value) == (
        "[T302] a pipeline is one compiled loop, and has no operations to run one by "
        "one\n"
        "  got: jax.disable_jit() around a call with a graph.pipeline\n"
        "  fix: leave jax.disable_jit() out, or call the stages without the pipeline\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )

    spread = ts.function(mesh=dp_mesh)(ts.distribute("data_parallel")(jnp.sin))
    with jax.disable_jit(), pytest.raises(OutsideTraceError) as caught:
        spread(X)
    assert str(caught.value) == (
        "[T302] a strategy infers from the program what each argument is\n"
        "  got: jax.disable_jit() around a call under ts.distribute\n"
        "  fix: leave jax.disable_jit() out, or ts.distribute\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


# --- debug_nans


def inner_logarithm(x):
    return jnp.log(x)  # here


@pytest.mark.parametrize("wrap", [jax.jit, ts.function, ts.function(donate=("x",))])
def test_a_nan_is_found_in_the_operation_that_makes_it(wrap):
    function = wrap(lambda x: jnp.cos(inner_logarithm(x)) * 2)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        function(X + 0)
    if "log" not in str(caught.value):  # its argument is gone
        assert str(caught.value) == "invalid value (nan) encountered in '<lambda>'"
        return
    assert str(caught.value) == "invalid value (nan) encountered in log"
    causes = [caught.value, caught.value.__cause__]
    traces = [traceback.extract_tb(each.__traceback__) for each in causes if each]
    lines = [frame.line for trace in traces for frame in trace]
    assert "return jnp.log(x)  # here" in lines


def test_a_nan_is_found_beside_static_arguments():
    scaled = ts.function(lambda x, scale: jnp.log(x) * scale[0], static_argnums=1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in log"):
        scaled(X, (2.0, 3.0))


def test_a_nan_of_a_gradient_is_found(capsys):
    @ts.function
    def body(x):
        return ts.grad(jnp.sum(jnp.sqrt(x * 0)), x)

    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"invalid value"),
    ):
        body(X)
    capsys.readouterr()


def test_a_call_without_nans_is_as_ever_and_one_with_them_changes_nothing(capsys):
    @ts.function
    def body(state, x):
        state["x"] = jnp.log(x)
        return x

    state = {"x": X}
    with jax.debug_nans(True):
        body(state, jnp.abs(X) + 1)
        kept = state["x"]
        with pytest.raises(FloatingPointError):
            body(state, X)
    assert state["x"] is kept
    capsys.readouterr()
