# SPDX-License-Identifier: Apache-2.0
"""Which interface listens; that it does is in tests/faults/test_listening.py."""

import socket

import pytest

from tessera.train.runtime.addresses import address_towards, bind_address


@pytest.fixture
def names(monkeypatch):
    """What names lead to, beside addresses."""
    known: dict[str, str] = {}
    look = socket.getaddrinfo

    def look_up(host, *given, **named):
        return look(known.get(host, host), *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_the_loopback_interface_alone_where_it_was_chosen(host, names):
    names["localhost"] = "127.0.0.1"
    assert bind_address((host, 80))[0].startswith("127.0.0.")


def test_all_where_a_machine_s_own_name_leads_to_the_loopback_interface(names):
    """As Debian has it in /etc/hosts; other machines look for another address."""
    names["gpu07"] = "127.0.1.1"
    assert bind_address(("gpu07", 80)) is None


def test_all_where_the_address_is_another_machine_s():
    """That of a service, which leads here."""
    assert bind_address(("203.0.113.7", 80)) is None


def test_this_machine_s_address_is_that_of_the_interface_on_the_way():
    assert address_towards(("127.0.0.1", 80)) == "127.0.0.1"
    assert address_towards(("no-such-machine.invalid", 80)) is None
