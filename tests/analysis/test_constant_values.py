# SPDX-License-Identifier: Apache-2.0
"""Loop lengths and branches that constants decide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tessera.analysis import execution_lanes
from tessera.analysis.constant_values import Frame
from tessera.analysis.hlo import parse


def frames(frame):
    """Every frame of a program, the outer ones first."""
    yield frame
    for each in frame.computation.instructions.values():
        inner = []
        if each.opcode == "while":
            inner = [frame.body(each)]
        elif each.opcode == "conditional":
            count = len(frame.module.callees(each))
            inner = [frame.branch(each, number) for number in range(count)]
        elif each.opcode == "call":
            callees = frame.module.callees(each)
            inner = [frame.call(each, callee) for callee in callees]
        for every in inner:
            yield from frames(every)


def found(function, *arguments):
    """Counts of the loops and shares of the branches of a compiled function."""
    # Without the counts that XLA writes, as on TPUs.
    text = jax.jit(function).lower(*arguments).compile().as_text()
    text = text.replace("known_trip_count", "left_out")
    counts, shares = [], []
    for frame in frames(Frame.entry(parse(text))):
        for each in frame.computation.instructions.values():
            if each.opcode == "while":
                counts.append(frame.count(each))
            elif each.opcode == "conditional":
                shares.append(frame.shares(each))
    return counts, shares


X = jnp.ones((64, 64))


def test_a_scan_is_as_long_as_its_constants_say():
    def step(x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=300)[0]

    assert found(step, X) == ([300], [])


def test_a_loop_may_count_down_and_in_steps():
    def step(x):
        def body(carry):
            i, y = carry
            return i - 3, jnp.tanh(y @ y)

        return lax.while_loop(lambda carry: carry[0] > 2, body, (100, x))[1]

    assert found(step, X) == ([33], [])


def test_a_loop_that_data_end_has_no_known_length():
    def step(x, n):
        return lax.fori_loop(0, n, lambda i, y: jnp.tanh(y @ y), x)

    assert found(step, X, 5) == ([None], [])


def causal(x):
    """Pairs of blocks, of which the later ones are skipped."""

    def row(carry, i):
        def column(carry, j):
            return lax.switch(
                (i < j).astype(jnp.int32) + (i <= j).astype(jnp.int32),
                [lambda c: jnp.tanh(c @ c), lambda c: jnp.sin(c @ c), lambda c: c],
                carry,
            ), None

        return lax.scan(column, carry, jnp.arange(4))[0], None

    return lax.scan(row, x, jnp.arange(4))[0]


def test_branches_are_counted_over_nested_loops():
    # Of 16 pairs 6 are before the diagonal, 4 on it and 6 after it.
    counts, shares = found(causal, X)
    assert counts == [4, 4]
    assert shares == [(6 / 16, 4 / 16, 6 / 16)]


def test_a_branch_in_a_branch_is_counted_where_the_outer_one_is_taken():
    def step(x):
        def layer(carry, i):
            def inner(c):
                return lax.cond(i == 0, jnp.sin, lambda c: jnp.tanh(c @ c), c)

            return lax.cond(i % 3 == 0, inner, lambda c: c @ c, carry), None

        return lax.scan(layer, x, jnp.arange(6))[0]

    _, shares = found(step, X)
    # Branch 1 is that of true: layers 0 and 3, of which the first is number 0.
    assert sorted(shares) == sorted([(4 / 6, 2 / 6), (1 / 2, 1 / 2)])


def test_branches_that_data_choose_have_no_known_shares():
    def step(x):
        return lax.cond(x[0, 0] > 0, lambda c: jnp.tanh(c @ c), jnp.sin, x)

    assert found(step, X) == ([], [None])


def test_of_very_many_executions_a_sample_is_looked_at(monkeypatch):
    monkeypatch.setattr(execution_lanes, "_MAX_LANES", 8)
    counts, (shares,) = found(causal, X)
    assert counts == [4, 4]
    assert sum(shares) == pytest.approx(1)


PREFETCH = """HloModule m
body {
  p = (s32[], s32[3], s32[3]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  far = s32[3] get-tuple-element(p), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  s = (s32[3], s32[3], u32[]) copy-start(far)
  near = s32[3] copy-done(s)
  ROOT t = (s32[], s32[3], s32[3]) tuple(j, near, far)
}
condition {
  p = (s32[], s32[3], s32[3]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}
ENTRY e {
  x = s32[3] constant({4, 5, 6})
  z = s32[] constant(0)
  t = (s32[], s32[3], s32[3]) tuple(z, FIRST, x)
  w = (s32[], s32[3], s32[3]) while(t), condition=condition, body=body
  ROOT r = s32[3] get-tuple-element(w), index=1
}"""


def test_what_a_loop_fetches_ahead_is_known():
    frame = Frame.entry(parse(PREFETCH.replace("FIRST", "x")))
    assert frame.value("r")[0].tolist() == [4, 5, 6]
    other = PREFETCH.replace("ENTRY e {", "ENTRY e {\n  y = s32[3] constant({0, 0, 0})")
    frame = Frame.entry(parse(other.replace("FIRST", "y")))
    assert frame.value("r") is None


def test_what_iterations_stack_is_known_after_the_loop():
    def step(x):
        def forward(carry, i):
            return jnp.tanh(carry @ carry), i % 4

        def backward(carry, kind):
            return lax.cond(kind == 0, jnp.sin, lambda c: jnp.tanh(c @ c), carry), None

        y, kinds = lax.scan(forward, x, jnp.arange(8))
        return lax.scan(backward, y, kinds)[0]

    _, (shares,) = found(step, X)
    assert sorted(shares) == [1 / 4, 3 / 4]


def test_a_branch_may_decide_on_another_branch():
    def step(x):
        def body(carry, i):
            kind = lax.cond(i < 2, lambda: i * 3, lambda: 0 * i)
            return lax.cond(kind == 3, jnp.sin, lambda c: jnp.tanh(c @ c), carry), None

        return lax.scan(body, x, jnp.arange(5))[0]

    _, shares = found(step, X)
    assert sorted(shares[-1]) == [1 / 5, 4 / 5]


TABLE = """HloModule m
first {
  ROOT p = f32[8] parameter(0)
}
second {
  p = f32[8] parameter(0)
  ROOT y = f32[8] negate(p)
}
ENTRY e {
  x = f32[8] parameter(0)
  table = s32[4] parameter(1), metadata={op_name="parts[1][0]"}
  device = u32[] partition-id()
  row = s32[1] dynamic-slice(table, device), dynamic_slice_sizes={1}
  n = s32[] reshape(row)
  ROOT c = f32[8] conditional(n, x, x), branch_computations={first, second}
}"""


@pytest.mark.parametrize(
    ("inputs", "partitions", "shares"),
    [
        ({}, None, None),
        ({"parts[1][0]": np.array([0, 1, 1, 1])}, None, None),
        ({}, [0, 1], None),
        ({"parts[1][0]": np.array([0, 1, 1, 1])}, [0, 1], (0.5, 0.5)),
        ({"parts[1][0]": np.array([0, 1, 1, 1])}, [0, 1, 2, 3], (0.25, 0.75)),
        # The input is sharded: what a device has is not what is given.
        ({"parts[1][0]": np.array([0, 1, 1, 1] * 2)}, [0, 1], None),
    ],
)
def test_inputs_and_devices_may_decide(inputs, partitions, shares):
    frame = Frame.entry(parse(TABLE), inputs)
    if partitions is not None:
        frame = frame.on(partitions)
    assert frame.shares(frame.computation.root) == shares
