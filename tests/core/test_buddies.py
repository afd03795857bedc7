"""Buddies: always on another host, and nobody keeps more than it must."""

from collections import Counter
from itertools import product

from resilin.core.buddies import buddies


def test_every_process_has_a_buddy_on_another_host_and_the_load_is_even():
    for sizes in product(range(5), repeat=4):
        hosts = {}
        # Numbers of processes are not in the order of the hosts.
        for host in (2, 0, 3, 1):
            hosts |= {len(hosts) + i: host for i in range(sizes[host])}
        found = buddies(hosts)
        num, most = len(hosts), max(sizes)
        if most == num:
            assert found == {}
            continue
        assert found.keys() == hosts.keys()
        assert all(hosts[buddy] != hosts[process] for process, buddy in found.items())
        assert max(Counter(found.values()).values()) == max(1, -(-most // (num - most)))


def test_equal_hosts_keep_the_pieces_of_one_other_host():
    hosts = {process: process // 8 for process in range(1000)}
    found = buddies(hosts)
    assert sorted(found.values()) == list(range(1000))
    for host in range(125):
        kept = {hosts[process] for process, buddy in found.items() if hosts[buddy] == host}
        assert kept == {(host - 1) % 125}
