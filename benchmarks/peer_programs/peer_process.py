# SPDX-License-Identifier: Apache-2.0
"""``PeerProcess``: a program beside which something is measured."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


class PeerProcess:
    """A program that answers each line of JSON with another one.

    Args:
      command: The program and its arguments.
      variables: Its environment; None is that of this process.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
        )

    def ask(self, request: Any) -> Any:
        """What it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(request)}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Its next line, without a question."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait(10)
            raise RuntimeError(f"{self.process.args} ended with {code}: see its error")
        return json.loads(line)

    def close(self) -> None:
        """End its input, and wait until it has ended."""
        self.process.communicate(timeout=60)
