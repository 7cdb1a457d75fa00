# SPDX-License-Identifier: Apache-2.0
"""Hydra composes the files of this repository once for each choice of them."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tessera.train.config import command_line
from tests.train.config.command_lines import CONFIGS_DIR


@pytest.fixture(autouse=True, scope="session")
def _files_composed_once() -> Iterator[None]:
    """It takes a tenth of a second, and most tests choose the same ones."""
    compose_files, made = command_line.compose_files, dict[Any, Any]()

    def once(choices: Any, config_dir: Any, model: Any) -> Any:
        if config_dir.resolve() != CONFIGS_DIR:
            return compose_files(choices, config_dir, model)
        key = *choices.items(), model.definition.name, repr(model.values)
        if key not in made:
            made[key] = compose_files(choices, config_dir, model)
        return deepcopy(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "compose_files", once)
        yield
