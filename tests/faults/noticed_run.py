# SPDX-License-Identifier: Apache-2.0
"""A training run whose cloud takes the machine of rank 1 away after step 6.

Its arguments are those of ``run_training.py``; the cloud is a server on loopback.
"""

import logging
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tessera.train.loop.main import main
from tessera.train.loop.metrics import MetricWriter
from tessera.train.runtime import preemption_notices
from tessera.train.runtime.preemption_notices import CLOUDS, google

preempted, announced = threading.Event(), threading.Event()


class MetadataServer(BaseHTTPRequestHandler):
    """Answers as Google Cloud does."""

    def do_GET(self) -> None:
        is_due = preempted.is_set() and self.path.endswith("/preempted")
        self.send_response(200)
        self.end_headers()
        none = b"FALSE" if self.path.endswith("/preempted") else b"NONE"
        self.wfile.write(b"TRUE" if is_due else none)

    def log_message(self, *_: Any) -> None:
        pass


class Writer(MetricWriter):
    """Waits at step 6 of rank 1, so that there are steps left."""

    def write(self, step: int, values: Any) -> None:
        super().write(step, values)
        if step == 6 and os.environ["RANK"] == "1":
            preempted.set()
            announced.wait(120)


class Announced(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "the run is to save and end" in record.getMessage():
            announced.set()


if __name__ == "__main__":
    from tessera.train.loop import train

    server = ThreadingHTTPServer(("127.0.0.1", 0), MetadataServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    CLOUDS["gce"] = lambda: google(address)  # type: ignore[index]
    preemption_notices._POLL_SECONDS = 0.1  # type: ignore[misc]
    train.MetricWriter = Writer  # type: ignore[misc]
    logging.getLogger("tessera.train.runtime").addHandler(Announced())
    sys.exit(main())
