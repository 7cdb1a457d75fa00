# SPDX-License-Identifier: Apache-2.0
"""Tests that need an NVIDIA GPU. Elsewhere they are skipped and say how to run them."""

import jax
import pytest

# Asked of the setting, so that collecting tests starts no backend.
_IS_ASKED_FOR = "cuda" in str(jax.config.jax_platforms)

only_on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not _IS_ASKED_FOR,
        reason="JAX runs on the CPU; with an NVIDIA GPU: "
        "JAX_PLATFORMS=cuda,cpu pytest -m gpu",
    ),
]
