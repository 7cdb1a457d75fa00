# SPDX-License-Identifier: Apache-2.0
"""What hand-written kernels of norms, rotary embeddings and gates could save on GPUs.

    python benchmarks/fusion_bytes.py [--quick] [--json PATH]

The bytes that a compiled program reads and writes in its kernels, beside the fewest
that any kernels could: each input once and each output once. First for RMSNorm, rotary
embedding and the gate of the MLP by themselves, forward and backward; as in the model,
the backward pass recomputes from the inputs. Then for one decoder layer with
``remat=named``: what is neither a matmul nor attention is grouped into regions between
these, and the fewest bytes are those of one kernel for each region. The times of the
layer are predicted, and take every byte to be of HBM: an array that stays in the L2
cache until it is read again costs less. It needs ``pip install
'tessera-spmd[targets-cuda13]'``.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import jax
import jax.numpy as jnp
import report
from flax import nnx

from tessera import function
from tessera.analysis.hlo import Computation, Instruction, Module, parse
from tessera.analysis.timeline.operation_times import operation_time, roofline
from tessera.analysis.timeline.operation_work import Work, is_free, work
from tessera.mesh import Mesh
from tessera.ops.activations import GATES
from tessera.ops.attention.flash import flash_attention
from tessera.ops.norms import rms_norm
from tessera.ops.rematerialization import remat
from tessera.targets.target import Target
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.decoder.decoder import Block
from tessera.train.models.decoder.layers import recomputed, rotate
from tessera.train.models.decoder.rotary import Rotation, frequencies
from tessera.train.models.named_models import config_of
from tessera.train.models.partition_rules import NO_MESH
from tessera.train.runtime.devices import prepare_devices

TARGETS: Final = ("h100:1x1",)
MODELS: Final = ("gemma3_1b", "llama3.1_8b")
ROWS, LENGTH = 2, 4096
# Functions of the model, as Python stacks name them, by what they compute.
_PARTS: Final = {
    "RMSNorm": "norm",
    "rotate": "rotary",
    "MLP.__call__.<locals>.product": "gate",
}
_MIB: Final = 2**20


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def one_device(target: str) -> Mesh:
    return Mesh(["dp"], shape=(1,), target=target)


def compiled(target: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """A program for one device of a target."""
    return function(mesh=one_device(target))(run).compile(*arguments)


# --- parts by themselves


def parts(config: DecoderConfig) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Each part's function and arguments; those that have gradients come first."""
    tokens = ROWS, LENGTH
    residual = array(*tokens, config.d_model)
    queries = array(*tokens, config.num_heads, config.head_dim)
    keys = array(*tokens, config.num_kv_heads, config.head_dim)
    wide = array(*tokens, config.mlp_dim)

    def norm(x: Any, scale: Any) -> Any:
        return recomputed(partial(rms_norm, eps=config.norm_epsilon))(x, scale)

    def rotary(queries: Any, keys: Any, positions: Any) -> Any:
        rotation = Rotation(positions, frequencies(config, "global")[0])
        turn = recomputed(rotate)
        return turn(queries, rotation), turn(keys, rotation)

    def gate(gate: Any, up: Any) -> Any:
        return GATES[config.activation](gate, up)

    scale = array(config.d_model, dtype="float32")
    positions = array(1, LENGTH, dtype="int32")
    return {
        "norm": (norm, [residual, scale]),
        "rotary": (rotary, [queries, keys, positions]),
        "gate": (recomputed(gate), [wide, wide]),
    }


def backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of floating-point arguments, from these and the cotangents."""

    def gradients(arguments: Any, cotangents: Any) -> Any:
        floating = [x for x in arguments if jnp.issubdtype(x.dtype, jnp.floating)]
        rest = arguments[len(floating) :]
        return jax.vjp(lambda *each: run(*each, *rest), *floating)[1](cotangents)

    return gradients


def part_rows(target: str, name: str) -> Iterator[report.Row]:
    for part, (run, arguments) in parts(config_of(name)).items():
        report.progress(f"{target}, {name}, {part}")
        results = jax.eval_shape(run, *arguments)
        programs = {
            "forward": compiled(target, run, *arguments),
            "backward": compiled(target, backward(run), arguments, results),
        }
        for phase, program in programs.items():
            module = parse(program.as_text())
            entry = module.computations[module.entry]
            kernels = [
                each for each in entry.instructions.values() if not is_free(each)
            ]
            moved = sum(work(module, entry, each).nbytes for each in kernels)
            used = [each for each in entry.parameters.values() if entry.readers(each)]
            least = nbytes(*used, entry.root)
            yield {
                "target": target,
                "sizes of": name,
                "part": part,
                "pass": phase,
                "kernels": len(kernels),
                "MiB": round(moved / _MIB, 1),
                "least MiB": round(least / _MIB, 1),
                "ratio": round(moved / least, 3),
            }


def nbytes(*instructions: Instruction) -> int:
    return sum(shape.nbytes for each in instructions for shape in each.shapes)


# --- a layer


def layer(target: str, config: DecoderConfig) -> dict[str, Any]:
    """Forward and backward pass of one block with cuDNN's attention, ``remat=named``.

    They are programs of their own, as loops over layers make them.
    """
    one = replace(config, num_layers=1)
    made = nnx.eval_shape(lambda: Block(one, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(made)

    def of_one_layer(leaf: Any) -> jax.ShapeDtypeStruct:
        # Matrices as they are gathered; the scales of norms are f32.
        shape = leaf.shape[1:]
        return array(*shape, dtype="bfloat16" if len(shape) > 1 else "float32")

    leaves, tree = jax.tree.flatten(state)
    weights = [of_one_layer(leaf) for leaf in leaves]

    def attend(q: Any, k: Any, v: Any) -> Any:
        heads = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        out = flash_attention(*heads, causal=True, scale=1.0, implementation="cudnn")
        return jnp.swapaxes(out, 1, 2)

    saved: dict[str, Any] = {}

    def forward(*inputs: Any) -> Any:
        weights, x, rotation = inputs

        def block(weights: Any, x: Any) -> Any:
            module = nnx.merge(definition, jax.tree.unflatten(tree, weights))
            return module(x, rotation, attend, NO_MESH)[0]

        run = remat(block, policy="named", prevent_cse=False)
        y, gradients = jax.vjp(run, weights, x)
        known = {id(each): i for i, each in enumerate(jax.tree.leaves(inputs))}
        residuals, saved["tree"] = jax.tree.flatten(gradients)
        saved["inputs"] = [known.get(id(each)) for each in residuals]
        return y, [each for each in residuals if id(each) not in known]

    def backward(inputs: Any, residuals: Any, cotangent: Any) -> Any:
        leaves, rest = jax.tree.leaves(inputs), iter(residuals)
        all_of_them = [next(rest) if i is None else leaves[i] for i in saved["inputs"]]
        return jax.tree.unflatten(saved["tree"], all_of_them)(cotangent)

    x = array(ROWS, LENGTH, config.d_model)
    rotation = Rotation(
        array(1, LENGTH, dtype="int32"), array(config.head_dim // 2, dtype="float32")
    )
    inputs = weights, x, rotation
    program = compiled(target, forward, *inputs)
    with one_device(target):
        _, residuals = jax.eval_shape(forward, *inputs)
    return {
        "forward": program,
        "backward": compiled(target, backward, inputs, residuals, x),
    }


@dataclass
class Region:
    """Kernels that one kernel could replace, as none needs a matmul of the others.

    Attributes:
      kernels: Its kernels.
      inputs: Bytes of each value that they read and do not write, by its name.
      outputs: Bytes of each value that is read outside, by its name.
    """

    kernels: list[Instruction] = field(default_factory=list)
    inputs: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)


@dataclass
class Dataflow:
    """Which kernels of an entry computation read what, through operations without code.

    Attributes:
      module: The program.
    """

    module: Module

    @property
    def entry(self) -> Computation:
        return self.module.computations[self.module.entry]

    def values(self, instruction: Instruction) -> dict[str, int]:
        """Bytes of the values that an instruction stands for, by name."""
        if instruction.opcode == "tuple":
            sources = self.entry.sources(instruction)
            return {k: v for each in sources for k, v in self.values(each).items()}
        if instruction.opcode == "constant":
            return {}
        if instruction.opcode == "bitcast":
            (source,) = self.entry.sources(instruction)
            return self.values(source)
        if instruction.opcode == "get-tuple-element":
            (source,) = self.entry.sources(instruction)
            index = instruction.attributes["index"]
            return {f"{source.name}#{index}": nbytes(instruction)}
        return {instruction.name: nbytes(instruction)}

    def reads(self, instruction: Instruction) -> dict[str, int]:
        """Bytes of the values that an instruction reads, by name."""
        sources = self.entry.sources(instruction)
        return {k: v for each in sources for k, v in self.values(each).items()}

    def is_anchor(self, instruction: Instruction) -> bool:
        """Whether no kernel is fused with it: matmuls, attention, control flow."""
        if instruction.opcode in ("while", "conditional"):
            return True
        kind = work(self.module, self.entry, instruction).kind
        return kind in ("matmul", "attention")

    def regions(self) -> list[Region]:
        """The regions between matmuls.

        Kernels are of one region if as many matmuls in a row come before them, and one
        reads what the other writes or both read one value.
        """
        depths: dict[str, int] = {}
        merged: dict[str, str] = {}

        def home(name: str) -> str:
            while (parent := merged.setdefault(name, name)) != name:
                name = parent
            return name

        kernels = [i for i in self.entry.instructions.values() if not is_free(i)]
        anchors = {each.name for each in kernels if self.is_anchor(each)}
        readers: dict[str, list[Instruction]] = {}
        for each in kernels:
            read = self.reads(each)
            writers = [value.partition("#")[0] for value in read]
            depths[each.name] = max(
                (depths.get(name, 0) + (name in anchors) for name in writers), default=0
            )
            for value in read:
                readers.setdefault(value, []).append(each)
            if each.name in anchors:
                continue
            for value, writer in zip(read, writers, strict=True):
                others = [writer, *(other.name for other in readers[value])]
                for other in others:
                    same = depths.get(other) == depths[each.name]
                    if same and other not in anchors:
                        merged[home(other)] = home(each.name)
        found: dict[str, Region] = {}
        for each in kernels:
            if each.name not in anchors:
                found.setdefault(home(each.name), Region()).kernels.append(each)
        results = self.values(self.entry.root)
        for region in found.values():
            self._bounds(region, readers, results)
        return list(found.values())

    def _bounds(
        self,
        region: Region,
        readers: dict[str, list[Instruction]],
        results: dict[str, int],
    ) -> None:
        own = {each.name for each in region.kernels}
        for each in region.kernels:
            for value, size in self.reads(each).items():
                if value.partition("#")[0] not in own:
                    region.inputs[value] = size
        for value, reading in readers.items():
            if value.partition("#")[0] not in own:
                continue
            outside = [each for each in reading if each.name not in own]
            if outside:
                region.outputs[value] = self.reads(outside[0])[value]
        for value, size in results.items():
            if value.partition("#")[0] in own:
                region.outputs[value] = size

    def contents(self, region: Region) -> str:
        """Which parts of the model the kernels of a region compute."""
        inside = list(region.kernels)
        for kernel in region.kernels:
            for inner in self.module.callees(kernel):
                inside += inner.instructions.values()
        stack = {
            frame.function for each in inside for frame in self.module.frames(each)
        }
        found = {
            part for name, part in _PARTS.items() if any(name in each for each in stack)
        }
        return ", ".join(sorted(found)) or "other"


@dataclass
class Cost:
    """What some kernels take, and what one for each region would.

    Attributes:
      kernels: The number of kernels.
      regions: The number of regions.
      moved: Bytes that they read and write.
      seconds: Their predicted time, without that of starting them.
      least: Bytes that one kernel for each region would read and write.
      best: Its predicted time.
    """

    kernels: int = 0
    regions: int = 0
    moved: float = 0.0
    seconds: float = 0.0
    least: float = 0.0
    best: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Cost(*(one + another for one, another in pairs))


def costs(target: str, program: Any) -> tuple[Cost, list[tuple[str, Cost]]]:
    """The cost of a program, and of each of its regions with what it computes."""
    flow, found = Dataflow(parse(program.as_text())), Target.parse(target)
    where = flow.module, found, flow.entry
    start = found.machine.overhead["operation"]

    def of(kernels: list[Instruction]) -> Cost:
        moved = sum(work(flow.module, flow.entry, each).nbytes for each in kernels)
        seconds = sum(operation_time(*where, each)[1] - start for each in kernels)
        return Cost(len(kernels), 1, moved, seconds, moved, seconds)

    def of_region(region: Region) -> Cost:
        cost = of(region.kernels)
        least = sum(region.inputs.values()) + sum(region.outputs.values())
        # One that reads a part of a value reads no more than its kernels do.
        cost.least = min(least, cost.moved)
        cost.best = roofline(found.machine, Work(nbytes=cost.least))
        return cost

    each = [(flow.contents(region), of_region(region)) for region in flow.regions()]
    kernels = [i for i in flow.entry.instructions.values() if not is_free(i)]
    return of(kernels), each


def layer_rows(target: str, name: str) -> Iterator[report.Row]:
    """What each part would save in one layer."""
    report.progress(f"{target}, {name}, layer")
    whole, by_part = Cost(), dict[tuple[str, str], Cost]()
    for phase, program in layer(target, config_of(name)).items():
        total, regions = costs(target, program)
        whole += total
        for part, cost in regions:
            by_part[part, phase] = by_part.get((part, phase), Cost()) + cost
    start = Target.parse(target).machine.overhead["operation"]
    seconds = whole.seconds + start * whole.kernels
    everything = sum(by_part.values(), Cost())
    for (part, phase), cost in {**by_part, ("all", "both"): everything}.items():
        if cost.moved < _MIB:
            continue
        yield {
            "target": target,
            "sizes of": name,
            "layer ms": round(1e3 * seconds, 2),
            "layer MiB": round(whole.moved / _MIB),
            "part": part,
            "pass": phase,
            "kernels": cost.kernels,
            "regions": cost.regions,
            "MiB": round(cost.moved / _MIB, 1),
            "least MiB": round(cost.least / _MIB, 1),
            "excess, % of bytes": percent(cost.moved - cost.least, whole.moved),
            "% of time, by bytes": percent(cost.seconds - cost.best, seconds),
            "by starts": percent((cost.kernels - cost.regions) * start, seconds),
        }


def percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2)


def main() -> None:
    """Compile, count, print the tables."""
    options = report.arguments(__doc__)
    prepare_devices(1, "cpu")
    models = MODELS[: 1 if options.quick else None]
    cases = [(target, name) for target in TARGETS for name in models]
    size = f"{ROWS} × {LENGTH} tokens, bf16"
    tables = {
        f"Parts by themselves, {size}": [x for case in cases for x in part_rows(*case)],
        f"One layer, {size}, times predicted": [
            x for case in cases for x in layer_rows(*case)
        ],
    }
    report.show_all(tables, options.json)


if __name__ == "__main__":
    main()
