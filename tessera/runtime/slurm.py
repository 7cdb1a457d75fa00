# SPDX-License-Identifier: Apache-2.0
"""The short forms in which Slurm writes lists of machines and numbers of tasks."""

import re


def first_host(nodes: str) -> str:
    """The first machine of a list.

    Args:
      nodes: As in ``SLURM_STEP_NODELIST``.

    Example:
      >>> first_host("gpu[007-009,012],login1")
      'gpu007'
      >>> first_host("rack[1-2]node[03-04].cluster")
      'rack1node03.cluster'
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()).strip()


def tasks_on_node(tasks: str, node: int) -> int | None:
    """How many tasks a machine has.

    Args:
      tasks: As in ``SLURM_STEP_TASKS_PER_NODE``.
      node: Which of the machines, from 0.

    Example:
      >>> tasks_on_node("4(x2),1", 1), tasks_on_node("4(x2),1", 2)
      (4, 1)
    """
    for part in tasks.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            return None
        times = int(match[2] or 1)
        if node < times:
            return int(match[1])
        node -= times
    return None
