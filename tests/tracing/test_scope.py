# SPDX-License-Identifier: Apache-2.0
"""What a trace is in: its parameters by name, its layouts."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import OutsideTraceError, ParameterNameError
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, tensor
from tessera.tracing import scope
from tessera.tracing.scope import Scope, opened


def scopes_of(function, *args):
    """The name scopes of a function's equations."""
    program = jax.make_jaxpr(function)(*args)
    return [jaxprs.name_scopes(equation) for equation in jaxprs.equations(program)]


# --- which scope is open


def test_no_scope_is_open_outside_a_trace():
    assert scope.current() is None


def test_the_innermost_scope_is_current():
    outer, inner = Scope(), Scope()
    with opened(outer):
        with opened(inner):
            assert scope.current() is inner
        assert scope.current() is outer
    assert scope.current() is None


def test_a_scope_closes_when_its_body_raises():
    with pytest.raises(RuntimeError), opened(Scope()):
        raise RuntimeError
    assert scope.current() is None


def test_two_threads_have_scopes_of_their_own():
    barrier = threading.Barrier(2, timeout=240)
    seen = {}

    def run(name):
        mine = Scope()
        with opened(mine):
            barrier.wait()
            seen[name] = scope.current() is mine
            barrier.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": True, "b": True}


# --- parameters by name


def test_a_parameter_is_declared_under_the_open_path():
    with opened(Scope()) as here, scope.named("encoder"), scope.named("block"):
        scope.parameter("up", (2, 3), init="normal")
    assert list(here.declared) == ["encoder/block/up"]
    declared = here.declared["encoder/block/up"]
    assert (declared.shape, declared.dtype, declared.trainable) == (
        (2, 3),
        jnp.float32,
        True,
    )


def test_a_parameter_without_an_input_yet_is_zeros():
    with opened(Scope()):
        value = scope.parameter("up", (2, 3), init="ones")
    assert value.shape == (2, 3)
    assert not value.any()


def test_a_parameter_with_an_input_is_that_input():
    given = jnp.ones((2, 3))
    with opened(Scope(values={"up": given})):
        assert scope.parameter("up", (2, 3), init="zeros") is given


def test_a_parameter_takes_the_mesh_of_the_step(dp_mesh):
    with opened(Scope(mesh=dp_mesh)) as here:
        scope.parameter("up", (8, 3), init="ones", layout=ShardSpec((0,), ("dp",)))
    assert here.declared["up"].mesh is dp_mesh
    assert here.declared["up"].spec == P("dp")


def test_a_parameter_needs_a_step():
    with pytest.raises(OutsideTraceError) as caught:
        scope.parameter("up", (2,), init="zeros")
    assert str(caught.value) == (
        "[T302] parameter 'up' is declared outside a step\n"
        "  fix: call it inside @graph.training_step, @graph.stage or @ts.function\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


def test_two_parameters_of_one_name_are_refused():
    with opened(Scope()):
        scope.parameter("up", (2,), init="zeros")
        with pytest.raises(ParameterNameError) as caught:
            scope.parameter("up", (3,), init="zeros")
    assert str(caught.value) == (
        "[T305] two parameters of this step are called 'up'\n"
        "  got: shapes (2,) and (3,)\n"
        "  fix: put each use in a @graph.stage of its own\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T305.html"
    )


@pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a/b", "a")])
def test_an_array_and_a_tree_cannot_share_a_place(first, second):
    with opened(Scope()):
        scope.parameter(first, (2,), init="zeros")
        with pytest.raises(ParameterNameError) as caught:
            scope.parameter(second, (3,), init="zeros")
    assert str(caught.value).startswith(
        f"[T305] {second!r} cannot be a parameter beside {first!r}: the tree of "
        "parameters would hold a tree and an array in one place\n"
        "  got: shapes (3,) and (2,)\n"
    )


def test_names_that_merely_begin_alike_are_two_places():
    with opened(Scope()) as here:
        scope.parameter("layer", (2,), init="zeros")
        scope.parameter("layer_norm", (2,), init="zeros")
    assert list(here.declared) == ["layer", "layer_norm"]


def test_uses_of_an_operation_are_numbered_under_each_path():
    with opened(Scope()):
        assert scope.fresh_component("block") == "block"
        assert scope.fresh_component("block") == "block_1"
        with scope.named("decoder"):
            assert scope.fresh_component("block") == "block"
    assert scope.fresh_component("block") == "block"


def test_a_path_ends_with_its_block_even_when_that_raises():
    with opened(Scope()) as here:
        with pytest.raises(RuntimeError), scope.named("encoder"):
            raise RuntimeError
        assert here.path == ()


def test_names_reach_the_operations_inside():
    def named(x):
        with scope.named("encoder"):
            return jnp.sin(x)

    assert scopes_of(named, 1.0) == ["encoder"]


# --- captured tensors


def test_a_tensor_that_is_used_becomes_a_parameter_once():
    table = tensor((2,), name="table")
    with opened(Scope()) as here:
        jnp.sin(table)
        _ = table + 1.0
    assert here.declared == {"table": table}
    assert "lazy" in repr(table)


def test_unnamed_tensors_are_numbered_under_the_open_path():
    with opened(Scope()) as here:
        jnp.sin(tensor((2,)))
        with scope.named("encoder"):
            jnp.sin(tensor((2,)))
            jnp.sin(tensor((2,)))
    assert list(here.declared) == ["tensor", "encoder/tensor", "encoder/tensor_1"]


def test_two_tensors_of_one_name_are_refused():
    first, second = tensor((2,), name="table"), tensor((3,), name="table")
    with opened(Scope()):
        jnp.sin(first)
        with pytest.raises(ParameterNameError, match="tensor another name"):
            jnp.sin(second)


def test_a_tensor_is_itself_again_after_the_trace():
    table = tensor((2,), init="ones", name="table")
    with opened(Scope()):
        assert not jnp.asarray(table).any()
    assert jnp.asarray(table).all()


# --- layouts of traced values


def test_a_value_has_the_layout_that_was_recorded_for_it(dp_mesh):
    with opened(Scope(mesh=dp_mesh)):
        value, other = jnp.ones(8), jnp.ones(8)
        scope.record_layout(value, dp_mesh, P("dp"))
        assert scope.layout_of(value) == (dp_mesh, P("dp"))
        assert scope.layout_of(other) is None
    assert scope.layout_of(value) is None


def test_a_constrained_value_has_that_layout(dp_mesh):
    with opened(Scope(mesh=dp_mesh)):
        value = scope.constrain(jnp.ones(8), dp_mesh, P("dp"))
        assert scope.layout_of(value) == (dp_mesh, P("dp"))
    assert value.sharding.spec == P("dp")


# --- devices that split a batch


def test_the_rules_of_gradients_know_the_mesh_of_the_step():
    """They are traced by a pass, after the function itself."""
    seen = {}

    @jax.custom_vjp
    def square(x):
        return x * x

    def forward(x):
        seen["forward"] = scope.num_devices(), scope.num_splits()
        return square(x), x

    def backward(x, cotangent):
        seen["backward"] = scope.num_devices(), scope.num_splits()
        return (2 * x * cotangent,)

    square.defvjp(forward, backward)

    def step(x):
        return ts.grad(square(x).sum(), x)

    mesh = Mesh(["dp"], devices=range(4))
    program = ts.function(step, mesh=mesh, in_specs={"x": P("dp")})
    program.trace(jax.ShapeDtypeStruct((8,), "float32")).graph  # noqa: B018 - passes
    assert seen == {"forward": (4, 4), "backward": (4, 4)}


def test_arrays_in_a_region_are_parts_already():
    seen = []

    def region(x):
        seen.append(scope.num_splits())
        return x

    mesh = Mesh(["pp", "dp"], devices=range(8), shape=(2, 4))

    def step(x):
        with_axis = jax.shard_map(
            region, mesh=mesh.compile_mesh, in_specs=P("pp"), out_specs=P("pp"),
            axis_names={"pp"},
        )  # fmt: skip
        return with_axis(x)

    ts.function(step, mesh=mesh).trace(jax.ShapeDtypeStruct((8,), "float32"))
    assert seen[-1] == 4
    assert scope.num_splits() == 1
