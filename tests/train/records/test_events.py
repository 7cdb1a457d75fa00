# SPDX-License-Identifier: Apache-2.0
"""Events are appended over all attempts, and read back whatever a kill left."""

import json
import logging
import resource

import pytest

from tessera.train.records.events import EventLog, WarningEvents, read_events


@pytest.fixture
def log(tmp_path):
    """The events of a first attempt, open."""
    events = EventLog(tmp_path / "events.jsonl")
    yield events
    events.close()


def test_an_event_is_in_the_file_as_soon_as_it_is_written(log, tmp_path):
    log.write("stop", at=12.5, step=3)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event == {"time": 12.5, "attempt": 0, "event": "stop", "step": 3}


def test_a_later_attempt_appends_and_knows_the_earlier_ones(tmp_path):
    path = tmp_path / "events.jsonl"
    for attempt in range(3):
        log = EventLog(path)
        assert log.attempt == len(log.earlier) == attempt
        log.write("start")
        log.close()
    assert [event["attempt"] for event in read_events(path)] == [0, 1, 2]


def test_half_a_line_of_a_killed_attempt_is_passed_over_and_not_continued(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start"}\n{"event": "pha')
    log = EventLog(path)
    log.write("start")
    log.close()
    assert [event["event"] for event in read_events(path)] == ["start", "start"]
    assert log.attempt == 1


def test_what_is_no_event_is_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = ["[]", "3", '{"event": 3}', "NaN", '{"time": Infinity}', "\udcff", ""]
    text = "\n".join([*lines, '{"event": "end"}'])
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert [*read_events(path)] == [{"event": "end"}]


def test_a_run_without_a_file_has_no_events(tmp_path):
    assert [*read_events(tmp_path / "events.jsonl")] == []
    event = EventLog(None).write("end", at=1.0)
    assert event == {"time": 1.0, "attempt": 0, "event": "end"}


def test_warnings_of_the_log_are_events(log, tmp_path):
    logger = logging.Logger("a run")
    logger.addHandler(WarningEvents(log))
    logger.info("going on")
    logger.warning("step %d is skipped", 3)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["event"], event["message"]) == ("warning", "step 3 is skipped")


def test_a_text_is_cut_where_the_line_could_not_be_read_back(log, tmp_path):
    log.write("sample", text="x" * 2**21)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["text"] == "x" * 2**16 + "…"


def test_a_full_disk_ends_the_events_and_not_the_run(log, caplog, request):
    """Nor does the warning that says so, which is an event in turn, wait for it."""
    handler = WarningEvents(log)
    logging.getLogger("tessera").addHandler(handler)
    request.addfinalizer(lambda: logging.getLogger("tessera").removeHandler(handler))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        for _ in range(2):
            assert log.write("end", at=1.0)["event"] == "end"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = caplog.records
    assert "events.jsonl gets no more events: File too large" in record.message


def test_a_line_is_json_of_the_standard(log, tmp_path):
    log.write("warning", message='"\n\x00é')
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["message"] == '"\n\x00é'
