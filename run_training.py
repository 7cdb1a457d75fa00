# SPDX-License-Identifier: Apache-2.0
"""Train a model: configuration -> mesh -> model -> compiled step -> loop.

    python run_training.py model=tiny model.mesh_shape=[[4,1],[fsdp,tp]]

``--help`` lists every setting; docs/reference/configuration.md explains them.
``tessera train`` is the same program.
"""

import sys

from tessera.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
