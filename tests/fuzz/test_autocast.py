# SPDX-License-Identifier: Apache-2.0
"""Random programs under autocast compute what the documented rules say, to the bit.

The reference has no nested programs and decides anew; see ``autocast_reference``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import tessera as ts
from tessera.graph.passes.autocast import autocast
from tests.fuzz.autocast_reference import evaluate, reference

SIZE, LAYERS = 4, 3
MASK = np.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 3 == 0

ONE_OPERAND = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "negate": lambda x: -x,
    "absolute": jnp.abs,
    "half": lambda x: x * 0.5,
    "third": lambda x: x * 0.3,
    "epsilon": lambda x: x + 1e-8,
    "square": lambda x: x**2,
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(2, -1).reshape(SIZE, SIZE),
    "roll": lambda x: jnp.roll(x, 1, axis=0),
    "rows": lambda x: x[jnp.array([1, 0, 3, 3])],
    "split": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
    "barrier": lax.optimization_barrier,
    "stop": lax.stop_gradient,
    "name": lambda x: checkpoint_name(x, "kept"),
    "mask": lambda x: jnp.where(MASK, x, 0.0),
    "low": lambda x: jnp.maximum(jnp.where(MASK, x, jnp.finfo("float32").min), -2.0),
    "clip": lambda x: jnp.clip(x, -1.5, 1.5),
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "softmax": jax.nn.softmax,
    "norm": lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6),
    "sum": lambda x: x + jnp.sum(x, 0),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "sort": lambda x: jnp.sort(x, 0),
    "sign": lambda x: jnp.where(x > 0.1, x, -x),
    "f32": lambda x: x.astype(jnp.float32),
    "bf16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "bits": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    ),
}
TWO_OPERANDS = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "divide": lambda x, y: x / (jnp.abs(y) + 0.5),
    "maximum": jnp.maximum,
    "select": lambda x, y: jnp.where(MASK, x, y),
    "matmul": jnp.matmul,
}
WRAPS = {
    "none": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "dots": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def operations(rng, count):
    """A random function of a list of matrices, a matrix and a bias to matrices."""
    steps = []
    for _ in range(count):
        kind = rng.choice(["one", "two", "matmul", "bias", "weight"], p=PROBABILITIES)
        picks = rng.random(2)
        name = rng.choice(list(ONE_OPERAND if kind == "one" else TWO_OPERANDS))
        steps.append((kind, name, picks))

    def run(values, w, b):
        values = list(values)
        for kind, name, picks in steps:
            # The newest are read most.
            x, y = (values[-1 - int(p * p * len(values))] for p in picks)
            match kind:
                case "one":
                    new = ONE_OPERAND[name](x)
                case "two":
                    new = TWO_OPERANDS[name](x, y)
                case "matmul":
                    new = x @ w
                case "bias":
                    new = x @ w + b
                case _:
                    new = x + w
            values.append(new)
        # Everything leads to the loss, through what is computed in f32.
        return values[-1], values[-2], sum(map(jnp.mean, (*values, b)))

    return run


PROBABILITIES = [0.45, 0.2, 0.2, 0.1, 0.05]


def block(rng):
    """A random block: operations, perhaps in a loop, a call or another autocast."""
    run = operations(rng, int(rng.integers(2, 7)))
    wrap = WRAPS[rng.choice(list(WRAPS))]
    inner = rng.choice(["none", "off", "float16", "bfloat16"], p=[0.7, 0.1, 0.1, 0.1])
    loops, is_zero = rng.random() < 0.5, rng.random() < 0.3

    def body(x, other, w, b):
        if inner == "none":
            return run([other, x], w, b)
        dtype = "bfloat16" if inner == "off" else inner
        with ts.autocast(dtype, enabled=inner != "off"):
            return run([other, x], w, b)

    def apply(values, weights, biases):
        x, other = values[-1], values[0]
        if not loops:
            *results, term = wrap(body)(x, other, weights[0], biases[0])
            return results, term

        def layer(carry, layer):
            h, total = carry
            h, kept, term = wrap(body)(h, other, *layer)
            return (h, total + h), (kept, term)

        total = jnp.zeros_like(x) if is_zero else x
        carry, (stacked, terms) = lax.scan(layer, (x, total), (weights, biases))
        return [*carry, stacked[1]], jnp.sum(terms) + jnp.sum(stacked)

    return apply


def program(rng):
    blocks = [block(rng) for _ in range(rng.integers(1, 4))]
    dtype = rng.choice(["bfloat16", "float16"], p=[0.7, 0.3])
    first = bool(rng.random() < 0.5)
    differentiates, is_inside = rng.random() < 0.7, rng.random() < 0.5

    def loss_of(weights, biases, x):
        with ts.autocast(dtype):
            values = [x @ weights[0] if first else x]
            total = jnp.mean(weights) + jnp.mean(biases)
            for apply in blocks:
                results, term = apply(values, weights, biases)
                values, total = values + results, total + term
            return total + sum(map(jnp.mean, values)), values[-1]

    def step(x, weights, biases):
        if not differentiates:
            return loss_of(weights, biases, x)
        with ts.autocast(dtype, enabled=is_inside):
            gradient = jax.value_and_grad(loss_of, (0, 1, 2), has_aux=True)
            return gradient(weights, biases, x)

    return step


def drawn(seed):
    """The program of a seed after differentiation, and its inputs."""
    rng = np.random.default_rng(seed)
    step = program(rng)
    shapes = (SIZE, SIZE), (LAYERS, SIZE, SIZE), (LAYERS, SIZE)
    values = [np.float32(rng.standard_normal(shape)) for shape in shapes]
    return ts.function(step, skip_passes=["autocast", "widen_sums"]).trace(*values), [
        jnp.asarray(value) for value in values
    ]


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.fuzz(sample=12, whole=2000)
def test_random_programs_follow_the_rules(seed):
    traced, values = drawn(seed)
    graph = {record.name: record.graph for record in traced.passes}["autocast"]
    values = [*values, *graph.captured]
    expected = reference(graph.program, values)
    narrowed = autocast(graph)
    results = evaluate(narrowed.program, values)
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
