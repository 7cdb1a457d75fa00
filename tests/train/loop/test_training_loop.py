# SPDX-License-Identifier: Apache-2.0
"""The loop: numbers read behind, bounded run-ahead, validation, a sample."""

import dataclasses
import io
import json
import math
import time
from typing import Any

import jax
import numpy as np
import pytest

from tessera.analysis.flops import count
from tessera.errors import LossScaleError
from tessera.train.config.optimizer_config import SgdConfig
from tessera.train.config.run_config import (
    ModelConfig,
    RuntimeConfig,
    TrainingConfig,
)
from tessera.train.data import Corpus
from tessera.train.data.data_config import DataConfig, SourceConfig
from tessera.train.loop import step_metrics
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.training_loop import Trainer
from tests.train.loop.short_runs import (
    CONFIG,
    NO_VALIDATION,
    STEPS,
    Ran,
    run_of,
    settings_of,
    short_run,
    train,
    with_program_of,
)


@pytest.fixture(scope="module")
def ran() -> Ran:
    return short_run()


@pytest.fixture(scope="module")
def unvalidated(ran, tmp_path_factory) -> Ran:
    """The same run without validation data and without a sample."""
    training = dataclasses.replace(ran.run.config.training, sample_length=0)
    run = with_program_of(ran, settings_of(data=NO_VALIDATION, training=training))
    return train(run, tmp_path_factory.mktemp("run"))


# --- numbers


@pytest.mark.full
def test_every_step_has_a_line_in_order(ran):
    assert [line["step"] for line in ran.steps] == list(range(1, STEPS + 1))
    assert all(
        line.keys()
        == {
            "step",
            "loss",
            "grad_norm",
            "learning_rate",
            "tokens_per_second",
            "step_seconds",
            "data_wait_fraction",
            "skipped",
            "skipped_in_a_row",
        }
        for line in ran.steps
    )


def test_numbers_are_written_in_full_precision(ran):
    rates = [line["learning_rate"] for line in ran.steps]
    schedule = ran.run.step_config.learning_rate
    expected = [float(schedule(step)) for step in range(STEPS)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    for line in ran.steps:
        assert line["loss"] == float(np.float32(line["loss"]))
    assert any(len(str(line["loss"])) > 12 for line in ran.steps)


def test_tokens_a_second_are_all_tokens_of_the_step(ran):
    for line in ran.steps:
        tokens = line["tokens_per_second"] * line["step_seconds"]
        assert math.isclose(tokens, 4 * 16, rel_tol=1e-9)


def test_the_wait_for_data_is_a_fraction_of_the_step(ran, tmp_path, monkeypatch):
    assert all(0 <= line["data_wait_fraction"] < 1 for line in ran.steps)

    def slow(*arguments, **options):
        for batch in train_quickly(*arguments, **options):
            time.sleep(0.2)
            yield batch

    train_quickly = Corpus.train
    monkeypatch.setattr(Corpus, "train", slow)
    training = dataclasses.replace(
        ran.run.config.training, steps=4, log_every=1, sample_length=0
    )
    runtime = RuntimeConfig(max_steps_in_flight=1)
    settings = settings_of(data=NO_VALIDATION, training=training, runtime=runtime)
    waiting = train(with_program_of(ran, settings), tmp_path)
    for line in waiting.steps[1:]:
        assert 0.5 < line["data_wait_fraction"] < 1.01
        assert f"data_wait_fraction {line['data_wait_fraction']:.4g}" in waiting.seen


def test_each_source_of_a_mixture_has_its_validation_loss(ran, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 900)
    sources = {
        n: SourceConfig(str(tmp_path / f"{n}.txt"), w) for n, w in (("a", 1), ("b", 3))
    }
    data = DataConfig(name="mixture", sources=sources, validation_fraction=0.2)
    training = dataclasses.replace(
        ran.run.config.training, steps=3, validate_every=0, sample_length=0
    )
    settings = settings_of(data=data, training=training)
    (line,) = (
        one
        for one in train(with_program_of(ran, settings), tmp_path / "run").lines
        if "val_loss" in one
    )
    a, b = line["val_loss/a"], line["val_loss/b"]
    assert a != b
    assert line["val_loss"] == pytest.approx((a + 3 * b) / 4)


def test_a_machine_whose_peak_is_unknown_has_no_mfu(ran):
    assert not any("mfu" in line for line in ran.lines)
    assert "mfu" not in ran.seen


@pytest.mark.full
def test_where_the_peak_is_known_mfu_is_its_share(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(step_metrics, "peak_flops", lambda kind, dtype: 1e9)
    training = dataclasses.replace(
        ran.run.config.training, steps=2, log_every=1, sample_length=0
    )
    settings = settings_of(data=NO_VALIDATION, training=training)
    known = train(with_program_of(ran, settings), tmp_path)
    flops = count(ran.run.compiled.traced.graph.program).total
    for line in known.steps:
        assert line["mfu"] == pytest.approx(flops / line["step_seconds"] / 1e9)
        assert f"mfu {line['mfu']:.4g}" in known.seen


def test_it_learns(ran):
    losses = [line["loss"] for line in ran.steps]
    assert losses[-1] < losses[0] - 0.1


def test_progress_is_shown_for_the_first_the_last_and_every_fifth_step(ran):
    shown = [line for line in ran.seen.splitlines() if "tokens/s" in line]
    assert [line.split()[2] for line in shown] == ["1/12", "5/12", "10/12", "12/12"]
    last = ran.steps[-1]
    assert f"loss {last['loss']:.4f}" in shown[-1]
    assert f"grad_norm {last['grad_norm']:.4g}" in shown[-1]


def test_one_program_serves_the_whole_run(ran):
    assert ran.run.step.num_programs() == 1
    assert ran.run.step.last is ran.run.compiled
    assert int(ran.state.step) == STEPS


# --- validation


def test_validation_follows_its_interval_and_the_last_step(ran):
    assert [line["step"] for line in ran.validations] == [5, 10, 12]
    assert all(line.keys() == {"step", "val_loss"} for line in ran.validations)
    for line in ran.validations:
        said = f"validation after step {line['step']}: loss {line['val_loss']:.4f}"
        assert said in ran.seen


@pytest.mark.full
def test_the_validation_loss_is_the_mean_over_its_first_batches(ran):
    corpus, total, tokens = ran.run.load_data(), 0.0, 0
    batches = corpus.validation(4)
    for batch, _ in zip(batches, range(2), strict=False):
        logits = ran.run.model.apply(
            ran.state.params,
            batch["tokens"],
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
        )
        scores = jax.nn.log_softmax(np.asarray(logits))
        rows, columns = np.nonzero(batch["targets"] != -100)
        total -= float(scores[rows, columns, batch["targets"][rows, columns]].sum())
        tokens += rows.size
    batches.close()
    np.testing.assert_allclose(ran.validations[-1]["val_loss"], total / tokens, 1e-5)


# --- the sample


def test_a_sample_ends_the_run(ran):
    *_, head, sample = ran.seen.splitlines()
    assert head.endswith("sample")
    # Synthetic tokens are numbers; zeros, which separate documents, are not shown.
    words = [int(word) for word in sample.split()]
    assert len(words) <= 6
    assert all(0 < word < 264 for word in words)


@pytest.mark.full
def test_text_is_continued_from_the_prompt(ran, tmp_path):
    (tmp_path / "a.txt").write_text("some text of which there is enough. " * 40)
    settings = settings_of(
        data=DataConfig(name="text", path=str(tmp_path / "a.txt")),
        training=dataclasses.replace(
            ran.run.config.training, steps=1, sample_prompt="of w", sample_length=3
        ),
    )
    seen = train(with_program_of(ran, settings), tmp_path / "run").seen
    assert "sample\n  of w" in seen


# --- the same and not the same


@pytest.mark.full
def test_the_same_seed_gives_bit_identical_numbers(ran, tmp_path):
    again = train(run_of(settings_of()), tmp_path)
    assert again.run.evaluate.num_programs() == 1  # that from before the first step
    assert again.numbers == ran.numbers
    for left, right in zip(
        jax.tree.leaves(again.state), jax.tree.leaves(ran.state), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.full
def test_microbatches_on_a_mesh_get_the_rows_of_one_device(unvalidated, tmp_path):
    before = unvalidated.run.config
    training = dataclasses.replace(
        before.training, micro_batch_size=1, gradient_accumulation_steps=2
    )
    model = dataclasses.replace(before.model, mesh_shape=((2, 1), ("fsdp", "tp")))
    settings = settings_of(training=training, model=model, data=NO_VALIDATION)
    same = train(run_of(settings), tmp_path)
    np.testing.assert_allclose(
        [line["loss"] for line in same.steps],
        [line["loss"] for line in unvalidated.steps],
        rtol=1e-5,
    )


@pytest.mark.full
def test_another_seed_gives_other_numbers(ran, tmp_path):
    training = dataclasses.replace(settings_of().training, seed=1)
    # The seed is in the arrays and not in the program.
    other = train(with_program_of(ran, settings_of(training=training)), tmp_path)
    assert ran.run.step.num_programs() == 1
    assert other.steps[0]["loss"] != ran.steps[0]["loss"]
    assert other.validations[-1] != ran.validations[-1]


# --- running ahead


class Counting:
    """A step that knows how many of its calls were not read yet."""

    def __init__(self, step: Any) -> None:
        self.step, self.started, self.read = step, 0, 0
        self.most = 0

    def __call__(self, *args: Any) -> Any:
        self.started += 1
        self.most = max(self.most, self.started - self.read)
        return self.step(*args)


class CountingWriter(MetricWriter):
    """Counts the steps whose numbers have come."""

    def __init__(self, counting: Counting) -> None:
        super().__init__(None)
        self._counting = counting
        self.behind: list[int] = []

    def write(self, step: int, values: Any) -> None:
        if "loss" in values:
            self.behind.append(self._counting.started - step)
            self._counting.read += 1


@pytest.mark.full
@pytest.mark.parametrize("most", [2, 8])
def test_no_more_steps_are_in_flight_than_allowed(most, ran):
    settings = settings_of(
        training=dataclasses.replace(
            ran.run.config.training, sample_length=0, validate_every=0
        ),
        data=NO_VALIDATION,
        runtime=RuntimeConfig(max_steps_in_flight=most),
    )
    run, counting = with_program_of(ran, settings), Counting(ran.run.step)
    vars(run)["step"] = counting
    writer = CountingWriter(counting)
    with Console(None, stream=io.StringIO(), terminal=False) as console:
        Trainer(run, run.load_data(), console, writer).train()
    assert counting.started == counting.read == STEPS
    assert counting.most == most
    # The oldest is read when as many as allowed are in flight, and not before.
    assert writer.behind == [most - 1] * (STEPS - most + 1) + [*range(most - 2, -1, -1)]


@pytest.mark.full
def test_a_hundred_steps_on_eight_simulated_devices_pass(tmp_path):
    """More than are in flight."""
    one_layer = dataclasses.replace(CONFIG, num_layers=1)
    settings = settings_of(
        model=ModelConfig(
            name="small", mesh_shape=((4, 2), ("fsdp", "tp")), config=one_layer
        ),
        data=NO_VALIDATION,
        training=TrainingConfig(
            steps=100,
            sequence_length=8,
            micro_batch_size=1,
            validate_every=0,
            validation_sequences=4,
            sample_length=0,
        ),
        runtime=RuntimeConfig(max_steps_in_flight=64),
    )
    ran = train(run_of(settings), tmp_path)
    assert len(ran.steps) == 100
    assert ran.run.step.num_programs() == 1
    assert ran.steps[-1]["loss"] < ran.steps[0]["loss"]


# --- the edges


def test_a_run_without_validation_data_has_no_validation_loss(unvalidated):
    assert unvalidated.validations == []
    assert len(unvalidated.steps) == STEPS
    assert "validation" not in unvalidated.seen


def test_a_sample_of_no_tokens_is_not_shown(unvalidated):
    assert "sample" not in unvalidated.seen


@pytest.mark.full
def test_fp16_that_overflows_at_the_smallest_scale_ends_the_run(tmp_path):
    """The first step makes the parameters infinite; each later one halves the scale."""
    settings = settings_of(
        training=dataclasses.replace(
            settings_of().training,
            mixed_precision="fp16",
            steps=30,
            validate_every=0,
            clip_norm=None,
        ),
        optimizer=SgdConfig(
            learning_rate=1e38, schedule="constant", warmup_steps=0, momentum=0.0
        ),
        runtime=RuntimeConfig(max_steps_in_flight=1),
    )
    with pytest.raises(LossScaleError) as caught:
        train(run_of(settings), tmp_path)
    assert str(caught.value) == (
        "[T506] fp16 gradients overflow at step 17 with the smallest loss scale\n"
        "  got: loss scale 1, loss nan\n"
        "  fix: use training.mixed_precision=bf16, or a lower "
        "optimizer.learning_rate\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T506.html"
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    scales = [json.loads(line)["loss_scale"] for line in lines]
    assert scales == [2.0**15, *(2.0**power for power in range(15, 0, -1))]
    overflows = [json.loads(line)["overflow"] for line in lines]
    assert overflows == [0.0] + [1.0] * 15
