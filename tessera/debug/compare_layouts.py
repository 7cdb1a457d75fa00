# SPDX-License-Identifier: Apache-2.0
"""``ts.compare_layouts``: the first operation of a step that depends on the mesh.

The step is traced for each mesh, and the values inside its program are made outputs of
it, as many at a time as fit a limit. What two meshes compute is then held side by side
in the order in which it is computed.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tessera.errors import NoMeshError
from tessera.mesh import Mesh

if TYPE_CHECKING:
    from tessera.debug.differences import Report


def compare_layouts(
    step: Callable[..., Any],
    batch: Any,
    meshes: Mesh | Sequence[Mesh | None],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> "Report":
    """Run a step on several meshes, and name the first operation that differs.

    Every value inside the step is compared in the order of computation, backward pass
    and loops included. They become outputs of the compiled programs, as many at a time
    as 256 MiB hold, so the operations are fused otherwise than when the step runs; the
    user's arrays are left as they are, donated ones too.

    Args:
      step: A ``ts.function`` or a training step. One that is made for a mesh, such as
        one that closes over a ``dist.tensor``, is given as a plain function that takes
        a mesh and returns the step.
      batch: The step's argument; a tuple holds several. Arrays that the step declares
        no layout for keep theirs, as far as a mesh has its axes.
      meshes: The first is what the others are compared with. None stands for one
        device, and a single mesh is compared with that.
      rtol: Relative error that is no difference. By default the square root of the
        machine epsilon of the coarsest dtype that was computed in so far: 3.5e-4 for
        f32, 0.088 for bf16. Integers have to be equal.
      atol: Absolute error that is none, by default ``rtol`` of the largest number of
        the array.

    Returns:
      A report that prints: for each mesh the first operation that differs, the user's
      line, the largest error and where it is; or that there is no difference.

    Raises:
      AbstractMeshError: [T105] a mesh has devices that this machine lacks.
      NoMeshError: [T106] there is no mesh to compare on.

    Example:
      >>> import jax.numpy as jnp
      >>> from tessera.api.function import function
      >>> @function
      ... def step(x):
      ...     return jnp.sum(jnp.sin(x))
      >>> compare_layouts(step, jnp.ones((8, 2)), Mesh(["dp"], devices=range(4))).agrees
      True
    """
    # Few programs look for differences, and all import this module.
    from tessera.debug.compared_runs import compared
    from tessera.debug.differences import Report, Tolerance
    from tessera.debug.mesh_runs import MeshRun

    reference, *others = _meshes(meshes)
    args = batch if isinstance(batch, tuple) else (batch,)
    expected = MeshRun.on(reference, step, args)
    runs = [MeshRun.on(mesh, step, args) for mesh in others]
    tolerance = Tolerance(rtol, atol)
    found = tuple(compared(expected, run, tolerance) for run in runs)
    return Report(expected.traced.graph.name, reference, found)


def _meshes(meshes: Mesh | Sequence[Mesh | None]) -> list[Mesh]:
    """The meshes, those of one device with every axis that the others have."""
    given = [None, meshes] if isinstance(meshes, Mesh) else list(meshes)
    known = [mesh for mesh in given if mesh is not None]
    if not known or len(given) < 2:
        raise NoMeshError(
            "there are no meshes to compare",
            got=f"{len(given)}, of which {len(given) - len(known)} None",
            fix="give one mesh, to compare it with one device, or several",
        )
    axes = tuple(dict.fromkeys(axis for mesh in known for axis in mesh.axes))
    ids = known[0].device_ids[:1]
    one = Mesh(axes, devices=ids, shape=(1,) * len(axes))
    return [one if mesh is None else mesh for mesh in given]
