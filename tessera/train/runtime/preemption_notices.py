# SPDX-License-Identifier: Apache-2.0
"""``runtime.preemption_notice``: asks a cloud whether it takes this machine away.

Each cloud has an HTTP endpoint on its machines that says so, 30 s (Google Cloud, Azure)
to two minutes (AWS) before the end:

- https://cloud.google.com/compute/docs/instances/create-use-preemptible
- https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from tessera.errors import printable
from tessera.train.files.untrusted_json import parse_json

_log: Final = logging.getLogger("tessera.train.runtime")
# AWS recommends 5 s. Azure answers a machine, which may have eight ranks that ask two
# things, five times a second.
_POLL_SECONDS: Final = 5.0
_TIMEOUT: Final = 2.0
_MAX_BYTES: Final = 2**16
_LINK_LOCAL: Final = "http://169.254.169.254"
# A proxy would answer for its own machine.
_open: Final = build_opener(ProxyHandler({})).open


def google(address: str = "http://metadata.google.internal") -> str | None:
    """Spot VMs that are preempted, and machines that end for maintenance."""

    def read(name: str, values: tuple[str, ...]) -> str:
        path = f"{address}/computeMetadata/v1/instance/{name}"
        text = _ask(path, {"Metadata-Flavor": "Google"}).strip()
        if text not in values:
            raise ValueError(f"{name} is {text[:80]!r}")
        return text

    if read("preempted", ("TRUE", "FALSE")) == "TRUE":
        return "Google Cloud preempts this machine"
    # Of accelerators, an hour before; other machines move while they run.
    ends = "TERMINATE_ON_HOST_MAINTENANCE"
    events = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", ends)
    if read("maintenance-event", events) == ends:
        return "Google Cloud ends this machine for maintenance"
    return None


def aws(address: str = _LINK_LOCAL) -> str | None:
    """Spot instances that are interrupted, by version 2 of the metadata service."""
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _ask(f"{address}/latest/api/token", ttl, method="PUT").strip()
    if not token.isascii() or not token.isprintable():
        raise ValueError(f"the token is {token[:80]!r}")
    path = f"{address}/latest/meta-data/spot/instance-action"
    try:
        text = _ask(path, {"X-aws-ec2-metadata-token": token})
    except HTTPError as error:
        if error.code == 404:
            return None
        raise
    action = _object(text).get("action")
    if action not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"instance-action is {text[:80]!r}")
    return f"AWS is to {action} this instance"


def azure(address: str = _LINK_LOCAL) -> str | None:
    """Spot machines that are evicted, and those that are started anew or deleted."""

    def read(path: str) -> str:
        return _ask(f"{address}/metadata/{path}", {"Metadata": "true"})

    path = "instance/compute/name?api-version=2021-02-01&format=text"
    own = read(path).strip().casefold()
    if not own:
        raise ValueError("the machine has no name")
    # The first request turns the service on, which may take two minutes.
    text = read("scheduledevents?api-version=2020-07-01")
    events = _object(text).get("Events")
    if not isinstance(events, list):
        raise ValueError(f"the scheduled events are {text[:80]!r}")
    for event in events:
        match event:
            # Of all machines of a scale set. One that freezes goes on after seconds.
            case {
                "EventType": "Preempt" | "Terminate" | "Reboot" | "Redeploy" as kind,
                "Resources": [*names],
            } if own in [str(name).casefold() for name in names]:
                return f"Azure announces for this machine: {kind}"
    return None


Ask: TypeAlias = Callable[[], str | None]
"""What is to happen to this machine, or None if it stays; raises whatever it is if the
endpoint does not answer, or nothing that has a meaning here."""

CLOUDS: Final[Mapping[str, Ask | None]] = {
    "none": None,
    "gce": google,
    "aws": aws,
    "azure": azure,
}


@contextmanager
def preemption_notices(
    ask: Ask | None, request_stop: Callable[[str], None]
) -> Iterator[None]:
    """Request a stop at a cloud's first notice during the block.

    An endpoint that cannot be understood, or does not answer, is warned of once.

    Args:
      ask: Asks a cloud, in a thread; None asks nobody.
      request_stop: Gets what the cloud says, in that thread.
    """
    if ask is None:
        yield
        return
    closed = threading.Event()
    thread = threading.Thread(
        target=_poll,
        args=(ask, request_stop, closed),
        name="preemption-notices",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        closed.set()  # and nobody waits for an answer


def _poll(
    ask: Ask, request_stop: Callable[[str], None], closed: threading.Event
) -> None:
    is_warned = False
    while not closed.is_set():
        try:
            if notice := ask():
                request_stop(notice)
                return
        except Exception as error:  # whatever it is, the next answer may be a notice
            if not is_warned:
                _log.warning(
                    "runtime.preemption_notice: there may be no notice before this "
                    "machine is taken away, and the run goes on: %s",
                    printable(str(error)),
                )
            is_warned = True
        closed.wait(_POLL_SECONDS)


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    request = Request(url, headers=dict(headers), method=method)
    try:
        with _open(request, timeout=_TIMEOUT) as response:
            return response.read(_MAX_BYTES).decode()
    except HTTPError as error:
        error.close()  # it holds the connection
        raise


def _object(text: str) -> dict[str, Any]:
    value = parse_json(text, longest=_MAX_BYTES)
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {text[:80]!r}")
    return value
