# SPDX-License-Identifier: Apache-2.0
"""How passes rewrite programs: some equations another way, the others as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tessera.graph.rewriting import (
    Environment,
    contains,
    programs_in_scopes,
    rewrite,
)
from tessera.jax_compat import jaxprs

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


def program_of(function, *args):
    return jax.make_jaxpr(function)(*args)


def is_sin(equation):
    return equation.primitive.name == "sin"


def as_cos(equation, operands):
    return [jnp.cos(operands[0])]


def names(program):
    """The primitives of a program, nested programs in brackets."""
    found = []
    for equation in jaxprs.equations(program):
        found.append(equation.primitive.name)
        found += [names(inner) for _, inner in jaxprs.nested(equation)]
    return found


NESTS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), c), x, None, length=3)[0],
    "while": lambda f: lambda x: lax.while_loop(lambda c: c[0] < 0.5, f, x + 0.1),
    "cond": lambda f: lambda x: lax.cond(x[0] < 0, f, lambda x: x * 2.0, x),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=jax.make_mesh((8,), ("z",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=P("z"),
        out_specs=P("z"),
    ),
    "scan in shard_map in jit": lambda f: jax.jit(NESTS["shard_map"](NESTS["scan"](f))),
}


@pytest.mark.parametrize("nest", NESTS)
def test_equations_are_rewritten_however_deep_they_are(nest):
    def with_sin(x):
        return NESTS[nest](lambda x: jnp.sin(x) * 0.5 + 0.4)(x)

    def with_cos(x):
        return NESTS[nest](lambda x: jnp.cos(x) * 0.5 + 0.4)(x)

    program = program_of(with_sin, X)
    rewritten = rewrite(program, is_sin, as_cos)
    assert names(rewritten) == names(program_of(with_cos, X))
    jaxprs.check(rewritten)
    results = jax.jit(lambda x: jaxprs.evaluate(rewritten, x))(X)
    np.testing.assert_allclose(results[0], jax.jit(with_cos)(X), rtol=1e-6)


def test_the_given_program_is_left_as_it_is():
    program = program_of(jax.jit(jnp.sin), X)
    before = str(program)
    rewrite(program, is_sin, as_cos)
    assert str(program) == before


def test_a_program_without_such_equations_is_the_same_object():
    program = program_of(jnp.tanh, X)
    assert rewrite(program, is_sin, as_cos) is program


def test_rewriting_twice_is_rewriting_once():
    once = rewrite(program_of(jax.jit(jnp.sin), X), is_sin, as_cos)
    assert rewrite(once, is_sin, as_cos) is once


def test_equations_keep_their_scopes_and_source_lines():
    def function(x):
        with jax.named_scope("mine"):
            y = x * 2.0
        return jnp.sin(y)

    program = program_of(function, X)
    rewritten = rewrite(program, is_sin, as_cos)
    kept, before = jaxprs.equations(rewritten)[0], jaxprs.equations(program)[0]
    assert jaxprs.name_scopes(kept) == "mine"
    assert jaxprs.source_line(kept) == jaxprs.source_line(before)
    assert __file__ in jaxprs.source_line(kept)


def test_weak_types_of_inputs_are_kept():
    program = program_of(lambda x: jnp.sin(x) * 2, 1.0)
    rewritten = rewrite(program, is_sin, as_cos)
    assert jaxprs.inputs(rewritten)[0].aval.weak_type


def test_contains_looks_into_nested_programs():
    assert contains(program_of(NESTS["scan in shard_map in jit"](jnp.sin), X), is_sin)
    assert not contains(
        program_of(NESTS["scan in shard_map in jit"](jnp.cos), X), is_sin
    )


def test_a_program_that_is_called_often_is_looked_at_once():
    seen = []

    def note(equation):
        seen.append(equation.primitive.name)
        return False

    again = jax.jit(lambda x: jnp.sin(x) * 2.0)
    assert not contains(program_of(lambda x: again(again(again(x))), X), note)
    assert seen == ["jit", "jit", "jit", "sin", "mul"]


def test_each_scope_that_a_program_is_called_in_is_a_path_to_it():
    again = jax.jit(jnp.sin)

    def function(x):
        with jax.named_scope("outer"):
            x = again(again(x))
        return again(x)

    paths = [path for _, path in programs_in_scopes(program_of(function, X), "of")]
    assert paths == ["of", "of/outer", "of/"]


def test_an_environment_reads_inputs_constants_and_literals():
    held = jnp.arange(8.0)
    program = program_of(lambda x: x * held + 2.0, X)
    env = Environment(program, [X])
    env.run(jaxprs.equations(program))
    (result,) = (env.read(atom) for atom in jaxprs.outputs(program))
    np.testing.assert_allclose(result, X * held + 2.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_recorded_equations_are_those_that_run(dtype):
    def function(x):
        with jax.named_scope("mine"):
            y = x * x
        return jnp.sin(y), jnp.max(y)

    program = program_of(function, X)

    def again(run):
        def apply(x):
            env = Environment(program, [x])
            run(env, jaxprs.equations(program))
            return env.outputs(program)

        return program_of(apply, X.astype(dtype))

    def record(env, equations):
        env.record(equations, program, news=jaxprs.inputs(program))

    recorded, bound = again(record), again(Environment.run)
    assert jaxprs.pretty(recorded) == jaxprs.pretty(bound)
    assert jaxprs.outputs(recorded)[0].aval.dtype == dtype
    jaxprs.check(recorded)


def test_a_copied_environment_is_on_its_own():
    program = program_of(jnp.sin, X)
    env = Environment(program, [X])
    other = env.copy()
    other.write(jaxprs.inputs(program), [X + 1])
    assert env.read(jaxprs.inputs(program)[0]) is X
