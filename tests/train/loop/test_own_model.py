# SPDX-License-Identifier: Apache-2.0
"""The model of ``examples/own_model``, trained from a command line like any other."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tessera.__main__ import main as tessera
from tessera.errors import (
    ModelFolderError,
    SettingConflictError,
    TesseraError,
    UnknownModelError,
    UnknownSettingError,
)
from tessera.jax_compat import jaxprs
from tessera.train.checkpoints.export_checkpoint import export_checkpoint
from tessera.train.commands.generate import main as generate
from tessera.train.config.command_line import compose
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir, main
from tessera.train.loop.run_summary import dry_run_text, run_rows
from tessera.train.loop.train_state import init_state
from tessera.train.models import definition, register_model

ROOT = Path(__file__).parents[3]
SMALL = (
    "model=own_decoder:Decoder",
    "model.width=16",
    "model.layers=1",
    "training.sequence_length=16",
    "training.micro_batch_size=2",
    "data=synthetic",
    "data.synthetic.tokens=4000",
)


@pytest.fixture(autouse=True)
def in_the_folder_of_the_example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_model")


def composed(*overrides):
    return compose([*SMALL, *overrides], configs_dir())


def run_of(*overrides):
    settings = composed(*overrides).config
    return Run(settings, mesh_of_shape(settings.model.mesh_shape))


def losses(run, steps=3):
    config = run.step_config
    state = init_state(
        run.model, config.optimizer, jax.random.key(0), run.mesh, zero_stage=0
    )
    corpus, found = run.load_data(), []
    batches = corpus.train(run.rows_per_step)
    for batch, _ in zip(batches, range(steps), strict=False):
        rows = {name: x.reshape(1, -1, x.shape[-1]) for name, x in batch.items()}
        state, metrics = run.step(state, rows)
        found.append(float(metrics["loss"]))
    batches.close()
    return found


def test_its_settings_are_those_of_its_dataclass():
    config = composed().config.model
    assert (config.name, config.definition) == ("Decoder", "own_decoder:Decoder")
    assert dataclasses.asdict(config.config) == {
        "vocab_size": 264,
        "width": 16,
        "heads": 4,
        "layers": 1,
    }


@dataclasses.dataclass(frozen=True)
class Head:
    scale: float = 1.0
    widths: tuple[int, ...] = (2, 3)


@dataclasses.dataclass(frozen=True)
class Nested:
    vocab_size: int = 264
    head: Head = dataclasses.field(default_factory=Head)


def new_table(config, key):
    return {"table": jax.random.normal(key, (config.vocab_size, config.vocab_size))}


@register_model(
    config=Nested, dims={"table": "vocab -"}, inputs=["tokens"], init=new_table
)
def nested(config, params, tokens):
    return config.head.scale * params["table"][tokens]


def test_settings_may_be_in_a_dataclass_of_their_own():
    words = "model=nested", "model.head.scale=2", "model.head.widths=[4]"
    given = compose([*words, "data=synthetic"], configs_dir())
    assert given.config.model.config == Nested(head=Head(2.0, (4,)))
    assert settings_of_text(given.text) == given.config
    with pytest.raises(UnknownSettingError, match=r"model\.head\.scael"):
        compose(["model=nested", "model.head.scael=2"], configs_dir())


def test_the_saved_configuration_reads_back():
    given = composed("model.heads=2")
    assert settings_of_text(given.text) == given.config


@pytest.mark.full
def test_four_devices_learn_what_one_does():
    alone = losses(run_of("training.micro_batch_size=4"))
    mesh = "model.mesh_shape=[[2,2],[fsdp,tp]]"
    np.testing.assert_allclose(losses(run_of(mesh)), alone, rtol=1e-5)
    assert len(set(alone)) == 3


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        ("training.mixed_precision=bf16",),
        pytest.param(
            ("training.zero_stage=3", "model.mesh_shape=[[4],[dp]]"),
            marks=pytest.mark.full,
        ),
        ("training.gradient_accumulation_steps=2", "training.sync_gradients_every=2"),
    ],
)
def test_options_of_the_step_compile_for_it(overrides):
    mesh = (
        () if "mesh_shape" in overrides[-1] else ("model.mesh_shape=[[2,2],[dp,tp]]",)
    )
    # Flax's own norms promote dtypes.
    with jax.numpy_dtype_promotion("standard"):
        run = run_of(*overrides, *mesh)
        rows = dict(row for row in run_rows(run) if row[0] != "layout")
        assert rows["parameters"] == f"{run.model.num_params:,}"
        assert "all-reduce" in dry_run_text(run)


def test_its_matmuls_are_not_fp8():
    with pytest.raises(SettingConflictError, match="no use for training"):
        composed("training.mixed_precision=fp8")


@pytest.mark.full
def test_every_matmul_of_a_narrow_step_has_narrow_operands():
    """Also where Flax computes in f32: an embedding has recorded its first dtype."""
    run = run_of("training.mixed_precision=bf16")
    with jax.numpy_dtype_promotion("standard"):
        records = run.step.trace(run.abstract_state, run.abstract_batch).passes
    operands = []

    def visit(program):
        makers = {}
        for equation in jaxprs.equations(program):
            makers.update(dict.fromkeys(equation.outvars, equation.primitive.name))
            if equation.primitive.name == "dot_general":
                operands.extend(makers.get(operand) for operand in equation.invars)
            for inner in jaxprs.inner_programs(equation):
                visit(inner)

    visit(next(each.graph for each in records if each.name == "widen_sums").program)
    # What rounds operands on CPU. A layer has eight matmuls, and the logits one.
    assert operands == ["reduce_precision"] * 2 * 3 * 9


@pytest.mark.full
def test_it_trains_saves_and_resumes_on_another_mesh(tmp_path, capfd):
    command = [
        *SMALL,
        "training.sample_length=4",
        "training.report=false",
        f"hydra.run.dir={tmp_path}/run",
    ]
    assert main([*command, "training.steps=2"]) == 0
    again = ["training.steps=4", "training.resume=auto"]
    mesh = ["model.mesh_shape=[[1,2],[fsdp,tp]]"]
    assert main([*command, *again, *mesh]) == 0
    out = capfd.readouterr().out
    assert "step 4/4" in out
    assert "step 2/4" not in out


@pytest.mark.full
def test_what_was_trained_is_used_with_the_module_that_defines_it(
    tmp_path, capsys, monkeypatch
):
    run, text = f"{tmp_path}/run", tmp_path / "notes.txt"
    text.write_text("some text " * 50)
    data = ["data=text", f"data.path={text}", f"data.cache_dir={tmp_path}/cache"]
    data += [
        "data.validation_fraction=0",
        "training.sample_length=0",
        "training.report=false",
    ]
    command = [*SMALL[:-2], *data, "training.steps=1", f"hydra.run.dir={run}"]
    assert main(command) == 0
    arguments = [run, "text", "--max-tokens=2"]
    assert generate([*arguments, "--module=own_decoder"]) == 0
    with monkeypatch.context() as patch:  # a process that has not imported it
        patch.delitem(definition._DEFINITIONS, "own_decoder:Decoder")
        patch.delitem(sys.modules, "own_decoder")
        assert generate(arguments) != 0
        with pytest.raises(ModelFolderError, match="--format=safetensors"):
            export_checkpoint(run, tmp_path / "folder", kind="hf")
    error = capsys.readouterr().err
    assert error.startswith("[T403]")
    assert "fix: import it: --module own_decoder" in error


@pytest.mark.full
def test_the_commands_of_the_guide_are_enough(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples/own_model/own_decoder.py", tmp_path)
    guide = (ROOT / "docs/guides/own-model.md").read_text()
    shutil.copy(ROOT / "examples/own_model/own_blocks.py", tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```$", guide, re.M | re.S)
    assert len(blocks) == 2
    for command in "".join(blocks).replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(command)
        assert program == "tessera"
        if arguments[0] == "train":  # each token of a sample runs the whole model
            arguments.append("training.sample_length=4")
        assert tessera(arguments) == 0
    out = capfd.readouterr().out
    assert "step 20/20" in out
    assert out.count("step 5/5") == 2
    assert out.count("step 10/10") == 2
    (evaluated,) = (tmp_path / "runs/evaluated/metrics.jsonl").read_text().splitlines()
    assert json.loads(evaluated).keys() == {"step", "val_loss"}
    names = load_file(tmp_path / "own.safetensors")
    assert "blocks.0.up.kernel" in names


@pytest.mark.parametrize(
    "override",
    ["training.remat=full", "model.mesh_shape=[[2],[pp]]", "training.loss_chunk=8"],
)
def test_what_needs_the_blocks_of_a_model_is_a_conflict(override):
    with pytest.raises(SettingConflictError):
        composed(override)


def test_sizes_that_a_mesh_does_not_divide_are_found_before_anything_is_written():
    with pytest.raises(TesseraError, match="T201"):
        run_of("model.vocab_size=265", "model.mesh_shape=[[1,2],[fsdp,tp]]").check()


@pytest.mark.parametrize(
    ("choice", "got"),
    [
        ("model=own_decoder:Decodr", "own_decoder:Decoder"),
        ("model=own_decodr:Decoder", "ModuleNotFoundError"),
        ("model=Decodr", "tiny"),
    ],
)
def test_a_name_that_does_not_exist(choice, got):
    with pytest.raises(UnknownModelError, match=got):
        compose([choice], configs_dir())


def test_a_module_that_registers_models_is_imported_by_a_flag(capfd):
    assert main(["--module", "own_decoder", "--cfg", "job", "model=Decoder"]) == 0
    assert "definition: own_decoder:Decoder" in capfd.readouterr().out


def test_the_name_of_two_registered_models_needs_its_module(monkeypatch):
    one = definition.definition_of(composed().config.model.definition)
    monkeypatch.setitem(definition._DEFINITIONS, "other:Decoder", one)
    with pytest.raises(UnknownModelError, match="own_decoder:Decoder, other:Decoder"):
        composed("model=Decoder")
    assert composed().config.model.definition == "own_decoder:Decoder"


def test_a_saved_configuration_imports_nothing():
    """A file would run what it names otherwise."""
    text = composed().text.replace("own_decoder", "never_imported")
    with pytest.raises(UnknownModelError, match="--module never_imported"):
        settings_of_text(text)
    assert "never_imported" not in sys.modules


def test_the_kind_of_a_model_is_chosen_by_its_name_alone():
    with pytest.raises(TesseraError, match=r"model\.definition"):
        compose(["model.definition=own_decoder:Decoder"], configs_dir())
