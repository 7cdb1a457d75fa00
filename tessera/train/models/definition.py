# SPDX-License-Identifier: Apache-2.0
"""``ModelDefinition``: how the settings of a run become a model; imports no JAX.

``model=<file>`` chooses a configuration of the decoder, ``model=my_package.my_module``
one that a user has registered; see ``register_model``.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from tessera.errors import (
    ModelShapeError,
    TesseraError,
    UnknownModelError,
    did_you_mean,
)
from tessera.train.files.user_modules import described, import_user_module

if TYPE_CHECKING:
    from tessera.graph.pipelining import Placement
    from tessera.mesh import Mesh
    from tessera.train.models.model import Model

DECODER: Final = "decoder"
# Settings of the group ``model`` that every model has; the others are its sizes.
MODEL_SETTINGS: Final = frozenset(
    {"name", "definition", "mesh_shape", "sequence_parallel", "context_parallel"}
)


@dataclass(frozen=True)
class ModelOptions:
    """What a run says of its model beside the model's own configuration.

    Attributes:
      sequence_parallel: Shard norms and residuals along the sequence over ``tp``.
      context_parallel: The attention over sequences that ``cp`` shards.
      remat: Rematerialization policies.
      pipeline_chunks: Virtual stages of each device of ``pp``.
      pipeline_placement: Which virtual stages these are.
      loss_chunk: Tokens whose logits are computed at a time.
      dtype: Dtype of activations; None is that of the parameters.
      fp8: Whether the projections of blocks multiply 8-bit operands.
    """

    sequence_parallel: bool = False
    context_parallel: str = "ring"
    remat: Any = "named"
    pipeline_chunks: int = 1
    pipeline_placement: "Placement" = "loop"
    loss_chunk: int | str = "auto"
    dtype: str | None = None
    fp8: bool = False


class ModelDefinition(ABC):
    """A kind of model: the class of its configuration, and how it is built from one.

    Attributes:
      name: What saved configurations call it.
      config_class: A dataclass, whose fields are settings of the group ``model``.
    """

    name: str
    config_class: type

    @property
    def label(self) -> str:
        """The name without the module."""
        return self.name.rpartition(":")[2]

    def configure(self, sizes: Mapping[str, Any]) -> Any:
        """The configuration with these values; a nested dataclass has a mapping.

        Raises:
          ModelShapeError: [T405] the class refuses them.
        """
        hints = get_type_hints(self.config_class)

        def build(name: str, value: Any) -> Any:
            is_nested = isinstance(value, Mapping) and is_dataclass(hints.get(name))
            return hints[name](**value) if is_nested else value

        try:
            return self.config_class(**{k: build(k, v) for k, v in sizes.items()})
        except (TypeError, ValueError) as error:
            if isinstance(error, TesseraError):
                raise
            raise ModelShapeError(
                f"{self.config_class.__name__} does not take these values",
                got=f"{error}; {', '.join(f'model.{k}={v}' for k, v in sizes.items())}",
                fix="use values that the class accepts",
            ) from error

    @abstractmethod
    def build(self, config: Any, options: ModelOptions, mesh: "Mesh | None") -> "Model":
        """The model, without arrays, for a mesh."""

    def problems(
        self, config: Any, options: ModelOptions, mesh: "Mesh"
    ) -> Iterator[TesseraError]:
        """Why the model cannot be laid out on a mesh; no backend."""
        try:
            self.build(config, options, mesh).check(mesh)
        except TesseraError as error:
            yield error

    def widths(self, config: Any, length: int) -> Mapping[str, int]:
        """Numbers that the largest activations have for each token, by their names."""
        del config, length
        return {}

    def row_coupling(self, config: Any) -> str | None:
        """What makes a row's loss depend on other rows; None where nothing does."""
        del config
        return None

    def incompatibilities(self, config: Any, saved: Any) -> Iterator[str]:
        """How parameters of equal shapes that a run saved mean something else here.

        Args:
          config: The configuration of this run.
          saved: That of the run.
        """
        del config, saved
        yield from ()

    def unused_settings(self, config: Any) -> Iterator[tuple[str, str]]:
        """Settings that this configuration does not read, and ``name=value``: why."""
        del config
        yield from ()


_DEFINITIONS: Final[dict[str, ModelDefinition]] = {}


def define(definition: ModelDefinition) -> None:
    """Let configurations name a definition."""
    _DEFINITIONS[definition.name] = definition


def import_module(module: str) -> None:
    """Import a module that registers models; the current folder is searched too.

    Raises:
      UnknownModelError: [T403] there is no such module, or its import fails.
    """
    try:
        import_user_module(module)
    except TesseraError:
        raise
    except Exception as error:
        raise UnknownModelError(
            f"the module {module!r} of a model cannot be imported",
            got=described(error),
            fix="name a module in the current folder or in PYTHONPATH, as in "
            "model=my_package.my_module:MyModel",
        ) from error


def registered_model(name: str) -> ModelDefinition | None:
    """The registered model of ``model=<name>``; None for the name of a file.

    Args:
      name: ``my_package.my_module:MyModel``, which is imported; or ``MyModel`` of a
        module that was imported before.

    Raises:
      UnknownModelError: [T403] there is no such module, it registers no such model, or
        several modules do.
    """
    module, colon, _ = name.partition(":")
    if colon:
        import_module(module)
        return definition_of(name)
    found = [full for full in _DEFINITIONS if full.endswith(f":{name}")]
    if len(found) > 1:
        raise UnknownModelError(
            f"several modules register a model {name!r}",
            got=f"model={name}: {', '.join(found)}",
            fix=f"name the module, too: model={found[0]}",
        )
    return _DEFINITIONS[found[0]] if found else None


def definition_of(name: str) -> ModelDefinition:
    """The definition with this name.

    Raises:
      UnknownModelError: [T403] there is none in this process.
    """
    if name == DECODER and name not in _DEFINITIONS:
        from tessera.train.models.decoder.definition import DecoderDefinition

        define(DecoderDefinition())
    if name in _DEFINITIONS:
        return _DEFINITIONS[name]
    module = name.partition(":")[0]
    raise UnknownModelError(
        f"no model {name!r} is registered in this process",
        got=f"model.definition={name}",
        fix=did_you_mean(name, _DEFINITIONS)
        if module in sys.modules
        else f"import it: --module {module}",
    )
