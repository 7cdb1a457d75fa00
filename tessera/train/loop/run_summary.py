# SPDX-License-Identifier: Apache-2.0
"""Describes a run: what was set, then what was compiled; and prints a dry run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from tessera.analysis.inspection import inspect
from tessera.analysis.memory import format_bytes
from tessera.errors import DataNotFoundError
from tessera.graph.compile_stages import Compiled
from tessera.mesh import Mesh
from tessera.train.checkpoints.choose_checkpoint import Choice
from tessera.train.config.command_line import Composed
from tessera.train.config.optimizer_config import scaled_learning_rate
from tessera.train.config.post_training_config import POLICY
from tessera.train.config.run_config import Config, data_parallel_groups
from tessera.train.data.corpus import Corpus
from tessera.train.data.prompts import PromptCorpus
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console, log
from tessera.train.loop.policy_sampler import compiled_rollout
from tessera.train.loop.rollout_batches import open_rollouts
from tessera.train.models.families.published_files import Published
from tessera.train.models.model import Model
from tessera.train.runtime.compile_cache import make_compile_cache
from tessera.train.runtime.devices import nearest_settings


def start_rows(
    run: Run, corpus: Corpus, composed: Composed, choice: Choice, devices: str
) -> list[tuple[str, str]]:
    """What a run is about to do, in about ten rows; compiles nothing.

    Args:
      run: The run.
      corpus: Its data.
      composed: The command line that it came from.
      choice: What it goes on from, and where it writes.
      devices: What it runs on, in words.
    """
    settings, mesh = run.config, run.mesh
    parameters = _parameters(run.model, " parameters")
    rows = [
        ("model", f"{settings.model.name}: {parameters}"),
        ("weights", _weights(run, choice)),
        ("data", _data(corpus)),
        *(("not used", keys) for s in corpus.sources if (keys := s.describe_ignored())),
        ("tokenizer", corpus.describe_tokenizer()),
        ("devices", devices),
        ("mesh", mesh.topology),
        ("precision", _precision(settings)),
    ]
    if settings.training.eval_only:
        rows.append(("batch", _batch(run)))
    else:
        steps = f"{settings.training.steps:,} steps"
        epochs = corpus.describe_epochs(rows_read(run))
        rows += [
            ("batch", f"{_batch(run)} a step; {steps} are {epochs}"),
            *_fill(run, corpus),
            ("optimizer", _optimizer(settings, mesh)),
        ]
    changed = " ".join(composed.changed)
    return [
        *rows,
        *(("note", note) for note in run.layout_notes()),
        ("settings", f"{changed or 'the defaults'}; config.yaml has all"),
        ("folder", str(choice.output_dir)),
    ]


def rows_read(run: Run) -> int:
    """Rows of the data that all steps of a run read; of a policy, prompts."""
    training, grpo = run.config.training, run.config.grpo
    if training.objective != POLICY:
        return training.steps * run.rows_per_step
    rollouts = -(-training.steps // grpo.steps_of_a_rollout)
    completions = run.rows_per_step * grpo.steps_per_rollout
    return rollouts * completions // grpo.group_size


def _weights(run: Run, choice: Choice) -> str:
    training = run.config.training
    if choice.checkpoint is not None:
        return f"of step {choice.checkpoint.metadata.step:,}: {choice.checkpoint.path}"
    if training.init_from is None:
        return f"random, by training.seed={training.seed}"
    return training.init_from + (", with new adapters" if run.model.adapters else "")


def _data(corpus: Corpus) -> str:
    """Each source and its size, in tokens."""
    total = sum(source.weight for source in corpus.sources)
    texts = []
    for source in corpus.sources:
        sizes = [
            s.stream.num_tokens for s in (source.train_rows, source.validation_rows)
        ]
        share = f" ({source.weight / total:.1%})" if len(corpus.sources) > 1 else ""
        text = (
            f"{source.title}{share}: {sizes[0]:,} tokens, {sizes[1]:,} for validation"
            if sizes[0]
            else f"{source.title}{share}: {sizes[1]:,} tokens for validation"
        )
        if (learned := source.learned) is not None:
            text += f"; {learned:.0%} of the tokens are learned (data.loss_on)"
        texts.append(text)
    return "; ".join(texts)


def _fill(run: Run, corpus: Corpus) -> Iterator[tuple[str, str]]:
    """The share of a row of a policy that has tokens: each row is one completion."""
    config, grpo = run.config, run.config.grpo
    if isinstance(corpus, PromptCorpus) and grpo.environment is None:
        source, most = corpus.sources[0], grpo.max_completion
        sides: Any = source.train_rows, source.validation_rows
        # Longer prompts are left out. The last token of a row is a target only.
        longest = min(max(side.longest for side in sides), config.longest_prompt)
        share = (longest + most - 1) / config.training.sequence_length
        yield (
            "fill",
            f"at most {share:.0%} of a row: {longest:,} tokens of the longest prompt, "
            f"{most:,} of a completion",
        )


def _precision(settings: Config) -> str:
    precision = settings.training.precision
    dtypes = {
        "parameters": precision.parameters,
        "computation": precision.computation
        + (", fp8 matmuls" if precision.fp8 else ""),
        "sums of gradients": precision.reduction,
    }
    if len({*dtypes.values()}) == 1:
        return precision.computation
    return "; ".join(f"{part} {dtype}" for part, dtype in dtypes.items())


def _batch(run: Run) -> str:
    """Sequences of a step, or of a batch of an evaluation."""
    settings, training = run.config, run.config.training
    tokens = f"sequences of {training.sequence_length:,} tokens"
    if training.eval_only:
        return f"{settings.rows_per_evaluation(run.mesh.shape):,} {tokens}"
    parts = training.gradient_accumulation_steps
    microbatches = f" in {parts} microbatches" if parts > 1 else ""
    return f"{run.rows_per_step:,} {tokens}{microbatches}"


def _optimizer(settings: Config, mesh: Mesh) -> str:
    chosen = settings.optimizer
    groups = data_parallel_groups(mesh.shape)
    rate = scaled_learning_rate(
        chosen.learning_rate, groups, chosen.scale_learning_rate
    )
    steps = chosen.warmup(settings.training.steps)
    unit = "step" if steps == 1 else "steps"
    warmup = f"{steps:,} {unit} of warm-up, then {chosen.schedule}"
    return f"{chosen.name}, learning rate {rate:g}: {warmup}"


def run_rows(run: Run, rollout: Compiled | None = None) -> list[tuple[str, str]]:
    """Mesh, parameters, batch and memory per device; compiles, allocates nothing.

    Args:
      run: The run.
      rollout: The program of its sampler, if that is to be shown.
    """
    settings, mesh = run.config, run.mesh
    memory = run.compiled.memory
    unit = "batch" if settings.training.eval_only else "step"
    state = inspect(run.abstract_state)
    return [
        ("mesh", f"{mesh.topology}{_place(mesh)}"),
        ("model", settings.model.name),
        ("recipe", settings.recipe),
        ("parameters", _parameters(run.model)),
        *(("layout", note) for note in run.layout_notes()),
        (
            "state",
            f"{format_bytes(state.nbytes)}, {format_bytes(state.local_nbytes)} per "
            "device",
        ),
        ("stored per device", _stored(run)),
        *(("recomputed", text) for text in run.model.remat_notes()),
        ("batch", _batch(run)),
        *_rows_of_others(run, rollout, unit),
        (
            "memory per device",
            f"{format_bytes(memory.peak)}: state and batch "
            f"{format_bytes(memory.arguments)}, temporaries "
            f"{format_bytes(memory.temporaries)}",
        ),
        (f"sent per {unit}", _sent(run.compiled)),
    ]


def _rows_of_others(
    run: Run, rollout: Compiled | None, unit: str
) -> Iterator[tuple[str, str]]:
    """What programs beside the step take, with the rest of the state."""
    state = run.abstract_state
    if run.step_config.offload_optimizer:
        state = replace(state, optimizer=None)
    rest = inspect(state).local_nbytes - inspect(state.params).local_nbytes
    for name, program in _others(run, rollout).items():
        peak, sent = format_bytes(program.memory.peak + rest), _sent(program)
        per = unit if name.endswith("scores") else "dispatch of one token"
        yield name, f"{peak} per device; sent per {per}: {sent}"


def _others(run: Run, rollout: Compiled | None) -> dict[str, Compiled]:
    """The programs beside the step, by name."""
    found = {f"{name} scores": each for name, each in run.compiled_scores.items()}
    return found if rollout is None else {**found, "rollout": rollout}


def _sent(program: Compiled) -> str:
    """What a program sends, by the axes of the mesh."""
    ledger = program.collectives
    sent = [
        f"{'×'.join(axes)}: {total.calls} calls, {format_bytes(total.nbytes)}"
        for axes, total in ledger.by_axis().items()
    ]
    if ledger.unplanned:
        size = sum(row.total_bytes for row in ledger.unplanned)
        found = f"{len(ledger.unplanned)} collectives, {format_bytes(size)}"
        sent.append(f"of these unplanned: {found}")
    return "; ".join(sent) or "nothing: one device"


def _place(mesh: Mesh) -> str:
    """Where a mesh is that is not here."""
    if mesh.target is not None:
        other = ", compiled for the CPU instead" if mesh.target.is_stand_in else ""
        if idle := len(mesh.idle_device_ids):
            shapes = nearest_settings(mesh.shape, mesh.target.num_devices)
            other += f", {idle} devices idle: model.mesh_shape={shapes} takes all"
        return f", of target {mesh.target}{other}"
    return ", abstract" if mesh.is_abstract else ""


def _parameters(model: Model, noun: str = "") -> str:
    total, active = model.num_params, model.num_active_params
    text = f"{total:,}{noun}"
    text += f", {active:,} for each token" if active < total else ""
    leaves = jax.tree.leaves(model.trained(model.abstract()))
    trained = sum(math.prod(leaf.shape) for leaf in leaves)
    return text + (f", {trained:,} of them trained" if model.frozen else "")


def _stored(run: Run) -> str:
    """What of the state and of the gradients one device holds.

    Gradients in a fixed order of sums are whole on every device.
    """
    state, zero = run.abstract_state, run.step_config.zero
    trees = {"parameters": state.params}
    if state.reference is not None:
        trees["reference"] = state.reference
    if not run.config.training.eval_only:
        trees["gradients"] = zero.abstract_gradients
        trees["optimizer"] = state.optimizer
    if state.reference is not None:
        trees["reference"] = state.reference
    held = {name: inspect(tree).local_nbytes for name, tree in trees.items()}
    if "gradients" in held and run.step_config.fixed_order is not None:
        held["gradients"] = inspect(trees["gradients"]).nbytes
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
    return f"{text} on the host" if run.step_config.offload_optimizer else text


def dry_run(run: Run, notes: Sequence[str], published: Mapping[str, str]) -> None:
    """Read the data of a run, compile its step, and print what it will do."""
    make_compile_cache()
    with Console(None) as console:
        for line in notes:
            log.info("%s", line)
        corpus = _dry_data(run)
        if corpus is not None:  # reward functions, too, can be called
            rollouts = open_rollouts(run, corpus, _no_phase, Path(), published)
            with rollouts or nullcontext():
                pass
        warnings = run.warnings(Published.parse(published))
        for line in (*warnings, *(corpus.warnings() if corpus else ())):
            log.warning("%s", line)
        rows = [("data", _data(corpus)), *_fill(run, corpus)] if corpus else []
        rollout = compiled_rollout(run)
        console.show_table("run", [*rows, *run_rows(run, rollout)])
        log.info("%s", dry_run_text(run, rollout))


def _no_phase(phase: str, step: int) -> None:
    """What a dry run does where phases begin."""


def _dry_data(run: Run) -> Corpus | None:
    """The data, if files were named; those of a target may be where the target is."""
    if run.config.data.name in ("stdlib", "synthetic"):
        return None
    try:
        return run.load_data()
    except DataNotFoundError as error:
        if run.mesh.target is None:
            raise
        log.warning("the data is not read: %s: %s", error.what, error.got)
        return None


def dry_run_text(run: Run, rollout: Compiled | None = None) -> str:
    """Memory per device, every collective of each compiled program, and its time.

    The time is predicted, and only where the mesh has a target.
    """
    parts = list[str]()
    for name, program in {"": run.compiled, **_others(run, rollout)}.items():
        title = f"{name}, " if name else ""
        parts.append(title + program.memory.as_text())
        parts.append(program.collectives.as_text())
        if run.mesh.target is not None:
            parts.append(program.timeline.as_text())
    return "\n\n".join(parts)
