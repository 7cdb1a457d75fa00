# SPDX-License-Identifier: Apache-2.0
"""The description of a run that its records begin with."""

from importlib.metadata import PackageNotFoundError

import tessera
from tessera import dist
from tessera.train.loop import run_records


def test_tessera_need_not_be_installed(monkeypatch):
    """A folder on PYTHONPATH, as on a machine without a network, has no metadata."""

    def not_installed(name):
        if name == "tessera":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(run_records, "version", not_installed)
    mesh = dist.Mesh(axes=["dp"], shape=[1])
    versions = run_records.description_of(mesh, 1)["versions"]
    assert versions["tessera"] == tessera.__version__
    assert versions["jax"] == "1.0"
