# SPDX-License-Identifier: Apache-2.0
"""What a step sends, among the numbers of a run."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.train.loop import profiling
from tessera.train.loop.communication_metrics import new_bytes, seconds
from tessera.train.loop.main import main
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.profiling import Window
from tessera.train.loop.run_folder import open_run_folder

SMALL = (
    *("model.vocab_size=264", "model.d_model=16", "model.num_layers=1"),
    *("model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=8"),
    *("model.mlp_dim=16", "model.window=8", "training.sequence_length=16"),
    *("training.micro_batch_size=2", "training.sample_length=0", "data=synthetic"),
    *("data.synthetic.tokens=2000", "training.validate_every=0"),
    *("training.checkpoint_every=1", "training.log_every=1"),
)


def ledger_of(**sent: int) -> Any:
    """A ledger with bytes by axes, whose names ``_`` joins."""
    totals = {
        tuple(axes.split("_")): SimpleNamespace(nbytes=nbytes)
        for axes, nbytes in sent.items()
    }
    return SimpleNamespace(by_axis=lambda: totals)


def lines(folder: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_bytes_by_axis_are_in_the_line_of_the_first_step(tmp_path):
    folder = open_run_folder(tmp_path, "")
    with MetricWriter(folder) as writer:
        writer.add_to_next(new_bytes(ledger_of(dp=8, dp_fsdp=16), folder.metrics))
        writer.write(1, {"loss": 2.5})
        writer.write(2, {"loss": 2.0})
    sent = {"communication_bytes/dp": 8.0, "communication_bytes/dp-fsdp": 16.0}
    assert lines(folder) == [
        {"step": 1, "loss": 2.5, **sent},
        {"step": 2, "loss": 2.0},
    ]


@pytest.mark.parametrize(
    ("ledger", "written"),
    [
        (ledger_of(dp=8, tp=4), {}),
        (ledger_of(dp=8), {"communication_bytes/dp": 8.0}),
        (
            ledger_of(dp=9, tp=4),
            {"communication_bytes/dp": 9.0, "communication_bytes/tp": 4.0},
        ),
    ],
)
def test_a_resumed_run_writes_them_where_they_have_changed(tmp_path, ledger, written):
    folder = open_run_folder(tmp_path, "")
    folder.metrics.write_text(
        '{"step": 1, "communication_bytes/dp": 1.0}\n'
        '{"step": 5, "communication_bytes/dp": 8.0, "communication_bytes/tp": 4.0}\n'
        '{"step": 6, "loss": 1.0}\n{"step": 7, "communication_bytes/'
    )
    assert new_bytes(ledger, folder.metrics) == written


def test_measured_seconds_are_at_the_last_step_that_was_profiled(tmp_path, monkeypatch):
    spent = {("fsdp",): SimpleNamespace(seconds=0.5)}
    measured: Any = SimpleNamespace(communication=spent)
    assert seconds(measured) == {"communication_seconds/fsdp": 0.5}
    report: Any = SimpleNamespace(measured=measured, as_text=lambda: "")
    report.from_trace = lambda *_: report
    monkeypatch.setattr(profiling, "write_profile", lambda *_: None)
    monkeypatch.setattr(profiling.jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: None)
    written = []
    window = Window(
        tmp_path,
        lambda: report,
        wait=1,
        warmup=0,
        active=2,
        write=lambda *line: written.append(line),
    )
    for step in range(11, 20):
        window.before(step, lambda: None)
    window.close()
    assert written == [(13, {"communication_seconds/fsdp": 0.5})]


@pytest.mark.full
def test_a_run_on_two_devices_has_what_its_table_says(tmp_path):
    """Once, also after a resume on the same mesh, whose curve is one."""
    command = [*SMALL, "model.mesh_shape=[[2],[fsdp]]", "training.resume=auto"]
    command += [f"hydra.run.dir={tmp_path}"]
    for steps in (2, 4):
        assert main([*command, f"training.steps={steps}"]) == 0
    read = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    sent = {
        line["step"]: line["communication_bytes/fsdp"]
        for line in read
        if "communication_bytes/fsdp" in line
    }
    assert [*sent] == [1]
    assert sent[1] > 0
