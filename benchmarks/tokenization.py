# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of preparing JSON lines, beside ``datasets.map``.

Both read the same file, with the same tokenizer and number of processes, in turns.
Tessera's time is that of a first run's ``load``: starting its processes, reading and
parsing the file, encoding, writing and checking. That of ``datasets`` is the time of
``map`` alone, from the Arrow file that it has made of the JSON lines before; ``with
reading`` includes that. Memory is the peak of the sum of the resident memory of all
processes.

    python benchmarks/tokenization.py --tokenizer tokenizer.json --peer-python PYTHON
        [--megabytes 64] [--processes 2] [--rounds 3] [--folder FOLDER] [--train]

``--peer-python`` has the packages ``datasets`` and ``tokenizers``; without it only
Tessera is measured, also with the tokenizer ``bytes``. ``--train`` then trains 20 steps
on the prepared tokens, in a new process.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).parents[1]
PEER = Path(__file__).parent / "peer_programs" / "peer_datasets.py"
PREPARE = """
import json, sys, time
from tessera.train.data import DataConfig, load
path, tokenizer, cache, workers = sys.argv[1:]
config = DataConfig(
    name="text", path=path, tokenizer=tokenizer, cache_dir=cache,
    num_workers=int(workers),
)
begin = time.perf_counter()
corpus = load(config, sequence_length=1024, seed=0, vocab_size=2**20)
seconds = time.perf_counter() - begin
source = corpus.sources[0]
streams = source.train_rows.stream, source.validation_rows.stream
# As the peer counts: without separators.
has_separator = corpus.tokenizer.separator is not None
tokens = sum(s.num_tokens - has_separator * s.num_documents for s in streams)
print(json.dumps({"tokens": tokens, "seconds": seconds}))
"""


def write_lines(path: Path, num_bytes: int) -> None:
    """JSON lines of 50 to 500 words each, drawn from the standard library's source."""
    modules = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    words = " ".join(p.read_text(errors="ignore") for p in sorted(modules)).split(" ")
    draw = random.Random(0)
    with path.open("w") as file:
        while file.tell() < num_bytes:
            begin = draw.randrange(len(words))
            text = " ".join(words[begin : begin + draw.randrange(50, 500)])
            file.write(json.dumps({"text": text}) + "\n")


def run(command: list[str], **variables: str) -> tuple[str, float]:
    """The last line of a program's output, and the peak of its memory in MB."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        cwd=ROOT,
    )
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(0.1)
    output = process.communicate()[0].strip()
    if process.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{output}")
    return output.splitlines()[-1], peak


def _memory(root: int) -> float:
    """MB that a process and its descendants hold, shared pages counted by each."""
    parents, sizes = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(fields[1])
        sizes[int(folder.name)] = int(fields[21])
    total, group = 0, [root]
    while group:
        pid = group.pop()
        total += sizes.get(pid, 0)
        group += [child for child, parent in parents.items() if parent == pid]
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each program."""
    lines, cache = folder / "lines.jsonl", folder / "cache"
    report.progress("writing the lines")
    write_lines(lines, options.megabytes * 10**6)
    last = [str(cache), str(options.processes)]
    arguments = [str(lines), str(options.tokenizer), *last]
    programs = {"tessera": [sys.executable, "-c", PREPARE, *arguments]}
    if options.peer_python:
        programs["datasets.map"] = [options.peer_python, str(PEER), *arguments]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for name in report.in_turns([*programs], options.rounds):
        report.progress(name)
        shutil.rmtree(cache, ignore_errors=True)
        line, peak = run(programs[name], TOKENIZERS_PARALLELISM="false")
        runs[name].append(json.loads(line) | {"peak": peak})
    assert len({one["tokens"] for each in runs.values() for one in each}) == 1
    rows = [_row(name, each, runs["tessera"]) for name, each in runs.items()]
    if options.train:
        report.print_table("training", [_train(options, lines, cache)])
    return rows


def _row(
    name: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> dict[str, Any]:
    rates = [one["tokens"] / one["seconds"] for one in runs]
    pairs = zip(runs, ours, strict=True)
    ratios = [one["seconds"] / own["seconds"] for one, own in pairs]
    seconds = [one["seconds"] + one.get("read", 0) for one in runs]
    return {
        "program": name,
        "tokens": runs[0]["tokens"],
        "tokens/s": round(statistics.median(rates)),
        "fastest": round(max(rates)),
        "slowest": round(min(rates)),
        "tessera is faster by": round(statistics.median(ratios), 2),
        "in single rounds": " ".join(f"{ratio:.2f}" for ratio in ratios),
        "seconds with reading": round(statistics.median(seconds), 1),
        "peak MB": round(max(one["peak"] for one in runs)),
    }


def _train(options: argparse.Namespace, lines: Path, cache: Path) -> dict[str, Any]:
    """A second run on the same tokens; made again if a peer was measured last."""
    report.progress("training")
    settings = [
        *("data=text", f"data.path={lines}", f"data.tokenizer={options.tokenizer}"),
        *(f"data.cache_dir={cache}", f"data.num_workers={options.processes}"),
        *("model=tiny", "model.vocab_size=32000", "training.steps=20"),
        *("training.sequence_length=256", "training.micro_batch_size=4"),
        *("training.loss_chunk=64", "training.sample_length=0"),
        *("training.validation_sequences=16", f"hydra.run.dir={cache.parent / 'run'}"),
        "training.log_every=1",
    ]
    begin = time.perf_counter()
    _, peak = run([sys.executable, "run_training.py", *settings])
    seconds = time.perf_counter() - begin
    metrics = (cache.parent / "run" / "metrics.jsonl").read_text().splitlines()
    waits = [json.loads(line).get("data_wait_fraction") for line in metrics]
    waits = [wait for wait in waits[1:] if wait is not None]
    return {
        "seconds": round(seconds, 1),
        "peak MB": round(peak),
        "data_wait_fraction": round(statistics.mean(waits), 5),
    }


def main(options: argparse.Namespace) -> None:
    """Every program, in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options, Path(folder))
    title = f"{options.megabytes} MB of JSON lines, {options.processes} processes"
    report.show(title, rows, options.json)


if __name__ == "__main__":
    found = report.parser(__doc__)
    found.add_argument("--tokenizer", default="bytes", help="a .json file, or bytes")
    found.add_argument("--peer-python", help="an interpreter with datasets")
    found.add_argument("--megabytes", type=int, default=64)
    found.add_argument("--processes", type=int, default=2)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--folder", type=Path, help="on the disk to measure")
    found.add_argument("--train", action="store_true", help="train on the tokens")
    main(found.parse_args())
