# SPDX-License-Identifier: Apache-2.0
"""Phase 2, passes: ``Graph`` -> ``Graph``, one per file, run by ``pass_runner``."""
