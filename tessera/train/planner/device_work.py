# SPDX-License-Identifier: Apache-2.0
"""Predicts how long one device computes for a microbatch, by a roofline of each matmul.

A matmul takes as long as its FLOPs at the rate that large ones reach, or as long as its
operands and results take to and from memory, whichever is longer. What stands between
matmuls is fused into passes over their operands and results, which memory bounds.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from tessera.targets.machine import Machine
from tessera.train.models.partition_rules import Placement
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.planner.matmuls import Product
from tessera.train.planner.ragged_matmuls import RaggedProducts
from tessera.train.planner.workload import Parameter, Workload

# The other axes that shard parameters have them gathered before they are used.
_SPLITS_MATMULS: Final = "tp"
# Axes that split the batch or the layers.
_OF_ROWS: Final = ("pp", "dp", "fsdp")
# What a step computes with, where tp does not divide the vocabulary.
_PADDED: Final = {"vocab": "words", "table": "columns"}
# Sizes are computed in multiples of a tile of the matmul units.
_TILE: Final = {"cpu": 1, "gpu": 64, "tpu": 128}
_F32: Final = 4
# XLA's max_windowed_einsum_iteration, in its spmd_partitioner.h.
_MOST_WINDOWS: Final = 32


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one device for one microbatch.

    Attributes:
      layers_forward: Of all layers, forward.
      layers_backward: Of all layers, backward, with what is computed again.
      ends_forward: Of what is before and after the layers, such as the logits.
      ends_backward: The same, backward.
    """

    layers_forward: float
    layers_backward: float
    ends_forward: float
    ends_backward: float

    @property
    def total(self) -> float:
        """Of the microbatch."""
        layers = self.layers_forward + self.layers_backward
        return layers + self.ends_forward + self.ends_backward


class DeviceWork:
    """The part of a workload that one device of a mesh has.

    Args:
      work: What is computed.
      place: The layout of the model's dims on the mesh.
      machine: The device.
      split: The stages of a pipeline, of which each device stores its own.

    Attributes:
      has_padding: Whether some stages have fewer layers than others.
      stage_share: The share of the layers that a device computes at a time: all, or a
        virtual stage with its padding.
    """

    def __init__(
        self,
        work: Workload,
        place: Placement,
        machine: Machine,
        split: StageSplit | None = None,
    ) -> None:
        self.work, self.place, self.machine = work, place, machine
        self.stage_share = split.depth / split.num_layers if split else 1.0
        self.has_padding = split is not None and not split.is_even
        # Stored layers for each layer: all stages have as many, some of them padding.
        self._padding = self.stage_share * len(split.layers) if split else 1.0
        self.ragged = RaggedProducts(work, place, machine.platform)
        self._layered, self._trained = work.layered(), work.trained()
        self._itemsize = 4 if work.matmul_dtype == "float32" else 2
        # In layers alone matmuls are in 8 bits.
        narrow = work.matmul_dtype == "float8"
        self._dtype = "bfloat16" if narrow else work.matmul_dtype
        self._rates = {
            True: machine.product_rate(work.matmul_dtype),
            False: machine.product_rate(self._dtype),
        }
        self._tile = _TILE[machine.platform]
        self._sizes = {} if place.mesh is None else place.mesh.shape
        self.axes = cache(self._axes)
        self.split = cache(self._split)
        self.scalars = cache(self._scalars)
        self.size = cache(place.size)
        self._kept_of_row = cache(self._row_bytes)
        self.state_bytes = cache(self._state_bytes)

    def _axes(self, names: tuple[str | None, ...]) -> list[str]:
        """The axes that shard dims, by their logical names."""
        return [axis for name in names if name for axis in self.place.axes(name)]

    def _split(self, names: tuple[str | None, ...]) -> int:
        """Shards of a matmul's dims, by their logical names."""
        axes = self.axes(tuple(_PADDED.get(name or "", name) for name in names))
        return math.prod(self._sizes[axis] for axis in axes if axis in _SPLITS_MATMULS)

    def _scalars(self, parameter: Parameter, *, without: tuple[str, ...] = ()) -> float:
        """Of a parameter on the device, were it not sharded over some axes.

        Padding of stages counts where stages do.
        """
        axes, size = self.axes(parameter.names), float(parameter.size)
        if parameter.is_layered and "pp" not in without:
            axes = [*self.place.axes("stages"), *axes]
            size *= self._padding
        return size / math.prod(self._sizes[a] for a in axes if a not in without)

    @cached_property
    def compute_key(self) -> tuple[Hashable, ...]:
        """What of the mesh ``compute`` reads: alike where it takes as long.

        That is none of the axes that split the batch or the layers, but for windowed
        matmuls.
        """
        others = {name: n for name, n in self._sizes.items() if name not in _OF_ROWS}
        return frozenset(others.items()), self.place.whole, self._windows(1.0)

    def compute(self, sequences: float, policy: str) -> PassSeconds:
        """Seconds of one microbatch.

        Args:
          sequences: Of the microbatch in one data-parallel group.
          policy: Of rematerialization, one of those of the workload.
        """
        share = sequences / self.size("context")
        again = self.work.recomputed[policy]
        layers, ends = self._products(share, True), self._products(share, False)
        inner = self._inner(share)
        between_layers = self._between(share, True)
        between_ends = self._between(share, False)
        count = again.operations + (share - 1) * again.operations_of_row
        starts = max(count, 0.0) * self.machine.overhead["operation"]
        kept = self.kept_bytes(sequences, policy) / self.machine.memory_rate
        forward = layers[0] + inner + between_layers + starts / 3 + kept
        forward += self._windows(share)
        recomputed = again.products * (layers[0] + between_layers)
        if self.work.inner_flops:
            recomputed += inner * again.inner_flops / self.work.inner_flops
        backward = layers[1] + self.work.inner_backward * inner
        backward += 2 * (between_layers + starts / 3) + recomputed + kept
        return PassSeconds(
            layers_forward=forward,
            layers_backward=backward,
            ends_forward=ends[0] + between_ends,
            ends_backward=ends[1] + self.work.ends_again * ends[0] + 2 * between_ends,
        )

    def _products(self, share: float, in_layers: bool) -> tuple[float, float]:
        """Seconds of the matmuls with parameters, forward and backward."""
        forward = backward = 0.0
        rate, memory_rate = self._rates[in_layers], self.machine.memory_rate
        for product in self.work.products:
            if (product.path in self._layered) != in_layers:
                continue
            m, k, n = self.local_dims(product)
            times = product.times
            if in_layers:
                m *= share
            else:  # chunks of as many tokens, and more of them
                times *= share
            groups = self.ragged.matrices(product)
            # Masked operands are written before they are read.
            mask = self._itemsize * m * groups / memory_rate if groups > 1 else 0
            once = self._matmul(m, groups * k, n, product.itemsize, rate) + mask * k
            back = self._matmul(m, groups * n, k, product.itemsize, rate) + mask * n
            if product.path in self._trained:
                back += self._matmul(groups * k, m, n, _F32, rate) + mask * k
            forward, backward = forward + times * once, backward + times * back
        return forward, backward

    def local_dims(self, product: Product) -> tuple[float, float, float]:
        """Rows of one sequence, inner and outer size of a product on the device."""
        inner = product.inner / self.split(product.inner_names)
        outer = product.outer / self.split(product.outer_names)
        return self.ragged.rows(product), inner, outer

    def ragged_bytes(self, sequences: float) -> float:
        """Masked operands and buffers of the ragged matmuls of a layer.

        Args:
          sequences: As for ``compute``.
        """
        share = sequences / self.size("context")
        return share * self._ragged_row / self.work.num_layers

    @cached_property
    def _ragged_row(self) -> float:
        """Of one sequence in all layers."""
        nbytes = self.ragged.buffer_bytes()
        for product in self.work.products:
            if (matrices := self.ragged.matrices(product)) > 1:
                rows, inner, outer = self.local_dims(product)
                numbers = product.times * rows * matrices * (inner + outer)
                nbytes += self._itemsize * numbers
        return nbytes

    def _matmul(
        self, m: float, k: float, n: float, itemsize: int, rate: float
    ) -> float:
        """Seconds of ``[m, k] @ [k, n]`` at so many FLOP/s."""
        tile, item = self._tile, self._itemsize
        flops = 2 * m * (tile * math.ceil(k / tile)) * (tile * math.ceil(n / tile))
        nbytes = item * (m * k + k * n) + itemsize * m * n
        return self.machine.seconds(flops / rate, nbytes=nbytes)

    def _windows(self, share: float) -> float:
        """Seconds in which windowed matmuls add up their parts, forward.

        Where no other axis splits the batch, a TPU's compiler does not gather weights
        that are split along what is summed over. Devices pass the parts around, two at
        a time, and add the products with them to the result, which is in f32.
        """
        axes = [*self.place.axes("batch"), *self.place.axes("context")]
        if self.machine.platform != "tpu" or axes != ["fsdp"]:
            return 0.0
        if self._sizes["fsdp"] > _MOST_WINDOWS:
            return 0.0
        nbytes = sum(
            each.times * each.rows * share * each.outer / self.split(each.outer_names)
            for each in self.work.products
            if each.path in self._layered and "fsdp" in self.axes(each.inner_names)
        )
        passes = 2 * _F32 * self._sizes["fsdp"] / 2
        return passes * nbytes / self.machine.memory_rate

    def _inner(self, share: float) -> float:
        """Seconds of the matmuls of activations in a forward pass.

        Where no kernel keeps the scores inside, softmax passes over them in memory.
        """
        share /= self.split(("heads",))
        flops, nbytes = self.work.inner_flops * share, self.work.inner_bytes * share
        rate = self.machine.product_rate(self._dtype, "attention")
        return flops / rate + nbytes / self.machine.memory_rate

    def _between(self, share: float, in_layers: bool) -> float:
        """Seconds of the passes over memory between matmuls, forward.

        The input of each matmul is written once and its result read once; norms and
        other reductions read what they reduce.
        """
        local, _ = self._traffic(in_layers)
        flops = 0.0
        if in_layers:
            local += self.work.reduced_bytes / self._residual_split
            flops = self.work.other_flops * self.copied_share
        return share * self.machine.seconds(elementwise=flops, nbytes=local)

    @cached_property
    def copied_share(self) -> float:
        """The share of the activations of layers that each device of ``tp`` has."""
        local, whole = self._traffic(True)
        return local / whole if whole else 1.0

    def _traffic(self, in_layers: bool) -> tuple[float, float]:
        """Bytes of operands and results of products of one sequence: local, global."""
        local = whole = 0.0
        seen = set()
        for product in self.work.products:
            if (product.path in self._layered) != in_layers:
                continue
            rows = product.times * product.rows
            nbytes = rows * product.outer * product.itemsize
            local += nbytes / self._activation_split(product.outer_names)
            whole += nbytes
            if product.source not in seen:
                seen.add(product.source)
                nbytes = rows * product.inner * self._itemsize
                local += nbytes / self._activation_split(product.inner_names)
                whole += nbytes
        return local, whole

    def _activation_split(self, names: tuple[str | None, ...]) -> int:
        """Shards of an activation over ``tp``, by the names of its last dims."""
        return self._residual_split if "embed" in names else self.split(names)

    @cached_property
    def _residual_split(self) -> int:
        """Shards of the residual stream over ``tp``, by sequence parallelism."""
        return self.size("sequence") // self.size("context")

    @cached_property
    def parts_of_wire(self) -> int:
        """Parts of a sequence that the devices of ``tp`` send to the next stage."""
        sent = self.place.between_stages(self.work.sequence_length)
        return sent.size("sequence") // self.size("context")

    def kept_bytes(self, sequences: float, policy: str) -> float:
        """What one device keeps of a microbatch for its backward pass.

        Args:
          sequences: As for ``compute``.
          policy: As for ``compute``.
        """
        return self._kept_of_row(policy) * (sequences / self.size("context"))

    def _row_bytes(self, policy: str) -> float:
        """Of one sequence."""
        again = self.work.recomputed[policy]
        kept = again.kept_bytes * self.copied_share
        if again.products:  # inputs of layers are kept, and results of some products
            stream = self.work.num_layers * sum(row.nbytes for row in self.work.lookups)
            inputs = min(stream, again.kept_bytes)
            kept = inputs / self._residual_split
            results = again.kept_bytes - inputs
            kept += results * self._share_of_results(named=policy == "named")
        return kept + self.ragged.kept_bytes(policy)

    def _share_of_results(self, *, named: bool) -> float:
        """The share of the results of products that each device of ``tp`` has.

        Of those in layers that are not sums over its devices. What is named of keys
        and values is the head that a device's queries use, where all have copies.
        """
        local = whole = 0.0
        for each in self.work.products:
            if each.path in self._layered and self.split(each.inner_names) == 1:
                numbers = each.times * each.rows * each.outer
                heads = self._copied_heads(each) if named else 1
                local += numbers / (heads * self.split(each.outer_names))
                whole += numbers
        return local / whole if whole else 1.0

    def _copied_heads(self, product: Product) -> int:
        """Key/value heads of which each device of ``tp`` has all, or 1."""
        names = product.outer_names
        if "kv_heads" not in names or self.split(names) == self.split(("heads",)):
            return 1
        (weight,) = (p for p in self.work.parameters if p.path == product.path)
        return weight.shape[weight.names.index("kv_heads")]

    def _state_bytes(self, zero_stage: int) -> tuple[float, float, float]:
        """Of the parameters, of the optimizer's state, and the most of one array's."""
        copies = self._sizes.get("dp", 1)
        of_params = 0.0
        states: list[float] = []
        for each in self.work.parameters:
            local = self.scalars(each)
            split = copies if local % copies == 0 else 1
            of_params += local * (each.itemsize / (split if zero_stage == 3 else 1))
            states.append(local * each.state_bytes / (split if zero_stage else 1))
        return of_params, sum(states), max(states)

    @cached_property
    def trained_scalars(self) -> float:
        """Of the gradients that the device stores."""
        return sum(self.scalars(p) for p in self.work.parameters if p.is_trained)

    @cached_property
    def gathered_bytes(self) -> tuple[float, float, float]:
        """Of tables, of their gradients, and of weights, gathered over fsdp and pp."""
        tables = trained = weights = 0.0
        for each in self.work.parameters:
            local = self.scalars(each, without=("fsdp", "pp"))
            if each.is_layered:
                weights += local * self._itemsize
            else:
                tables += local * self._itemsize
                trained += local * _F32 * each.is_trained
        return tables, trained, weights

    @cached_property
    def logit_width(self) -> float:
        """Of the widest product outside of layers, such as the logits."""
        ends = [e for e in self.work.products if e.path not in self._layered]
        widths = [each.outer / self.split(each.outer_names) for each in ends]
        return max(widths, default=0.0)

    def optimizer_seconds(self, zero_shards: int) -> float:
        """Seconds of the update of the parameters.

        Args:
          zero_shards: Into how many more parts ZeRO splits the optimizer's state.
        """
        # The gradient is read, the parameter and the optimizer's state also written.
        nbytes = sum(
            self.scalars(each) * (3 * _F32 + 2 * each.state_bytes)
            for each in self.work.parameters
            if each.is_trained
        )
        return nbytes / zero_shards / self.machine.memory_rate

    def accumulation_seconds(self, zero_shards: int) -> float:
        """Seconds of adding the gradients of one microbatch to those before."""
        return self.trained_scalars * 3 * _F32 / zero_shards / self.machine.memory_rate
