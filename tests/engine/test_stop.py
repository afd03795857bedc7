import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from resilin.engine.stop import RESTART, SIGNALS, StopRequest


@pytest.fixture
def stop():
    """A request; signals have their handlers back behind the test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    request = StopRequest()
    yield request
    request.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def run(code, timeout=30):
    """Runs a program in a process of its own; it must end by itself."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_nobody_asked(stop):
    assert not stop.asked
    assert not stop.wait(0)
    stop.listen()
    assert not stop.wait(0.01)
    assert (stop.reason, stop.signal, stop.exit_code) == (None, None, RESTART)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_a_signal_asks(stop, number):
    stop.listen()
    os.kill(os.getpid(), number)
    assert until(lambda: stop.asked)
    assert (stop.reason, stop.signal, stop.exit_code) == (number.name, number, 128 + number)
    began = time.monotonic()
    assert stop.wait(30)
    assert stop.wait(30)
    assert time.monotonic() - began < 5


def test_whoever_asks_first_is_remembered(stop):
    stop.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert until(lambda: stop.asked)
    os.kill(os.getpid(), signal.SIGTERM)
    stop.request("me too")
    assert stop.wait(0.1)
    assert (stop.reason, stop.exit_code) == ("SIGUSR1", 128 + signal.SIGUSR1)


def test_a_signal_behind_another_request_does_not_change_it(stop):
    stop.listen()
    stop.request("the user")
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(3):
        assert stop.wait(0.05)
    assert (stop.reason, stop.signal, stop.exit_code) == ("the user", None, RESTART)


@pytest.mark.parametrize("listening", [False, True])
def test_a_request_from_another_thread_ends_the_waiting(stop, listening):
    if listening:
        stop.listen()
    timer = threading.Timer(0.1, stop.request, ["a poller"])
    timer.start()
    began = time.monotonic()
    assert stop.wait(4)
    timer.join()
    assert time.monotonic() - began < 2, "it waited for the whole time"


def test_other_signals_do_not_ask(stop):
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        stop.listen()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert until(lambda: seen)
        for _ in range(3):
            assert not stop.wait(0.01)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_more_signals_than_a_pipe_holds(stop, capfd):
    stop.listen()
    for _ in range(70_000):
        signal.raise_signal(signal.SIGUSR1)
    assert stop.wait(0)
    assert stop.reason == "SIGUSR1"
    assert capfd.readouterr().err == ""


def test_a_signal_is_seen_while_the_main_thread_is_blocked():
    # A mutex that its owner locks again: no handler of Python runs any more, as in a collective.
    result = run("""
        import ctypes, os, signal, threading, time
        from resilin.engine.stop import StopRequest

        stop = StopRequest()
        stop.listen()

        def watch():
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
            asked = stop.wait(10)
            print(asked, stop.reason, stop.exit_code, flush=True)
            os._exit(0)

        threading.Thread(target=watch).start()
        mutex = ctypes.create_string_buffer(256)
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)
        print("the main thread was not blocked", flush=True)
    """)
    assert result.stdout == "True SIGTERM 143\n", result.stderr


def test_a_handler_of_the_user_is_left_alone_with_a_word(stop, caplog):
    seen = []

    def mine(number, _):
        seen.append(number)

    signal.signal(signal.SIGTERM, mine)
    with caplog.at_level(logging.WARNING, "resilin"):
        stop.listen()
    assert "SIGTERM has a handler already, which is left alone" in caplog.text
    assert "SIGUSR1" not in caplog.text
    assert signal.getsignal(signal.SIGTERM) is mine
    os.kill(os.getpid(), signal.SIGTERM)
    assert until(lambda: seen)
    assert not stop.wait(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert until(lambda: stop.wait(0.05))
    stop.close()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_wakeup_descriptor_of_the_user_is_left_alone(stop):
    # Such as that of asyncio, whose loop would never hear of a signal again.
    read, write = os.pipe()
    os.set_blocking(write, False)
    assert signal.set_wakeup_fd(write) == -1
    try:
        stop.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(lambda: stop.asked)
        stop.close()
    finally:
        left = signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)
    assert left == write


def test_only_the_main_thread_can_listen(stop, caplog):
    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=stop.listen)
    thread.start()
    thread.join()
    assert "not the main thread" in caplog.text
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_closing_gives_everything_back(stop):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    descriptors = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else None
    for _ in range(3):
        stop.listen()
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        stop.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        wakeup = signal.set_wakeup_fd(-1)
        assert wakeup == -1
    stop.close()
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_waiting_goes_on_behind_release(stop):
    stop.listen()
    stop.release()
    assert not stop.wait(0.01)
    stop.request("later")
    assert stop.wait(0)


def test_the_end_of_a_child_is_no_request_to_its_parent():
    # A process that the user forks has the handlers of its parent, and its pipe.
    result = run("""
        import os, signal, time
        from resilin.engine.stop import StopRequest

        stop = StopRequest()
        stop.listen()
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        time.sleep(0.2)
        print(stop.wait(0.2), stop.reason)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    """)
    assert result.stdout == "False None\n", result.stderr


def test_a_child_that_was_forked_can_be_terminated():
    result = run("""
        import multiprocessing, time
        from resilin.engine.stop import StopRequest

        stop = StopRequest()
        stop.listen()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(3)
        print(child.exitcode)
        child.kill()
        child.join()
    """)
    assert result.stdout == "-15\n", result.stderr


def test_pollers_ask(stop, caplog):
    answers = iter([False, OSError("no route to the metadata service"), False, True, False])

    def spot_notice():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    caplog.set_level(logging.WARNING, "resilin")
    stop.poll(spot_notice, 0.005)
    assert stop.wait(10)
    assert (stop.reason, stop.exit_code) == ("spot_notice returned True", RESTART)
    assert caplog.text.count("failed; it will be called again") == 1
    assert "no route to the metadata service" in caplog.text
    # It has said what it had to say, and is not asked again.
    time.sleep(0.05)
    assert next(answers) is False


def test_one_poller_that_hangs_does_not_keep_another_from_asking(stop):
    release = threading.Event()
    stop.poll(lambda: release.wait(10), 0.001)

    class Notice:
        def __call__(self):
            return True

        def __repr__(self):
            return "Notice()"

    stop.poll(Notice(), 0.01)
    assert stop.wait(5)
    assert stop.reason == "Notice() returned True"
    release.set()


def test_closing_ends_the_pollers(stop):
    def pollers():
        return [t for t in threading.enumerate() if t.name == "resilin-poller" and t.is_alive()]

    assert until(lambda: not pollers())
    asked = []
    stop.poll(lambda: asked.append(1) or False, 0.005)
    assert until(lambda: len(asked) > 2)
    stop.close()
    assert until(lambda: not pollers())
    assert not stop.asked
