# SPDX-License-Identifier: Apache-2.0
"""The model as a pipeline of JaxPP, each stage a program of its own.

python pipeline_jaxpp.py SETTING_AS_JSON
"""

import json
import sys
from functools import partial
from importlib.metadata import version

import jax
from jaxpp import api, schedules
from pipeline_setting import Setting, Step, Tree, error, layer, serve, take_output

SCHEDULES = {
    "gpipe": schedules.GPipe,
    "1f1b": schedules.Std1F1B,
    "interleaved": schedules.Interleaved1F1B,
    "zero_bubble": schedules.ZeroBubble,
    "dualpipev": schedules.DualPipeV,
}


def main(given: str) -> None:
    out, setting = take_output(), Setting(**json.loads(given))
    count, devices = setting.microbatches, setting.devices
    mesh = api.MpmdMesh(jax.sharding.Mesh(jax.devices()[:devices], ("pp",)), "pp")

    def make(schedule: str, remat: str) -> Step:
        del remat
        each = setting.layers_of_stage(schedule)
        stages = setting.layers // each
        sizes = (stages,) if stages == devices else (stages, devices)
        table = SCHEDULES[schedule](*sizes)

        def loss_of(weights: Tree, part: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, target = part
            for i, own in enumerate(weights, 1):
                x = layer(x, own)
                if i % each == 0:
                    x = api.mark_stage_end(x)
            return error(x, target) / count

        @partial(api.mpmd_jit_with_loop, mpmd_mesh=mesh)
        def step(weights: Tree, batch: Tree) -> Tree:
            part = partial(jax.value_and_grad(loss_of), weights)
            return api.treduce(part, batch, table, operation=api.Add)

        weights, *batch = setting.arrays()
        parts = [a.reshape(count, -1, *a.shape[1:]) for a in batch]
        compiled = step.compile(weights, parts)

        def run(weights: Tree) -> Tree:
            return jax.tree.map(
                lambda array: array.to_mpmd_local_array, compiled(weights, parts)
            )

        # Each weight lies where its gradient does.
        _, gradients = run(weights)
        shardings = jax.tree.map(lambda array: array.sharding, gradients)
        weights = jax.device_put(weights, shardings)
        return lambda: run(weights), None

    known = f"jaxpp {version('jaxpp')}, jax {jax.__version__}"
    serve(out, setting, known, make)


if __name__ == "__main__":
    main(sys.argv[1])
