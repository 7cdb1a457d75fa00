# SPDX-License-Identifier: Apache-2.0
"""The subcommands of ``tessera`` that are not modules to run on their own."""
