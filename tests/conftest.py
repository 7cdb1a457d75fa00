# SPDX-License-Identifier: Apache-2.0
"""Eight simulated CPU devices for every test, set once, before any backend starts."""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

from tests.compiled_programs import folder_of_compiled_programs

# XLA sizes its thread pool from this. With one thread a device, a queued step holds a
# thread that another step's collective waits for, and both wait for ever.
os.environ.setdefault("PJRT_NPROC", "32")

# A job in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Here and in the processes that tests start; a folder of the user's is left alone.
if "tessera-tests" not in os.environ.get("JAX_COMPILATION_CACHE_DIR", ""):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder_of_compiled_programs()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # Found again in a clone elsewhere, and when lines have moved.
    os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "0"

# Tokens that tests prepare, in processes of their own too, are not the user's.
if "tessera-tests-" not in os.environ.get("XDG_CACHE_HOME", ""):
    os.environ["XDG_CACHE_HOME"] = cache = tempfile.mkdtemp(prefix="tessera-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)

# A name that is no path may be of the Hub: no test looks it up on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tessera.mesh import Mesh

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_numpy_dtype_promotion", "strict")
# XLA's older emitters, in one module of LLVM, compile in a third of the time. XLA reads
# this when it first compiles, here and in the processes that tests start. It aborts at
# a flag that it does not know, as that of JAX 0.12 does at these.
if jax.__version_info__[:2] == (0, 10):
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "device_count" not in flag]
    faster = ["use_fusion_emitters=false", "parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *(f"--xla_cpu_{f}" for f in faster)])
# Halves the time to compile. What JAX traces, what XLA partitions, and the collectives
# are the same; the fixture ``optimized`` is for what is not.
jax.config.update("jax_disable_most_optimizations", True)

# The first example of a shape compiles, so a deadline would measure the compiler.
hypothesis.settings.register_profile(
    "tessera", deadline=None, derandomize=True, max_examples=40, print_blob=True
)
hypothesis.settings.load_profile("tessera")


@pytest.fixture
def dp_mesh() -> Mesh:
    """All eight devices along one axis."""
    return Mesh(["dp"], devices=range(8))


@pytest.fixture
def grid_mesh() -> Mesh:
    """Two by four devices: ``dp`` outside, ``tp`` inside."""
    return Mesh(["dp", "tp"], devices=range(8), shape=(2, 4))


@pytest.fixture
def cube_mesh() -> Mesh:
    """Two by two by two devices."""
    return Mesh(["dp", "pp", "tp"], devices=range(8))


@pytest.fixture
def large_mesh() -> Mesh:
    """Seventy-two devices that this machine does not have."""
    return Mesh(["tp", "pp", "dp"], devices=range(72))


@pytest.fixture(scope="module")
def compiled_here() -> Iterator[None]:
    """Compile what an earlier run compiled: where compiling is the subject."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else JAX does not look at its settings again
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def optimized(compiled_here: None) -> Iterator[None]:
    """Compile with all of LLVM's optimizations: where bits or accuracy are the subject.

    Programs compiled the other way are dropped: they would have other bits.
    """
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
