# SPDX-License-Identifier: Apache-2.0
"""Command lines: what they mean, and what the process does with them."""

import shlex
import sys
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from tessera.errors import ModelShapeError, TesseraError
from tessera.graph.pipelining import named_schedules
from tessera.train.config import run_config as config
from tessera.train.config.config_schema import (
    settings_of_text,
)
from tessera.train.config.optimizer_config import OPTIMIZERS, AdamWConfig
from tessera.train.config.run_config import (
    Config,
    ModelConfig,
    RuntimeConfig,
    TrainingConfig,
)
from tessera.train.config.setting_fields import as_yaml, problems_of
from tessera.train.data.data_config import DataConfig, SyntheticConfig
from tessera.train.models.axis_rules import RULES
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.named_models import config_of, model_names
from tessera.train.models.partition_rules import Method
from tests.train.config.command_lines import (
    CONFIGS_DIR,
    composed,
    run_from_command_line,
)

# --- what command lines mean


def test_the_defaults_are_those_of_the_classes():
    assert composed().config == Config(
        name="tiny",
        model=ModelConfig(name="tiny", config=config_of("tiny")),
        training=TrainingConfig(),
        data=DataConfig(tokenizer="bytes"),
        optimizer=AdamWConfig(),
        runtime=RuntimeConfig(),
    )


QUICK_FILES = ("tiny", "moe_tiny", "gemma3_4b", "llama3.1_70b", "qwen3_30b_a3b")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_FILES else pytest.mark.full)
        for name in model_names()
    ],
)
def test_the_command_of_a_model_file_chooses_the_named_model(name):
    text = (CONFIGS_DIR / "model" / f"{name}.yaml").read_text().partition("\n\n")[0]
    command = text.partition("# Command: python run_training.py")[2].replace("#", " ")
    arguments = [one for one in shlex.split(command) if not one.startswith("data")]
    model = composed(*arguments).config.model
    expected = ModelConfig(name=name, config=config_of(name))
    assert replace(model, mesh_shape=expected.mesh_shape) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_files_are_the_defaults_of_their_classes(name):
    assert composed(f"optimizer={name}").config.optimizer == OPTIMIZERS[name]()
    text = yaml.safe_load((CONFIGS_DIR / "optimizer" / f"{name}.yaml").read_text())
    assert set(text) - {"defaults"} == {f.name for f in fields(OPTIMIZERS[name])}


@pytest.mark.parametrize(
    ("group", "cls"), [("training", TrainingConfig), ("runtime", RuntimeConfig)]
)
def test_the_default_files_show_every_setting(group, cls):
    text = yaml.safe_load((CONFIGS_DIR / group / "default.yaml").read_text())
    assert list(text) == [field.name for field in fields(cls)]


def test_every_file_begins_with_what_it_is_and_a_command():
    for file in CONFIGS_DIR.rglob("*.yaml"):
        text = file.read_text()
        head = "".join(takewhile(lambda line: line[0] == "#", text.splitlines(True)))
        assert "python run_training.py" in head, file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[4,1],["fsdp","tp"]]', ((4, 1), ("fsdp", "tp"))),
        ("[[4,1],[fsdp,tp]]", ((4, 1), ("fsdp", "tp"))),
        ("[[1, 4], [fsdp, tp]]", ((1, 4), ("fsdp", "tp"))),
        ("[[2,2],['tp','dp']]", ((2, 2), ("tp", "dp"))),
        ("[[-1,2],[fsdp,tp]]", ((-1, 2), ("fsdp", "tp"))),
        ("[[8],[dp]]", ((8,), ("dp",))),
    ],
)
def test_meshes_are_written_with_or_without_quotes(text, expected):
    assert composed(f"model.mesh_shape={text}").config.model.mesh_shape == expected


def test_overrides_act_after_the_files_whatever_their_order():
    given = composed(
        "training.micro_batch_size=2",
        "model.mesh_shape=[[8,2],[fsdp,tp]]",
        "model=gemma3_4b",
        "training.clip_norm=null",
        "optimizer.weight_decay=0.01",
        "training={steps: 5, seed: 7}",
    ).config
    assert given.model.config == config_of("gemma3_4b")
    assert given.model.mesh_shape == ((8, 2), ("fsdp", "tp"))
    assert given.training == TrainingConfig(
        micro_batch_size=2, clip_norm=None, steps=5, seed=7
    )
    assert given.optimizer == AdamWConfig(weight_decay=0.01)


def test_one_setting_may_refer_to_another():
    given = composed("training.validate_every=${training.steps}", "training.steps=7")
    assert given.config.training.validate_every == 7


def test_the_output_folder_has_the_runs_name_and_the_time():
    parts = composed("name=mine").output_dir.parts
    assert parts[:2] == ("outputs", "mine")
    assert [len(part) for part in parts[2:]] == [len("2026-11-20"), len("23-59-59")]


def test_the_output_folder_may_be_given():
    given = composed("hydra.run.dir=/somewhere/${name}", "name=mine")
    assert given.output_dir == Path("/somewhere/mine")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer=sgd", "model.mesh_shape=[[4,1],[fsdp,tp]]"),
        ("training.sample_prompt='1e3'", "training.clip_norm=null"),
        ("training.sample_prompt='a: [b] # é\n\tnull'", "optimizer.learning_rate=1e-7"),
    ],
)
def test_the_saved_text_reads_back_as_the_same_settings(overrides):
    given = composed(*overrides)
    assert settings_of_text(given.text) == given.config
    assert "hydra" not in yaml.safe_load(given.text)


def test_the_saved_text_keeps_lists_on_one_line():
    text = composed("model.mesh_shape=[[4,1],[fsdp,tp]]").text
    assert "  mesh_shape: [[4, 1], [fsdp, tp]]\n" in text


# --- the process


def seen(capsys, *arguments, run=None):
    calls = []
    code = run_from_command_line(run or calls.append, arguments)
    out, err = capsys.readouterr()
    return code, out, err, calls


def test_a_good_command_line_runs(capsys):
    code, out, err, (call,) = seen(capsys, "training.steps=5")
    assert (code, out, err) == (0, "", "")
    assert call.config.training.steps == 5


def test_a_mistake_is_a_short_message_and_exit_code_two(capsys):
    code, out, err, calls = seen(capsys, "training.stepz=5")
    assert (code, out, calls) == (2, "", [])
    assert err.startswith("[T501] there is no setting 'training.stepz'\n")
    assert "Traceback" not in err


def test_a_mistake_that_the_run_finds_is_shown_the_same_way(capsys):
    def run(composed):
        raise TesseraError("no such text", fix="write some")

    code, _, err, _ = seen(capsys, run=run)
    assert code == 2
    assert err == (
        "[T000] no such text\n  fix: write some\n  docs: https://tessera-spmd.github.io/tessera/errors/T000.html\n"
    )


def test_a_bug_keeps_its_traceback(capsys):
    def run(composed):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        seen(capsys, run=run)


@pytest.mark.parametrize("flags", [["--print-config"], ["--cfg", "job"]])
def test_the_configuration_is_shown_in_place_of_a_run(capsys, flags):
    code, out, _, calls = seen(capsys, *flags, "training.steps=5")
    assert (code, calls) == (0, [])
    assert out == composed("training.steps=5").text


def test_what_the_command_line_changed_is_known_with_its_values():
    assert composed().changed == ()
    made = composed(
        *("model=moe_tiny", "training.steps=300", "training.log_every=5"),
        *("training.validate_every='${training.log_every}'", "model.num_layers=8"),
        "training.sample_prompt='a b'",
    )
    # Not that of steps, which is the default.
    assert made.changed == (
        *("model=moe_tiny", "model.num_layers=8", "training.log_every=5"),
        *("training.validate_every=5", "training.sample_prompt='a b'"),
    )
    mixture = composed("data=mixture", "data.sources={a: {path: b}}").changed
    assert mixture[:2] == ("data=mixture", "data.sources.a.path=b")


def test_help_names_every_setting_in_eighty_columns(capsys):
    code, out, _, calls = seen(capsys, "--help", "optimizer=lion", "training.steps=7")
    assert (code, calls) == (0, [])
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "  training.steps=7  (int)\n" in out
    assert "  optimizer.beta2=0.99  (float)\n" in out
    assert f"model={' | '.join(model_names())} model.name" in " ".join(out.split())
    assert "  model.vocab_size=264  (int)\n" in out
    assert "``" not in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--help", "model=foo", "optimizer=lion"], "[T403] there is no model 'foo'"),
        (["optimizer=lion", "data=text", "-h"], "[T502] data=text needs data.path"),
        (["training.step=5", "--help"], "[T501] there is no setting 'training.step'"),
        (["--help", "bogus"], "got: bogus: missing EQUAL"),
        (["--foo", "--help"], "[T501] unknown flag got: --foo"),
        (["--help", "--module"], "got: argument --module: expected one argument"),
        (["--help", "--module", "nope"], "the module 'nope' of a model cannot be"),
    ],
)
def test_help_is_shown_whatever_stands_beside_it(capsys, arguments, problem):
    code, out, err, calls = seen(capsys, *arguments)
    assert (code, err, calls) == (0, "", [])
    assert all(len(line) <= 80 for line in out.splitlines())
    text, _, note = out.partition(
        "\nThese are not the values of the command line, which is wrong:\n"
    )
    # The choices that can be used are.
    beta2 = (
        0.99 if "optimizer=lion" in arguments and "data=text" not in arguments else 0.95
    )
    assert f"  optimizer.beta2={beta2}  (float)\n" in text
    assert problem in " ".join(note.split())


def test_help_for_a_sweep_is_that_of_its_files(capsys):
    code, out, _, _ = seen(capsys, "-m", "training.seed=1,2", "optimizer=lion", "-h")
    assert code == 0
    assert "  optimizer.beta2=0.99  (float)\n" in out
    assert "is wrong" not in out


def test_help_names_the_program_that_was_called(capsys, monkeypatch):
    for called, shown in (
        ("/usr/bin/tessera", "usage: tessera train [group"),
        ("./run_training.py", "usage: python run_training.py [group"),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        assert f"\n{shown}" in seen(capsys, "--help")[1]


def test_an_unknown_flag_says_what_to_use(capsys):
    code, _, err, calls = seen(capsys, "--experimental-rerun=x")
    assert (code, calls) == (2, [])
    assert (
        "  got: --experimental-rerun=x\n"
        "  fix: use --help, --print-config, --module or --multirun; settings have no "
        "dashes: optimizer.learning_rate=1e-4, training.dry_run=true\n"
    ) in err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--lr=1e-4"], "--lr=1e-4: did you mean 'optimizer.learning_rate'?"),
        (["--model", "tiny"], "--model: write model=tiny"),
        (["--training.seed=3"], "--training.seed=3: write training.seed=3"),
        (["--bf16", "model=tiny"], "--bf16: write training.mixed_precision=bf16"),
        (["--max-steps", "5"], "--max-steps: write training.steps=<steps>"),
        (["--training.step=5"], "--training.step=5: did you mean 'training.steps'?"),
        (["--config", "x.yaml"], "--config: write settings one by one"),
    ],
)
def test_a_flag_that_is_a_setting_says_how_it_is_written(capsys, words, fix):
    code, _, err, calls = seen(capsys, *words)
    assert (code, calls) == (2, [])
    assert f"  fix: settings have no dashes; for {fix}" in err


def test_yaml_values_are_written_as_on_a_command_line():
    assert as_yaml((1, "a b", None, 1e-8)) == "[1,'a b',null,1e-08]"


# --- the schema


def test_choices_are_those_of_the_modules_that_implement_them():
    """They are written once more where no import of JAX is needed."""
    assert config.SCHEDULE_NAMES == named_schedules.NAMES
    assert get_args(Method) == config.CONTEXT_METHODS
    assert set(config.MESH_AXES) == {axis for axes in RULES.values() for axis in axes}


def test_every_number_of_the_schema_has_a_least_and_a_most():
    """A float has both by what a float32 holds."""
    groups = (TrainingConfig, RuntimeConfig, DataConfig, SyntheticConfig)
    for cls in (*groups, *OPTIMIZERS.values()):
        for name, hint in get_type_hints(cls).items():
            kinds = set(get_args(hint) or (hint,))
            limits = cls.__dataclass_fields__[name].metadata
            if int in kinds and str not in kinds:
                assert {"least", "most"} <= set(limits), f"{cls.__name__}.{name}"
            if float in kinds:
                assert {"least", "above"} & set(limits), f"{cls.__name__}.{name}"
                for beyond in (1e39, float("inf"), float("nan")):
                    broken = replace(cls(), **{name: beyond})
                    assert problems_of(broken, "group"), f"{cls.__name__}.{name}"
    for name, hint in get_type_hints(DecoderConfig).items():
        for kind, most in ((int, 2**31), (float, 1e39)):
            if kind in (get_args(hint) or (hint,)):
                with pytest.raises(ModelShapeError, match=f"{name} = "):
                    replace(config_of("moe_tiny"), **{name: most})


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("training.steps=99999999999999999999999", "T502"),
        (f"training.steps={'9' * 5000}", "T502"),
        ("training.micro_batch_size=1048577", "T502"),
        ("training.seed=true", "T502"),
        ("training.steps=[1]", "T502"),
        ("training.steps={a: 1}", "T502"),
        ("training.resume=[a]", "T502"),
        ("training.sample_prompt='\udcff'", "T502"),
        ("training.remat=[full,[none]]", "T502"),
        ("training.remat={global: [full]}", "T502"),
        ("training.remat={1: full}", "T502"),
        ("training.remat=[null]", "T502"),
        ("training.loss_chunk=9999999999", "T502"),
        ("training.loss_chunk=true", "T502"),
        ("model.mesh_shape=[[[1]],[dp]]", "T101"),
        ("model.mesh_shape=[[1],[[dp]]]", "T102"),
        ("model.mesh_shape=[[1.0],[dp]]", "T101"),
        ("model.mesh_shape=[[100000000000000000000],[dp]]", "T101"),
        ("model.vocab_size=9999999999999", "T405"),
        ("model.num_layers=1000000", "T405"),
        ("model.rope_base_local=1e-60", "T405"),
        ("optimizer.learning_rate=1e39", "T502"),
        ("optimizer.epsilon=1e-60", "T502"),
        ("optimizer.beta1=0.99999999999", "T502"),
        ("runtime.step_deadline=1e12", "T502"),
        ("data.prefetch=1000000", "T502"),
        ("data.synthetic.tokens=99999999999999", "T502"),
    ],
)
def test_a_value_beyond_what_it_can_mean_is_refused(override, code):
    with pytest.raises(TesseraError) as caught:
        composed(override, "data=synthetic")
    assert caught.value.code == code
    assert len(str(caught.value)) < 2000


def test_a_schedule_of_a_million_places_is_not_made():
    with pytest.raises(TesseraError) as caught:
        composed(
            "model.mesh_shape=[[3],[pp]]",
            "training.gradient_accumulation_steps=1000000",
        )
    assert str(caught.value) == (
        "[T311] a schedule of so many stages and microbatches is too large a table\n"
        "  got: 3 stages x 1000000 microbatches\n"
        "  fix: use at most 87381 for training.gradient_accumulation_steps\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )
