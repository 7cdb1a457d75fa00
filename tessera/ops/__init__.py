# SPDX-License-Identifier: Apache-2.0
"""Operations on arrays; users find them in ``ts.op``, ``ts.nn`` and ``ts.dist``."""
