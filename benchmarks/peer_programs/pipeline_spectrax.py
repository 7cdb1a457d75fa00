# SPDX-License-Identifier: Apache-2.0
"""The model as a pipeline of SpectraX, each stage a program of its own.

python pipeline_spectrax.py SETTING_AS_JSON
"""

import json
import sys

import jax
import spectrax
from pipeline_setting import Setting, Step, Tree, error, layer, serve, take_output
from spectrax import runtime

SCHEDULES = {
    "gpipe": runtime.GPipe,
    "1f1b": runtime.Std1F1B,
    "interleaved": runtime.InterleavedH1,
    "zero_bubble": runtime.ZeroBubbleH1,
    "dualpipev": runtime.DualPipeV,
}


def main(given: str) -> None:
    out, setting = take_output(), Setting(**json.loads(given))
    devices = jax.sharding.Mesh(jax.devices()[: setting.devices], ("pp",))
    mesh = runtime.types.MpMdMesh(devices, "pp")

    def make(schedule: str, remat: str) -> Step:
        del remat
        each = setting.layers_of_stage(schedule)
        table = SCHEDULES[schedule](setting.microbatches)
        if schedule == "interleaved":  # as the others place stages
            table.stage_layout = "interleaved"

        @runtime.sxjit(mesh=mesh, schedule=table, batch_argnums=(1, 2))
        def loss_of(weights: Tree, x: jax.Array, target: jax.Array) -> jax.Array:
            for i, own in enumerate(weights):
                if i and i % each == 0:
                    x = runtime.sxstage_iter(x)
                x = layer(x, own)
            return error(x, target)

        step = runtime.sxvalue_and_grad(loss_of)
        weights, x, target = setting.arrays()
        # Each weight lies where its gradient does.
        _, (gradients,) = step(weights, x, target)
        shardings = jax.tree.map(lambda array: array.sharding, gradients)
        weights = jax.device_put(weights, shardings)
        return lambda: step(weights, x, target), None

    version = f"spectrax-lib {spectrax.__version__}, jax {jax.__version__}"
    serve(out, setting, version, make)


if __name__ == "__main__":
    main(sys.argv[1])
