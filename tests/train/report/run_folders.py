# SPDX-License-Identifier: Apache-2.0
"""Folders of runs as the trainer leaves them, with what a report has to show."""

import json
import math
from pathlib import Path
from typing import Any

HOSTILE = '<script>alert("1")</script>&<img src=x onerror=alert(2)>'

SETTINGS = """name: tiny
training:
  steps: 200
  numerics: deterministic
optimizer:
  learning_rate: 0.003
"""

PROGRAM: list[Any] = [
    ["mesh", "pp × fsdp mesh, 2 × 2"],
    ["parameters", "1,234,567"],
    ["layout", "layers 0-2, 3-5"],
    ["layout", "1f1b: 2 stages, 2 microbatches"],
    ["memory per device", "4 GiB: state and batch 3 GiB, temporaries 1 GiB"],
    ["sent per step", "fsdp: 8 calls, 5 MiB; pp: 4 calls, 1 MiB"],
]


BEGINS: list[Any] = [
    ["model", "tiny: 1,234,567 parameters"],
    ["data", "text at 'books': 7,560,354 tokens, 232,639 for validation"],
    ["settings", "training.steps=200 training.numerics=deterministic"],
]


def metrics(steps: int) -> list[dict[str, Any]]:
    """A curve of a loss that falls, with a validation every 50 steps."""
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        lines.append(
            {
                "step": step,
                "time": 1e9 + step,
                "loss": 2 + 3 / step + 0.1 * math.sin(step),
                "grad_norm": 1 + 0.5 * math.sin(step),
                "learning_rate": 0.003 * min(1, step / 20),
                "tokens_per_second": 12000.0 + step % 7,
                "step_seconds": 0.1 + 0.01 * (step % 5),
                "data_wait_fraction": 0.1,
                "mfu": 0.4,
                "peak_memory_bytes": 5 << 30,
                "skipped": 0.0,
            }
        )
        if step % 50 == 0:
            lines.append({"step": step, "val_loss": 2.5 + 1 / step})
    return lines


def reward_metrics(steps: int) -> list[dict[str, Any]]:
    """A reward that rises, with a rollout for every second step."""
    lines = metrics(steps)[:steps]
    for line in lines:
        step = line["step"]
        line |= {"kl": 0.01 * step, "entropy": 1.0, "sampler_mismatch": 0.001}
        line |= {"clip_low_fraction": 0.1, "clip_high_fraction": 0.2, "ratio_max": 1.5}
        if step % 2:
            line |= {"reward": step / steps, "reward_std": 0.3, "reward_missing": 0.0}
            line |= {"reward/correct": step / steps, "reward/format": "NaN"}
            line |= {"completion_length": 30.5, "truncated_fraction": 0.1}
            line |= {"groups_without_variance": 0.25, "rollout_seconds": 2.0}
            line |= {"reward_seconds": 0.5, "rollout_tokens_per_second": 900.0}
    return [*lines, {"step": steps, "val_reward": 0.75}]


def completion(step: int, text: Any = "It is 4.", **more: Any) -> dict[str, Any]:
    """A line of ``samples.jsonl``."""
    line = {"step": step, "prompt": "What is 2 + 2?", "completion": text}
    line |= {"reward": 0.5, "rewards": {"correct": 1.0, "format": None}}
    return line | {"advantage": -0.25, "tokens": 37, "ended": True} | more


def start(attempt: int = 0, resumed: int | None = None, at: float = 1e9) -> dict:
    return {
        "time": at,
        "attempt": attempt,
        "event": "start",
        "process_start": at - 5,
        "resumed_step": resumed,
        "mesh": {"pp": 2, "fsdp": 2},
        "num_devices": 4,
        "device_kind": "cpu",
        "num_processes": 2,
        "host": "node1",
        "versions": {"python": "3.11.2", "jax": "0.10.2"},
    }


def phase(name: str, at: float, seconds: float, **more: Any) -> dict[str, Any]:
    fields = {"event": "phase", "phase": name, "seconds": seconds}
    return {"time": at, "attempt": 0, **fields, **more}


def events() -> list[dict[str, Any]]:
    """Two attempts: the first fails at step 100, the second ends."""
    steps = {"first_step": 1, "last_step": 100, "data_seconds": 1.0}
    more = {"first_step": 81, "last_step": 200, "data_seconds": 1.0}
    again = start(1, 80, at=1e9 + 100)
    damaged = "THE CHECKPOINT OF STEP 90 IS DAMAGED: state/x is missing"
    slow = "rank 1 is slow, and all others wait for it: it takes 0.3 s"
    second = {"attempt": 1}
    return [
        start(),
        {"time": 1e9, "attempt": 0, "event": "program", "run": BEGINS, "rows": PROGRAM},
        phase("start", 1e9 - 5, 5.0),
        phase("compile", 1e9, 10.0),
        phase("step", 1e9 + 10, 40.0, **steps),
        {
            "time": 1e9 + 50,
            "attempt": 0,
            "event": "failure",
            "message": "OSError: gone",
        },
        again,
        {"time": 1e9 + 101, **second, "event": "warning", "message": damaged},
        phase("start", 1e9 + 95, 5.0, **second),
        phase("step", 1e9 + 101, 60.0, **more, **second),
        {"time": 1e9 + 160, **second, "event": "warning", "message": slow},
        {
            **{"time": 1e9 + 162, **second, "event": "sample"},
            **{"step": 200, "prompt": "def f(", "text": "x):\n    return x"},
        },
        {"time": 1e9 + 163, **second, "event": "end", "step": 200},
    ]


def make_run(
    folder: Path,
    *,
    lines: list[dict[str, Any]] | None = None,
    happened: list[dict[str, Any]] | None = None,
    settings: str = SETTINGS,
    samples: list[dict[str, Any]] | None = None,
) -> Path:
    """The folder of a run that has everything that a report shows."""
    folder.mkdir(parents=True)
    for name, values in (
        ("metrics.jsonl", metrics(200) if lines is None else lines),
        ("events.jsonl", events() if happened is None else happened),
        ("samples.jsonl", samples or []),
    ):
        text = "".join(json.dumps(value) + "\n" for value in values)
        (folder / name).write_text(text)
    (folder / "config.yaml").write_text(settings)
    return folder


def make_hostile_run(folder: Path) -> Path:
    """A run of which every text is a piece of HTML that would run."""
    return make_run(
        folder / HOSTILE,
        lines=[{**metrics(1)[0], f"val_loss/{HOSTILE}": 1.0, f"reward/{HOSTILE}": 1.0}],
        happened=[
            {**start(), "host": HOSTILE, "device_kind": HOSTILE}
            | {"versions": {HOSTILE: HOSTILE}, "mesh": {HOSTILE: 2, "tp": 1}},
            {"time": 1e9, "event": "program", "rows": [[HOSTILE, HOSTILE]]},
            phase("compile", 1e9, 10.0),
            {"time": 1e9, "event": "warning", "message": HOSTILE},
            {"time": 1e9, "event": "ranks", "step": 1, "seconds": {HOSTILE: 0.1}},
            {"time": 1e9, "event": "sample", "prompt": HOSTILE, "text": HOSTILE},
            {"time": 1e9, "event": "failure", "message": HOSTILE},
        ],
        settings=json.dumps({HOSTILE: HOSTILE, "training": {"steps": HOSTILE}}),
        samples=[
            completion(1, HOSTILE, prompt=HOSTILE, rewards={HOSTILE: 1.0}),
            completion(2, [{"role": HOSTILE, "content": HOSTILE, HOSTILE: HOSTILE}]),
        ],
    )


def make_reward_run(folder: Path) -> Path:
    """A run that learned from rewards, with four completions of each rollout."""
    rollout = phase("rollout", 1e9 + 170, 40.0, first_step=1, last_step=1)
    scored = phase("reward", 1e9 + 210, 10.0, first_step=1, last_step=1)
    return make_run(
        folder,
        lines=reward_metrics(20),
        happened=[*events(), rollout, scored],
        settings=SETTINGS.replace("training:", "training:\n  objective: policy"),
        samples=[
            completion(step, f"It is {step + i}.", reward=(step + i) / 30)
            for step in range(1, 20, 2)
            for i in range(4)
        ],
    )
