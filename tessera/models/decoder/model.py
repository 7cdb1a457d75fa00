# SPDX-License-Identifier: Apache-2.0
"""A model as a pure function of a parameter tree, for training steps.

``Decoder`` is an nnx module and owns its arrays. ``DecoderModel`` owns none: it knows
the names, shapes and layouts of the parameters, initializes them, and applies the
module to any such tree. The tree is nested plain dicts, with leaves such as
``params["decoder"]["mlp"]["up"]["kernel"]``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tessera.errors import ParameterTreeError, ShardDivisibilityError
from tessera.mesh import Mesh
from tessera.models.decoder.config import DecoderConfig
from tessera.models.decoder.decoder import Decoder
from tessera.models.decoder.pipeline_stages import StageSplit
from tessera.models.decoder.placement import decoder_placement
from tessera.models.decoder.remat import NONE, policies_of
from tessera.models.partition_rules import Placement
from tessera.ops.attention.context_parallel_variants import Method
from tessera.shard import ShardSpec
from tessera.tree import Tree, named_leaves

# Nested dicts; the leaves are arrays, shapes, specs or layouts.


@dataclass(frozen=True)
class DecoderModel:
    """A Gemma 3 text model without arrays.

    Attributes:
      config: Sizes.
      sequence_parallel: Shard norms and residuals along the sequence over ``tp``. The
        results are the same, and a residual takes 1 / tp of the memory: each all-reduce
        becomes a reduce-scatter, which XLA on CPU compiles to all-reduce and slice, and
        an all-gather (arXiv 2205.05198).
      context_parallel: The attention over sequences that ``cp`` shards: ``ring`` passes
        keys and values around, ``all_to_all`` exchanges sequence shards for heads.
      remat: The rematerialization policies of the layers; see ``remat.policies_of``.
      split: The pipeline stages of the layers; the parameters under ``decoder`` are
        then stored by stage, see ``StageSplit``.

    Example:
      >>> from tessera.models.registry import config_of
      >>> model = DecoderModel(config_of("gemma3_270m"))
      >>> model.abstract()["decoder"]["mlp"]["up"]["kernel"].shape
      (18, 640, 2048)
    """

    config: DecoderConfig
    sequence_parallel: bool = False
    context_parallel: Method = "ring"
    remat: Any = NONE
    split: StageSplit | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.remat, str):  # a list is not hashable; a model is
            policies = policies_of(self.remat, self.config)
            object.__setattr__(self, "remat", policies)

    @cached_property
    def _parts(self) -> tuple[nnx.GraphDef[Decoder], nnx.State[str, Any]]:
        """The module's graph definition, and its abstract parameters."""
        return nnx.split(nnx.eval_shape(lambda: self._new(jax.random.key(0))))

    def _new(self, key: jax.Array) -> Decoder:
        rngs = nnx.Rngs(params=key)
        return Decoder(self.config, rngs=rngs, remat=self.remat)

    def abstract(self) -> Tree:
        """Shape and dtype of every parameter as it is stored; allocates nothing."""
        return jax.eval_shape(self.stored, nnx.to_pure_dict(self._parts[1]))

    def specs(self) -> Tree:
        """The ShardSpec of every parameter, with logical names for mesh axes."""

        def spec(path: str, param: nnx.Variable[Any]) -> ShardSpec:
            names, _ = self._stored_dims(path, param)
            return ShardSpec(tuple(range(len(names))), names)

        return _map_params(self._parts[1], spec)

    def _stored_dims(
        self, path: str, param: nnx.Variable[Any]
    ) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
        """Logical names and sizes of a parameter's dims as it is stored."""
        names = param.shard_spec.mesh_axes
        if self.split is None or not path.startswith("decoder/"):
            return names, param.shape
        return (None, "stages", *names), self.split.shape(param.shape)

    def stored(self, params: Tree) -> Tree:
        """Convert parameters without stages to the form of ``init``."""
        if self.split is None:
            return params
        return {**params, "decoder": self.split.stack(params["decoder"])}

    def plain(self, params: Tree) -> Tree:
        """Convert parameters from the form of ``init`` to that without stages."""
        if self.split is None:
            return params
        return {**params, "decoder": self.split.unstack(params["decoder"])}

    def place(self, mesh: Mesh | None) -> Placement:
        """The placement of this model on a mesh.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
        """
        return decoder_placement(
            self.config,
            mesh,
            sequence_parallel=self.sequence_parallel,
            context_parallel=self.context_parallel,
        )

    def layouts(self, mesh: Mesh) -> Tree:
        """The PartitionSpec of every parameter on a mesh.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
        """
        place = self.place(mesh)
        failed: list[ShardDivisibilityError] = []

        def layout(path: str, param: nnx.Variable[Any]) -> PartitionSpec | None:
            names, shape = self._stored_dims(path, param)
            try:
                return place.resolve(names, shape, f"parameter {path!r}")
            except ShardDivisibilityError as error:
                failed.append(error)
                return None

        tree = _map_params(self._parts[1], layout)
        if failed:
            raise _joined(failed)
        return tree

    def layout_notes(self, mesh: Mesh) -> list[str]:
        """Notes on layouts that a reader may not expect, one sentence each.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
        """
        place, config = self.place(mesh), self.config
        notes: list[str] = []
        tp = place.size("heads")
        if "kv_heads" in place.whole:
            notes.append(
                f"num_kv_heads {config.num_kv_heads} < tp {tp}: the key and value "
                "projections are replicated over 'tp', and each device uses the one "
                f"head that its {config.num_heads // tp} query head(s) attend with"
            )
        if "table" in place.whole:
            notes.append(
                f"the embedding table is replicated over 'pp', which does not divide "
                f"d_model {config.d_model}"
            )
        if place.size("embed") > 1:
            notes.append(
                f"norm scales ({config.num_norm_params:,} of {config.num_params:,} "
                "parameters) are replicated on every device"
            )
        if self.sequence_parallel and tp == 1:
            notes.append("sequence_parallel changes nothing: 'tp' has one device")
        if place.size("context") > 1:
            notes.append(_context_note(config.window, self.context_parallel, mesh))
        elif self.context_parallel != "ring":
            notes.append("context_parallel changes nothing: 'cp' has one device")
        return notes

    def init(
        self, key: jax.Array, mesh: Mesh | None = None, *, layouts: Tree | None = None
    ) -> Tree:
        """Initialize float32 parameters, each shard on its own device.

        Args:
          key: The same key gives the same values on every mesh, up to rounding of the
            last bit.
          mesh: Their mesh; None is the default device.
          layouts: PartitionSpecs other than ``layouts(mesh)``.

        Raises:
          AbstractMeshError: [T105] this machine lacks some of the devices.
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
        """
        shardings = None
        if mesh is not None:
            layouts = self.layouts(mesh) if layouts is None else layouts
            shardings = jax.tree.map(partial(NamedSharding, mesh.jax), layouts)

        def make(key: jax.Array) -> Tree:
            return self.stored(nnx.to_pure_dict(nnx.split(self._new(key))[1]))

        return jax.jit(make, out_shardings=shardings)(key)

    def module(self, params: Tree) -> Decoder:
        """The nnx module with these parameters.

        Raises:
          ParameterTreeError: [T306] names or shapes are not those of this model.
        """
        _check_params(params, self.abstract())
        return nnx.merge(self._parts[0], nnx.State(self.plain(params)))

    def stage(self, params: Tree) -> Decoder:
        """The nnx module with the layers of one virtual stage.

        Args:
          params: The tree of ``init``, with the ``[depth, ...]`` of one virtual stage
            for each array under ``decoder``.
        """
        return nnx.merge(self._parts[0], nnx.State(params))

    def apply(
        self,
        params: Tree,
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        mesh: Mesh | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token after each one.

        Args:
          params: As from ``init``.
          tokens: int32, global ``[B, S]``; per device ``[B / (dp · fsdp), S]``. A
            token outside the vocabulary makes its row NaN. Sequences are in their own
            order; ``cp`` shards what is computed from them.
          positions: int32; by default 0, 1, 2, ... from the start of each segment.
          segment_ids: int32; a token attends only to its own segment, a run of equal
            ids. None is one segment a row.
          mesh: The mesh of the step; None leaves every layout to XLA.

        Returns:
          float32, global ``[B, S, V]``; per device
          ``[B / (dp · fsdp), S / cp, V / tp]``.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ParameterTreeError: [T306] names or shapes are not those of this model.
          ShardDivisibilityError: [T201] batch, or with sequence_parallel or ``cp`` the
            sequence, is not a multiple of its axes' size.
        """
        place = self.place(mesh)
        logits = self.module(params)(
            place.arranged(tokens),
            positions=None if positions is None else place.arranged(positions),
            segment_ids=None if segment_ids is None else place.arranged(segment_ids),
            place=place,
        )
        logits = place.restored(logits, dim=1)
        return place.constrain(logits, "batch", "context", "vocab")


def _context_note(window: int, method: Method, mesh: Mesh) -> str:
    cp = mesh.shape["cp"]
    how = {
        "ring": f"in zigzag order; its {cp} devices pass keys and values around a ring",
        "all_to_all": f"and exchanged for heads among its {cp} devices",
    }[method]
    if method == "ring" and mesh.shape.get("pp", 1) > 1:
        how = f"in zigzag order; stages gather the keys and values of its {cp} devices"
    return (
        f"sequences are sharded over 'cp' {how}; local layers exchange only a halo of "
        f"{window - 1} tokens, if chunks are that long"
    )


def _map_params(
    state: Any, function: Callable[[str, nnx.Variable[Any]], Any], prefix: str = ""
) -> Tree:
    """A nested dict of ``function(path, parameter)``."""
    return {
        name: function(prefix + name, node)
        if isinstance(node, nnx.Variable)
        else _map_params(node, function, f"{prefix}{name}/")
        for name, node in state.items()
    }


def _joined(errors: list[ShardDivisibilityError]) -> ShardDivisibilityError:
    """One error for all parameters that cannot be sharded."""
    first, *others = errors
    got = [first.got, *(f"also {error.what}: {error.got}" for error in others)]
    fix = "\n".join(dict.fromkeys(error.fix for error in errors))
    return ShardDivisibilityError(first.what, got="\n".join(got), fix=fix)


def _check_params(params: Tree, expected: Tree) -> None:
    actual, declared = (
        {name: leaf.shape for name, leaf in named_leaves(tree).items()}
        for tree in (params, expected)
    )
    if actual == declared:
        return
    problems = [
        f"{path!r}: {actual.get(path, 'missing')}, expected "
        f"{declared.get(path, 'no such parameter')}"
        for path in sorted(actual.keys() | declared.keys())
        if actual.get(path) != declared.get(path)
    ]
    raise ParameterTreeError(
        "these are not the parameters of this model",
        got="\n".join(problems),
        fix="create them with model.init(key), or compare with model.abstract()",
    )
