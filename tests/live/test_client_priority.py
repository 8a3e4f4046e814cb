"""A client on the server's machine goes before other programs, where it may, and only meanwhile."""

import os
import subprocess
import sys

import pytest

from twinserve.backends.live.serving import client
from twinserve.backends.live.serving.process import put_ahead

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux only")


def test_the_thread_is_an_ordinary_one_again_afterwards():
    before = os.sched_getscheduler(0)
    with pytest.raises(KeyError), client.ahead_of_others() as ahead:
        inside = os.sched_getscheduler(0)
        raise KeyError
    assert ahead == (inside != before) and os.sched_getscheduler(0) == before


def test_where_the_host_does_not_allow_it_nothing_changes(monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with client.ahead_of_others() as ahead:
        assert ahead is False and client.keep_ahead() is False
    assert put_ahead(os.getpid()) is False


def test_a_server_goes_ahead_with_all_that_it_started():
    started = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True)"
    words = [sys.executable, "-c", f"{started}; p.wait()"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as server:
        child = int(server.stdout.readline())
        ahead = put_ahead(server.pid)
        kinds = {os.sched_getscheduler(process) == os.SCHED_RR for process in (server.pid, child)}
        os.kill(child, 9)
    assert kinds == {ahead}
