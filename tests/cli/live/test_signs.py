"""What wakes the launcher, and how soon."""

import os
import signal
import subprocess
import sys
import threading
import time

from resilin.cli.live.signs import Inbox

LONG = 30.0


def test_a_signal_a_message_and_an_exit_end_the_wait_at_once():
    began = time.monotonic()
    with Inbox([signal.SIGUSR2]) as inbox:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert inbox.wait(LONG, []) == [signal.SIGUSR2]
        done = []
        thread = threading.Thread(target=inbox.post, args=[lambda: done.append(1)])
        thread.start()
        assert inbox.wait(LONG, []) == []
        thread.join()
        for message in inbox.messages():
            message()
        assert done == [1]
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        assert inbox.wait(LONG, []) == []
        assert child.wait(LONG) == 0
        read, write = os.pipe()
        os.close(write)
        assert inbox.wait(LONG, [read]) == []
        os.close(read)
    assert time.monotonic() - began < LONG


def test_signals_have_their_former_handlers_afterwards():
    before = signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGCHLD)
    with Inbox([signal.SIGUSR2]):
        assert signal.getsignal(signal.SIGUSR2) != before[0]
    assert (signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGCHLD)) == before
