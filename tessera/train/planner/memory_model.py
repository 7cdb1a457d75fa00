# SPDX-License-Identifier: Apache-2.0
"""``memory_of``: predicts the memory of one device for a layout, without compiling.

The state is exact: the parameters and the state of the optimizer by their declared
layouts. The rest is the larger of two moments. While the loss is computed, everything
that the backward pass needs is kept, the embedding is there in the dtype of
activations, and its gradient in f32 and some logits are added. While a layer is
differentiated, so are the layer's own results and the gradients so far.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

from tessera.graph.pipelining import allocate, schedule
from tessera.ops.linear_loss_chunks import chunk_rows
from tessera.targets.machine import Machine
from tessera.train.planner.device_work import DeviceWork
from tessera.train.planner.layout import Layout

MARGIN: Final = {"cpu": 1.5, "gpu": 1.25, "tpu": 1.6}
"""By platform: how far below the memory of a device a prediction is to be called safe.

benchmarks/planner_memory.py measures the errors that these bounds are above."""

_F32: Final = 4
# Copies of the embedding while the loss is computed: as stored, and gathered; TPUs have
# it in a second order of dims, too; in pipelines, whose stages branch, also the results
# of branches and what is summed over devices.
_TABLES: Final = {"cpu": 2.0, "gpu": 2.0, "tpu": 3.0}
_TABLES_OF_STAGES: Final = {**_TABLES, "tpu": 6.0}
# Copies of its gradient in f32, without and with ``tp``, counted in programs for v5p:
# compilers of TPUs keep those of the loop over chunks and of its sum over devices.
_GRADIENTS: Final = {"cpu": (1.0, 1.0), "gpu": (1.0, 1.0), "tpu": (2.0, 4.5)}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Predicted bytes of one device at the fullest moment of a step.

    Attributes:
      parameters: Stored parameters.
      optimizer: The state of the optimizer, where it is on the device.
      kept: Results of the forward pass that the backward pass needs.
      gradients: Gradients of the parameters that the device stores.
      working: What is computed at that moment: logits, or one layer.
      tables: The embedding where it is gathered, and its gradient.
      on_host: Of the optimizer's state, what is in the memory of the host instead.
      reference: The parameters of the reference model, where it is a copy.
      rollout: What a rollout takes beside the state, while no step does.
    """

    parameters: float
    optimizer: float
    kept: float
    gradients: float
    working: float
    tables: float
    on_host: float = 0.0
    reference: float = 0.0
    rollout: float = 0.0

    @property
    def state(self) -> float:
        """Parameters and optimizer state, which are there between steps, too."""
        return self.parameters + self.optimizer + self.reference

    @property
    def total(self) -> float:
        """Of all parts."""
        work = self.kept + self.gradients + self.working + self.tables
        return self.state + max(work, self.rollout)


def is_safe(nbytes: float, machine: Machine) -> bool:
    """Whether a predicted number of bytes fits a device for all that is known."""
    return nbytes * MARGIN[machine.platform] <= machine.memory_bytes


def memory_of(device: DeviceWork, layout: Layout) -> MemoryEstimate:
    """The memory of a layout.

    Args:
      device: The part of the work that one device has.
      layout: The layout.
    """
    parameters, optimizer, largest = device.state_bytes(layout.zero_stage)
    # Offloaded moments come back to the device for the update, an array at a time.
    on_device = largest if layout.offload else optimizer
    parts = max(_moments(device, layout), key=sum)
    on_host = optimizer if layout.offload else 0.0
    return MemoryEstimate(parameters, on_device, *parts, on_host)


def _moments(
    device: DeviceWork, layout: Layout
) -> tuple[tuple[float, float, float, float], ...]:
    """Kept, gradients, working and tables: at the loss, and in a layer."""
    work, sizes = device.work, layout.sizes
    stages, policy = sizes.get("pp", 1), layout.kept_policy
    kept = device.kept_bytes(layout.micro_batch_size, policy) * device.stage_share
    whole = device.kept_bytes(layout.micro_batch_size, "none")
    tables, trained, weights = device.gathered_bytes
    gathered = "fsdp" in sizes or stages > 1
    split = sizes.get("dp", 1) if layout.zero_stage >= 2 else 1
    gradients = _F32 * device.trained_scalars / split
    sums = gradients if layout.microbatches > 1 else 0.0
    if layout.schedule:
        inputs = whole and sum(each.nbytes for each in work.lookups)
        share = layout.micro_batch_size / device.size("context")
        of_wires, of_residuals, of_splits = slots_of(layout)
        # The ring buffers, and what a tick writes to them.
        kept *= of_residuals + 1
        kept += (of_wires + 2) * inputs * share / device.parts_of_wire
        kept += of_splits * _weight_residuals(device, layout)
        sums += trained  # those of a tick
    if layout.gather == "step":
        # A copy of a stage's weights, and two of tables in f32: one is a branch's.
        wide = 1 if work.matmul_dtype == "float32" else 2
        kept += weights * device.stage_share * layout.chunks + 2 * wide * tables
        gradients *= sizes.get("fsdp", 1)
        sums = gradients + trained
    layer = (whole + 2 * weights) / work.num_layers
    if layout.remat == "none":
        layer /= 4  # its results are among what is kept
    layer += device.ragged_bytes(layout.micro_batch_size)
    of_platform = _TABLES_OF_STAGES if stages > 1 else _TABLES
    copies = of_platform[device.machine.platform] - (1 if gathered else 2)
    in_loss = copies * tables
    in_loss += _GRADIENTS[device.machine.platform]["tp" in sizes] * trained
    return (
        (kept, sums, _logits_bytes(device, layout), in_loss),
        (kept, sums + gradients, layer, trained),
    )


def slots_of(layout: Layout) -> tuple[int, int, int]:
    """Slots of a pipeline's buffers: of wires, of residuals, of split backwards.

    In the stages of ``layout.chunks`` parts each, as ``buffer_slots.py`` counts them.
    """
    stages, count, chunks = layout.sizes["pp"], layout.microbatches, layout.chunks
    recomputes = layout.recomputes_stages
    if layout.schedule == "dualpipev":
        return _slots_of_v(stages, recomputes)
    splits = min(count, stages) if layout.schedule == "zero_bubble" else 0
    if layout.schedule == "gpipe":
        return (count, 0, splits) if recomputes else (count + 1, count + 1, splits)
    waiting = min(count * chunks + 1, (chunks + 1) * stages - 1)
    if recomputes:
        return max(waiting - 2, 1), 0, splits
    return 2, waiting, splits


@cache
def _slots_of_v(stages: int, recomputes: bool) -> tuple[int, int, int]:
    """The same from a table; they do not depend on the number of microbatches."""
    table = schedule("dualpipev", stages, 2 * stages)
    slots = allocate(table, recomputes=recomputes)
    wires = slots.input_slots + slots.end_slots
    return wires, slots.residual_slots, slots.weight_slots


def _weight_residuals(device: DeviceWork, layout: Layout) -> float:
    """Bytes that a split backward leaves for the gradients of weights.

    The operands of their products; or, of stages with padding, which are branches, the
    gradients themselves.
    """
    work, item = device.work, 2 if device.work.matmul_dtype != "float32" else _F32
    if device.has_padding:
        scalars = sum(
            device.scalars(each, without=("fsdp",)) for each in work.parameters
        )
        return _F32 * scalars
    numbers = 0.0
    for each in work.products:
        if each.path in work.layered():
            rows, inner, outer = device.local_dims(each)
            numbers += each.times * rows * (inner + outer)
    share = layout.micro_batch_size / device.size("context")
    return item * numbers * share * device.stage_share


def _logits_bytes(device: DeviceWork, layout: Layout) -> float:
    tokens = layout.micro_batch_size * device.work.sequence_length
    tokens /= device.size("context")
    width, platform = device.logit_width, device.machine.platform
    if layout.loss_chunk == "auto" and width:
        tokens = chunk_rows(int(tokens), int(width), platform)
    elif layout.loss_chunk not in ("auto", "none"):
        tokens = min(tokens, int(layout.loss_chunk))
    # The logits of half a chunk, and the gradients by those of all of it.
    item = 2 if device.work.matmul_dtype != "float32" else _F32
    logits = _F32 if platform == "cpu" else _F32 / 2 + item
    return tokens * width * logits
