# SPDX-License-Identifier: Apache-2.0
"""Phase 1, trace: a callable and its arguments -> ``Graph``."""
