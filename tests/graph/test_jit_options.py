# SPDX-License-Identifier: Apache-2.0
"""The options of ``jax.jit``: static arguments, donated ones, shardings, XLA's."""

import operator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import (
    ArgumentError,
    LayoutMismatchError,
    SettingConflictError,
    SpecFormError,
)

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scale:
    """A tree that hashes, with leaves that are no arrays."""

    factor: float
    name: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A tree of arrays."""

    x: object
    y: object


def body(x, scale, *rest, key=0):
    assert isinstance(scale, Scale)
    return x * scale.factor + len(rest) + key


# --- static arguments


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1},
        {"static_argnums": (1,)},
        {"static_argnums": -1},
        {"static_argnames": "scale"},
        {"static_argnums": [1], "static_argnames": ["key"]},
    ],
    ids=str,
)
def test_a_static_argument_is_one_value_whatever_tree_it_is(options):
    step = ts.jit(body, **options)
    for _ in range(2):
        np.testing.assert_allclose(step(X, Scale(2.0, "a")), X * 2, rtol=1e-6)
        np.testing.assert_allclose(step(X, scale=Scale(2.0, "a")), X * 2, rtol=1e-6)
    np.testing.assert_allclose(step(X, Scale(3.0, "a")), X * 3, rtol=1e-6)
    assert step.num_programs() == 3


def test_a_static_argument_is_compared_as_a_whole():
    @jax.tree_util.register_pytree_node_class
    class ByName:
        def __init__(self, name, value):
            self.name, self.value = name, value

        def __eq__(self, other):
            return isinstance(other, ByName) and other.name == self.name

        def __hash__(self):
            return hash(self.name)

        def tree_flatten(self):
            return (self.value,), self.name

        @classmethod
        def tree_unflatten(cls, name, children):
            raise AssertionError("a static argument is never flattened")

    step = ts.jit(lambda x, by: x * len(by.name), static_argnums=1)
    for value in (X, X + 1):
        np.testing.assert_array_equal(step(X, ByName("ab", value)), X * 2)
    assert step.num_programs() == 1


def test_a_static_argument_without_a_hash_is_refused():
    step = ts.jit(lambda x, by: x, static_argnums=1)
    with pytest.raises(ArgumentError, match="'by' can be neither traced nor held"):
        step(X, {"a": X})


def test_a_builtin_takes_static_arguments():
    assert ts.jit(operator.add, static_argnums=(1,))(X, 1)[0] == 0.0


@pytest.mark.parametrize("number", [3, -4])
def test_there_must_be_such_an_argument(number):
    for option in ("static_argnums", "donate_argnums"):
        with pytest.raises(SpecFormError, match=f"no argument {number}"):
            ts.jit(lambda x, y: x, **{option: number})
    for option in ("static_argnames", "donate_argnames"):
        with pytest.raises(SpecFormError, match="did you mean 'rate'"):
            ts.jit(lambda x, rate: x, **{option: "rat"})


# --- donated arguments


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"donate_argnames": ["state"]},
        *({"donate": donated} for donated in (["state"], "state", (0,))),
    ],
    ids=str,
)
def test_a_donated_argument_is_gone(options):
    step = ts.jit(lambda state, x: {"w": state["w"] + x}, **options)
    state = {"w": X + 1.0}
    step(state, X)
    assert state["w"].is_deleted()
    assert not X.is_deleted()


def test_an_argument_is_not_both_static_and_donated():
    with pytest.raises(SettingConflictError, match="both static and donated"):
        ts.jit(lambda x: x, static_argnums=0, donate_argnums=0)


# --- shardings


def test_shardings_are_layouts_and_their_mesh(dp_mesh):
    split, whole = (NamedSharding(dp_mesh.jax, P(*axes)) for axes in (["dp"], []))
    step = ts.jit(
        lambda tree, y: (tree["a"] + y, tree["b"]),
        in_shardings=({"a": split, "b": whole}, None),
        out_shardings=(split, None),
    )
    compiled = step.compile({"a": X, "b": X}, X)
    (a, b), (y,) = compiled.jax.input_shardings[0][:2]
    assert (a.spec, y.spec) == (P("dp"), P())
    assert b is None or b.spec == P()
    assert step({"a": X, "b": X}, X)[0].sharding == split


def test_one_sharding_is_for_all_arguments(dp_mesh):
    split = NamedSharding(dp_mesh.jax, P("dp"))
    compiled = ts.jit(jnp.add, in_shardings=split, out_shardings=split).compile(X, X)
    assert [s[0].spec for s in compiled.jax.input_shardings[0][:2]] == [P("dp")] * 2


def test_a_spec_needs_the_mesh_that_is_open(dp_mesh):
    step = ts.jit(lambda x: x * 2, in_shardings=(P("dp"),), out_shardings=P("dp"))
    with dp_mesh:
        assert step(X).sharding.spec == P("dp")
    with jax.set_mesh(dp_mesh.jax):
        assert step(X).sharding.spec == P("dp")


def test_the_open_mesh_is_looked_up_at_every_call(dp_mesh):
    half = ts.Mesh(["dp"], devices=range(4))
    step = ts.jit(lambda x: x * 2, out_shardings=P("dp"))
    for mesh in (dp_mesh, half, dp_mesh):
        with jax.set_mesh(mesh.jax):
            assert step(np.asarray(X)).sharding.mesh.size == mesh.size


def test_shardings_are_of_one_mesh_and_of_the_mesh_that_is_declared(dp_mesh, grid_mesh):
    half = ts.Mesh(["dp"], devices=range(4))
    one, other = (NamedSharding(mesh.jax, P("dp")) for mesh in (dp_mesh, half))
    with pytest.raises(SettingConflictError, match="several meshes"):
        ts.jit(jnp.add, in_shardings=(one, other))
    with pytest.raises(SettingConflictError, match="declared in two ways"):
        ts.jit(jnp.add, in_shardings=(one, one), mesh=grid_mesh)
    with pytest.raises(SettingConflictError, match="declared in two ways"):
        ts.jit(jnp.sin, in_shardings=one, in_specs={"x": P()})


@pytest.mark.parametrize("name", ["in_specs", "in_shardings"])
@pytest.mark.parametrize("form", ["by name", "by position", "for all"])
def test_layouts_of_arguments_have_three_forms_under_either_name(dp_mesh, name, form):
    split = NamedSharding(dp_mesh.jax, P("dp"))
    layouts = {
        "by name": {"x": split, "y": P("dp")},
        "by position": [P("dp"), split],
        "for all": split,
    }
    step = ts.jit(lambda x, y: x + y, **{name: layouts[form]})
    assert [v.spec for v in step.trace(X, X).graph.inputs] == [P("dp")] * 2
    assert step(X, X).sharding.mesh == dp_mesh.jax


def test_layouts_by_position_leave_out_what_is_static(dp_mesh):
    def scaled(x, factor, y, *rest, key=0):
        return x * factor + y + key + sum(rest)

    for static in ({"static_argnums": 1}, {"static_argnames": ("factor", "key")}):
        step = ts.function(scaled, mesh=dp_mesh, in_specs=(P(), P("dp"), P()), **static)
        traced = step.trace(X, 2, X, X, key=1)
        assert [v.spec for v in traced.graph.inputs] == [P(), P("dp"), P()]


@pytest.mark.parametrize("layouts", [(P(),), (P(),) * 4], ids=["few", "many"])
def test_there_is_one_layout_for_each_argument(dp_mesh, layouts):
    for name in ("in_specs", "in_shardings"):
        with pytest.raises(SpecFormError, match=f"{name} has not one layout for each"):
            ts.function(lambda x, y, z=0: x, mesh=dp_mesh, **{name: layouts})
    step = ts.function(lambda x, y=1: x * y, mesh=dp_mesh, in_specs=(P("dp"),))
    assert step(X, 2).sharding.spec == P("dp")  # a number has no layout
    with pytest.raises(SpecFormError, match="no layout for argument 'y'"):
        step(X, X)


def test_a_tree_of_layouts_is_for_one_argument(dp_mesh):
    layouts = TrainState(P("dp"), None)
    step = ts.function(lambda state: state.x, mesh=dp_mesh, in_specs=(layouts,))
    assert step(TrainState(X, X)).sharding.spec == P("dp")
    with pytest.raises(SpecFormError, match=r"in_specs=\(tree,\)"):
        ts.function(lambda state: state.x, mesh=dp_mesh, in_specs=layouts)


def test_the_empty_spec_declares_replicas(dp_mesh):
    split = jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp")))
    for declared in ({"in_specs": P()}, {"in_specs": (P(),)}, {"in_shardings": P()}):
        step = ts.function(lambda x: x, mesh=dp_mesh, **declared)
        with pytest.raises(LayoutMismatchError, match="not laid out as declared"):
            step(split)


def test_none_declares_no_layout(dp_mesh):
    split = jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp")))
    step = ts.jit(jnp.add, in_shardings=(None, None))
    assert step(X, X).sharding == X.sharding
    assert step(split, X).sharding == split.sharding


@pytest.mark.parametrize("layout", ["dp", ("dp", None), 3, {"x": "dp"}], ids=repr)
def test_what_is_no_layout_is_refused(dp_mesh, layout):
    for name in ("in_specs", "out_specs", "in_shardings", "out_shardings"):
        with pytest.raises(SpecFormError, match=f"{name} takes layouts"):
            ts.function(jnp.add, mesh=dp_mesh, **{name: layout})


def test_a_sharding_of_one_device_is_a_place():
    device = jax.devices()[1]
    place = SingleDeviceSharding(device)
    for options in ({"in_shardings": place}, {"out_shardings": place}):
        assert ts.jit(jnp.sin, **options)(X).devices() == {device}
    assert ts.jit(jnp.sin, out_shardings=place).eval_shape(X).sharding.device_set == {
        device
    }


def test_other_shardings_are_refused():
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    with pytest.raises(SpecFormError, match="on a mesh or on one device"):
        ts.jit(jnp.sin, out_shardings=host)


@pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
def test_a_dim_of_a_sharding_is_not_unconstrained(dp_mesh, option):
    spec = P(P.UNCONSTRAINED)
    for sharding in (spec, NamedSharding(dp_mesh.jax, spec)):
        with pytest.raises(SpecFormError, match=f"{option} has a dim that is unconstr"):
            ts.jit(jnp.sin, **{option: sharding})


# --- the compiler's


def test_unused_arguments_are_kept_where_asked():
    def count(**options):
        text = ts.jit(lambda x, y: x + 1.0, **options).compile(X, X).as_text()
        return text.count("parameter(")

    assert count(keep_unused=True) == count() + 1


def test_options_of_the_compiler_are_of_this_function_alone():
    options = {"xla_disable_hlo_passes": "algsimp"}
    step = ts.jit(lambda x: x / 3.0 * 0.1, compiler_options=options)
    assert dict(step.trace(X).graph.plan.compiler_options) == options
    np.testing.assert_allclose(step(X), X / 3.0 * 0.1, rtol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        ts.jit(jnp.sin, compiler_options={"no_such_option": True})(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        ts.jit(jnp.sin).lower(X).compile({"no_such_option": True})


def test_options_of_the_compiler_are_refused_inside_another_function():
    options = {"xla_disable_hlo_passes": "algsimp"}
    inner = ts.jit(lambda x: x / 3.0, compiler_options=options)
    outer = ts.jit(lambda x: inner(x) + 1.0)
    with pytest.raises(SettingConflictError, match="are for whole programs"):
        outer(X)
    with pytest.raises(ValueError, match="only be passed to top-level"):
        jax.jit(lambda x: inner(x) + 1.0)(X)
    same = ts.jit(outer, compiler_options=options)
    np.testing.assert_allclose(same(X), X / 3.0 + 1.0, rtol=1e-6)


def test_options_of_the_compiler_hold_where_the_function_is_transformed():
    step = ts.jit(lambda x: jnp.sum(x * 2.0), compiler_options={"no_such_option": "1"})
    for transform in (jax.grad, jax.vmap):
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
            transform(step)(X)


@pytest.mark.parametrize("inline", [True, False])
def test_it_is_inlined_where_asked_as_by_jax(inline):
    def has_call(jit):
        step = jit(lambda x: x + 1.0, inline=inline)
        return "jit[" in str(jax.make_jaxpr(lambda x: step(x))(X))

    assert has_call(ts.jit) is has_call(jax.jit)


def test_a_function_that_is_compiled_already_keeps_its_options(dp_mesh):
    inner = ts.jit(
        body,
        static_argnums=1,
        donate_argnums=0,
        in_specs={"x": P("dp")},
        out_specs=P("dp"),
        keep_unused=True,
        compiler_options={"xla_disable_hlo_passes": "algsimp"},
    )
    step = ts.jit(inner, mesh=dp_mesh)
    assert step.options == replace(inner.options, mesh=dp_mesh)
    assert step(X + 0.0, Scale(2.0, "a")).sharding.spec == P("dp")
    assert ts.jit(inner, out_specs=P()).options.out_specs == P()


# --- what is no function


@pytest.mark.parametrize("body", [3, staticmethod(jnp.sin), classmethod(jnp.sin)])
def test_what_is_no_function_is_refused(body):
    with pytest.raises(ArgumentError, match="is not a function"):
        ts.jit(body)


def test_a_function_that_returns_before_its_body_runs_is_refused():
    def generate(x):
        yield x + 1.0

    async def wait(x):
        return x + 1.0

    for body in (generate, wait):
        with pytest.raises(ArgumentError, match="returns before its body runs"):
            ts.jit(body)


def test_options_that_are_left_out_say_what_takes_their_place():
    for option in ({"device": jax.devices()[1]}, {"backend": "cpu"}):
        with pytest.raises(ArgumentError, match=r"jax\.device_put\(x, device\)"):
            ts.jit(jnp.sin, **option)
        assert ts.jit(jnp.sin, **dict.fromkeys(option))(X).shape == X.shape
    with pytest.raises(ArgumentError, match="did you mean 'in_specs'"):
        ts.function(in_spec=P("dp"))
