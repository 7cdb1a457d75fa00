# SPDX-License-Identifier: Apache-2.0
"""When a step is compiled, and that it is not compiled again: XLA's work is counted."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import ArgumentError

X = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def compilations() -> Iterator[list[str]]:
    """One entry for each program that XLA compiled while the test ran."""
    events: list[str] = []
    listening = True

    def listen(name: str, seconds: float, **_: object) -> None:
        if listening and name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    listening = False


@pytest.fixture
def count(compilations) -> Callable[..., int]:
    """How many programs XLA compiles while a step is called with each set of arguments.

    What is called with is made before, so that its own small programs do not count.
    """

    def counted(step, *calls) -> int:
        before = len(compilations)
        for args, kwargs in calls:
            jax.block_until_ready(step(*args, **kwargs))
        return len(compilations) - before

    return counted


def call(*args, **kwargs):
    return args, kwargs


def test_a_repeated_call_compiles_once_and_the_counter_counts(count):
    step = ts.function(lambda x: x + 1)
    assert count(step, call(X), call(X), call(X + 1)) == 1
    assert count(step, call(X[:4])) == 1
    assert step.num_programs() == 2


# --- configurations


def config():
    return {
        "rate": 1e-4,
        "clip": 1.0,
        "steps": 100,
        "mixed": True,
        "name": "adam",
        "warmup": None,
        "betas": [0.9, (0.95, "x")],
        "nested": {"decay": 0.01, "empty": {}, "tags": ("a", "b")},
    }


def reordered():
    return dict(reversed(config().items()))


def test_equal_configurations_are_one_however_they_are_made(count):
    @ts.function
    def step(x, config):
        assert config["warmup"] is None
        assert config["name"] == "adam"
        return x * config["rate"] if config["mixed"] else x

    calls = [call(X, config()), call(X, config()), call(X, reordered())]
    assert count(step, *calls) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rate": 1e-3},
        {"steps": 100.0},
        {"mixed": 1},
        {"warmup": 0},
        {"betas": [0.9, (0.95, "y")]},
        {"nested": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_another_configuration_is_another_program(count, change):
    step = ts.function(lambda x, config: x * config["rate"])
    calls = [call(X, config()), call(X, config() | change), call(X, config())]
    assert count(step, *calls) == 2


@dataclass(frozen=True)
class Settings:
    rate: float
    act: str = "relu"


def test_equal_dataclasses_are_one(count):
    step = ts.function(lambda x, settings: x * settings.rate)
    calls = [call(X, Settings(0.5)), call(X, Settings(0.5)), call(X, Settings(0.25))]
    assert count(step, *calls) == 2


def test_what_has_no_hash_is_refused():
    step = ts.function(lambda x, config: x)
    with pytest.raises(ArgumentError, match="'config/tags'"):
        step(X, {"tags": {"a"}})
    with pytest.raises(ArgumentError, match="'config'"):
        step(X, SimpleNamespace(rate=1))


# --- callables


def doubled(x, factor=2.0):
    return x * factor


class Model:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return x * self.factor

    def __call__(self, x):
        return x * self.factor


@dataclass(frozen=True)
class Layer:
    factor: float

    def apply(self, x):
        return x * self.factor


def closure(factor):
    def apply(x):
        return x * factor

    return apply


MODEL = Model(3.0)
TWOS = jnp.full(8, 2.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: doubled,
        lambda: functools.partial(doubled, factor=3.0),
        lambda: functools.partial(functools.partial(doubled), factor=3.0),
        lambda: lambda x: x * 3.0,
        lambda: closure(3.0),
        lambda: MODEL,
        lambda: MODEL.apply,
        lambda: Layer(3.0).apply,
        lambda: jnp.sin,
    ],
    ids=lambda make: make.__code__.co_names[0] if make.__code__.co_names else "lambda",
)
def test_a_callable_that_is_made_anew_is_the_same_one(count, make):
    step = ts.function(lambda model, x: model(x))
    calls = [call(make(), X), call(make(), X)]
    assert count(step, *calls) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (closure(2.0), closure(3.0)),
        (functools.partial(doubled, factor=2.0), functools.partial(doubled, factor=3)),
        (Layer(2.0).apply, Layer(3.0).apply),
        (Model(2.0), Model(2.0)),
        (lambda x: x, lambda x: x),
    ],
    ids=["closure", "partial", "method", "object", "lambda"],
)
def test_callables_that_may_differ_are_two(count, one, other):
    step = ts.function(lambda model, x: model(x))
    assert count(step, call(one, X), call(other, X), call(one, X)) == 2


def test_a_program_keeps_the_arrays_that_its_callable_closes_over(count):
    twos, threes = jnp.full(8, 2.0), jnp.full(8, 3.0)
    step = ts.function(lambda model, x: model(x))
    assert count(step, call(closure(twos), X), call(closure(twos), X)) == 1
    np.testing.assert_array_equal(step(closure(threes), X), X * 3)
    np.testing.assert_array_equal(step(closure(twos), X), X * 2)


# --- how a call is written


def test_a_call_has_one_program_for_each_form_as_with_jax_jit(count):
    def body(x, scale=2.0, *, bias=None):
        return x * scale + (0.0 if bias is None else bias)

    step = ts.function(body)
    calls = [call(X), call(x=X), call(X, scale=2.0), call(scale=2.0, x=X)]
    assert count(step, *calls, *calls) == 4
    for args, kwargs in calls:
        np.testing.assert_array_equal(step(*args, **kwargs), X * 2)
    assert step.num_programs() == 4


def test_keywords_in_any_order_reach_their_arguments():
    step = ts.function(lambda a, b, *rest, c=1.0, **more: a - b * c + more.get("d", 0))
    assert step(X, X * 2, c=3.0)[1] == step(c=3.0, b=X * 2, a=X)[1] == -5.0
    assert step(a=X, b=X, d=X)[1] == step(d=X, b=X, a=X)[1] == 1.0
    assert step.num_programs() == 3


def test_a_default_that_holds_an_array_is_closed_over(count):
    step = ts.function(lambda x, scale=TWOS: x * scale)
    assert count(step, call(X), call(X)) == 1
    np.testing.assert_array_equal(step(X), X * 2)
    np.testing.assert_array_equal(step(X, X), X * X)


def test_a_default_that_has_no_hash_may_be_left_out():
    step = ts.function(lambda x, tags={"a"}: x * len(tags))
    np.testing.assert_array_equal(step(X), X)


# --- numbers


def test_scalars_of_numpy_are_arrays_and_pythons_are_static(count):
    step = ts.function(lambda x, scale: x * scale)
    arrays = [call(X, np.float32(2)), call(X, np.float32(3)), call(X, np.ones((), "f"))]
    assert count(step, *arrays) == 1
    assert count(step, call(X, 2.0), call(X, 3.0), call(X, 2.0)) == 2


@pytest.mark.parametrize(
    ("numbers", "programs"),
    [
        ((0.0, -0.0, 0.0), 2),
        ((1, True, 1.0, 1), 3),
        ((float("nan"), float("nan"), np.nan), 1),
    ],
    ids=str,
)
def test_numbers_are_alike_by_type_and_sign_and_nan_is_like_nan(numbers, programs):
    step = ts.function(lambda x, number: x * float(number))
    signs = [np.signbit(step(X, number))[1] for number in numbers]
    assert signs == [np.signbit(np.float32(number)) for number in numbers]
    assert step.num_programs() == programs


def test_a_weak_number_becomes_strong_once(count):
    @ts.function
    def step(x, scale):
        return x * scale, scale * jnp.float32(2)

    scale = jnp.asarray(1.0)  # as weak as a Python number
    step(X, scale)
    for _ in range(4):
        _, scale = step(X, scale)
    assert step.num_programs() == 2
    assert count(step, call(X, scale), call(X, scale)) == 0


# --- results that become arguments


def trained(step, weights, count_of=4):
    for _ in range(count_of):
        weights = step(weights, X)
    return weights


def test_results_on_one_device_are_like_what_they_replace():
    step = ts.function(lambda w, x: w - 0.1 * x)
    trained(step, np.ones(8, np.float32))
    assert step.num_programs() == 1


def test_a_step_on_a_mesh_takes_its_results_in_the_place_of_fresh_arrays(dp_mesh):
    layout = ts.ShardSpec((0,), ("dp",))
    step = ts.function(
        lambda w, x: w - 0.1 * x, mesh=dp_mesh, in_specs={"x": layout}, out_specs=P()
    )
    fresh = np.ones(8, np.float32)
    trained(step, fresh)
    assert step.num_programs() == 1
    # Another call in between, so that the program is found and not just tried again.
    step(fresh[:, None], X[:, None])
    placed = jax.device_put(fresh, NamedSharding(dp_mesh.jax, P()))
    step(placed, X)
    assert step.num_programs() == 2


def test_fresh_arrays_find_the_program_of_placed_ones(dp_mesh, count):
    step = ts.function(lambda w: w + 1, mesh=dp_mesh)
    placed = jax.device_put(X, NamedSharding(dp_mesh.jax, P()))
    assert count(step, call(placed), call(X), call(placed), call(X)) == 1
    assert step.num_programs() == 1


def test_a_layout_that_the_partitioner_chose_settles(dp_mesh):
    layout = ts.ShardSpec((0,), ("dp",))
    step = ts.function(lambda w, x: w - x, mesh=dp_mesh, in_specs={"x": layout})
    weights = trained(step, np.ones(8, np.float32), 2)
    settled = step.num_programs()
    assert settled <= 2
    trained(step, weights)
    assert step.num_programs() == settled


def test_a_strategy_lays_out_its_results_as_its_arguments(count):
    @ts.function
    @ts.distribute("data_parallel")
    def step(weights, batch):
        loss = jnp.mean((batch @ weights) ** 2)
        return loss, weights - 0.1 * ts.grad(loss, weights)

    weights, batch = np.ones(3, np.float32), np.ones((8, 3), np.float32)
    for _ in range(4):
        _, weights = step(weights=weights, batch=batch)
    assert step.num_programs() == 1
    assert count(step, call(weights=weights, batch=batch)) == 0


# --- jit of what there is


def test_jit_of_a_bound_method_is_a_step_of_its_object(count):
    step = ts.jit(Layer(2.0).apply)
    assert count(step, call(X), call(X)) == 1
    np.testing.assert_array_equal(step(x=X), X * 2)


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @ts.function
    def step(self, x):
        return x * self.rate


def test_a_method_is_compiled_for_each_object(count):
    one, other = Trainer(2.0), Trainer(3.0)
    assert count(one.step, call(X), call(X)) == 1
    assert count(other.step, call(X), call(X)) == 1
    np.testing.assert_array_equal(other.step(X), X * 3)


def test_jit_of_a_function_has_its_own_programs_and_the_same_body(count):
    inner = ts.function(lambda x: x + 1)
    step = ts.jit(inner)
    assert count(step, call(X), call(X)) == 1
    assert (step.num_programs(), inner.num_programs()) == (1, 0)


def test_a_result_gives_its_number():
    loss, count = ts.function(lambda x: (x.sum(), 3))(X)
    assert loss.item() == 28.0
    assert isinstance(loss.item(), float)
    assert count.item() == 3
    assert f"{loss.item():.4f}" == "28.0000"
