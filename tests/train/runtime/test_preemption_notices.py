# SPDX-License-Identifier: Apache-2.0
"""The metadata services of three clouds, as a server on loopback imitates them."""

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tessera.train.config.run_config import PREEMPTION_NOTICES
from tessera.train.runtime import preemption_notices as module
from tessera.train.runtime.preemption_notices import (
    CLOUDS,
    preemption_notices,
)

ALIVE = 240.0
GCE = "/computeMetadata/v1/instance"
TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


@dataclass
class Metadata:
    """Answers by path: a text, or a status and a text; 404 for other paths."""

    answers: dict[str, str | tuple[int, str]]
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def answer(
        self, method: str, path: str, headers: dict[str, str]
    ) -> tuple[int, str]:
        self.asked.append((method, path, headers))
        answer = self.answers.get(path, (404, "not found"))
        status, text = (200, answer) if isinstance(answer, str) else answer
        if text == "never":
            self.let_go.wait(ALIVE)
        return status, text


Serve = Callable[..., Metadata]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers."""
    running = []

    def start(answers: dict[str, str | tuple[int, str]]) -> Metadata:
        metadata = Metadata(answers)

        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                headers = {k.lower(): v for k, v in self.headers.items()}
                status, text = metadata.answer(self.command, self.path, headers)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode("latin-1"))

            do_GET = do_PUT = respond

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((metadata, server, thread))
        metadata.address = f"http://127.0.0.1:{server.server_port}"
        return metadata

    yield start
    for metadata, server, thread in running:
        metadata.let_go.set()
        server.shutdown()
        thread.join()
        server.server_close()


def gce(preempted: str = "FALSE", event: str = "NONE") -> dict[str, str]:
    return {f"{GCE}/preempted": preempted, f"{GCE}/maintenance-event": event}


def aws(action: str | None = None) -> dict[str, str]:
    return {TOKEN: "secret"} | ({ACTION: action} if action else {})


def azure(*events: object, name: str = "gpu_3") -> dict[str, str]:
    text = json.dumps({"DocumentIncarnation": 1, "Events": events})
    return {NAME: name, EVENTS: text}


def event(kind: str, *names: str) -> dict[str, object]:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": names,
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 11 Apr 2026 22:26:58 GMT",
    }


@pytest.mark.parametrize(
    ("cloud", "answers", "notice"),
    [
        (module.google, gce(), None),
        (module.google, gce("TRUE"), "Google Cloud preempts this machine"),
        (module.google, gce("FALSE\n", "MIGRATE_ON_HOST_MAINTENANCE"), None),
        (
            module.google,
            gce("FALSE", "TERMINATE_ON_HOST_MAINTENANCE"),
            "Google Cloud ends this machine for maintenance",
        ),
        (module.aws, aws(), None),
        (
            module.aws,
            aws('{"action": "terminate", "time": "2026-09-18T08:22:00Z"}'),
            "AWS is to terminate this instance",
        ),
        (module.aws, aws('{"action": "stop"}'), "AWS is to stop this instance"),
        (
            module.aws,
            aws('{"action": "hibernate"}'),
            "AWS is to hibernate this instance",
        ),
        (module.azure, azure(), None),
        *(
            (
                module.azure,
                azure(event(k, "gpu_3")),
                f"Azure announces for this machine: {k}",
            )
            for k in ("Preempt", "Terminate", "Reboot", "Redeploy")
        ),
        (module.azure, azure(event("Freeze", "gpu_3")), None),
        (module.azure, azure(event("Preempt", "gpu_30", "gpu")), None),
        (
            module.azure,
            azure(7, event("Freeze", "gpu_3"), event("Preempt", "a", "GPU_3")),
            "Azure announces for this machine: Preempt",
        ),
    ],
)
def test_what_a_cloud_says_of_this_machine(serve, cloud, answers, notice):
    assert cloud(serve(answers).address) == notice


def test_each_cloud_is_asked_as_it_wants_to_be(serve):
    metadata = serve({**gce(), **aws(), **azure()})
    for cloud in (module.google, module.aws, module.azure):
        cloud(metadata.address)
    headers = {path: (method, given) for method, path, given in metadata.asked}
    assert headers[f"{GCE}/preempted"][1]["metadata-flavor"] == "Google"
    assert headers[TOKEN][0] == "PUT"
    assert headers[TOKEN][1]["x-aws-ec2-metadata-token-ttl-seconds"] == "60"
    assert headers[ACTION][1]["x-aws-ec2-metadata-token"] == "secret"
    assert headers[EVENTS][1]["metadata"] == headers[NAME][1]["metadata"] == "true"


def test_no_proxy_is_asked(serve, monkeypatch):
    proxy, metadata = serve(gce("TRUE")), serve(gce())
    monkeypatch.setenv("http_proxy", proxy.address)
    assert module.google(metadata.address) is None
    assert proxy.asked == []


@pytest.mark.parametrize(
    ("cloud", "answers"),
    [
        (module.google, gce("true")),
        (module.google, gce("<html>TRUE</html>")),
        (module.google, gce("FALSE", "")),
        (module.google, {}),
        (module.google, {f"{GCE}/preempted": (500, "TRUE")}),
        (module.google, gce("\xff\xfe")),
        (module.aws, {}),
        (module.aws, {TOKEN: "a\r\nb: c", ACTION: '{"action": "stop"}'}),
        (module.aws, aws("terminate")),
        (module.aws, aws('["terminate"]')),
        (module.aws, aws('{"action": "none"}')),
        (module.aws, aws("[" * 60_000)),
        (module.aws, aws(" " * 2**17 + '{"action": "stop"}')),
        (module.azure, {NAME: "", EVENTS: "{}"}),
        (module.azure, azure() | {EVENTS: '{"Events": "Preempt"}'}),
        (module.azure, azure() | {EVENTS: "{"}),
    ],
)
def test_an_answer_without_a_meaning_is_no_notice(serve, cloud, answers):
    with pytest.raises((OSError, ValueError)):
        cloud(serve(answers).address)


def test_an_endpoint_that_is_slow_is_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT", 0.1)
    with pytest.raises(OSError, match="timed out"):
        module.google(serve(gce("never")).address)


class Scripted:
    """A cloud of which each answer is given; the last one is repeated."""

    def __init__(self, *answers: str | Exception | None) -> None:
        self.answers, self.count = list(answers), 0
        self.is_through = threading.Event()

    def __call__(self) -> str | None:
        self.count += 1
        if self.count > len(self.answers) + 2:
            self.is_through.set()
        answer = self.answers[min(self.count, len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def causes(monkeypatch) -> queue.SimpleQueue[str]:
    """The requests to stop of a watch that asks often."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    return queue.SimpleQueue()


def test_the_first_notice_is_one_request_to_stop(causes):
    cloud = Scripted(None, None, "it ends")
    with preemption_notices(cloud, causes.put):
        assert causes.get(timeout=ALIVE) == "it ends"
    assert causes.empty()
    assert cloud.count == 3


def test_an_endpoint_that_fails_is_warned_of_once_and_asked_again(causes, caplog):
    fails = ConnectionRefusedError(111, "Connection refused")
    causes = queue.SimpleQueue[str]()
    cloud = Scripted(
        fails, ValueError("\x1b[2J"), KeyError("x"), None, fails, "it ends"
    )
    with preemption_notices(cloud, causes.put):
        assert causes.get(timeout=ALIVE) == "it ends"
    (record,) = caplog.records
    assert record.getMessage() == (
        "runtime.preemption_notice: there may be no notice before this machine is "
        "taken away, and the run goes on: [Errno 111] Connection refused"
    )


def test_nobody_at_the_address_is_no_notice():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    for cloud in (module.google, module.aws, module.azure):
        with pytest.raises(OSError, match="refused"):
            cloud(address)


def test_a_machine_that_stays_is_asked_until_the_run_ends(causes):
    cloud = Scripted(None)
    with preemption_notices(cloud, causes.put):
        assert cloud.is_through.wait(ALIVE)
    assert causes.empty()


def test_none_asks_nobody(causes, monkeypatch):
    monkeypatch.setattr(module.threading, "Thread", None)
    with preemption_notices(CLOUDS["none"], causes.put):
        assert causes.empty()


def test_there_is_a_cloud_for_each_value_of_the_setting():
    assert tuple(CLOUDS) == PREEMPTION_NOTICES
