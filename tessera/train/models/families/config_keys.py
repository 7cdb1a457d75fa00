# SPDX-License-Identifier: Apache-2.0
"""Reads the values of a ``config.json``, and refuses those that it does not understand.

A key that changes what a model computes must not be overlooked. So every key is either
read by the family, in the list of keys without an effect on the computation, or an
error.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from tessera.errors import ModelFolderError

T = TypeVar("T")

REQUIRED: Final[Any] = object()

# What a folder's reader, generation and other uses of a model do with it.
_WITHOUT_EFFECT: Final = (
    frozenset({"architectures", "chunk_size_feed_forward", "id2label", "label2id"})
    | {"model_type", "problem_type", "transformers_version", "_name_or_path"}
    | {"dtype", "torch_dtype", "torchscript", "initializer_range"}
    | {"use_cache", "cache_implementation", "return_dict", "output_attentions"}
    | {"output_hidden_states", "max_position_embeddings"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
# What a tool that wrote the folder says of itself.
_REMARKS: Final = "unsloth_"


class ConfigKeys:
    """The keys of a ``config.json``, or of a part of it, until all of them are read.

    Args:
      values: The keys and values.
      where: The keys that lead to this part, for messages: ``rope_parameters.``.

    Example:
      >>> keys = ConfigKeys({"hidden_size": 64, "num_experts": 4})
      >>> keys.take("hidden_size", int)
      64
      >>> keys.problems()
      ['num_experts = 4: this key is unknown']
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values, self.where = dict(values), where
        self._read: set[str] = set()
        self._problems: list[str] = []
        self._parts: dict[str, ConfigKeys] = {}

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def take(self, name: str, kind: type[T], default: T = REQUIRED) -> T:
        """The value of a key; the default if it is absent or null.

        Raises:
          ModelFolderError: [T806] it has another type, or there is no default.
        """
        self._read.add(name)
        value = self.values.get(name)
        if value is None and default is not REQUIRED:
            return default
        # Integers are numbers, but true and false are no integers.
        number = kind is float and type(value) is int
        if type(value) is not kind and not number:
            raise _unreadable(
                [f"{self.where}{name} = {_shown(value)}: not a {kind.__name__}"]
            )
        try:
            return kind(value)  # type: ignore[call-arg]
        except OverflowError:
            raise _unreadable(
                [f"{self.where}{name} = {_shown(value)}: too large"]
            ) from None

    def take_nullable(self, name: str, kind: type[T], default: T) -> T | None:
        """The value of a key whose null is not its default, but means none."""
        if name in self.values and self.values[name] is None:
            self._read.add(name)
            return None
        return self.take(name, kind, default)

    def take_part(self, name: str) -> "ConfigKeys":
        """The keys of an object in this one; none if it is absent or null."""
        if name not in self._parts:
            self.add_part(name, self.take(name, dict, {}))
        return self._parts[name]

    def add_part(self, name: str, values: Mapping[str, Any]) -> "ConfigKeys":
        """Keys that were collected from several objects, to be read like one."""
        self._parts[name] = ConfigKeys(values, f"{self.where}{name}.")
        return self._parts[name]

    def expect(self, name: str, *supported: Any) -> None:
        """Note a problem if a key is neither absent nor has one of these values."""
        self._read.add(name)
        if name in self.values and self.values[name] not in supported:
            self.refuse(
                name, f"only {' or '.join(map(_shown, supported))} is supported"
            )

    def refuse(self, name: str, why: str) -> None:
        """Note that the value of a key cannot be honored."""
        self._read.add(name)
        self._problems.append(
            f"{self.where}{name} = {_shown(self.values.get(name))}: {why}"
        )

    def skip(self, *names: str) -> None:
        """Mark keys as read that have no effect on what the model computes."""
        self._read.update(names)

    def problems(self) -> list[str]:
        """Each key that was refused, or that nothing has read."""
        known = self._read | _WITHOUT_EFFECT
        unknown = [
            f"{self.where}{name} = {_shown(value)}: this key is unknown"
            for name, value in self.values.items()
            if not (name in known or name.startswith(_REMARKS)) and value is not None
        ]
        parts = [line for part in self._parts.values() for line in part.problems()]
        return [*self._problems, *unknown, *parts]

    def finish(self) -> None:
        """Check that every key was read.

        Raises:
          ModelFolderError: [T806] lists those that were not, or that were refused.
        """
        if problems := self.problems():
            raise _unreadable(problems)


def without_effect(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values that say nothing of what a model computes."""
    return {
        name: value
        for name, value in values.items()
        if name in _WITHOUT_EFFECT or name.startswith(_REMARKS)
    }


def ignored_keys(values: Mapping[str, Any]) -> list[str]:
    """The keys about a tool that wrote the ``config.json``: ``unsloth_version``."""
    return [name for name in values if name.startswith(_REMARKS)]


def read_rope(
    keys: ConfigKeys, kind: str | None = None, *, theta: str = "rope_theta"
) -> ConfigKeys:
    """The rotary parameters of a kind of layer, as transformers 5 writes them.

    It writes ``rope_parameters``, an object with one for each kind of layer if they
    differ. Before, the base was the key ``theta`` and the rest was ``rope_scaling``,
    whose ``rope_type`` was ``type``.

    Args:
      keys: The configuration.
      kind: ``full_attention`` or ``sliding_attention``, if layers differ.
      theta: The older name of the base.
    """
    current, older = keys.take_part("rope_parameters"), keys.take_part("rope_scaling")
    if kind is not None:
        current = current.take_part(kind)
    sources = [("rope_parameters", current.values)]
    if kind != "sliding_attention":  # which was never scaled
        renamed = {"type": "rope_type"}
        scaling = {renamed.get(k, k): v for k, v in older.values.items()}
        sources.append(("rope_scaling", scaling))
    sources.append((theta, {"rope_theta": keys.take(theta, float, None)}))
    current.skip(*current.values)
    older.skip(*older.values)
    merged: dict[str, Any] = {}
    for source, values in sources:
        for name, value in values.items():
            if value is not None and merged.setdefault(name, value) != value:
                keys.refuse(source, f"{name} is {_shown(merged[name])} elsewhere")
    written = f"rope_parameters.{kind}" if kind else "rope_parameters"
    is_older = "rope_type" in older.values or "type" in older.values
    is_older = is_older and "rope_type" not in current.values and len(sources) == 3
    return keys.add_part("rope_scaling" if is_older else written, merged)


def read_rope_kind(rope: ConfigKeys, *supported: str) -> str:
    """The kind of rotary scaling; notes a problem if it is not one of these.

    Then the other keys of its kind are no problems of their own.
    """
    kind = rope.take("rope_type", str, "default")
    rope.expect("rope_type", "default", *supported)
    if kind in ("default", *supported):
        return kind
    rope.skip(*rope.values)
    return "default"


def _unreadable(problems: list[str]) -> ModelFolderError:
    return ModelFolderError(
        "this config.json cannot be used",
        got="\n".join(problems),
        fix="use a model whose configuration is supported, or remove a key that has "
        "no effect on what the model computes",
    )


def _shown(value: Any) -> str:
    return repr(value)[:80]
