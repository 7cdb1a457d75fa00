# SPDX-License-Identifier: Apache-2.0
"""When a function is converted, and what is said where that does not help."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import op
from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow import autograph, converted_calls

X = jnp.arange(3.0)
YES = jnp.array(True)


@pytest.fixture
def conversions(monkeypatch):
    """The names of the functions that are converted."""
    names = []

    def convert(function, operators):
        names.append(function.__name__)
        return before(function, operators)

    before = converted_calls.convert
    monkeypatch.setattr(converted_calls, "convert", convert)
    return names


def test_a_function_that_needs_no_conversion_is_traced_as_it_is(conversions):
    @ts.function
    def function(x, flag):
        for row in x:
            x = x + row if flag else x
        return x

    function(X, True)
    assert conversions == []


def test_what_it_calls_is_converted_too_and_libraries_are_not(conversions):
    def helper(x):
        return jnp.where(x > 0, x, 0.0) + np.float32(1)

    @ts.function
    def function(x, flag):
        return helper(x) if flag else x

    function(X, YES)
    assert conversions == ["function", "helper"]


def test_a_function_is_traced_as_it_is_only_once(conversions, monkeypatch):
    traces = []

    @contextlib.contextmanager
    def opened(conversion):
        traces.append("as it is" if conversion is None else "converted")
        with before(conversion):
            yield

    before = autograph.conversion_context
    monkeypatch.setattr(autograph, "conversion_context", opened)

    @ts.function
    def function(x, flag, name):
        return x if flag else -x

    function(X, YES, "a")
    function(X, YES, "b")
    assert traces == ["as it is", "converted", "converted"]
    assert conversions == ["function"]


def test_a_filter_of_a_comprehension_cannot_be_converted():
    @ts.function
    def function(x):
        return [value for value in x if value > 1]  # here

    with pytest.raises(ControlFlowError) as caught:
        function(X)
    line = function.body.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"[T319] Python needs a value at {__file__}:{line} that is only known when the "
        "program runs\n"
        "  got: Attempted boolean conversion of traced array with shape bool[].\n"
        "  got: in: return [value for value in x if value > 1]  # here\n"
        "  fix: use `if` in a function that is defined in a file, or jnp.where and "
        "jax.lax.cond; for loops jax.lax.fori_loop and jax.lax.while_loop\n"
        "  fix: for `a < b < c`, max, min, any, all, int and float write `a < b and "
        "b < c`, jnp.maximum, jnp.minimum, jnp.any, jnp.all and x.astype\n"
        "  fix: leave out x.item() and x.tolist(): arrays compute as numbers do\n"
        "  fix: to show values, use print(x), with an f-string as its argument\n"
        "  fix: a Python value stays one unless a transformation of JAX takes it as an "
        "argument: close over it, or use functools.partial\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T319.html"
    )


def test_a_function_without_source_is_named():
    names = {}
    text = "def helper(x):\n    return x if x[0] > 0 else -x"
    exec(compile(text, "<made here>", "exec"), names)
    helper = names["helper"]

    @ts.function
    def function(x):
        return helper(x)

    with pytest.raises(ControlFlowError) as caught:
        function(X)
    reason = "its source is not to be had, from <made here>"
    assert f"helper runs as it is: {reason}" in caught.value.got


def test_a_traced_size_an_index_of_a_list_and_an_assertion():
    @ts.function
    def size(x, n):
        return jnp.zeros(n)

    @ts.function
    def index(x, n):
        return [x, -x][n]

    @ts.function
    def assertion(x, n):
        assert n > 0
        return x

    for function in (index, assertion):
        with pytest.raises(ControlFlowError, match="only known when the program runs"):
            function(X, jnp.int32(1))
    with pytest.raises(TypeError, match="Shapes must be 1D sequences of concrete"):
        size(X, jnp.int32(1))


def test_what_is_not_about_control_flow_is_raised_as_it_is():
    @ts.function
    def function(x, flag):
        y = x if flag else -x
        return {"y": y}["z"]

    with pytest.raises(KeyError, match="z"):
        function(X, YES)


def clipped(x, limit):
    if jnp.max(x) > limit:
        x = x * (limit / jnp.max(x))
    return x


def test_stages_checkpoints_and_functions_to_be_differentiated_are_converted():
    kept = ts.checkpoint(clipped)
    slope = ts.value_and_grad(lambda x: jnp.sum(clipped(x, 1.0)))

    @ts.graph.stage("first")
    def first(x):
        return clipped(x, 1.0)

    @ts.graph.training_step
    def step(x):
        return first(x), kept(x, 1.0), slope(x)[0]

    stage, checkpoint, total = step(X[None])
    np.testing.assert_array_equal(stage[0], X / 2)
    np.testing.assert_array_equal(checkpoint[0], X / 2)
    assert total == 1.5


def test_kernels_are_converted_and_print_by_device(dp_mesh, capsys):
    @op.kernel
    def halved(x):
        total = 0.0
        for value in x:
            if value > 3:
                value = value / 2
                print("large")  # noqa: T201
            total = total + value
        return x + total

    @ts.function
    def function(x):
        return halved(x)

    x = dp_mesh_array(dp_mesh)
    np.testing.assert_array_equal(function(x), [0, 2, 4, 6, 6, 7.5, 9, 10.5])
    jax.effects_barrier()
    assert capsys.readouterr().out.splitlines() == ["large"] * 4


def dp_mesh_array(mesh):
    return jax.device_put(jnp.arange(8.0), NamedSharding(mesh.jax, P("dp")))
