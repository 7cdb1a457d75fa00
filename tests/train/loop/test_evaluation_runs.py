# SPDX-License-Identifier: Apache-2.0
"""``training.eval_only``: a run that evaluates parameters and trains nothing."""

import dataclasses
import json

import jax
import optax
import pytest

from tessera.errors import EmptyDataError, OutputPathError, TesseraError
from tessera.train.checkpoints.choose_checkpoint import choose
from tessera.train.commands.export import main as export
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data import DataConfig, load
from tessera.train.loop.build_run import Run
from tessera.train.loop.evaluation import validation_means
from tessera.train.loop.main import main
from tessera.train.loop.run_summary import dry_run_text, run_rows
from tessera.train.loop.train_state import init_state
from tessera.train.models.weights import export_weights
from tests.train.config.command_lines import composed
from tests.train.loop.short_runs import (
    NO_VALIDATION,
    run_of,
    settings_of,
    short_run,
    train,
    with_program_of,
)

OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adafactor")
# Small enough to compile in seconds, with 264 ids for bytes.
SMALL = (
    *("model.vocab_size=264", "model.d_model=16", "model.num_layers=2"),
    *("model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=8"),
    *("model.mlp_dim=16", "model.window=8", "training.sequence_length=16"),
    *(
        "training.micro_batch_size=4",
        "training.sample_length=0",
        "training.report=false",
    ),
)


def test_all_of_a_text_may_be_for_validation(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 30)
    for path in (tmp_path / "a.txt", tmp_path):
        sizes = []
        for fraction in (0, 1):
            config = DataConfig(
                **{"name": "text", "path": str(path)},
                **{"cache_dir": f"{tmp_path}/cache", "validation_fraction": fraction},
            )
            corpus = load(config, sequence_length=16, seed=0, vocab_size=257)
            (source,) = corpus.sources
            sides = source.train_rows, source.validation_rows
            sizes.append([side.stream.num_tokens for side in sides])
        assert sizes[0] == sizes[1][::-1]
        assert sizes[0][0] > 200
        (batch,) = corpus.validation(len(source.validation_rows))
        assert (batch["targets"] != -100).sum() == sizes[1][1] - 1
        with pytest.raises(EmptyDataError, match="smaller than one batch"):
            corpus.train(1)


@pytest.fixture
def mixture(tmp_path):
    for name, words in {"a": "one two ", "b": "3 4 5 "}.items():
        (tmp_path / f"{name}.txt").write_text(words * 900)
    sources = ",".join(f"{n}:{{path:{tmp_path}/{n}.txt}}" for n in "ab")
    return "data=mixture", f"data.sources={{{sources}}}"


def evaluated(path):
    """The numbers of a run that has no others, and wrote nothing else."""
    (line,) = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    assert not (path / "checkpoints").exists()
    return line


@pytest.mark.full
def test_the_losses_are_those_of_the_validation_after_the_step(tmp_path, mixture):
    """Of a checkpoint with state that is dropped, on other meshes, of its export."""
    command = [*SMALL, *mixture, "optimizer.learning_rate=0.1", "training.steps=3"]
    fp16 = "mixed_precision=fp16"
    trained, meshes = tmp_path / "trained", ("[[2],[dp]]", "[[1,2],[fsdp,tp]]")
    options = f"training.{fp16}", f"hydra.run.dir={trained}"
    assert main([*command, *options, f"model.mesh_shape={meshes[0]}"]) == 0
    *steps, expected = map(
        json.loads, (trained / "metrics.jsonl").read_text().splitlines()
    )
    assert expected.keys() == {"step", "val_loss", "val_loss/a", "val_loss/b"}
    assert expected["val_loss"] < steps[0]["loss"] - 0.1  # not what was initialized
    before = sorted(trained.rglob("*"))
    weights = f"{tmp_path}/weights.safetensors"
    assert export([str(trained), weights]) == 0
    starts = {f"resume={trained}": (3, meshes), f"init_from={weights}": (0, meshes[:1])}
    for start, (step, on) in starts.items():
        for mesh in on:
            path = tmp_path / f"{step}{mesh}"
            assert not main(
                [
                    *(*command, f"training.{start}", f"training.{fp16}"),
                    *("training.eval_only=true", f"model.mesh_shape={mesh}"),
                    *("optimizer=sgd", f"hydra.run.dir='{path}'"),
                ]
            )
            line = evaluated(path)
            assert line.pop("step") == step
            for name, loss in line.items():
                # Bit for bit, where the program has the rows of the same mesh.
                tolerance = 0 if mesh == meshes[0] else 1e-4
                assert loss == pytest.approx(expected[name], rel=tolerance, abs=0)
    assert sorted(trained.rglob("*")) == before


def validation_loss(mesh, micro_batch_size, sequences=7, **changed):
    """Of the same parameters, on a mesh and in batches of some size."""
    settings = settings_of(training=dataclasses.replace(TRAINING, **changed))
    training = dataclasses.replace(
        settings.training,
        micro_batch_size=micro_batch_size,
        validation_sequences=sequences,
    )
    model = dataclasses.replace(settings.model, mesh_shape=mesh)
    run = run_of(dataclasses.replace(settings, model=model, training=training))
    state = init_state(run.model, optax.identity(), jax.random.key(0), run.mesh)
    means = validation_means(run, run.load_data(), state, lambda: True)
    return means["synthetic"]["loss"]


ONE = ((1,), ("fsdp",))
TRAINING = settings_of().training


@pytest.mark.slow(reason="it compiles an evaluation for each mesh")
@pytest.mark.parametrize(
    ("mesh", "micro_batch_size", "changed"),
    [
        (((2,), ("fsdp",)), 1, {}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (ONE, 1, {}),
                (ONE, 7, {}),
                (ONE, 16, {"gradient_accumulation_steps": 2}),
                (((2, 2), ("dp", "tp")), 3, {}),
                (((2, 2), ("pp", "fsdp")), 2, {"gradient_accumulation_steps": 4}),
                (((2,), ("cp",)), 4, {}),
                (
                    ((2,), ("fsdp",)),
                    2,
                    {"numerics": "deterministic", "reduction_parts": 2},
                ),
            )
        ),
    ],
)
def test_a_validation_reads_the_same_rows_on_every_mesh_and_batch_size(
    mesh, micro_batch_size, changed
):
    expected = validation_loss(ONE, 4)
    assert validation_loss(mesh, micro_batch_size, **changed) == pytest.approx(
        expected, rel=2e-6
    )


@pytest.mark.slow(reason="it compiles three validations")
def test_null_validates_on_all_sequences_and_fewer_on_the_first():
    whole, most = validation_loss(ONE, 4, None), validation_loss(ONE, 4, 10_000)
    assert whole == most != validation_loss(ONE, 4, 3)


@pytest.mark.full
def test_another_text_is_evaluated_but_never_in_the_run_s_own_folder(tmp_path, mixture):
    trained, command = tmp_path / "run", [*SMALL, "training.steps=1"]
    synthetic = ["data=synthetic", "data.synthetic.tokens=9000"]
    assert main([*command, *synthetic, f"hydra.run.dir={trained}"]) == 0
    command += [*mixture, "training.eval_only=true", f"training.resume={trained}"]
    config = composed(*command).config
    run = Run(config, mesh_of_shape(config.model.mesh_shape))
    with pytest.raises(OutputPathError, match="does not write into the run"):
        choose(str(trained), trained).check(run, run.load_data(), "")
    assert main([*command, f"hydra.run.dir={tmp_path}/other"]) == 0
    assert evaluated(tmp_path / "other").keys() >= {"val_loss/a", "val_loss/b"}


def evaluation(init_from="w.safetensors", **changed):
    training = dataclasses.replace(
        settings_of().training, eval_only=True, init_from=init_from, **changed
    )
    return settings_of(training=training)


@pytest.fixture
def weights(tmp_path):
    start = run_of(settings_of())
    path = tmp_path / "w.safetensors"
    export_weights(start.model.init(jax.random.key(3), start.mesh), path)
    return str(path)


@pytest.mark.slow(reason="it trains twice")
def test_a_run_from_weights_is_evaluated_before_its_first_step(tmp_path):
    before = short_run()
    path = tmp_path / "w.safetensors"
    export_weights(before.state.params, path)
    training = dataclasses.replace(before.run.config.training, init_from=str(path))
    with_weights = with_program_of(before, settings_of(training=training))
    first, *later = train(with_weights, tmp_path).validations
    assert first == before.validations[-1] | {"step": 0}
    assert [line["step"] for line in later] == [5, 10, 12]


@pytest.mark.full
def test_it_needs_neither_steps_nor_a_compiled_step(weights, tmp_path):
    """Rows for fewer than one batch would be an error of a run that trains."""
    ran = train(run_of(evaluation(weights, gradient_accumulation_steps=999)), tmp_path)
    assert "step" not in vars(ran.run)
    (line,) = ran.lines
    assert f"validation after step 0: loss {line['val_loss']:.4f}" in ran.seen
    assert "sample" not in ran.seen
    rows = dict(run_rows(ran.run))
    assert rows["batch"] == "4 sequences of 16 tokens"
    assert rows["stored per device"].startswith("parameters ")
    assert rows["stored per device"].count(",") == 0
    assert rows["sent per batch"] == "nothing: one device"
    assert dry_run_text(ran.run).startswith("memory per device, compiled for cpu\n")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_array_is_made_beside_the_parameters(optimizer):
    config = composed(
        *SMALL,
        *(f"optimizer={optimizer}", "training.offload_optimizer=true"),
        *("model.mesh_shape=[[2],[dp]]", "training.eval_only=true"),
        "training.init_from=w.safetensors",
    ).config
    state = Run(config, mesh_of_shape(config.model.mesh_shape)).abstract_state
    assert jax.tree.leaves(state)[1:] == jax.tree.leaves(state.params)


@pytest.mark.parametrize(
    ("overrides", "got"),
    [
        ([], "no parameters were trained, so there is nothing to evaluate"),
        (["training.resume=auto"], "its own folder has no checkpoints"),
        (["training.resume=run", "data.validation_fraction=0"], "fraction=0.0"),
        (["training.resume=run", "training.profile_communication=true"], "no steps"),
    ],
)
def test_settings_that_leave_nothing_to_evaluate_are_refused(overrides, got):
    with pytest.raises(TesseraError) as caught:
        composed("training.eval_only=true", *overrides)
    assert caught.value.code == "T507"
    assert got in caught.value.got


def test_a_run_that_trains_needs_text_that_is_not_for_validation():
    with pytest.raises(TesseraError, match=r"T507.*validation_fraction") as caught:
        composed("data.validation_fraction=1")
    assert "nothing is left to train on" in caught.value.got


@pytest.mark.full
def test_data_without_a_target_is_refused(weights, tmp_path):
    settings = dataclasses.replace(evaluation(weights), data=NO_VALIDATION)
    with pytest.raises(EmptyDataError, match="nothing to evaluate"):
        train(run_of(settings), tmp_path)
