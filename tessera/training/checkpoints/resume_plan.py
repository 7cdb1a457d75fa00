# SPDX-License-Identifier: Apache-2.0
"""``tessera.resume_plan``: what going on from a checkpoint would read and move.

Importing this loads nothing that ``import tessera`` does not: the trainer comes with
the first plan.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.mesh import Mesh

if TYPE_CHECKING:
    from tessera.training.checkpoints.restore_plan import ResumePlan
    from tessera.training.config import Config


def resume_plan(
    path: str | Path,
    onto: "Mesh | Sequence[Any] | Config | None" = None,
    *,
    hosts: int = 1,
) -> "ResumePlan":
    """What going on from a checkpoint would read and move; nothing is allocated.

    No array is read, and the mesh need not exist. The checksums are not looked at: that
    is done by the run, which reads every byte.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.
      onto: A mesh, or a mesh shape such as ``[[4, 2], ["fsdp", "tp"]]``, for the
        configuration of the checkpoint; or whole settings. None is the mesh that it was
        saved on.
      hosts: On how many machines the devices are, as many on each.

    Returns:
      A plan that prints: how each array is split and was split, bytes for each host and
      device, and everything that does not divide or does not fit.

    Raises:
      CheckpointMismatchError: [T802] another version of Tessera wrote it.
      CheckpointNotFoundError: [T801] there is no complete checkpoint.
      MeshShapeError: [T101] the mesh shape is none, or ``hosts`` does not divide it.
    """
    from tessera.training.checkpoints.restore_plan import planned

    return planned(Path(path), onto, hosts)
