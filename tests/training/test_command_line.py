# SPDX-License-Identifier: Apache-2.0
"""Command lines: what they mean, and what is said of those that mean nothing."""

import subprocess
import sys
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tessera.errors import TesseraError
from tessera.models.registry import CONFIGS, config_of
from tessera.training.command_line import compose, run_from_command_line
from tessera.training.config import (
    ModelSettings,
    RuntimeConfig,
    Settings,
    TrainingConfig,
)
from tessera.training.data.config import DataConfig
from tessera.training.optimizers import OPTIMIZERS, AdamWConfig
from tessera.training.schema import Schema, settings_of, typed
from tessera.training.settings import as_yaml
from tessera.training.usage import group_settings

ROOT = Path(__file__).parents[2]
CONFIGS_DIR = ROOT / "configs"


def composed(*overrides):
    return compose(overrides, CONFIGS_DIR)


def message(*overrides):
    with pytest.raises(TesseraError) as caught:
        composed(*overrides)
    return str(caught.value)


# --- what command lines mean


def test_the_defaults_are_those_of_the_classes():
    assert composed().settings == Settings(
        name="tiny",
        model=ModelSettings(name="tiny", config=config_of("tiny")),
        training=TrainingConfig(),
        data=DataConfig(),
        optimizer=AdamWConfig(),
        runtime=RuntimeConfig(),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_files_are_the_registry(name):
    model = composed(f"model={name}").settings.model
    assert model == ModelSettings(name=name, config=config_of(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_files_are_the_defaults_of_their_classes(name):
    assert composed(f"optimizer={name}").settings.optimizer == OPTIMIZERS[name][0]()
    text = yaml.safe_load((CONFIGS_DIR / "optimizer" / f"{name}.yaml").read_text())
    assert set(text) - {"defaults"} == {f.name for f in fields(OPTIMIZERS[name][0])}


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
    assert composed(f"model.mesh_shape={text}").settings.model.mesh_shape == expected


def test_overrides_act_after_the_files_whatever_their_order():
    given = composed(
        "training.micro_batch_size=2",
        "model.mesh_shape=[[8,2],[fsdp,tp]]",
        "model=gemma3_4b",
        "training.clip_norm=null",
        "optimizer.weight_decay=0.01",
        "training={steps: 5, seed: 7}",
    ).settings
    assert given.model.config == config_of("gemma3_4b")
    assert given.model.mesh_shape == ((8, 2), ("fsdp", "tp"))
    assert given.training == TrainingConfig(
        micro_batch_size=2, clip_norm=None, steps=5, seed=7
    )
    assert given.optimizer == AdamWConfig(weight_decay=0.01)


def test_one_setting_may_refer_to_another():
    given = composed("training.validate_every=${training.steps}", "training.steps=7")
    assert given.settings.training.validate_every == 7


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
    config = typed(Schema)
    config.optimizer = typed(type(given.settings.optimizer))
    assert settings_of(OmegaConf.merge(config, OmegaConf.create(given.text))) == (
        given.settings
    )
    assert "hydra" not in yaml.safe_load(given.text)


def test_the_saved_text_keeps_lists_on_one_line():
    text = composed("model.mesh_shape=[[4,1],[fsdp,tp]]").text
    assert "  mesh_shape: [[4, 1], [fsdp, tp]]\n" in text


# --- what is refused


def test_a_misspelt_key_gets_a_hint():
    assert message("optimizer.beta3=0.9") == (
        "[T501] there is no setting 'optimizer.beta3'\n"
        "  got: optimizer.beta3=0.9\n"
        "  fix: did you mean 'beta2'? Known: 'name', 'learning_rate', "
        "'scale_learning_rate', 'warmup_steps', 'schedule', 'final_fraction', 'beta1', "
        "'beta2', 'epsilon', 'weight_decay'\n"
        "  docs: docs/errors/T501.md"
    )


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.stepz=5", "did you mean 'steps'?"),
        ("trainin.steps=5", "did you mean 'training.steps'?"),
        ("steps=5", "did you mean 'training.steps'?"),
        ("training.mesh_shape=[[1],[dp]]", "did you mean 'model.mesh_shape'?"),
        ("modle=tiny", "did you mean 'model'?"),
        ("data.noise=0", "did you mean 'data.synthetic.noise'?"),
        ("data.synthetic.noize=0", "did you mean 'noise'?"),
        ("training.steps.x=3", "Known: none"),
        ("+training.foo=1", "Known: 'steps'"),
        ("++training.foo=1", "Known: 'steps'"),
        ("training={steps: 5, sead: 3}", "did you mean 'seed'?"),
        ("data/x=stdlib", "did you mean 'data'?"),
        ("data@x=stdlib", "did you mean 'data'?"),
        ("hydra.job.name=x", "leave it out"),
        ("hydra/launcher=x", "leave it out"),
    ],
)
def test_keys_that_do_not_exist_are_T501(override, hint):
    said = message(override)
    assert said.startswith("[T501] ")
    assert hint in said


def test_an_optimizer_takes_its_own_settings_only():
    assert message("optimizer=sgd", "optimizer.beta2=0.9").startswith(
        "[T501] there is no setting 'optimizer.beta2'"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "training.steps=5.5",
            "[T502] training.steps does not take this value\n"
            "  got: training.steps=5.5: Value '5.5' of type 'float' could not be "
            "converted to Integer\n"
            "  fix: give a value of type int\n",
        ),
        (
            "training.clip_norm=much",
            "[T502] training.clip_norm does not take this value\n"
            "  got: training.clip_norm=much: Value 'much' of type 'str' could not be "
            "converted to Float\n"
            "  fix: give a value of type float or null\n",
        ),
        (
            "training=null",
            "[T502] training does not take this value\n"
            "  got: training=null: field 'training' is not Optional\n"
            "  fix: set one setting at a time: training.<setting>=<value>\n",
        ),
        (
            "training.steps=1,2",
            "[T502] one run has one value of each setting\n"
            "  got: training.steps=1,2\n"
            "  fix: start a run for each value, or quote text that has a comma: "
            "\"training.steps='…'\"\n",
        ),
        (
            "~training.steps",
            "[T502] a setting cannot be deleted\n"
            "  got: ~training.steps\n"
            "  fix: give it a value instead\n",
        ),
        (
            "++training.steps=5",
            "[T502] settings cannot be added, and this one is there already\n"
            "  got: ++training.steps=5\n"
            "  fix: leave out the +: training.steps=5\n",
        ),
        (
            "training.steps=[1",
            "[T502] an argument is not an override\n"
            "  got: training.steps=[1: no viable alternative at input '[1'\n"
            "  fix: write group.setting=value; put quotes around text with special "
            "characters, and others around those for the shell: "
            "\"group.setting='a b'\"\n",
        ),
        (
            "training.seed=${training.seed}",
            "[T502] a setting has no value\n"
            "  got: Recursive interpolation detected\n"
            "  fix: give it one, or refer to a setting that has one: "
            "${group.setting}\n",
        ),
        (
            "model.vocab_size=???",
            "[T502] a setting has no value\n"
            "  got: Missing mandatory value: vocab_size\n"
            "  fix: give it one, or refer to a setting that has one: "
            "${group.setting}\n",
        ),
        (
            "data=wikipedia",
            "[T502] there is no data 'wikipedia'\n"
            "  got: data=wikipedia\n"
            "  fix: Known: 'stdlib', 'synthetic', 'text'\n",
        ),
    ],
)
def test_values_that_cannot_be_are_T502(override, expected):
    assert message(override) == expected + "  docs: docs/errors/T502.md"


def test_an_unknown_model_and_an_unknown_optimizer_have_their_own_codes():
    assert message("model=gemma3_1") == (
        "[T403] there is no model 'gemma3_1'\n"
        "  got: model=gemma3_1\n"
        "  fix: did you mean 'gemma3_1b'? Known: 'gemma3_1b', 'gemma3_270m', "
        "'gemma3_4b', 'moe_tiny', 'tiny'\n"
        "  docs: docs/errors/T403.md"
    )
    assert message("optimizer=adan") == (
        "[T505] there is no optimizer 'adan'\n"
        "  got: optimizer=adan\n"
        "  fix: did you mean 'adam'? Known: 'adafactor', 'adam', 'adamw', 'lion', "
        "'sgd'\n"
        "  docs: docs/errors/T505.md"
    )


def test_a_file_outside_the_configuration_folder_cannot_be_chosen():
    assert message("model=../../../etc/model").startswith("[T403] there is no model")


def test_sizes_that_make_no_model_are_refused():
    assert message("model.num_kv_heads=3").startswith("[T405] ")


def test_all_mistakes_come_at_once():
    assert message(
        "optimizer.beta3=1",
        "training.gradient_accumulation_steps=4",
        "training.sync_gradients_every=3",
        "training.mixed_precision=fp8",
        "training.steps=five",
        "model.mesh_shape=[[2],[sp]]",
    ).splitlines()[:6] == [
        "[T501] 5 things in the configuration cannot be used",
        "  got: 1. [T501] there is no setting 'optimizer.beta3': optimizer.beta3=1",
        "  got: 2. [T502] training.steps does not take this value: "
        "training.steps=five: Value 'five' of type 'str' could not be converted to "
        "Integer",
        "  got: 3. [T103] the model has no use for mesh axes 'sp': "
        "model.mesh_shape=[[2],[sp]]",
        "  got: 4. [T502] training.mixed_precision does not take this value: "
        "training.mixed_precision=fp8",
        "  got: 5. [T503] training.sync_gradients_every does not divide "
        "training.gradient_accumulation_steps: 4 / 3 leaves 1",
    ]


# --- what would be dangerous


@pytest.mark.parametrize(
    "override",
    [
        "training._target_=os.system",
        "+data._target_=os.system",
        "optimizer={_target_: os.system}",
        "optimizer._partial_=true",
    ],
)
def test_nothing_can_be_instantiated(override):
    assert message(override).startswith(("[T502] a configuration holds", "[T501]"))


SECRET = "hunter2"


@pytest.mark.parametrize(
    "override",
    [
        "data.path=${oc.env:SECRET}",
        "data.path=x${oc.env:SECRET}y",
        "data.path='${oc.env:${name}}'",
        "data.path='${${name}:SECRET}'",
        "hydra.run.dir=out/${oc.env:SECRET}",
        "hydra.run.dir=${hydra:runtime.cwd}",
        "name=${oc.env:SECRET}",
        "model.mesh_shape=[[1],['${oc.env:SECRET}']]",
    ],
)
def test_the_environment_cannot_get_into_the_saved_configuration(override, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    said = message("data=text", override)
    assert said.startswith("[T502] ")
    assert "reads something outside the configuration" in said
    assert SECRET not in said


def test_what_a_file_holds_is_judged_like_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    folder = tmp_path / "configs"
    for file in CONFIGS_DIR.rglob("*.yaml"):
        copy = folder / file.relative_to(CONFIGS_DIR)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())

    def said_of(text):
        (folder / "data" / "mine.yaml").write_text(text)
        with pytest.raises(TesseraError) as caught:
            compose(["data=mine"], folder)
        return str(caught.value)

    for path in (
        "${oc.env:SECRET}",
        "${oc.decode:'${oc.env:SECRET}'}",
        "${oc.env:${name}}",
        "${${name}:SECRET}",
    ):
        assert said_of(f"name: text\npath: {path}\n").startswith(
            "[T502] data.path reads something outside the configuration\n"
        )
    assert said_of("name: text\npaht: books\n") == (
        "[T501] there is no setting 'data.paht'\n"
        "  got: In 'data/mine'\n"
        "  fix: did you mean 'path'? Known: 'name', 'path', 'tokenizer', "
        "'validation_fraction', 'prefetch', 'synthetic'\n"
        "  docs: docs/errors/T501.md"
    )
    assert said_of("name: text\n_target_: os.system\n").startswith("[T50")
    assert said_of("prefetch: many\n").startswith(
        f"[T502] the files of {folder} do not make a configuration\n"
        "  got: In 'data/mine': ValidationError raised while composing config:\n"
    )
    assert said_of("name: [text\n").startswith(
        f"[T502] the files of {folder} do not make a configuration\n"
    )


@pytest.mark.parametrize("text", ["hydra.run.dir=''", 'hydra.run.dir="a\0b"'])
def test_an_output_folder_needs_a_name(text):
    said = message(text)
    assert said.startswith("[T504] the run has no folder to write to\n")


# --- the process


def seen(capsys, *arguments, run=None):
    calls = []
    code = run_from_command_line(run or calls.append, CONFIGS_DIR, arguments)
    out, err = capsys.readouterr()
    return code, out, err, calls


def test_a_good_command_line_runs(capsys):
    code, out, err, (call,) = seen(capsys, "training.steps=5")
    assert (code, out, err) == (0, "", "")
    assert call.settings.training.steps == 5


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
        "[T000] no such text\n  fix: write some\n  docs: docs/errors/T000.md\n"
    )


def test_a_bug_keeps_its_traceback(capsys):
    def run(composed):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        seen(capsys, run=run)


def test_cfg_job_shows_the_configuration_and_runs_nothing(capsys):
    code, out, _, calls = seen(capsys, "--cfg", "job", "training.steps=5")
    assert (code, calls) == (0, [])
    assert out == composed("training.steps=5").text


def test_help_names_every_setting_in_eighty_columns(capsys):
    code, out, _, calls = seen(capsys, "--help", "optimizer=lion", "training.steps=7")
    assert (code, calls) == (0, [])
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "  training.steps=7  (int)\n" in out
    assert "  optimizer.beta2=0.99  (float)\n" in out
    assert "model=gemma3_1b | gemma3_270m | gemma3_4b | moe_tiny | tiny\n" in out
    assert "  model.vocab_size=264  (int)\n" in out
    assert "``" not in out


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--multirun", "start a run for each value, from a loop of the shell"),
        ("-m", "start a run for each value, from a loop of the shell"),
        (
            "--experimental-rerun=x",
            "use --help or --cfg job, or write settings as group.setting=value",
        ),
    ],
)
def test_flags_that_are_not_taken_say_what_to_use(capsys, flag, fix):
    code, _, err, calls = seen(capsys, flag)
    assert (code, calls) == (2, [])
    assert f"  got: {flag}\n  fix: {fix}\n" in err


def test_composing_starts_no_backend():
    program = f"""
from pathlib import Path
from tessera import _jax
from tessera.training.command_line import compose
compose(["model.mesh_shape=[[4,2],[fsdp,tp]]"], Path({str(CONFIGS_DIR)!r}))
print(_jax.backend_started())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "False\n", done.stderr


# --- the documentation


def rows_of(group, cls):
    for one in group_settings(group, cls):
        default = f"`{one.default}`" if one.default else "of the file"
        yield f"| `{one.name}` | {one.type} | {default} | {one.meaning} |"


def test_the_documentation_has_every_setting_as_it_is():
    text = (ROOT / "docs" / "configuration.md").read_text()
    expected = [
        *rows_of("model", ModelSettings),
        *rows_of("training", TrainingConfig),
        *rows_of("data", DataConfig),
        *rows_of("runtime", RuntimeConfig),
    ]
    for cls, _ in OPTIMIZERS.values():
        expected += rows_of("optimizer", cls)
    written = [line for line in text.splitlines() if line.startswith("| `")]
    assert written == expected, "\n".join(expected)


def test_yaml_values_are_written_as_on_a_command_line():
    assert as_yaml((1, "a b", None, 1e-8)) == "[1,'a b',null,1e-08]"
