# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer whose features are data: one module for all families."""
