# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first, and what of its output says why."""

from tessera.train.runtime.rank_failures import Failure, first_failure, relevant_lines


def test_the_first_failure_is_the_one_that_was_said_first():
    said = Failure(1, 1, ended_at=10.4, failed_at=10.0)
    seen = Failure(0, 1, ended_at=10.2, failed_at=10.1)
    assert first_failure([seen, said]) is said


def test_a_killed_rank_comes_before_those_that_noticed():
    killed = Failure(1, -9, ended_at=10.3)
    noticed = Failure(0, 1, ended_at=10.2, failed_at=10.1)
    assert first_failure([noticed, killed]) is killed
    # Nothing but SIGKILL itself does this, so it does not matter how late it is seen.
    seen_late = Failure(1, -9, ended_at=19.0)
    assert first_failure([noticed, seen_late]) is seen_late


def test_a_rank_that_crashes_long_after_another_failed_comes_after_it():
    raised = Failure(0, 1, ended_at=10.2, failed_at=10.1)
    soon, late = Failure(1, -11, ended_at=10.9), Failure(1, -11, ended_at=19.0)
    assert first_failure([raised, soon]) is soon
    assert first_failure([raised, late]) is raised


def test_a_rank_that_jax_aborts_comes_after_those_that_failed():
    aborted = Failure(0, -6, ended_at=10.2)
    raised = Failure(1, 1, ended_at=10.4, failed_at=10.0)
    assert first_failure([aborted, raised]) is raised


def test_a_failure_in_words():
    assert str(Failure(2, -9, 0.0, phase="step 3")) == (
        "rank 2: killed by SIGKILL in phase 'step 3'"
    )
    assert str(Failure(0, 76, 0.0)) == "rank 0: exit code 76"


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "ValueError: x",
]


def test_what_to_read_is_the_last_traceback_with_its_causes():
    noise = ["W1121 some line of a library"] * 50
    assert relevant_lines([*TRACEBACK, *noise, *TRACEBACK]) == TRACEBACK
    why = "During handling of the above exception, another exception occurred:"
    chained = [*TRACEBACK, "", why, "", *TRACEBACK]
    assert relevant_lines([*noise, *chained]) == chained


def test_what_to_read_is_the_coded_error_where_there_is_no_traceback():
    error = ["[T705] a port of rank 0 is busy", "  got: x"]
    assert relevant_lines(["noise", *error]) == error


def test_what_to_read_is_the_last_lines_otherwise():
    lines = [str(number) for number in range(100)]
    assert relevant_lines(lines) == lines[-30:]
    assert relevant_lines([]) == []
