# SPDX-License-Identifier: Apache-2.0
"""Whatever the planner advises is a legal run of the batch that was asked for."""

import math
from functools import cache

import jax
import numpy as np
import pytest

from tessera.foundations.config_files import configs_dir
from tessera.foundations.tree import named_leaves
from tessera.mesh import Mesh
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.layout_checks import build_model, layout_problems
from tessera.train.config.run_config import Config
from tessera.train.config.settings_checks import check
from tessera.train.planner.search import search
from tessera.train.planner.search_space import AXES, Space
from tessera.train.planner.step_time import StepModel


@cache
def traced(name: str, length: int) -> StepModel:
    words = ("data=synthetic", f"model={name}", f"training.sequence_length={length}")
    config = compose(words, configs_dir()).config
    return StepModel.of(config, Target.parse("cpu:1"))


def stored_bytes(settings: Config) -> float:
    """Parameters on each device, by the layout that the model declares for them."""
    sizes, names = settings.model.mesh_shape
    mesh = Mesh(names, shape=sizes)
    built = build_model(settings, mesh)
    place, leaves = built.place(mesh), named_leaves(built.abstract())
    dims = jax.tree.leaves(built.dim_names(), is_leaf=lambda x: isinstance(x, tuple))
    return sum(
        leaf.size * leaf.dtype.itemsize / math.prod(map(place.size, filter(None, own)))
        for leaf, own in zip(leaves.values(), dims, strict=True)
    )


@pytest.mark.full
@pytest.mark.fuzz(sample=5, whole=200)
def test_what_a_search_finds_passes_the_checks_of_a_run(seed):
    rng = np.random.default_rng(seed)
    name = "moe_tiny" if rng.random() < 0.3 else "tiny"
    of_one = traced(name, int(rng.choice([24, 32])))
    devices, batch = int(rng.integers(1, 13)), int(rng.integers(1, 25))
    target = Target.parse(f"cpu:{devices}")
    axes = tuple(axis for axis in AXES if rng.random() < 0.8)
    space = Space(of_one.config, frozenset(), axes or ("dp",), batch)
    model = StepModel(of_one.config, of_one.work, target)
    found = search(space, model)
    for each in found.best:
        layout = each.layout
        assert layout.num_devices == devices
        assert layout.global_batch_size == batch
        settings = layout.applied(of_one.config)
        assert check(settings) + layout_problems(settings) == []
        assert each.prediction.seconds > 0
        assert each.prediction.memory_bytes <= target.machine.memory_bytes
        if layout.zero_stage < 3:
            parameters = model.memory(layout).parameters
            assert parameters == pytest.approx(stored_bytes(settings))
