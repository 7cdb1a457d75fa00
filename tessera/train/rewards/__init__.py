# SPDX-License-Identifier: Apache-2.0
"""Rewards of completions: Python functions in processes of their own, and models.

rewards           scores the completions of a batch: ``Rewards``
reward_names      ``my_rewards:correct``, ``exact(column='solution')``, ``./model``
reward_functions  imports and calls functions, in their process
reward_process    a process that may hang or die, and is started again
library           checked rewards: exact, math, regex, json_schema, length
"""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
