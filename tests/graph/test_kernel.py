# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts
from tessera import dist
from tessera import mesh as meshes
from tessera.errors import (
    AbstractMeshError,
    ArgumentError,
    KernelError,
    MeshConflictError,
    NoMeshError,
    ShardDivisibilityError,
    UnconnectedGradientError,
)
from tessera.graph.kernel import kernel
from tessera.mesh import Mesh
from tessera.ops.matmul import matmul
from tessera.tracing import scope

P = PartitionSpec


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh.jax, P(*spec)))


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def message_of(kind, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@kernel
def dp_step(x):
    # Local gradient
    grad = matmul(x, x.T)
    # Global sync across data-parallel axis
    grad = dist.allreduce(grad, axis="dp")
    return grad


def gram_of_blocks(x, count):
    return sum(block @ block.T for block in np.split(x, count))


# --- what runs


def test_a_body_runs_on_the_blocks_of_its_argument(dp_mesh):
    x = numbers(16, 4)
    got = dp_step(on(dp_mesh, x, "dp"))
    np.testing.assert_allclose(got, gram_of_blocks(x, 8))
    assert got.sharding == NamedSharding(dp_mesh.jax, P())


def test_an_argument_without_a_layout_comes_whole(dp_mesh):
    x = numbers(2, 3)
    with dp_mesh:
        np.testing.assert_allclose(dp_step(x), 8 * x @ x.T)
        np.testing.assert_allclose(dp_step(jnp.asarray(x)), 8 * x @ x.T)


def test_a_lazy_tensor_comes_in_blocks(dp_mesh):
    spec = dist.ShardSpec(("row",), ("dp",))
    x = dist.tensor((16, 4), spec, dp_mesh, init="normal")
    np.testing.assert_allclose(
        dp_step(x), gram_of_blocks(np.asarray(x), 8), rtol=1e-5, atol=1e-5
    )


def test_what_varies_is_split_along_its_leading_dim(grid_mesh):
    @kernel
    def body(x):
        whole = dist.all_reduce(x, ("dp", "tp"))
        return {
            "both": x,
            "tp": dist.all_reduce(x, "dp"),
            "dp": dist.all_reduce(x, "tp"),
            "none": whole,
            "number": 2.0,
        }

    x = numbers(8, 2)
    got = body(on(grid_mesh, x, ("dp", "tp")))
    specs = {name: value.sharding.spec for name, value in got.items()}
    assert specs == {
        "both": P(("dp", "tp")),
        "tp": P("tp"),
        "dp": P("dp"),
        "none": P(),
        "number": P(),
    }
    np.testing.assert_array_equal(got["both"], x)
    np.testing.assert_array_equal(got["tp"], x[:4] + x[4:])
    np.testing.assert_array_equal(got["dp"], x.reshape(2, 4, 2).sum(axis=1))
    np.testing.assert_array_equal(got["none"], x.sum(axis=0, keepdims=True))
    assert got["number"] == 2


def test_axes_of_a_result_stand_in_the_order_of_the_mesh(grid_mesh):
    got = kernel(lambda x: x.T)(on(grid_mesh, numbers(4, 4), "tp", "dp"))
    assert got.sharding.spec == P(("dp", "tp"))


def test_a_varying_scalar_has_one_entry_per_device(grid_mesh):
    @kernel
    def body(x):
        return x.sum(), dist.all_reduce(x.sum(), "tp")

    x = numbers(8)
    each, by_dp = body(on(grid_mesh, x, ("dp", "tp")))
    assert each.tolist() == x.tolist()
    assert by_dp.tolist() == [6, 22]


def test_size_and_rank_speak_of_the_region(grid_mesh):
    @kernel
    def body(x):
        inside = meshes.current()
        assert inside.size == 8
        return x * 0 + inside.rank

    x = on(grid_mesh, np.zeros(8, np.int32), ("dp", "tp"))
    assert body(x).tolist() == list(range(8))


def test_trees_numbers_strings_and_functions_are_arguments(dp_mesh):
    @kernel
    def body(params, scale, *, how="sum", after=jnp.abs):
        local = getattr(params["w"], how)() * scale + params["b"]
        return after(dist.all_reduce(local, "dp"))

    params = {"w": on(dp_mesh, numbers(8), "dp"), "b": np.float32(1)}
    assert body(params, 2) == 64
    assert body(params, -2, after=jnp.negative) == 48
    assert body(params, scale=2, how="prod") == 64


def test_tuples_and_none_come_out_as_they_are(dp_mesh):
    x = on(dp_mesh, numbers(8), "dp")
    first, (nothing, second) = kernel(lambda x: (x, (None, x + 1)))(x)
    assert nothing is None
    assert (second - first).tolist() == [1] * 8


def test_a_kernel_in_a_kernel_runs_on_the_blocks_there(dp_mesh):
    outer = kernel(lambda x: dp_step(x) * 2)
    x = numbers(16, 4)
    np.testing.assert_allclose(outer(on(dp_mesh, x, "dp")), 2 * gram_of_blocks(x, 8))


def test_a_kernel_looks_like_its_body():
    assert dp_step.__name__ == "dp_step"
    assert list(dp_step.__wrapped__.__code__.co_varnames)[:1] == ["x"]


def test_the_mesh_of_the_arguments_comes_before_the_open_one(dp_mesh, grid_mesh):
    x = numbers(16, 4)
    with grid_mesh:
        got = dp_step(on(dp_mesh, x, "dp"))
    np.testing.assert_allclose(got, gram_of_blocks(x, 8))


def test_a_kernel_without_arrays_runs_on_the_open_mesh(dp_mesh):
    @kernel
    def ranks():
        return meshes.current().rank

    with dp_mesh:
        assert ranks().tolist() == list(range(8))


# --- when it is traced


def test_the_same_shapes_are_traced_once(dp_mesh, grid_mesh):
    traces = []

    @kernel
    def body(x, scale=1):
        traces.append(scale)
        return x * scale

    x = on(dp_mesh, numbers(8), "dp")
    body(x)
    first = len(traces)
    body(x + 1)
    body(x, 1)
    body(x, scale=1)
    assert len(traces) == first
    for call in (
        lambda: body(x, 2),
        lambda: body(x, 2.0),
        lambda: body(on(dp_mesh, numbers(16), "dp")),
        lambda: body(on(dp_mesh, numbers(8))),
        lambda: body(on(dp_mesh, np.zeros(8, np.int32), "dp")),
        lambda: body(on(grid_mesh, numbers(8), "dp")),
    ):
        seen = len(traces)
        call()
        assert len(traces) == seen + first
        call()
        assert len(traces) == seen + first


def test_a_compiled_kernel_does_not_keep_its_arguments_alive(dp_mesh):
    x = on(dp_mesh, numbers(16, 4), "dp")
    dp_step(x)
    x.delete()
    y = numbers(16, 4) + 1
    np.testing.assert_allclose(dp_step(on(dp_mesh, y, "dp")), gram_of_blocks(y, 8))


def test_declared_layouts_serve_where_jit_hides_them(dp_mesh):
    rows = {"x": dist.ShardSpec(("row",), ("dp",))}

    @kernel(layouts=rows)
    def body(x):
        return dist.all_reduce(x @ x.T, "dp")

    x = numbers(16, 4)
    with dp_mesh:
        np.testing.assert_allclose(jax.jit(body)(x), gram_of_blocks(x, 8))
        np.testing.assert_allclose(body(x), gram_of_blocks(x, 8))


def test_inside_jit_an_array_that_is_closed_over_keeps_its_layout(dp_mesh):
    x = on(dp_mesh, numbers(16, 4), "dp")
    got = jax.jit(lambda scale: dp_step(x) * scale)(2.0)
    np.testing.assert_allclose(got, 2 * gram_of_blocks(numbers(16, 4), 8))


@pytest.mark.parametrize("fixture", ["grid_mesh", "large_mesh"])
def test_in_a_trace_of_tessera_the_recorded_layout_counts(fixture, request):
    mesh = request.getfixturevalue(fixture)
    rows = 2 * mesh.shape["dp"]

    def step(x):
        with scope.opened(scope.Scope(mesh=mesh)):
            scope.record_layout(x, mesh, P("dp"))
            gram = dp_step(x)
            assert scope.layout_of(gram) == (mesh, P())
            return gram

    split = NamedSharding(mesh.compile_mesh, P("dp"))
    x = jax.ShapeDtypeStruct((rows, 4), jnp.float32, sharding=split)
    compiled = jax.jit(step).lower(x).compile()
    assert jax.eval_shape(step, x).shape == (2, 2)
    assert compiled.as_text().count(" all-reduce(") == 1
    assert compiled.output_shardings.is_fully_replicated


# --- gradients


@pytest.mark.full
def test_the_gradient_is_that_of_the_blocks(dp_mesh):
    x = numbers(16, 4)
    weights = numbers(2, 2)

    def loss(x):
        return (dp_step(x) * weights).sum()

    def reference(x):
        blocks = x.reshape(8, 2, 4)
        return sum((block @ block.T * weights).sum() for block in blocks)

    want = jax.grad(reference)(x)
    np.testing.assert_allclose(jax.grad(loss)(on(dp_mesh, x, "dp")), want)


def test_the_gradient_by_a_replicated_argument_is_the_sum_over_devices(dp_mesh):
    @kernel
    def body(w, x):
        return dist.all_reduce(((x @ w) ** 2).sum(), "dp")

    w, x = numbers(4), numbers(16, 4)
    got = jax.grad(body)(on(dp_mesh, w), on(dp_mesh, x, "dp"))
    np.testing.assert_allclose(got, jax.grad(lambda w: ((x @ w) ** 2).sum())(w))


def test_second_derivatives_work(dp_mesh):
    @kernel
    def body(x):
        return dist.all_reduce((x**3).sum(), "dp")

    x = on(dp_mesh, numbers(8), "dp")
    got = jax.grad(lambda x: jax.grad(body)(x).sum())(x)
    np.testing.assert_allclose(got, 6 * numbers(8))


# --- mistakes


def test_arguments_on_different_meshes_are_listed(dp_mesh, grid_mesh):
    @kernel
    def body(x, params):
        return x + params["w"]

    x, w = on(dp_mesh, numbers(8), "dp"), on(grid_mesh, numbers(8), "dp")
    assert message_of(MeshConflictError, body, x, {"w": w}) == (
        "[T308] the arguments of a kernel live on different meshes\n"
        "  got: params['w']: Mesh(dp=2, tp=4; devices 0..7)\n"
        "  got: x: Mesh(dp=8; devices 0..7)\n"
        "  fix: put them on one mesh, with jax.device_put or mesh=\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T308.html"
    )


def test_a_kernel_needs_a_mesh():
    assert message_of(NoMeshError, dp_step, numbers(2, 2)) == (
        "[T106] a kernel needs a mesh, and no argument is on one\n"
        "  got: arguments x\n"
        "  fix: call it inside 'with mesh:', or pass arrays that have a layout\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T106.html"
    )


def test_a_traced_argument_that_hides_its_layout_is_refused(dp_mesh):
    x = on(dp_mesh, numbers(16, 4), "dp")
    assert message_of(KernelError, jax.jit(dp_step), x) == (
        "[T208] a kernel does not know the layout of argument 'x'\n"
        "  got: float32[16,4], traced by a transformation that hides layouts\n"
        "  fix: declare it: @op.kernel(layouts={'x': dist.ShardSpec(...)}), or "
        "dist.ShardSpec.replicated()\n"
        "  fix: or compile with ts.jit, which keeps the layouts of its arguments\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T208.html"
    )
    message_of(KernelError, jax.vmap(dp_step), x)


def test_a_value_computed_in_a_step_has_no_layout_of_its_own(dp_mesh):
    def step(x):
        with scope.opened(scope.Scope(mesh=dp_mesh)):
            scope.record_layout(x, dp_mesh, P("dp"))
            return dp_step(x * 2)

    message = message_of(KernelError, jax.eval_shape, step, jnp.ones((16, 4)))
    assert "got: float32[16,4], computed in a step that leaves its layout" in message


def test_a_declared_layout_that_does_not_fit(dp_mesh):
    body = kernel(layouts={"x": dist.ShardSpec(("row",), ("dp",))})(lambda x: x)
    with dp_mesh:
        message = message_of(ShardDivisibilityError, body, numbers(6))
    assert message.startswith("[T201] argument 'x' cannot be split evenly")


def test_a_layout_for_no_argument_comes_with_a_guess():
    def body(hidden):
        return hidden

    layouts = {"hiden": dist.ShardSpec.replicated()}
    assert message_of(KernelError, kernel(layouts=layouts), body) == (
        "[T208] a layout is given for 'hiden', which is no argument\n"
        "  got: body(hidden)\n"
        "  fix: did you mean 'hidden'? Known: 'hidden'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T208.html"
    )


def test_a_tensor_that_is_closed_over_is_refused(dp_mesh):
    w = dist.tensor((8,), dist.ShardSpec((0,), ("dp",)), dp_mesh, name="w")
    message = message_of(KernelError, kernel(lambda x: x + w), on(dp_mesh, numbers(8)))
    assert message.startswith("[T208] a kernel closes over tensor 'w'")
    assert "fix: pass it as an argument: every device gets its block" in message


def test_a_result_that_is_no_array(dp_mesh):
    body = kernel(lambda x: {"x": x, "name": "x"})
    assert message_of(KernelError, body, on(dp_mesh, numbers(8))) == (
        "[T208] a kernel returns something that is not an array\n"
        "  got: 'x', of type str\n"
        "  fix: return arrays or numbers, or trees of them\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T208.html"
    )


def test_a_constant_without_a_hash_is_named(dp_mesh):
    body = kernel(lambda x, names: x)
    message = message_of(ArgumentError, body, on(dp_mesh, numbers(8)), {1: {3}})
    assert message.startswith("[T301] argument 'names/1' can be neither traced nor")


def test_an_abstract_mesh_is_traced_and_not_run():
    spec = dist.ShardSpec(("row",), ("dp",))
    x = dist.tensor((72, 4), spec, Mesh(["dp"], devices=range(72)))
    assert "T105" in message_of(AbstractMeshError, dp_step, x)


def test_a_kernel_that_runs_at_once_may_take_gradients(dp_mesh):
    @kernel
    def mean_gradient(w, x):
        own = dist.per_device(w, axis="dp")
        loss = jnp.mean((x * own) ** 2)
        return dist.all_reduce(ts.grad(loss, own), axis="dp", op="mean")

    w, x = jnp.float32(3.0), numbers(16)
    expected = jax.grad(lambda w: jnp.mean((x * w) ** 2))(w)
    np.testing.assert_allclose(mean_gradient(w, on(dp_mesh, x, "dp")), expected)


def test_a_kernel_that_runs_at_once_may_branch_on_its_blocks(dp_mesh):
    @kernel
    def halve_the_large(x):
        if x.sum() > 3:
            return x / 2
        return x

    x = on(dp_mesh, numbers(8), "dp")
    np.testing.assert_array_equal(halve_the_large(x), [0, 1, 2, 3, 2, 2.5, 3, 3.5])


def test_a_kernel_that_runs_at_once_obeys_autocast_as_in_a_step(dp_mesh):
    @kernel
    def product(x):
        with ts.autocast("bf16"):
            return x @ x.T

    x = on(dp_mesh, numbers(16, 4) + 0.001, "dp")
    np.testing.assert_array_equal(product(x), ts.jit(product)(x))
    assert np.any(np.asarray(product(x)) != kernel(lambda x: x @ x.T)(x))


def test_a_kernel_takes_no_array_that_is_committed_to_another_device(dp_mesh):
    add = kernel(lambda x, y: x + y)
    y = jax.device_put(1.0, jax.devices()[0])
    message = message_of(MeshConflictError, add, on(dp_mesh, numbers(8), "dp"), y)
    assert message.startswith("[T308] the inputs of one step live on different meshes")


def test_a_loss_that_depends_on_no_weight_is_refused_there_too(dp_mesh):
    slope = kernel(lambda w, x: ts.grad(jnp.sum(x), w))
    with pytest.raises(UnconnectedGradientError, match="does not depend on"):
        slope(jnp.float32(3.0), on(dp_mesh, numbers(16), "dp"))
