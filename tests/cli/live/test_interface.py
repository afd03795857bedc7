"""The interface of an address."""

import socket
import sys

import pytest

from resilin.cli.live.interface import interface_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_loopback_address_is_that_of_its_interface(address):
    assert interface_of(address) == "lo"


def test_each_interface_with_an_address_is_found_by_it():
    # The one that leads out, if there is a network: no packet is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.77", 9))
        except OSError:
            pytest.skip("this machine has no network")
        address = sock.getsockname()[0]
    assert interface_of(address) in {name for _, name in socket.if_nameindex()}


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ValueError, match=r"203\.0\.113\.9 must be one of .*127\.0\.0\.1"):
        interface_of("203.0.113.9")


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="not known here"):
        interface_of("no-such-host.invalid")
