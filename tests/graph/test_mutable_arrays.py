# SPDX-License-Identifier: Apache-2.0
"""``jax.new_ref``: mutable arrays as arguments, as ``jax.jit`` takes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import WriteBackError

X = jnp.arange(8.0)


def add(ref, x):
    ref[...] = ref[...] + x
    return ref[...].sum()


def set_one(ref, i):
    ref[i] = 7.0
    return ref[i + 1]


def in_a_loop(ref, n):
    def body(i, total):
        ref[i] = ref[i] * 2
        return total + ref[i]

    return jax.lax.fori_loop(0, n, body, 0.0)


def in_a_branch(ref, x):
    jax.lax.cond(
        x > 0,
        lambda: ref.__setitem__(0, x),
        lambda: ref.__setitem__(1, x),
    )
    return x


def read(ref, x):
    return ref[2:4] * x


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (add, X),
        (set_one, jnp.int32(3)),
        (in_a_loop, jnp.int32(4)),
        (in_a_branch, jnp.float32(-3)),
        (read, jnp.float32(2)),
    ],
)
def test_the_caller_sees_what_a_jitted_function_would_change(function, other):
    ours, theirs = jax.new_ref(X), jax.new_ref(X)
    compiled, jitted = ts.function(function), jax.jit(function)
    for _ in range(2):
        np.testing.assert_array_equal(compiled(ours, other), jitted(theirs, other))
        np.testing.assert_array_equal(ours[...], theirs[...])
    assert compiled.num_programs() == 1


def test_several_of_them_in_containers_beside_what_is_given_back():
    @ts.function
    def step(state, x):
        first, second = state["pair"]
        first[...], second[...] = second[...], first[...]
        state["steps"] = state["steps"] + 1

    first, second = jax.new_ref(X), jax.new_ref(-X)
    state = {"pair": (first, second), "steps": jnp.int32(0)}
    step(state, X)
    np.testing.assert_array_equal(first[...], -X)
    np.testing.assert_array_equal(second[...], X)
    assert state["pair"] == (first, second)
    assert state["steps"] == 1


def test_gradients_go_through_them():
    @ts.function
    def step(ref, x):
        ref[...] = ref[...] * x**2
        return ts.grad(jnp.sum(ref[...]), x), ts.value_and_grad(add, 1)(ref, x)

    ref = jax.new_ref(X)
    slope, (total, ones) = step(ref, X)
    np.testing.assert_allclose(slope, 2 * X**2)
    np.testing.assert_allclose(total, jnp.sum(X**3 + X))
    np.testing.assert_array_equal(ones, jnp.ones(8))
    np.testing.assert_allclose(ref[...], X**3 + X)


def test_gradients_go_through_those_of_others():
    def step(ref, x):
        ref[...] = ref[...] * x**2
        return ts.grad(jnp.sum(ref[...]), x)

    ref = jax.new_ref(X)
    np.testing.assert_allclose(jax.jit(ts.function(step))(ref, X), 2 * X**2)
    closed_over = ts.function(lambda x: step(ref, x))
    np.testing.assert_allclose(closed_over(X), 2 * X**4, rtol=1e-6)
    np.testing.assert_allclose(ref[...], X**5, rtol=1e-6)


@jax.custom_vjp
def stash_gradient(ref, x):
    del ref
    return x


def stash_gradient_back(ref, gradient):
    ref[...] = gradient
    return None, gradient


stash_gradient.defvjp(lambda ref, x: (x, ref), stash_gradient_back)


def stash(ref, x):
    return jnp.sin(stash_gradient(ref, jnp.sin(x)))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f, ref, x: jax.grad(f, 1)(ref, x),
        lambda f, ref, x: jax.vjp(lambda x: f(ref, x), x)[1](x),
        lambda f, ref, x: jax.grad(jax.remat(f), 1)(ref, x),
        lambda f, ref, x: jax.jit(jax.grad(f, 1))(ref, x),
        lambda f, ref, x: jax.grad(lambda x: f({"r": ref}, x)["y"])(x),
    ],
)
def test_transformations_of_jax_see_the_array_itself(transformed):
    def function(ref, x):
        is_nested = isinstance(ref, dict)
        y = stash(ref["r"] if is_nested else ref, x)
        return {"y": y} if is_nested else y

    found = []
    for jit in (jax.jit, ts.jit):
        ref, step = jax.new_ref(jnp.float32(0)), jit(function)
        step(ref, X)
        found.append((transformed(step, ref, jnp.float32(1)), ref[...]))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[1][1] != 0


def test_without_jit_jax_differentiates_beside_them():
    @ts.jit
    def step(ref, x):
        ref[...] += 1
        return jnp.sum(scaled(ref, x))

    @jax.custom_vjp
    def scaled(ref, x):
        return ref[...] * x

    scaled.defvjp(lambda ref, x: (scaled(ref, x), ref), lambda ref, g: (None, g))
    with jax.disable_jit():
        ref = jax.new_ref(X)
        assert step(ref, 2.0) == 2 * jnp.sum(X + 1)
        np.testing.assert_array_equal(ref[...], X + 1)
        plain = ts.jit(lambda ref, x: jnp.sum(ref[...] * x))
        assert jax.grad(plain, 1)(ref, 2.0) == jnp.sum(X + 1)


def test_they_keep_the_kind_that_they_were_made_with():
    @jax.remat
    def f(y, ref):
        ref[...] += y * y
        return y * y

    for function in (jax.grad(ts.jit(f)), ts.jit(jax.grad(f))):
        ref = jax.new_ref(jnp.float32(1), kind="no_grad_no_remat")
        assert function(2.0, ref) == 4
        assert ref[...] == 5


def test_inside_other_functions_they_are_the_same_array():
    inner = ts.function(add)
    for outer in (
        ts.function(lambda r, x: inner(r, x)),
        jax.jit(lambda r, x: inner(r, x)),
    ):
        ref = jax.new_ref(X)
        assert outer(ref, X) == 2 * X.sum()
        np.testing.assert_array_equal(ref[...], 2 * X)


def test_they_keep_their_layout(dp_mesh):
    rows = NamedSharding(dp_mesh.jax, P("dp"))
    ref = jax.new_ref(jax.device_put(X, rows))
    step = ts.graph.training_step(mesh=dp_mesh)(add)
    assert step(ref, X) == 2 * X.sum()
    assert ref.sharding.is_equivalent_to(rows, 1)
    specs = [value.spec for value in step.last.traced.graph.inputs]
    assert specs[0] == P("dp")


@pytest.mark.parametrize("own", [P("dp"), P()])
def test_on_a_mesh_a_function_may_close_over_one(dp_mesh, own):
    rows, whole = (NamedSharding(dp_mesh.jax, spec) for spec in (P("dp"), P()))

    found = []
    # JAX itself cannot lower such a function of jax.jit inside another.
    for jit, outer in ((jax.jit, lambda f: f), (ts.jit, jax.jit)):
        ref = jax.new_ref(jax.device_put(X, NamedSharding(dp_mesh.jax, own)))
        for layout in (rows, whole):
            step = jit(lambda x: add(ref, x) * x, out_shardings=layout)  # noqa: B023
            results = [step(X), outer(step)(X)]
            assert [r.sharding.spec for r in results] == [layout.spec] * 2
            found.append((results, ref[...]))
        assert ref.sharding.is_equivalent_to(NamedSharding(dp_mesh.jax, own), 1)
    jax.tree.map(np.testing.assert_array_equal, found[:2], found[2:])


def test_a_function_with_a_mesh_takes_them_in_a_program_of_jax(dp_mesh):
    ref = jax.new_ref(X)
    step = ts.function(add, mesh=dp_mesh)
    assert jax.jit(step)(ref, X) == 2 * X.sum()
    np.testing.assert_array_equal(ref[...], 2 * X)


def test_a_program_is_compiled_for_the_shape_of_one(dp_mesh):
    rows = NamedSharding(dp_mesh.jax, P("dp"))
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows, is_ref=True)
    compiled = ts.jit(add).lower(shape, X).compile()
    ref = jax.new_ref(jax.device_put(X, rows))
    assert compiled(ref, X) == 2 * X.sum()
    np.testing.assert_array_equal(ref[...], 2 * X)
    assert ref.sharding.is_equivalent_to(rows, 1)


def test_a_function_fills_in_what_jax_vjp_returned():
    @ts.jit
    def forward():
        y, back = jax.vjp(lambda x, y: x * y, 2.0, 3.0)
        back.args_res = [None, None]
        return y, back

    @ts.jit
    def backward(back):
        back.args_res = [2.0, 3.0]
        return back(1.0)

    y, back = forward()
    assert (y, *backward(back)) == (6, 3, 2)


def test_a_call_that_fails_leaves_them_as_they_are():
    @ts.function
    def fail(ref):
        ref[...] = ref[...] * 2
        raise KeyError("mine")

    ref = jax.new_ref(X)
    with pytest.raises(KeyError):
        fail(ref)
    np.testing.assert_array_equal(ref[...], X)


@pytest.mark.parametrize(
    ("call", "what", "got", "fix"),
    [
        (
            lambda ref: ts.function(lambda a, b: a[...] + b[...])(ref, ref),
            "a mutable array is given to the call a second time",
            "one Ref{float32[8]} in two places of the arguments",
            "pass it once, or pass another one: jax.new_ref(ref[...])",
        ),
        (
            lambda ref: jax.vjp(ts.function(lambda a, b: a[...] + b[...]), ref, ref),
            "a mutable array is given to the call a second time",
            "one Ref{float32[8]} in two places of the arguments",
            "pass it once, or pass another one: jax.new_ref(ref[...])",
        ),
        (
            lambda ref: ts.function(lambda a: add(ref, a[...]))(ref),
            "a mutable array is closed over, and is given to the call as well",
            "Ref{float32[8]}",
            "pass it to the function as an argument alone",
        ),
        (
            lambda ref: ts.function(
                lambda x: jax.jit(lambda x: add(ref, x))(x), mesh=ts.Mesh(["dp"])
            )(X),
            "a mutable array that a function closes over lies on one device",
            "Ref{float32[8]}, and a mesh of several",
            "pass it to the function as an argument",
        ),
        (
            lambda ref: ts.function(lambda a: a)(ref),
            "a mutable array is returned, and cannot be given to the caller",
            "Ref{float32[8]}",
            "return its value: ref[...]",
        ),
        (
            lambda _: ts.function(jax.new_ref)(X),
            "a mutable array is returned, and cannot be given to the caller",
            "Ref{float32[8]}",
            "return its value: ref[...]",
        ),
    ],
)
def test_what_cannot_be_given_back_is_refused(call, what, got, fix):
    ref = jax.new_ref(X)
    with pytest.raises(WriteBackError) as caught:
        call(ref)
    assert str(caught.value) == (
        f"[T320] {what}\n  got: {got}\n  fix: {fix}\n  docs: https://tessera-spmd.github.io/tessera/errors/T320.html"
    )
    np.testing.assert_array_equal(ref[...], X)


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["", "jit"])
def test_a_function_may_close_over_a_mutable_array(inner):
    def body(x):
        count[...] += 1
        return x + inner(lambda x: add(ref, x))(x)

    def under_scan(x):
        return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0]

    found = []
    for jit in (jax.jit, ts.jit):
        ref, count = jax.new_ref(X), jax.new_ref(jnp.int32(0))
        step = jit(body)
        values = [step(X), step(X), jit(under_scan)(X), jax.jit(step)(X)]
        found.append((values, ref[...], count[...]))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0][2] == 6


@pytest.mark.slow(reason="it compiles several programs")
def test_a_gradient_goes_through_a_function_that_closes_over_one():
    def loss(ref, x):
        def scaled(carry, _):
            ref[...] += 1.0
            return carry * jax.jit(lambda: ref[...])(), None

        total = jax.lax.scan(scaled, jnp.sin(x), None, length=3)[0]
        ref[...] = ref[...] * jax.lax.stop_gradient(x)
        return jnp.sum(total * ref[...])

    def step(ref, x):
        return (total := loss(ref, x)), ts.grad(total, x)

    ours, theirs = jax.new_ref(X), jax.new_ref(X)
    for _ in range(2):
        found = ts.jit(functools.partial(step, ours))(X + 1)
        expected = jax.jit(jax.value_and_grad(functools.partial(loss, theirs)))(X + 1)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_array_equal(ours[...], theirs[...])
