# SPDX-License-Identifier: Apache-2.0
"""``tessera.schedule``: what is said holds for the steps that are traced after it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import errors, graph, schedule
from tessera.graph.compile_stages import Lowered
from tessera.graph.lower.lower_to_jit import compile_lowered, options_of
from tessera.jax_compat.workarounds import correct_options
from tessera.mesh import Mesh
from tessera.tracing import scope
from tessera.tracing.scope import Plan


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    before = scope.current_plan()
    yield
    scope.set_plan(before)


X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def pipelined_step(**options: Any) -> Any:
    mesh = Mesh(["pp"], devices=range(2))
    first, last = (graph.stage(name)(lambda x, w: jnp.tanh(x @ w)) for name in "ab")

    @graph.pipeline(stages=[first, last], mesh=mesh, batch="x", **options)
    def model(x: Any, w: Any) -> Any:
        return last(first(x, w), 2.0 * w)

    @ts.function(mesh=mesh)
    def step(x: Any, w: Any) -> Any:
        return ts.grad(model(x, w).mean(), w)

    return step


def order_of(step: Any) -> str:
    """The schedule of the pipeline in a step."""
    text = step.trace(X, jnp.eye(4)).as_text()
    line = next(line for line in text.splitlines() if "call=" in line)
    return line.split("call=")[1].split(",")[1].strip()


def test_nothing_is_planned_unless_it_is_said():
    assert scope.current_plan() == Plan()
    text = graph.trace(lambda x: x.sum(), X).as_text()
    assert "schedule:" not in text


# --- microbatches


def test_a_pipeline_has_the_microbatches_that_were_said():
    assert order_of(pipelined_step()) == "2 microbatches"
    schedule.pipeline_microbatches(8)
    assert order_of(pipelined_step()) == "8 microbatches"
    schedule.pipeline_microbatches(None)
    assert order_of(pipelined_step()) == "2 microbatches"


def test_a_pipeline_that_names_its_own_number_keeps_it():
    schedule.pipeline_microbatches(8)
    assert order_of(pipelined_step(microbatches=4)) == "4 microbatches"


def test_a_step_is_compiled_anew_for_another_plan_and_once_for_each():
    step, found = pipelined_step(), []
    for count in (2, 8, 2):
        schedule.pipeline_microbatches(count)
        found.append(step(X, jnp.eye(4)))
        step(X, jnp.eye(4))
    assert step.num_programs() == 2
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_array_equal(found[2], found[0])


def test_what_is_said_in_a_step_holds_for_that_step():
    @ts.function
    def step(x: Any) -> Any:
        schedule.all_reduce_overlap(False)
        return 2.0 * x

    assert step.trace(X).graph.plan == Plan(all_reduce_overlap=False)
    assert scope.current_plan() == Plan()


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "8"])
def test_a_number_of_microbatches_is_positive_and_whole(count):
    with pytest.raises(errors.PipelineSizeError) as caught:
        schedule.pipeline_microbatches(count)
    assert str(caught.value) == (
        "[T311] a pipeline's number of microbatches is a positive whole number\n"
        f"  got: pipeline_microbatches({count!r})\n"
        "  fix: use 1 or more, or None to leave it to the pipeline\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )


# --- overlap


def test_overlap_is_recorded_and_shown_with_what_a_cpu_makes_of_it():
    schedule.all_reduce_overlap(True)
    schedule.pipeline_microbatches(8)
    explanation = graph.trace(lambda x: x.sum(), X)
    assert explanation.traced.graph.plan == Plan(8, all_reduce_overlap=True)
    assert (
        "schedule: microbatches=8 all_reduce_overlap=True "
        "(no collective of a CPU runs beside computation)" in explanation.as_text()
    )
    schedule.all_reduce_overlap(False)
    text = graph.trace(lambda x: x.sum(), X).as_text()
    assert "schedule: microbatches=8 all_reduce_overlap=False\n" in text


@pytest.mark.parametrize(
    ("platform", "said", "options"),
    [
        ("gpu", True, {"xla_gpu_enable_latency_hiding_scheduler": True}),
        ("gpu", False, {"xla_gpu_enable_latency_hiding_scheduler": False}),
        ("gpu", None, {}),
        ("cpu", True, {}),
        ("cpu", False, {}),
    ],
)
def test_overlap_is_an_option_of_the_compiler_on_gpus(
    platform, said, options, monkeypatch
):
    traced = ts.function(lambda x: x.sum()).trace(X)
    kind = type(traced.graph)
    monkeypatch.setattr(kind, "platform", property(lambda _: platform))
    planned = replace(traced.graph, plan=Plan(all_reduce_overlap=said))
    assert options_of(planned) == correct_options(platform) | options


PIPELINED = "xla_gpu_enable_pipelined_all_reduce"


@pytest.mark.parametrize(
    ("devices", "plan", "environment", "pipelined"),
    [
        (2, Plan(), "", True),
        (2, Plan(all_reduce_overlap=True), "", True),
        (2, Plan(all_reduce_overlap=False), "", None),
        (2, Plan(compiler_options=((PIPELINED, False),)), "", False),
        (2, Plan(), f"--{PIPELINED}=false", None),
        (1, Plan(), "", None),
    ],
)
def test_several_gpus_overlap_unless_the_user_says_otherwise(
    devices, plan, environment, pipelined, monkeypatch
):
    mesh = Mesh(["dp"], devices=range(devices))
    planned = replace(ts.function(jnp.sum, mesh=mesh).trace(X).graph, plan=plan)
    own = dict(plan.compiler_options or ())
    assert options_of(planned) == correct_options("cpu") | own
    monkeypatch.setattr(type(planned), "platform", property(lambda _: "gpu"))
    monkeypatch.setenv("XLA_FLAGS", environment)
    assert options_of(planned).get(PIPELINED) is pipelined


def test_a_step_is_compiled_with_these_options(monkeypatch):
    given = []

    class Stub:
        def compile(self, compiler_options: Any = None) -> Any:
            given.append(compiler_options)
            return ts.function(lambda x: x.sum()).lower(X).jax.compile()

    traced = ts.function(lambda x: x.sum()).trace(X)
    Lowered(traced, Stub()).compile()
    schedule.all_reduce_overlap(True)
    monkeypatch.setattr(type(traced.graph), "platform", property(lambda _: "gpu"))
    traced = ts.function(lambda x: x.sum()).trace(X)
    Lowered(traced, Stub()).compile()
    on_cpu = correct_options("cpu") or None
    assert given == [on_cpu, {"xla_gpu_enable_latency_hiding_scheduler": True}]


@pytest.mark.parametrize("option", [PIPELINED, "xla_gpu_nosuch"])
def test_a_default_that_this_xla_lacks_is_left_out(option, monkeypatch):
    given = []

    class Stub:
        def compile(self, options: Any) -> str:
            given.append(dict(options))
            if option in options:
                message = f"INVALID_ARGUMENT: No such compile option: '{option}'"
                raise jax.errors.JaxRuntimeError(message)
            return "compiled"

    mesh = Mesh(["dp"], devices=range(2))
    graph = ts.function(jnp.sum, mesh=mesh).trace(X).graph
    monkeypatch.setattr(type(graph), "platform", property(lambda _: "gpu"))
    if option == PIPELINED:
        assert compile_lowered(graph, Stub()) == "compiled"
        first, second = given
        assert second == {name: first[name] for name in first if name != option}
    chosen = replace(graph, plan=Plan(compiler_options=((option, True),)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=option):
        compile_lowered(chosen, Stub())


@pytest.mark.parametrize("said", [2, "yes", jax])
def test_overlap_is_on_or_off(said):
    with pytest.raises(errors.SettingValueError) as caught:
        schedule.all_reduce_overlap(said)
    assert "all_reduce_overlap is on or off" in str(caught.value)
