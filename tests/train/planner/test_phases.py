# SPDX-License-Identifier: Apache-2.0
"""What the planner expects beside the steps of preferences and rewards."""

from collections import Counter
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any

import pytest

from tessera.analysis.flops import count
from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config
from tessera.train.loop.build_run import Run
from tessera.train.planner import phases as phases_module
from tessera.train.planner.answer import Answer
from tessera.train.planner.layout import Layout
from tessera.train.planner.phases import DISPATCH, FILL
from tessera.train.planner.search import Candidate, SearchResult
from tessera.train.planner.search_space import Space
from tessera.train.planner.step_time import StepModel
from tessera.train.planner.workload import Workload, workload
from tessera.train.rollouts.dispatch_inputs import CHUNKS
from tessera.train.rollouts.sampler import Sampler

TARGET = Target.parse("h100:1x8", "cpu")
LAYOUT = Layout((("fsdp", 4), ("tp", 2)), 4, 2, remat="full")
KL = {"kl_coefficient": 0.1}


def config(objective: str, loss: str = "dpo", *words: str, **grpo: Any) -> Config:
    line = "data=synthetic", "training.sequence_length=64", "recipe=none", *words
    found = compose(line, configs_dir()).config
    return replace(
        found,
        training=replace(found.training, objective=objective),
        preference=replace(found.preference, loss=loss),
        grpo=replace(found.grpo, **{"max_completion": 16, **grpo}),
    )


@cache
def work(objective: str) -> Workload:
    return workload(config(objective), TARGET, ("none", "dots", "full"))


def model(objective: str, loss: str = "dpo", *words: str, **grpo: Any) -> StepModel:
    """Of one trace: that of another objective differs in the logits alone."""
    return StepModel(config(objective, loss, *words, **grpo), work("policy"), TARGET)


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> None:
    work("policy")


def seconds(*args: Any, layout: Layout = LAYOUT, **grpo: Any) -> dict[str, float]:
    return dict(model(*args, **grpo).predict(layout).phases)


def test_phases_are_those_of_the_objective():
    assert [*seconds("next_token")] == []
    assert [*seconds("preference")] == ["reference scores"]
    assert [*seconds("preference", "orpo")] == []
    rollout = ["prefill", "decoding"]
    assert [*seconds("policy")] == rollout
    assert [*seconds("policy", passes=2)] == ["policy scores", *rollout]
    both = ["reference scores", "policy scores", *rollout]
    assert [*seconds("policy", steps_per_rollout=2, **KL)] == both


@pytest.mark.parametrize("name", ["server", "environment"])
def test_rollouts_of_others_and_of_turns_are_not_predicted(name):
    step = model("policy", **{name: "http://localhost:1/v1"})
    assert dict(step.predict(LAYOUT).phases) == {}
    assert step.memory(LAYOUT).rollout == 0


def test_a_step_takes_longer_by_what_is_beside_it():
    found = model("policy", **KL).predict(LAYOUT)
    step = found.compute + found.exposed + found.bubble + found.overhead
    assert found.seconds == step + sum(found.phases.values()) > step


def test_a_rollout_is_shared_by_its_steps():
    """More steps roll out more prompts, more passes learn from the same ones."""
    one, steps, passes = (
        seconds("policy", slots=8, **more)
        for more in ({}, {"steps_per_rollout": 2}, {"passes": 2})
    )
    assert steps["decoding"] == pytest.approx(one["decoding"])
    assert passes["decoding"] == pytest.approx(one["decoding"] / 2)
    assert passes["prefill"] == pytest.approx(one["prefill"] / 2)
    assert passes["policy scores"] == pytest.approx(steps["policy scores"] / 2)


def test_scores_that_were_made_once_take_no_time_and_no_copy():
    settings = config("preference")
    chosen = replace(settings.preference, reference="precomputed")
    once = StepModel(replace(settings, preference=chosen), work("policy"), TARGET)
    assert dict(once.predict(LAYOUT).phases) == {}
    assert once.memory(LAYOUT).reference == 0
    assert model("preference").memory(LAYOUT).reference > 0


def test_a_reference_is_asked_in_each_step():
    once, often = (seconds("policy", passes=n, **KL) for n in (1, 4))
    assert once["reference scores"] == often["reference scores"]


def test_prompts_of_a_group_are_computed_once():
    few, many = (
        seconds("policy", group_size=size, layout=replace(LAYOUT, microbatches=16))
        for size in (32, 2)
    )
    assert many["prefill"] > few["prefill"]
    assert many["decoding"] == few["decoding"]


def test_rows_beyond_the_slots_wait_for_them():
    wide, narrow = (seconds("policy", slots=slots)["decoding"] for slots in (64, 8))
    assert 2.5 < narrow / wide < 4.01  # 8 rows of a part, in 2 slots instead of 8


def test_a_token_takes_as_long_as_to_read_the_weights():
    """However many rows it is of; with eight of a part, two slots have four turns."""
    free = {"operation": 0.0, "step": 0.0, "allocation": 0.0}
    slow = replace(TARGET.machine, memory_bandwidth=1e8, overhead=free)
    target = replace(TARGET, machine=slow)
    layout = replace(LAYOUT, mesh=(("dp", 4), ("tp", 2)))
    steps = [
        StepModel(config("policy", slots=n), work("policy"), target) for n in (8, 16)
    ]
    weights = steps[0].phases(layout)._weights() / slow.memory_rate
    few, some = (step.predict(layout).phases for step in steps)
    assert few["decoding"] / some["decoding"] == pytest.approx(2, rel=0.2)
    # A dispatch reads and writes them, too.
    assert few["decoding"] / (4 * (16 + 2) * weights) == pytest.approx(1.1, rel=0.1)


def test_a_window_limits_what_a_token_reads():
    """tiny has windows of 64 tokens in five of its six layers."""
    phases = model("policy").phases(LAYOUT)
    token = phases.cached(1)
    assert phases.cached(64) == pytest.approx(64 * token)
    assert phases.cached(256) == pytest.approx((5 * 64 + 256) / 6 * token)


def test_memory_has_the_copy_and_the_largest_phase():
    plain, copy = (model("policy", **kl).memory(LAYOUT) for kl in ({}, KL))
    assert copy.reference == copy.parameters == plain.parameters
    assert plain.reference == 0
    assert copy.total - plain.total == pytest.approx(copy.parameters)
    few, many = (model("policy", slots=n).memory(LAYOUT) for n in (8, 2**16))
    assert few.total == plain.total  # a step takes more
    assert many.total == many.state + many.rollout > few.total


def test_a_reference_without_adapters_is_no_copy():
    found = model("preference", "dpo", "model.lora.rank=4")
    assert found.memory(LAYOUT).reference == 0
    assert "reference scores" in found.predict(LAYOUT).phases


def test_programs_of_the_sampler_are_those_that_it_has():
    has = {n: each.default for n, each in signature(Sampler).parameters.items()}
    assert has["dispatch_tokens"] == DISPATCH
    assert has["block"] * CHUNKS[-1] == FILL


@pytest.mark.full
def test_scores_send_what_the_compiled_program_does():
    settings = LAYOUT.applied(config("preference"))
    mesh = mesh_of_shape(settings.model.mesh_shape)
    rows = Run(settings, mesh).compiled_scores["reference"].collectives.rows
    found = Counter[Any]()
    for row in rows:
        found[row.axes] += row.total_bytes
    phases, sent = model("preference").phases(LAYOUT), list[Any]()
    phases._scores(lambda each: sent.append(each) or 0.0)
    total = Counter[Any]()
    for each in sent:
        share = 1 if each.kind == "all-gather" else 1 / 3
        total[each.axes] += LAYOUT.microbatches * share * each.nbytes * each.times
    assert total["fsdp",] == pytest.approx(found["fsdp",], rel=0.1)
    assert total["tp",] == pytest.approx(found["tp",], rel=0.3)


@pytest.mark.full
@pytest.mark.parametrize("objective", ["preference", "policy"])
def test_logits_that_are_computed_again_are_no_model_flops(objective):
    """A backward pass computes the logits of chunks again, which takes time alone."""
    settings = config(objective)
    again = workload(settings, TARGET, ("none",))
    whole = replace(settings.training, loss_chunk="none")
    once = workload(replace(settings, training=whole), TARGET, ("none",))
    assert (once.ends_again, again.ends_again) == (0, 1)
    assert again.flops == pytest.approx(once.flops, rel=1e-6)
    settings = replace(LAYOUT, remat="none").applied(settings)
    run = Run(settings, mesh_of_shape(settings.model.mesh_shape))
    traced = count(run.compiled.traced.graph.program).matmul
    ends = sum(p.flops for p in again.products if p.path not in again.layered())
    assert 32 * (again.flops + ends) == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(
    ("objective", "has_cache", "lines"),
    [
        ("next_token", True, []),
        ("preference", True, ["rank 1: step ", " %, reference scores "]),
        ("policy", True, ["rank 1: step ", ", prefill ", "and no time of rewards"]),
        (
            "policy",
            False,
            ["rank 1: step 100 %", "and no time of rollouts and rewards"],
        ),
    ],
)
def test_a_plan_says_what_phases_take(monkeypatch, objective, has_cache, lines):
    if not has_cache:
        monkeypatch.setattr(phases_module, "RecomputedDecoding", object)
    step = model(objective)
    best = Candidate(LAYOUT, step.predict(LAYOUT), is_safe=True)
    space = Space(step.config, frozenset(), (), LAYOUT.global_batch_size)
    text = Answer(TARGET, space, (), SearchResult(best=[best])).as_text()
    assert ("rank 1: " in text) == bool(lines)
    assert all(line in text for line in lines)
