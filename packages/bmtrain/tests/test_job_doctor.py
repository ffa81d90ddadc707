"""The doctor of a job on several hosts: its checks, and what it reports if something is wrong."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time

import pytest

import bmt_comm
from bmtrain import job_doctor


def test_each_two_hosts_meet_once_and_each_host_meets_one_other_at_a_time():
    for players in range(1, 9):
        rounds = job_doctor.tournament(players)
        assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(players), 2))
        assert all(len(set(itertools.chain(*meetings))) == 2 * len(meetings) for meetings in rounds)


def facts(hosts, clock=0.0, **versions):
    given = {"torch": "2.13.0", "python": "3.11", "bmt-comm": "2.0.0"}
    return [
        {"host": host, "machine": host, "versions": {**given, **(versions if n else {})}, "clock": clock * n}
        for n, host in enumerate(hosts)
    ]


def test_other_versions_are_named_with_their_hosts():
    assert job_doctor.check_versions(facts("ab")).status == "ok"
    check = job_doctor.check_versions(facts("ab", torch="2.6.0", python="3.10"))
    assert (check.status, check.detail) == ("failed", "torch: 2.13.0 on a, 2.6.0 on b; python: 3.11 on a, 3.10 on b")
    assert job_doctor.check_versions(facts("ab", python="3.10")).status == "warning"


@pytest.mark.parametrize(
    ("hosts", "clock", "said"),
    [
        ("aabb", 0.1, "a has ranks 0 to 1; b has ranks 2 to 3"),
        ("abab", 0.1, "not neighbours"),
        ("aab", 0.1, "not as many each"),
        ("aabb", 9.0, "clocks differ by 18 s"),
    ],
)
def test_where_ranks_are(hosts, clock, said):
    given = facts(hosts, clock)
    check = job_doctor.check_placement(job_doctor.hosts_of(given), given)
    assert check.status == ("ok" if clock < 1 and hosts == "aabb" else "warning")
    assert said in check.detail


def test_slow_links_are_named():
    trips, copies = {(0, 1): 50.0, (0, 2): 60.0, (1, 2): 55.0}, {(0, 1): 1e4, (0, 2): 1e4, (1, 2): 1e4}
    check = job_doctor.check_links("abc", trips, copies)
    assert (check.status, check.detail) == ("ok", "3 between 3 hosts, 1.68 to 1.68 GB/s")
    check = job_doctor.check_links("abc", trips, {**copies, (1, 2): 1e5})
    assert (check.status, check.advice != "") == ("warning", True)
    assert check.detail.endswith("b and c: 0.17 GB/s")
    assert "a and c: 900 µs a round trip" in job_doctor.check_links("abc", {**trips, (0, 2): 900.0}, copies).detail


@pytest.mark.ranks(3, timeout=60)
def test_links_are_measured_between_the_first_ranks_of_hosts(ctx):
    for leaders in ([0, 1, 2], [0, 2]):
        pairs = set(itertools.combinations(range(len(leaders)), 2))
        trips, copies = job_doctor.measure_links(ctx.world, leaders)
        assert trips.keys() == copies.keys() == pairs
        assert all(time > 0 for time in (*trips.values(), *copies.values()))


def doctor(rank, port=0, **environment):
    """Start the doctor as a launcher does, on one of two hosts."""
    given = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(port), **environment}
    command = [sys.executable, "-m", "bmtrain", "doctor", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **given})


def finished(process):
    try:
        return process.communicate(timeout=120)[0], process.returncode
    finally:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "said"), [("no.such.host.invalid", "does not find the address of rank 0"), ("127.0.0.1", "not reach")]
)
def test_a_rank_says_that_it_does_not_reach_rank_0(address, said):
    output, status = finished(
        doctor(1, free_port(), MASTER_ADDR=address, TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    )
    assert status == 1
    assert "rank 1:\n  failed   addresses: " in output
    assert said in output
    assert "what to do: " in output


def test_devices_that_differ_between_ranks_are_a_failed_check(monkeypatch):
    said = "ranks call init_distributed() with different arguments: device is cuda on rank 0, cpu on rank 1"

    def differ(**arguments):
        raise ValueError(said)

    monkeypatch.setattr(bmt_comm, "init_distributed", differ)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    *_, check = job_doctor.run_job_checks()
    assert (check.name, check.status, check.detail) == ("rendezvous", "failed", said)


def test_a_rank_may_come_before_rank_0_without_torchrun():
    where = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    port = free_port()
    late = doctor(1, port, **where)
    time.sleep(1)
    try:
        output, status = finished(doctor(0, port, **where))
        assert status == 0, output
    finally:
        assert finished(late)[1] == 0
    names = [check["name"] for check in json.loads(output)["checks"]]
    assert names == ["addresses", "rendezvous", "versions", "hosts", "transport", "collectives"]
