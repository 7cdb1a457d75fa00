# SPDX-License-Identifier: Apache-2.0
"""What the planner answers: a table, a command line and JSON."""

import json
import shlex
from dataclasses import replace

import pytest

from tessera.analysis.memory import format_bytes
from tessera.errors import (
    OutputPathError,
    PlanError,
    TargetError,
    UnknownSettingError,
)
from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.commands.plan import main
from tessera.train.config.command_line import compose
from tessera.train.config.recipes import RANDOM_WEIGHTS
from tessera.train.planner import step_time
from tessera.train.planner.answer import Answer, describe
from tessera.train.planner.layout import Layout
from tessera.train.planner.plan_run import plan_run
from tessera.train.planner.step_time import StepModel
from tessera.train.planner.workload import Workload

WORDS = (
    "data=synthetic",
    "training.sequence_length=64",
    "training.global_batch_size=32",
    "runtime.target=cpu:4",
)


@pytest.fixture(scope="module")
def work() -> Workload:
    """The trace of the model, which neither layout nor batch nor memory changes."""
    config = compose([*WORDS, "training.dry_run=true"], configs_dir()).config
    return StepModel.of(config, Target.parse("cpu:4")).work


@pytest.fixture
def traced_before(monkeypatch, work):
    monkeypatch.setattr(step_time, "workload", lambda *_: work)


@pytest.fixture(scope="module")
def answer(work) -> Answer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time, "workload", lambda *_: work)
        return plan_run(WORDS)


def test_the_command_line_trains_in_the_best_layout(answer):
    words = shlex.split(answer.command(answer.best.layout))
    assert words[:2] == ["tessera", "train"]
    assert not any(word.startswith("runtime.target") for word in words)
    settings = compose(words[2:], configs_dir()).config
    sizes, axes = settings.model.mesh_shape
    assert tuple(zip(axes, sizes, strict=True)) == answer.best.layout.mesh
    assert settings.training.global_batch_size == 32
    assert settings.training.remat == answer.best.layout.remat


@pytest.mark.parametrize(
    "layout",
    [
        Layout((("pp", 2), ("fsdp", 2)), 2, 8, schedule="interleaved", chunks=2),
        Layout((("dp", 4),), 8, 1, zero_stage=3, offload=True, loss_chunk=256),
        Layout((("fsdp", 2), ("tp", 2)), 4, 4, remat="full", sequence_parallel=True),
    ],
    ids=describe,
)
def test_overrides_give_a_run_the_layout(layout):
    words = [*WORDS[:2], "training.global_batch_size=32", *layout.overrides()]
    settings = compose(words, configs_dir()).config
    assert replace(Layout.of(settings), microbatches=layout.microbatches) == layout
    assert Layout.of(layout.applied(settings)) == layout


def test_without_the_compiler_of_the_target_times_are_not_called_good(answer):
    assert "within 10 % at the median" in answer.as_text()
    missing = replace(answer, target=Target.parse("h100:8"))
    if missing.target.is_installed:
        pytest.skip("the compiler is installed")
    text = missing.as_text()
    assert "within 10 % at the median" not in text
    assert "steps come out too long" in text
    assert "\nFor good ones: pip install --upgrade 'tessera-spmd[targets-" in text
    assert missing.as_json()["uncertainty"] in text


def test_the_table_says_what_was_asked_and_found(answer):
    text = answer.as_text(rows=3)
    assert text.startswith("tiny on cpu:4: 4 devices of 1.00 GiB; 32 sequences of 64")
    assert "not legal: " in text
    assert describe(answer.best.layout) in text
    assert text.splitlines()[-1] == answer.command(answer.best.layout)
    assert len([line for line in text.splitlines() if line[:1].isdigit()]) == 3


def test_figures_of_a_row_belong_together(answer):
    found = answer.as_json()
    best = found["layouts"][0]
    parts = sum(best[name] for name in ("compute", "exposed", "bubble", "overhead"))
    assert best["seconds"] == pytest.approx(parts)
    assert best["tokens_per_second"] == pytest.approx(32 * 64 / parts)
    assert 0 < best["mfu"] < 1
    assert json.loads(json.dumps(found))["tokens"] == 32 * 64


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_what_the_command_line_sets_is_not_searched():
    fixed = plan_run(
        [*WORDS, "training.remat=full", "model.mesh_shape=[[2,2],[dp,tp]]"],
    )
    assert {each.layout.remat for each in fixed.ranked} == {"full"}
    assert {frozenset(each.layout.mesh) for each in fixed.ranked} == {
        frozenset({("dp", 2), ("tp", 2)})
    }


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_a_setting_may_need_an_axis_that_the_plan_chooses():
    found = plan_run([*WORDS, "training.pipeline_schedule=zero_bubble"])
    pipelines = [each.layout for each in found.ranked if each.layout.schedule]
    assert pipelines
    assert {layout.schedule for layout in pipelines} == {"zero_bubble"}
    staged = plan_run([*WORDS, "training.zero_stage=2"])
    assert {each.layout.zero_stage for each in staged.ranked} == {2}


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_a_batch_that_is_not_set_is_said():
    words = [word for word in WORDS if "global_batch" not in word]
    found = plan_run(words)
    assert found.space.global_batch_size == 4 * 8
    assert "training.global_batch_size is not set" in found.as_text()


def test_a_plan_needs_a_target():
    with pytest.raises(TargetError, match=r"\[T711\] a plan needs the machine"):
        plan_run(WORDS[:3])


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_a_model_that_fits_nowhere_says_what_it_takes(tmp_path):
    file = tmp_path / "small.toml"
    text = (configs_dir() / "target" / "cpu.toml").read_text()
    file.write_text(text.replace("memory_bytes = 1073741824", "memory_bytes = 9000000"))
    with pytest.raises(PlanError) as caught:
        plan_run([*WORDS[:3], f"runtime.target={file}:4"])
    message = str(caught.value)
    assert message.startswith("[T714] no layout of this run fits the memory of small:4")
    assert "with least memory: " in message


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_a_batch_that_nothing_shares_says_why():
    words = [*WORDS[:2], "training.global_batch_size=5", "runtime.target=cpu:7"]
    with pytest.raises(PlanError, match=r"\[T714\] no layout on cpu:7 is legal"):
        plan_run(words)


@pytest.mark.slow(reason="the one whole plan")
def test_the_command_writes_what_it_is_asked_to(tmp_path, capsys):
    assert main([*WORDS, "--rows=2", f"--json={tmp_path}/plan.json"]) == 0
    assert "tessera train data=synthetic" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["devices"] == 4


def test_a_file_that_cannot_be_written_is_said_first(tmp_path, capsys):
    assert main([*WORDS, f"--json={tmp_path}/none/plan.json"]) == 2
    assert OutputPathError.code in capsys.readouterr().err


def test_flags_of_plan_say_how_settings_are_written():
    with pytest.raises(UnknownSettingError) as caught:
        main.__wrapped__(["model=tiny", "--target=h100:8"])
    assert "for --target=h100:8: did you mean 'runtime.target'?" in caught.value.fix


def test_the_command_line_is_that_of_the_run_that_was_planned(answer):
    """Fine-tuning is planned without weights, and would train random ones."""
    config = replace(answer.space.config, recipe="finetune")
    bare = replace(answer, space=replace(answer.space, config=config))
    assert bare.as_text().endswith(f"As planned, {RANDOM_WEIGHTS}")
    assert RANDOM_WEIGHTS not in answer.as_text()


@pytest.mark.slow(reason="it traces a model of its own")
def test_a_registered_model_is_planned_with_what_it_takes(monkeypatch):
    monkeypatch.syspath_prepend(configs_dir().parent / "examples" / "own_model")
    sizes = ("model.layers=1", "training.sequence_length=16", "data=synthetic")
    words = ("model=Decoder", "runtime.target=cpu:2", *sizes)
    found = plan_run(words, modules=["own_decoder"])
    assert {each.layout.remat for each in found.ranked} == {"named"}
    assert "memory lacks what its layers keep" in found.uncertainty
    line = shlex.split(found.command(found.best.layout))
    assert line[2:4] == ["--module=own_decoder", "model=Decoder"]
    assert compose(line[3:], configs_dir()).config.model.num_devices == 2


def test_the_goodput_is_that_of_the_best_layout(answer, work):
    assert answer.state_bytes == sum(12 * each.size for each in work.parameters)
    text = answer.goodput_text(write_rate=1e9, restart=300)
    assert text.startswith("goodput 100.0%, were failures those of Llama 3 (419 in 54 ")
    assert f": {format_bytes(round(answer.state_bytes))}, complete after" in text


def test_the_command_shows_the_goodput_it_is_asked_for(traced_before, capsys):
    assert main(["--goodput", "2e9", "300", "--rows=1", *WORDS]) == 0
    assert "\ngoodput 100.0%" in capsys.readouterr().out
    assert main(["--goodput", "0", "300", *WORDS]) == 2
    assert "T502" in capsys.readouterr().err
