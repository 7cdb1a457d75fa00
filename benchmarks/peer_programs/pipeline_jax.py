# SPDX-License-Identifier: Apache-2.0
"""The model in plain JAX on one device, one microbatch after the other.

python pipeline_jax.py SETTING_AS_JSON
"""

import json
import sys

import jax
from pipeline_setting import Setting, Step, Tree, loss_of, serve, take_output


def main(given: str) -> None:
    out, setting = take_output(), Setting(**json.loads(given))
    weights, *batch = setting.arrays()
    count = setting.microbatches
    parts = [each.reshape(count, -1, *each.shape[1:]) for each in batch]

    @jax.jit
    def step(weights: Tree, parts: Tree) -> Tree:
        def add(total: Tree, part: Tree) -> Tree:
            found = jax.value_and_grad(loss_of)(weights, *part)
            return jax.tree.map(lambda a, b: a + b / count, total, found), None

        zeros = jax.tree.map(jax.numpy.zeros_like, (jax.numpy.float32(0), weights))
        return jax.lax.scan(add, zeros, parts)[0]

    def make(schedule: str, remat: str) -> Step:
        del schedule, remat
        placed = jax.device_put(weights)
        compiled = step.lower(placed, parts).compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        return lambda: compiled(placed, parts), temporaries

    serve(out, setting, f"jax {jax.__version__}", make)


if __name__ == "__main__":
    main(sys.argv[1])
