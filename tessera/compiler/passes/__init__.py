# SPDX-License-Identifier: Apache-2.0
"""Stage 2, passes: ``Graph`` -> ``Graph``, one a file, in ``pass_runner``'s order."""
