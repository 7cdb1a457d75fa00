# SPDX-License-Identifier: Apache-2.0
"""Weight gradients on CPU: another form of the same product, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.analysis.ledger import collectives
from tessera.graph.ir import Graph
from tessera.graph.passes import orient_matmuls as module
from tessera.graph.passes.orient_matmuls import orient_matmuls
from tessera.jax_compat import jaxprs

DRAW = np.random.default_rng(0)
X = jnp.asarray(DRAW.normal(size=(4, 8, 6)).astype("f4"))
W = jnp.asarray(DRAW.normal(size=(6, 10)).astype("f4"))
SKIP = ["orient_matmuls"]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """The matmuls of these tests are small."""
    monkeypatch.setattr(module, "_WORTH_IT", 0)


def names(program):
    """The primitives of a program, those of nested ones after their own."""
    found = []
    for equation in jaxprs.equations(program):
        found.append(equation.primitive.name)
        for inner in jaxprs.inner_programs(equation):
            found += names(inner)
    return found


def matmuls(program):
    """Which dims every matmul contracts."""
    found = []
    for equation in jaxprs.equations(program):
        if equation.primitive.name == "dot_general":
            found.append(equation.params["dimension_numbers"][0])
        for inner in jaxprs.inner_programs(equation):
            found += matmuls(inner)
    return found


def slope(function):
    """A function's gradient by its last argument, in one Tessera step."""

    def gradient(x, w):
        return ts.grad(jnp.sum(function(x, w) ** 2), w)

    return gradient


def program_of(function, *args, **options):
    return ts.function(function, **options).trace(*args).graph.program


def test_a_weight_gradient_contracts_the_last_dims_of_its_left_operand():
    gradient = slope(lambda x, w: jnp.sin(x) @ w)
    before = program_of(gradient, X, W, skip_passes=SKIP)
    after = program_of(gradient, X, W)
    assert matmuls(before) == [((2,), (0,)), ((0, 1), (0, 1))]
    assert matmuls(after) == [((2,), (0,)), ((1, 2), (0, 1))]
    assert names(before)[-2:] == ["dot_general", "transpose"]
    assert names(after)[-3:] == ["transpose", "optimization_barrier", "dot_general"]


def transposed(function, x, w):
    """The shapes of what the pass puts behind barriers."""
    return [
        equation.outvars[0].aval.shape
        for equation in jaxprs.equations(program_of(slope(function), x, w))
        if equation.primitive.name == "optimization_barrier"
    ]


def test_the_smaller_operand_is_the_one_that_is_transposed():
    assert transposed(lambda x, w: jnp.sin(x) @ w, X, W) == [(6, 4, 8)]
    assert transposed(lambda x, w: jnp.sin(x) @ w, X, W[:, :3]) == [(3, 4, 8), (3, 6)]


def test_of_two_operands_of_one_size_the_cotangent_is_transposed():
    def read_by_its_derivative(x, w):
        return jnp.tanh(jnp.tanh(x @ w[:, :6]) @ w[:, :6])

    square = [(6, 4, 8), (6, 6)]
    assert transposed(read_by_its_derivative, X, W) == 2 * square


PRODUCTS = {
    "matmul": (X, W, jnp.matmul),
    "two dims": (X[0], W, jnp.matmul),
    "wide to narrow": (X, W[:, :2], jnp.matmul),
    "heads out": (
        X,
        W.reshape(6, 5, 2),
        lambda x, w: jnp.einsum("btd,dhk->bthk", x, w),
    ),
    "heads in": (
        X.reshape(4, 8, 3, 2),
        W.reshape(3, 2, 10),
        lambda x, w: jnp.einsum("bthk,hkd->btd", x, w),
    ),
    "heads among the dims": (
        X,
        W.reshape(6, 5, 2),
        lambda x, w: jnp.einsum(
            "bhtk,btd->hkd", jnp.einsum("btd,dhk->bthk", x, w).swapaxes(1, 2), x
        ),
    ),
    "experts": (
        X,
        jnp.stack([W] * 4),
        lambda x, w: jnp.einsum("etd,edf->etf", x, w),
    ),
    "written by the user": (
        X,
        W,
        lambda x, w: jnp.einsum("btd,bte->de", x, (x @ w)),
    ),
}


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "product",
    [*list(PRODUCTS)[:3], *(pytest.param(p, marks=FULL) for p in list(PRODUCTS)[3:])],
)
def test_gradients_are_those_of_the_same_product(product):
    x, w, function = PRODUCTS[product]
    changed = ts.function(slope(function)).trace(x, w)
    assert changed.diff("orient_matmuls")
    with jax.disable_jit():
        got = jaxprs.evaluate(changed.graph.program, x, w)[0]
    want = jax.grad(lambda w: jnp.sum(function(x, w) ** 2))(w)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


def with_rule(layer):
    ruled = jax.custom_vjp(layer)
    ruled.defvjp(
        lambda x, w: (layer(x, w), (x, w)),
        lambda kept, g: jax.vjp(layer, *kept)[1](g),
    )
    return ruled


NESTS = {
    "scan": lambda f: (
        lambda x, w: lax.scan(lambda c, _: (c + f(x, w), None), f(x, w), length=2)[0]
    ),
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "cond": lambda f: (
        lambda x, w: lax.cond(x[0, 0, 0] > 0, f, lambda x, w: 2.0 * f(x, w), x, w)
    ),
    "custom_vjp": with_rule,
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=ts.Mesh(["dp"], devices=range(2)).jax,
        in_specs=(P("dp"), P()),
        out_specs=P("dp"),
    ),
}


@pytest.mark.parametrize("nest", NESTS)
def test_nested_matmuls_are_changed_as_well(nest):
    gradient = slope(NESTS[nest](lambda x, w: jnp.tanh(x @ w)))
    assert ((0, 1), (0, 1)) in matmuls(program_of(gradient, X, W, skip_passes=SKIP))
    program = program_of(gradient, X, W)
    assert ((0, 1), (0, 1)) not in matmuls(program)
    assert "optimization_barrier" in names(program)
    jaxprs.check(program)


def test_a_product_that_something_else_reads_too_keeps_its_order():
    def function(x, y):
        product = jnp.einsum("btd,btf->df", x, y)
        return product, product.T

    y = X @ W
    program = program_of(function, X, y)
    assert [len(v.aval.shape) for v in jaxprs.outputs(program)] == [2, 2]
    got = ts.function(function)(X, y)
    np.testing.assert_allclose(got[0], jnp.einsum("btd,btf->df", X, y), rtol=1e-5)
    np.testing.assert_array_equal(got[1], got[0].T)


def test_precision_and_dtype_of_the_result_are_kept():
    def function(x, y):
        numbers = (((0, 1), (0, 1)), ((), ()))
        return lax.dot_general(
            x, y, numbers, precision="highest", preferred_element_type=jnp.float32
        )

    half = X.astype(jnp.bfloat16)
    (matmul,) = [
        equation
        for equation in jaxprs.equations(program_of(function, half, half))
        if equation.primitive.name == "dot_general"
    ]
    assert matmul.outvars[0].aval.dtype == jnp.float32
    assert set(matmul.params["precision"]) == {lax.Precision.HIGHEST}


def test_small_matmuls_those_of_integers_and_those_of_other_devices_are_left_alone(
    monkeypatch,
):
    graph = ts.function(slope(jnp.matmul)).trace(X, W).origin.graph
    whole = ts.function(slope(jnp.matmul), skip_passes=SKIP).trace(X, W).graph
    integers = X.astype(jnp.int32)
    numbers = ts.function(lambda x: jnp.einsum("btd,btf->df", x, x)).trace(integers)
    assert orient_matmuls(whole).program is not whole.program
    assert orient_matmuls(numbers.graph).program is numbers.graph.program
    with monkeypatch.context() as patch:
        patch.setattr(module, "_WORTH_IT", 1 << 22)
        assert orient_matmuls(whole).program is whole.program
    monkeypatch.setattr(Graph, "platform", property(lambda graph: "gpu"))
    assert orient_matmuls(whole).program is whole.program
    assert graph.platform == "gpu"


def test_changing_twice_is_changing_once():
    graph = ts.function(slope(jnp.matmul)).trace(X, W).graph
    assert orient_matmuls(graph).program is graph.program


def test_a_function_that_jax_differentiates_is_still_differentiable():
    function = ts.function(lambda x, y: jnp.einsum("btd,btf->df", x, y))
    y = X @ W

    def loss(x, y):
        return jnp.sum(function(x, y) ** 2)

    def plain(x, y):
        return jnp.sum(jnp.einsum("btd,btf->df", x, y) ** 2)

    for got, want in zip(
        jax.grad(loss, (0, 1))(X, y), jax.grad(plain, (0, 1))(X, y), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("axes", "sizes", "wide"),
    [
        (("fsdp",), (4,), P("fsdp", None)),
        (("tp",), (4,), P(None, "tp")),
        (("fsdp", "tp"), (2, 2), P("fsdp", "tp")),
    ],
    ids=["fsdp", "tp", "fsdp×tp"],
)
def test_what_is_sent_over_a_mesh_stays_as_it_was(axes, sizes, wide):
    mesh = ts.Mesh(axes, devices=range(4), shape=sizes)
    narrow = P(*reversed(wide))
    rows = P("fsdp" if "fsdp" in axes else None)

    def step(weights, x):
        hidden = jnp.tanh(x @ weights["up"])
        loss = jnp.sum((hidden @ weights["down"]) ** 2)
        return ts.grad(loss, weights)

    weights = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
    layouts = {"up": wide, "down": narrow}
    place = jax.tree.map(lambda spec: NamedSharding(mesh.jax, spec), layouts)
    weights = jax.device_put(weights, place)
    found = [
        ts.function(
            step,
            mesh=mesh,
            in_specs={"weights": layouts, "x": rows},
            out_specs=layouts,
            skip_passes=skip,
        ).compile(weights, jnp.ones((8, 4, 8)))
        for skip in ((), SKIP)
    ]
    assert found[0].traced.diff("orient_matmuls")
    sent = [collectives(each.jax, mesh).totals() for each in found]
    assert sent[0] == sent[1]
    assert sent[0]


# --- memory


def block(activation, is_residual):
    def apply(weights, x):
        hidden = activation(x @ weights["up"]) @ weights["down"]
        return x + hidden if is_residual else activation(hidden)

    return apply


def parallel(weights, x):
    """Two branches that read one activation."""
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"] + jnp.sin(x @ weights["a"])


DEEP = {
    "of one width": (16, block(jnp.tanh, is_residual=False)),
    "residual": (16, block(jnp.tanh, is_residual=True)),
    "rematerialized": (16, jax.checkpoint(parallel)),
    "jitted": (16, jax.jit(block(jnp.tanh, is_residual=False))),
    "whose activations are not read otherwise": (64, block(jax.nn.gelu, True)),
}


def deep_step(layer):
    def step(weights, x):
        for each in weights:
            x = layer(each, x)
        loss = jnp.mean(x**2)
        gradients = ts.grad(loss, weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


QUICK = ("of one width", "rematerialized")


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=() if name in QUICK else FULL) for name in DEEP],
)
def test_temporaries_grow_by_a_twentieth_at_most(model):
    width, layer = DEEP[model]
    shapes = {"up": (16, width), "down": (width, 16), "a": (16, 16)}
    if "rematerialized" not in model:
        del shapes["a"]
    types = {name: jax.ShapeDtypeStruct(s, "float32") for name, s in shapes.items()}
    weights = [types] * 12  # of fewer layers, one transposed array is more than that
    x = jax.ShapeDtypeStruct((4, 16, 16), "float32")
    step = deep_step(layer)
    changed, plain = (
        ts.function(step, donate=["weights"], skip_passes=skip).compile(weights, x)
        for skip in ((), SKIP)
    )
    assert changed.traced.diff("orient_matmuls")
    sizes = [c.jax.memory_analysis().temp_size_in_bytes for c in (changed, plain)]
    assert sizes[0] <= 1.05 * sizes[1]
