# SPDX-License-Identifier: Apache-2.0
"""The model as a pipeline of Tessera, whose weights are arguments.

python pipeline_tessera.py SETTING_AS_JSON
"""

import json
import sys

import jax
from pipeline_setting import Setting, Step, Tree, error, layer, serve, take_output

import tessera as ts
from tessera import graph
from tessera.mesh import Mesh


def run_layers(x: jax.Array, weights: Tree) -> jax.Array:
    """A stage."""
    for each in weights:
        x = layer(x, each)
    return x


def main(given: str) -> None:
    out, setting = take_output(), Setting(**json.loads(given))
    mesh = Mesh(("pp",), devices=range(setting.devices))

    def make(schedule: str, remat: str) -> Step:
        each = setting.layers_of_stage(schedule)
        first_layers = range(0, setting.layers, each)
        stages = [graph.stage(f"stage_{i}")(run_layers) for i in first_layers]

        @graph.pipeline(
            stages,
            schedule=schedule,
            microbatches=setting.microbatches,
            batch="x",
            remat=remat,
        )
        def model(x: jax.Array, weights: Tree) -> jax.Array:
            for stage, i in zip(stages, first_layers, strict=True):
                x = stage(x, weights[i : i + each])
            return x

        @ts.function(mesh=mesh)
        def step(weights: Tree, x: jax.Array, target: jax.Array) -> Tree:
            loss = error(model(x, weights), target)
            return loss, ts.grad(loss, weights)

        weights, x, target = setting.arrays()
        compiled = step.compile(weights, x, target)
        weights = jax.device_put(weights, compiled.input_shardings[0][0])
        return lambda: step(weights, x, target), compiled.memory.temporaries

    serve(out, setting, f"tessera {ts.__version__}, jax {jax.__version__}", make)


if __name__ == "__main__":
    main(sys.argv[1])
