# SPDX-License-Identifier: Apache-2.0
"""Names of rewards as the command line and YAML files write them."""

import ast
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, NamedTuple

from tessera.errors import RewardError
from tessera.train.files.hub import PREFIX, HubName

ENVIRONMENT: Final = "environment"
"""The name of the reward that an environment gives."""

_NAME: Final = re.compile(r"(?:([\w.]+):)?([\w.]+)(\(.*\))?", re.DOTALL)


class RewardName(NamedTuple):
    """A reward that a run names.

    Attributes:
      text: The name as it was written.
      label: The function's name, or the last part of a model's; with a number where
        several rewards have it.
      module: Where the function is; empty for those of the library, and for models.
      function: Its name there; empty for a model.
      settings: Keyword arguments that the name has.
    """

    text: str
    label: str
    module: str
    function: str
    settings: Mapping[str, Any]

    @property
    def is_model(self) -> bool:
        """Whether the text is a folder or a name of the Hub."""
        return not self.function


def parse_names(texts: Sequence[str]) -> list[RewardName]:
    r"""Read ``module:function``, ``exact``, ``regex(pattern=r"\d+")`` or ``./model``.

    What is in the parentheses are literals of Python, which are not evaluated.

    Raises:
      RewardError: [T720] a text is none of these.

    Example:
      >>> parse_names(["my_rewards:near(tolerance=0.1)"])[0].settings
      {'tolerance': 0.1}
    """
    names: list[RewardName] = []
    for text in texts:
        match, module, function = _NAME.fullmatch(text.strip()), "", ""
        settings = dict[str, Any]()
        try:
            if match is not None:
                module, function = match[1] or "", match[2]
                settings = _settings(f"f{match[3] or '()'}")
            elif not names_model(text):
                raise ValueError("it is neither module:function nor a known name")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RewardError(
                f"{text!r} is no name of a reward",
                got=str(error),
                fix="write my_rewards:correct for a function of your module, "
                "./reward-model for a folder, or literals as settings, as in "
                "'regex(pattern=r\"\\d+\")'",
            ) from error
        label = function.rpartition(".")[2] or _name_of_model(text)
        taken = {ENVIRONMENT, *(name.label for name in names)}
        others = (f"{label}_{number}" for number in count(2))
        label = next(one for one in chain([label], others) if one not in taken)
        names.append(RewardName(text, label, module, function, settings))
    return names


def names_model(text: str) -> bool:
    """Whether a text is a folder or a name of the Hub: it has a slash."""
    return re.fullmatch(r"[^:()]*/[^:()]*", text.removeprefix(PREFIX)) is not None


def _name_of_model(text: str) -> str:
    """The last part of a path, or of a name of the Hub without its revision."""
    hub = HubName.find(text)
    return Path(hub.repo if hub else text).expanduser().resolve().name


def _settings(source: str) -> dict[str, Any]:
    """The keyword arguments of the text of a call, all of them literals."""
    call = ast.parse(source, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("it has more than one pair of parentheses")
    names = [each.arg for each in call.keywords]
    if call.args or None in names or len(set(names)) < len(names):
        raise ValueError("each setting needs a name, once")
    for node in ast.walk(call):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = ast.get_source_segment(source, node) or ""
            # "\b" is a backspace, which no completion has: all rewards would be 0.
            if "\\" in text and not (text[0] in "rR" and node.value in text):
                raise ValueError(f"a backslash needs an r in front: {text}")
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
