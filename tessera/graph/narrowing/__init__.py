# SPDX-License-Identifier: Apache-2.0
"""``ts.autocast``: its table of operations, and the values that become narrow."""
