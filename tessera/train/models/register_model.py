# SPDX-License-Identifier: Apache-2.0
"""``register_model``: lets the trainer train a model of one's own.

    @register_model(config=Sizes, dims={"embed/embedding": "vocab embed", ...})
    class Decoder(nnx.Module):
        def __init__(self, config, *, rngs): ...
        def __call__(self, tokens, segment_ids, positions): ...  # logits

``tessera train model=my_package.my_module:Decoder`` imports the module and trains it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, TypeVar

from tessera.errors import (
    ModelDefinitionError,
    SettingConflictError,
    TesseraError,
)
from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.train.models.block_methods import check_methods
from tessera.train.models.definition import (
    MODEL_SETTINGS,
    ModelDefinition,
    ModelOptions,
    define,
)
from tessera.train.models.pipeline_stages import split_of
from tessera.train.models.registered_model import RegisteredModel

INPUTS: Final = ("tokens", "segment_ids", "positions")
"""What a model may read of a batch, int32 ``[B, S]`` each."""

_MESH_AXES: Final = ("dp", "fsdp", "tp", "ep_outer", "ep")

Target = TypeVar("Target")


def register_model(
    *,
    config: type,
    dims: Mapping[str, str],
    inputs: Sequence[str] = INPUTS,
    init: Callable[..., Tree] | None = None,
    blocks: str | None = None,
) -> Callable[[Target], Target]:
    """A decorator that lets configurations name a model.

    Decorates a class, which is called with ``config`` and ``rngs=`` (flax.nnx) or
    ``config`` and ``key=`` (Equinox), and whose instances are called with the inputs by
    name; or a function ``(config, params, **inputs)``. The
    result is logits, floating-point ``[B, S, V]``. Parameters are float32.

    A model that names its repeated ``blocks`` has three methods in the place of the
    call, which are static methods of a class for functions. Each takes by name what it
    reads of the inputs, and ``block`` may take ``index``, the number of the block:

    ================== ====================== ================================
    method             of a module            of functions
    ================== ====================== ================================
    the hidden state   ``embed(self)``        ``embed(config, params)``
    after a block      ``block(self, block,   ``block(config, params, block,
                       hidden)``              hidden)``
    the logits         ``head(self, hidden)`` ``head(config, params, hidden)``
    ================== ====================== ================================

    The blocks are then scanned, ``training.remat`` applies to each, and pipelines run
    them in stages. Their parameters are stacked: ``layers/0/up`` and ``layers/1/up``
    are ``layers/up``, whose first dim is that of the layers.

    Args:
      config: A dataclass, whose fields become the settings of the group ``model``.
      dims: The logical names of each parameter's dims, by patterns of its name; see
        ``tessera.train.models.dim_table``.
      inputs: What the model reads of a batch, of ``INPUTS``. Rows hold several
        documents: without ``segment_ids`` tokens attend to other documents.
      init: For a function: ``(config, key) -> params``.
      blocks: The attribute, or for functions the entry of the parameters, that is the
        list of blocks; they differ in nothing but the values of their parameters.

    Raises:
      ModelDefinitionError: [T407] the arguments do not fit each other.
    """
    _check_config(config)
    if unknown := set(inputs) - set(INPUTS):
        raise ModelDefinitionError(
            "a batch does not have these inputs",
            got=f"inputs={tuple(inputs)}: {', '.join(sorted(unknown))}",
            fix=f"use some of {', '.join(INPUTS)}",
        )

    def register(target: Target) -> Target:
        if blocks is None:
            _check_call(target, init, inputs)
        else:
            owner = ("self",) if init is None else ("config", "params")
            check_methods(target, inputs, owner)
        definition = RegisteredDefinition(
            target, config, dims, tuple(inputs), init, blocks
        )
        define(definition)
        return target

    return register


@dataclass(eq=False)
class RegisteredDefinition(ModelDefinition):
    """What ``register_model`` was given."""

    target: Any
    config_class: type
    dims: Mapping[str, str]
    inputs: tuple[str, ...]
    init: Callable[..., Tree] | None
    blocks: str | None

    def __post_init__(self) -> None:
        self.name = f"{self.target.__module__}:{self.target.__name__}"

    def build(
        self, config: Any, options: ModelOptions, mesh: Mesh | None
    ) -> RegisteredModel:
        """The model, with the stages of a mesh that has ``pp``.

        Raises:
          ModelDefinitionError: [T407] its blocks cannot be stacked.
          PipelineSizeError: [T311] there are more virtual stages than blocks.
        """
        if self.blocks is None:
            return RegisteredModel(config, self, dtype=options.dtype)
        model = RegisteredModel(config, self, remat=options.remat, dtype=options.dtype)
        chunks, placement = options.pipeline_chunks, options.pipeline_placement
        split = split_of(mesh, model, chunks, placement)
        return replace(model, split=split and replace(split, blocks=self.blocks))

    def problems(
        self, config: Any, options: ModelOptions, mesh: Mesh
    ) -> Iterator[TesseraError]:
        """Settings that need more of a model than this one has, T311, T407, T408."""
        default, has_blocks = ModelOptions(), self.blocks is not None
        axes = (*_MESH_AXES, "pp") if has_blocks else _MESH_AXES
        values = {
            "model.sequence_parallel": options.sequence_parallel,
            "model.context_parallel": options.context_parallel != "ring",
            "training.remat": not has_blocks and options.remat != default.remat,
            "training.loss_chunk": isinstance(options.loss_chunk, int),
            "training.mixed_precision=fp8": options.fp8,
        }
        lacking = [name for name, is_set in values.items() if is_set]
        lacking += [f"mesh axis {a!r}" for a in mesh.axes if a not in axes]
        fix = f"leave it out; mesh axes are {', '.join(axes)}"
        if not has_blocks:
            fix += "; pp and training.remat need register_model(blocks=)"
        for what in lacking:
            yield SettingConflictError(
                f"a registered model has no use for {what}",
                got=f"{self.name}, {what}",
                fix=fix,
            )
        yield from super().problems(config, options, mesh)


def _check_config(config: type) -> None:
    if not is_dataclass(config) or not isinstance(config, type):
        got, fix = f"{config!r}", "give a class that @dataclass decorates"
    elif clash := [one.name for one in fields(config) if one.name in MODEL_SETTINGS]:
        got, fix = f"{config.__name__}.{clash[0]}", "give the field another name"
    else:
        return
    raise ModelDefinitionError(
        "the configuration of a model is a dataclass whose fields are settings",
        got=got,
        fix=fix,
    )


def _check_call(target: Any, init: Any, inputs: Sequence[str]) -> None:
    call: Any = target if init is not None else getattr(target, "__call__")  # noqa: B004, B009
    before = [None, None] if init is not None else [None]
    try:
        inspect.signature(call).bind(*before, **dict.fromkeys(inputs))
    except (TypeError, ValueError) as error:
        raise ModelDefinitionError(
            f"{getattr(target, '__name__', target)} cannot be called with its inputs",
            got=f"inputs={tuple(inputs)}: {error}",
            fix="take these arguments by name, or declare the ones that it takes: "
            'inputs=("tokens",)',
        ) from error
