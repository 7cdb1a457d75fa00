# SPDX-License-Identifier: Apache-2.0
"""Ten steps of DPO and of ORPO beside TRL's trainers, on one device and on four."""

import json
import os
import random
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.foundations.tree import named_leaves
from tessera.train.data.corpus import load
from tessera.train.data.data_config import DataConfig
from tessera.train.loop.main import main as train
from tessera.train.loop.trained_model import open_trained
from tessera.train.models import from_pretrained

SCRIPT = Path(__file__).with_name("trl_steps.py")
PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has TRL")

STEPS, PAIRS, LENGTH, VOCABULARY = 10, 4, 40, 264
BETA = {"dpo": 0.5, "orpo": 0.5}
RATE, EPSILON = 1e-3, 1e-6
ADAMW = (
    f"optimizer.learning_rate={RATE}",
    f"optimizer.epsilon={EPSILON}",
    "optimizer.beta2=0.999",
    "optimizer.weight_decay=0",
)
SGD = ("optimizer=sgd", "optimizer.learning_rate=1", "optimizer.momentum=0")
MESHES = {"one": "[[1],[fsdp]]", "fsdp2_tp2": "[[2,2],[fsdp,tp]]"}


def run_trl(*arguments: str | Path) -> None:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr


def records() -> list[dict[str, str]]:
    """Pairs of which a row has room for one: both trainers have the same steps."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.randint(least, most)))

    return [
        {
            "prompt": text(2, 4) + ":",
            "chosen": text(9, 12),
            "rejected": text(9, 12),
        }
        for _ in range(STEPS * PAIRS)
    ]


@dataclass
class Reference:
    """What TRL made of pairs.

    Attributes:
      folder: The model that both begin with, ``model``, and ``pairs.jsonl``.
      losses: Of each step.
      gradients: Of the first step, by the names of Tessera's parameters.
      weights: After the last step.
    """

    folder: Path
    losses: np.ndarray
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def leaves_of(folder: Path) -> dict[str, np.ndarray]:
    _, params = from_pretrained(folder)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}


@pytest.fixture(scope="module")
def trl(tmp_path_factory) -> Any:
    """TRL's steps of a loss, on the pairs in the order in which Tessera reads them."""

    @cache
    def of(loss: str) -> Reference:
        folder = tmp_path_factory.mktemp(loss)
        run_trl("make", folder / "model")
        pairs = records()
        lines = [json.dumps(pair) + "\n" for pair in pairs]
        (folder / "pairs.jsonl").write_text("".join(lines))
        by_answer = {
            pair["chosen"]: line for pair, line in zip(pairs, lines, strict=True)
        }
        read = chosen_answers(folder)
        assert sorted(read) == sorted(by_answer)
        (folder / "read.jsonl").write_text("".join(by_answer[a] for a in read))
        settings = {
            "per_device_train_batch_size": PAIRS,
            "max_steps": STEPS,
            "learning_rate": RATE,
            "adam_epsilon": EPSILON,
            "beta": BETA[loss],
            "max_length": LENGTH,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        names = ("model", "read.jsonl", "settings.json", "trl")
        run_trl(loss, *(folder / name for name in names))
        made = folder / "trl"
        return Reference(
            folder,
            np.load(made / "losses.npy"),
            leaves_of(made / "gradients"),
            leaves_of(made / "weights"),
        )

    return of


def chosen_answers(folder: Path) -> list[str]:
    """The chosen answers in the order of training."""
    config = DataConfig(
        name="preferences",
        path=str(folder / "pairs.jsonl"),
        tokenizer=str(folder / "model"),
        validation_fraction=0.0,
    )
    corpus = load(config, sequence_length=LENGTH, seed=0, vocab_size=VOCABULARY)
    batches, answers = corpus.train(PAIRS), []
    for _ in range(STEPS):
        batch = next(batches)
        assert batch["segment_ids"].max(axis=1).tolist() == [2] * PAIRS
        is_answer = (batch["segment_ids"] == 1) & (batch["targets"] >= 0)
        for targets, learned in zip(batch["targets"], is_answer, strict=True):
            ids = [int(number) for number in targets[learned][:-1]]
            answers.append(corpus.tokenizer.decode(ids))
    return answers


def run_tessera(reference: Reference, loss: str, mesh: str, *others: str) -> Path:
    """The folder of a run on the same pairs."""
    folder = reference.folder
    name = f"{loss}-{len([*folder.glob('outputs/*')])}"
    arguments = [
        "recipe=preference",
        f"name={name}",
        f"model={folder / 'model'}",
        f"model.mesh_shape={mesh}",
        "data=preferences",
        f"data.path={folder / 'pairs.jsonl'}",
        "data.validation_fraction=0",
        f"preference.loss={loss}",
        f"preference.beta={BETA[loss]}",
        f"training.steps={STEPS}",
        f"training.sequence_length={LENGTH}",
        f"training.global_batch_size={PAIRS}",
        "training.micro_batch_size=1",
        "training.mixed_precision=f32",
        "training.clip_norm=null",
        "training.log_every=1",
        "training.report=false",
        "optimizer.warmup_steps=0",
        "optimizer.schedule=constant",
        *others,
    ]
    assert train(arguments) == 0
    (run,) = (folder / "outputs" / name).glob("*/*")
    return run


def weights_of(run: Path) -> dict[str, np.ndarray]:
    params = open_trained(run).read(None)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}


def assert_close(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("loss", BETA)
def test_ten_steps(trl, monkeypatch, loss, mesh):
    """Of two microbatches on each mesh; TRL has one, so that its NLL is one mean."""
    reference = trl(loss)
    monkeypatch.chdir(reference.folder)
    run = run_tessera(reference, loss, MESHES[mesh], *ADAMW)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    np.testing.assert_allclose(losses, reference.losses, atol=1e-5, rtol=1e-5)
    before = leaves_of(reference.folder / "model")
    moved = [np.abs(w - before[name]).max() for name, w in reference.weights.items()]
    assert min(moved) > 10 * 1e-5
    assert_close(weights_of(run), reference.weights)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("loss", BETA)
def test_the_gradients_of_the_first_step(trl, monkeypatch, loss, mesh):
    """What a step of SGD at the rate 1 subtracts."""
    reference = trl(loss)
    monkeypatch.chdir(reference.folder)
    run = run_tessera(reference, loss, MESHES[mesh], *SGD, "training.steps=1")
    after = weights_of(run)
    before = leaves_of(reference.folder / "model")
    gradients = {name: before[name] - after[name] for name in before}
    assert max(np.abs(g).max() for g in reference.gradients.values()) > 0.01
    assert_close(gradients, reference.gradients)
