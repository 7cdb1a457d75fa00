# SPDX-License-Identifier: Apache-2.0
"""The table of a run, and the whole answer of a dry run."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tessera.analysis.collective import Collective
from tessera.analysis.inspection import inspect
from tessera.analysis.memory import format_bytes
from tessera.errors import BadRecordError, DataNotFoundError
from tessera.targets.target import Target
from tessera.train.checkpoints.choose_checkpoint import Choice
from tessera.train.config.command_line import Composed
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.optimizer_config import AdamWConfig, OptimizerConfig
from tessera.train.config.post_training_config import GrpoConfig
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.data.corpus import load
from tessera.train.data.data_config import DataConfig, SourceConfig, SyntheticConfig
from tessera.train.loop import run_summary
from tessera.train.loop.build_run import Run
from tessera.train.loop.policy_sampler import compiled_rollout, policy_sampler
from tessera.train.loop.run_summary import (
    dry_run,
    dry_run_text,
    run_rows,
    start_rows,
)
from tessera.train.rollouts.rollout import rows_of
from tessera.train.rollouts.trajectories import Trajectory
from tests.small_model import SMALL
from tests.train.data.chat_folders import turns, write_folder
from tests.train.loop.post_training_runs import policy_run, write_prompts

# What was compiled elsewhere has the lines of elsewhere, which say what is planned.
pytestmark = pytest.mark.usefixtures("compiled_here")

CONFIG = SMALL
BATCH = {
    "sequence_length": 16,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 3,
}


def run_of(
    sizes: tuple[int, ...],
    axes: tuple[str, ...],
    target: Target | None = None,
    **training: Any,
) -> Run:
    settings = Config(
        name="small",
        model=ModelConfig(name="small", mesh_shape=(sizes, axes), config=CONFIG),
        training=TrainingConfig(
            **{**BATCH, **training},
        ),
    )
    return Run(settings, mesh_of_shape(settings.model.mesh_shape, target=target))


@pytest.fixture(scope="module")
def run() -> Run:
    """On more devices than there are."""
    return run_of((4, 4), ("fsdp", "tp"))


@pytest.mark.full
def test_the_table_says_mesh_model_state_batch_memory_and_what_is_sent(run):
    before = jax.live_arrays()  # held, so that none of them goes meanwhile
    rows = run_rows(run)
    memory, ledger = run.compiled.memory, run.compiled.collectives
    sent = ledger.by_axis()
    assert not ledger.unplanned
    assert rows == [
        ("mesh", "fsdp × tp mesh, 4 × 4, abstract"),
        ("model", "small"),
        ("recipe", "none"),
        ("parameters", "20,800"),
        *(("layout", note) for note in run.model.layout_notes(run.mesh)),
        ("state", dict(rows)["state"]),
        (
            "stored per device",
            "parameters 7.75 KiB, gradients 7.75 KiB, optimizer 15.5 KiB",
        ),
        ("recomputed", "named in 2 of 2 layers"),
        ("batch", "24 sequences of 16 tokens in 3 microbatches"),
        (
            "memory per device",
            f"{format_bytes(memory.peak)}: state and batch "
            f"{format_bytes(memory.arguments)}, temporaries "
            f"{format_bytes(memory.temporaries)}",
        ),
        (
            "sent per step",
            "; ".join(
                f"{'×'.join(axes)}: {total.calls} calls, {format_bytes(total.nbytes)}"
                for axes, total in sent.items()
            ),
        ),
    ]
    assert ("tp",) in sent
    assert ("fsdp",) in sent
    assert len(jax.live_arrays()) == len(before)


@pytest.mark.full
def test_the_table_says_how_much_of_what_is_sent_is_unplanned(run, monkeypatch):
    monkeypatch.setattr(Collective, "is_planned", property(lambda row: row.calls == 1))
    rows = run.compiled.collectives.unplanned
    size = format_bytes(sum(row.total_bytes for row in rows))
    assert dict(run_rows(run))["sent per step"].endswith(
        f"; of these unplanned: {len(rows)} collectives, {size}"
    )


@pytest.mark.full
def test_gradients_in_a_fixed_order_are_whole_on_every_device():
    run = run_of((2, 2), ("fsdp", "tp"), numerics="deterministic", reduction_parts=4)
    held = dict(run_rows(run))["stored per device"]
    whole = format_bytes(4 * run.model.num_params)
    assert f"gradients {whole}" in held
    assert f"parameters {whole}" not in held


@pytest.mark.full
def test_the_state_is_counted_whole_and_per_device(run):
    # Parameters and AdamW's two moments in f32, and three counters.
    whole = 3 * 4 * run.model.num_params + 3 * 4
    state = dict(run_rows(run))["state"]
    total, local = state.removesuffix(" per device").split(", ")
    assert total == format_bytes(whole)
    # What the compiled program takes on each device: its state and its batch.
    batch = 4 * (3 * 2 * 16) * 4
    assert local == format_bytes(run.compiled.memory.arguments - batch)


@pytest.mark.full
def test_a_dry_run_shows_memory_and_every_collective(run):
    text = dry_run_text(run)
    compiled = run.compiled
    assert text == f"{compiled.memory.as_text()}\n\n{compiled.collectives.as_text()}"
    assert text.startswith("memory per device, compiled for cpu\n  arguments ")
    assert "all-reduce" in text


@pytest.fixture(scope="module")
def on_target() -> Run:
    return run_of((2, 2), ("fsdp", "tp"), Target.parse("cpu:4"))


@pytest.mark.full
def test_a_dry_run_for_a_target_predicts_the_time_of_a_step(on_target):
    text = dry_run_text(on_target)
    timeline = on_target.compiled.timeline
    assert text.endswith(f"\n\n{timeline.as_text()}")
    assert "predicted step on cpu:4: " in text
    # Three microbatches through the loop over two layers.
    assert max(each.times for each in timeline.operations) >= 6


@pytest.mark.full
def test_one_device_sends_nothing():
    rows = dict(run_rows(run_of((1, 1), ("fsdp", "tp"))))
    assert rows["mesh"] == "fsdp × tp mesh, 1 × 1"
    assert rows["sent per step"] == "nothing: one device"


@pytest.mark.full
def test_a_mesh_that_leaves_devices_of_its_target_idle_says_which_would_not():
    rows = dict(run_rows(run_of((2, 1), ("fsdp", "tp"), Target.parse("cpu:4"))))
    assert rows["mesh"] == (
        "fsdp × tp mesh, 2 × 1, of target cpu:4, 2 devices idle: "
        "model.mesh_shape=[[4,1],[fsdp,tp]] or [[2,2],[fsdp,tp]] takes all"
    )


@pytest.mark.full
def test_memory_settings_are_shown_with_what_they_do():
    remat = {"global": "full"}
    run = run_of((2,), ("dp",), zero_stage=2, offload_optimizer=True, remat=remat)
    rows = dict(run_rows(run))
    whole = 4 * run.model.num_params
    assert rows["stored per device"] == (
        f"parameters {format_bytes(whole)}, gradients {format_bytes(whole / 2)}, "
        f"optimizer {format_bytes(whole + 8)} on the host"
    )
    assert rows["recomputed"] == "full in 1 of 2 layers"
    assert run.compiled.memory.arguments == whole + whole + 12 + 4 * 3 * 2 * 16 * 4


# --- what is set, before anything is compiled


def started(
    folder: Path,
    *,
    checkpoint: Any = None,
    changed: tuple[str, ...] = (),
    optimizer: OptimizerConfig | None = None,
    data: DataConfig | None = None,
    ignored: Collection[str] = (),
    length: int = 16,
    **training: Any,
) -> dict[str, str]:
    """The rows of a run that begins."""
    run = run_of((4,), ("dp",), **training)
    settings = replace(run.config, optimizer=optimizer or AdamWConfig())
    run = Run(settings, run.mesh)
    data = data or DataConfig(
        name="synthetic", synthetic=SyntheticConfig(tokens=4000, vocab_size=64)
    )
    corpus = load(data, sequence_length=length, seed=0, vocab_size=300)
    first, *others = corpus.sources
    corpus = replace(corpus, sources=[replace(first, ignored=ignored), *others])
    composed = Composed(settings, "", folder, changed=changed)
    choice = Choice(folder, checkpoint)
    return dict(start_rows(run, corpus, composed, choice, "4 CPU devices"))


def test_a_run_says_in_a_dozen_rows_what_it_is_about_to_do(tmp_path):
    rows = started(tmp_path, changed=("training.steps=300", "data=synthetic"))
    assert len(rows) == 11
    data = rows.pop("data")
    assert re.fullmatch(
        r"synthetic patterns: [\d,]+ tokens, \d+ for validation", data
    ), data
    epochs = rows.pop("batch")
    assert epochs.startswith(
        "24 sequences of 16 tokens in 3 microbatches a step; 300 steps are "
    )
    assert rows == {
        "model": "small: 20,800 parameters",
        "weights": "random, by training.seed=0",
        "tokenizer": "synthetic, 64 ids, separator 0",
        "devices": "4 CPU devices",
        "mesh": "dp mesh, 4",
        "precision": "float32",
        "optimizer": "adamw, learning rate 0.003: 20 steps of warm-up, then cosine",
        "settings": "training.steps=300 data=synthetic; config.yaml has all",
        "folder": str(tmp_path),
    }


def test_the_weights_are_those_that_the_run_begins_with(tmp_path):
    assert started(tmp_path, init_from="/models/one")["weights"] == "/models/one"
    where = tmp_path / "checkpoints" / "1200"
    checkpoint = SimpleNamespace(path=where, metadata=SimpleNamespace(step=1200))
    rows = started(tmp_path, init_from="/models/one", checkpoint=checkpoint)
    assert rows["weights"] == f"of step 1,200: {where}"


def test_the_learning_rate_is_the_one_that_is_reached(tmp_path):
    scaled = AdamWConfig(learning_rate=1e-5, scale_learning_rate="linear")
    assert "learning rate 4e-05: " in started(tmp_path, optimizer=scaled)["optimizer"]


def test_mixed_precision_names_the_dtype_of_each_part(tmp_path):
    assert started(tmp_path, mixed_precision="bf16")["precision"] == (
        "parameters float32; computation bfloat16; sums of gradients float32"
    )
    rows = started(tmp_path, mixed_precision="fp8")
    assert "computation bfloat16, fp8 matmuls; " in rows["precision"]


def test_an_evaluation_has_no_steps_and_no_optimizer(tmp_path):
    rows = started(tmp_path, eval_only=True)
    assert rows["batch"] == "8 sequences of 16 tokens"
    assert "optimizer" not in rows


def test_each_source_of_a_mixture_has_its_share_and_what_is_not_used(tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 400)
    sources = {
        name: SourceConfig(path=str(tmp_path / "a.txt"), weight=weight)
        for name, weight in (("a", 1), ("b", 3))
    }
    data = DataConfig(name="mixture", sources=sources, cache_dir=str(tmp_path))
    rows = started(tmp_path, data=data, ignored={"id", "date"})
    assert rows["not used"] == "keys of the records of a: date, id"
    shares = re.findall(r"\((\S+%)\): ([\d,]+) tokens, (\d+) for", rows["data"])
    assert [share for share, *_ in shares] == ["25.0%", "75.0%"]
    assert "epochs of a, " in rows["batch"]


def test_conversations_say_which_part_of_them_is_learned(tmp_path):
    pytest.importorskip("jinja2")
    line = json.dumps({"messages": turns("hi", "hello")}) + "\n"
    (tmp_path / "chats.jsonl").write_text(line * 30)
    data = DataConfig(
        **{"name": "text", "path": str(tmp_path / "chats.jsonl")},
        **{"messages_key": "messages", "loss_on": "answers"},
        tokenizer=str(write_folder(tmp_path, "llama", marked=True)),
        cache_dir=str(tmp_path / "cache"),
    )
    rows = started(tmp_path, data=data, length=80)
    learned = "; 8% of the tokens are learned (data.loss_on)"  # by hand: 3 of 38
    assert rows["data"].endswith(f" tokens, 38 for validation{learned}")


# --- the data of a dry run


def dry(monkeypatch, capsys, path, *, target=None, sizes=(1,), **data):
    """What a dry run prints; nothing is compiled."""
    run = run_of(sizes, ("dp",), target)
    config = DataConfig(name="text", path=str(path), **data)
    model = replace(run.config.model, config=replace(CONFIG, vocab_size=264))
    run = Run(replace(run.config, data=config, model=model), run.mesh)
    monkeypatch.setattr(run_summary, "run_rows", lambda run, rollout: [("mesh", "m")])
    monkeypatch.setattr(run_summary, "dry_run_text", lambda run, rollout: "text")
    dry_run(run, (), {})
    return capsys.readouterr().out


@pytest.mark.parametrize("sizes", [(1,), (512,)])
def test_a_dry_run_reads_the_data(tmp_path, monkeypatch, capsys, sizes):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Call me Ishmael."}\n' * 20_000)
    seen = dry(monkeypatch, capsys, path, sizes=sizes, cache_dir=str(tmp_path / "c"))
    assert "323,017 tokens, 16,983 for validation\n" in seen
    path.write_text('{"text": "Call me Ishmael."}\n' * 20 + "{}\n")
    with pytest.raises(BadRecordError, match="line 21"):
        dry(monkeypatch, capsys, path, sizes=sizes, cache_dir=str(tmp_path / "c"))


def test_a_dry_run_for_a_target_may_have_its_data_there(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    seen = dry(monkeypatch, capsys, gone, target=Target.parse("cpu:4"), sizes=(4,))
    assert "the data is not read: " in seen
    with pytest.raises(DataNotFoundError):
        dry(monkeypatch, capsys, gone)


def test_a_policy_says_which_part_of_a_row_its_longest_completion_fills(
    tmp_path, monkeypatch, capsys
):
    run = policy_run(write_prompts(tmp_path / "sums.jsonl"))
    prompt, completion = 5, 6  # a separator, a+b= and what is written
    row = rows_of(
        [np.arange(prompt, dtype=np.int32)],
        [Trajectory(np.arange(completion), *[np.ones(completion, bool)] * 2, True)],
        run.config.training.sequence_length,
    )
    assert (row["segment_ids"] > 0).mean() == 10 / 16
    fill = "62% of a row: 5 tokens of the longest prompt, 6 of a completion"
    monkeypatch.setattr(run_summary, "compiled_rollout", lambda run: None)
    monkeypatch.setattr(run_summary, "open_rollouts", lambda *_: None)
    monkeypatch.setattr(run_summary, "run_rows", lambda run, rollout: [])
    monkeypatch.setattr(run_summary, "dry_run_text", lambda run, rollout: "text")
    dry_run(run, (), {})
    assert f"  fill  at most {fill}" in capsys.readouterr().out


# --- programs beside the step


def tuned(objective: str, **grpo: Any) -> Run:
    run = run_of((2, 2), ("fsdp", "tp"), Target.parse("cpu:4"), objective=objective)
    settings = replace(run.config, grpo=GrpoConfig(max_completion=8, **grpo))
    return Run(settings, run.mesh)


@pytest.mark.full
@pytest.mark.parametrize(
    ("run", "names"),
    [
        pytest.param(tuned("preference"), ["reference"], id="preference"),
        pytest.param(tuned("policy"), [], id="policy"),
        pytest.param(tuned("policy", passes=2), ["policy"], id="passes"),
        pytest.param(
            tuned("policy", passes=2, kl_coefficient=0.1),
            ["reference", "policy"],
            id="both",
        ),
    ],
)
def test_a_dry_run_shows_the_scores_beside_the_step(run, names):
    rows, text = dict(run_rows(run)), dry_run_text(run)
    assert [name for name in rows if name.endswith(" scores")] == [
        f"{name} scores" for name in names
    ]
    assert text.count(" scores, memory per device") == len(names)
    assert text.count("predicted step on cpu:4: ") == 1 + len(names)
    for name in names:
        assert "per device; sent per step: fsdp: " in rows[f"{name} scores"]
        assert "; tp: " in rows[f"{name} scores"]


def test_memory_of_scores_has_the_rest_of_the_state(monkeypatch):
    """The moments of the optimizer and the copy are there, whoever reads them."""
    run = tuned("preference")
    assert run.reference == "copy"
    compiled = SimpleNamespace(
        memory=SimpleNamespace(peak=1 << 20),
        collectives=SimpleNamespace(by_axis=dict, unplanned=()),
    )
    monkeypatch.setattr(Run, "compiled_scores", {"reference": compiled})
    ((_, text),) = run_summary._rows_of_others(run, None, "step")
    state = run.abstract_state
    whole = inspect(state).local_nbytes - inspect(state.params).local_nbytes
    assert text.startswith(f"{format_bytes((1 << 20) + whole)} per device")


@pytest.mark.full
def test_a_dry_run_of_a_policy_shows_its_sampler():
    """The weights are gathered once for the tokens of a dispatch."""
    run = tuned("policy", slots=4)
    rollout = compiled_rollout(run)
    assert rollout is not None
    rows, text = dict(run_rows(run, rollout)), dry_run_text(run, rollout)
    assert "; tp: " in rows["rollout"]
    assert " per device; sent per dispatch of one token: fsdp: " in rows["rollout"]
    assert "rollout, memory per device, compiled for cpu\n" in text
    gathered = sum(
        row.total_bytes for row in rollout.collectives.rows if row.kind == "all-gather"
    )
    whole = 4 * run.model.num_params / 2  # over tp, and norms on all
    assert gathered == pytest.approx(whole, rel=0.1)
    assert compiled_rollout(tuned("policy", server="http://localhost:1/v1")) is None


@pytest.mark.full
def test_a_dry_run_shows_the_sampler_on_its_own_mesh():
    run = tuned("policy", slots=4, mesh_shape=[[1, 4], ["fsdp", "tp"]])
    rollout = compiled_rollout(run)
    assert rollout is not None
    assert policy_sampler(run).dispatch_tokens == 8
    assert [*rollout.collectives.by_axis()] == [("tp",)]


@pytest.mark.full
def test_with_deterministic_numerics_each_device_samples_its_own_parts():
    """With whole weights, which it gathers over all axes."""
    run = tuned("policy", slots=4)
    training = replace(run.config.training, numerics="deterministic", reduction_parts=4)
    run = Run(replace(run.config, training=training), run.mesh)
    rollout = compiled_rollout(run)
    assert rollout is not None
    gathered = sum(
        row.total_bytes for row in rollout.collectives.rows if row.kind == "all-gather"
    )
    assert gathered >= 4 * run.model.num_params
