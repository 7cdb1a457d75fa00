# SPDX-License-Identifier: Apache-2.0
"""The subcommands of ``tessera``: each module's ``main`` is one."""
