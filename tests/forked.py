"""Start a Python program by a fork of a process that has imported torch, as if by `subprocess`.

A job of a test is an agent, the template that its warm workers are forked from, and the workers.
With a new interpreter for agent and template, a test of a second has seven seconds of imports.
Here the agent is forked from the fork server of the session (`world.py`), and the template from
it, before the first line of the agent. All else is as it was: processes of their own, with
environment, output and process groups as the test says.

Options and variables that only the interpreter reads, when it starts, have no effect; and the
parent of the program is the fork server.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import inspect
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing import process, reduction, util
from typing import Any

from resilin.cli.warm import run_program
from tests import world


class Handed:
    """An open file of this process that becomes one of the program; an int there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _taken, (reduction.DupFd(self.fd),)


def _taken(duplicate: Any) -> int:
    return duplicate.detach()


class Popen(subprocess.Popen):
    """A program that was forked: `[sys.executable, SCRIPT | -m MODULE | -c CODE, ...]`."""

    def _execute_child(self, *values: Any) -> None:
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
        said = dict(zip(names, values, strict=True))
        command = [os.fspath(part) for part in said["args"]]
        known = command[1] in RUN or not command[1].startswith("-")
        if command[0] != sys.executable or not known:
            raise ValueError(f"not a program of this Python: {command}")
        pipes = [said[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        world.start_fork_server()
        self._forked = multiprocessing.get_context("forkserver").Process(
            target=_main,
            args=(
                command[1:],
                dict(os.environ if said["env"] is None else said["env"]),
                os.fspath(said["cwd"] or os.getcwd()),
                said["start_new_session"],
                signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
                [Handed(own if own != -1 else number) for number, own in enumerate(pipes)],
            ),
        )
        self._forked.start()
        self.pid = self._forked.pid
        self._child_created = True
        self._close_pipe_fds(
            *(said[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(said[name] for name in ("errread", "errwrite")),
        )

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._forked.join(timeout)
        code = self._internal_poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code


def run(command: list[Any], *, check: bool = False, timeout: float, **named: Any) -> Any:
    """`subprocess.run` of a program that is forked."""
    if named.pop("capture_output", False):
        named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **named) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(command, program.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# From here on: what happens in the program.


def _script(path: str) -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _code(text: str) -> None:
    sys.path.insert(0, "")
    sys.argv[0] = "-c"
    exec(compile(text, "<string>", "exec"), sys.modules["__main__"].__dict__)


RUN = {"-m": _module, "-c": _code}


def _main(
    command: list[str],
    environ: dict[str, str],
    cwd: str,
    session: bool,
    deaf: bool,
    fds: list[int],
) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if session:
        os.setsid()
    # What is ignored stays so in a new program.
    signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    # The main program, for all that it can see.
    process._parent_process = None
    gc.freeze()
    if "--warm" in command or "demo" in command:
        keep_template()
    how = RUN.get(command[0], _script)
    sys.argv = command if how is _script else command[1:]
    try:
        run_program(functools.partial(how, sys.argv[0]))
    except SystemExit:
        if getattr(sys, "last_type", None) is KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise


def keep_template() -> None:
    """Fork the process that will be the program's own fork server, the first that it asks for."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_template(theirs)
    theirs.close()
    spawn = util.spawnv_passfds

    def fork(path: Any, arguments: list[str], fds: list[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return spawn(path, arguments, fds)
        told = json.dumps([arguments[-1], list(fds), dict(os.environ)]).encode()
        ours.sendall(len(told).to_bytes(8, "little") + told)
        reduction.sendfds(ours, fds)
        ours.close()
        util.spawnv_passfds = spawn
        return pid

    util.spawnv_passfds = fork


def _become_template(line: socket.socket) -> None:
    try:
        with line.makefile("rb", 0) as told:
            size = int.from_bytes(told.read(8), "little")
            if size:
                code, numbers, environ = json.loads(told.read(size))
                os.environ.clear()
                os.environ.update(environ)
                fds = reduction.recvfds(line, len(numbers))
                # None of the numbers is in the way of another.
                above = max(numbers) + 1
                fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
                for fd in map(int, os.listdir("/proc/self/fd")):
                    if fd > 2 and fd not in fds:
                        with contextlib.suppress(OSError):  # that of the list itself
                            os.close(fd)
                for fd, number in zip(fds, numbers, strict=True):
                    os.dup2(fd, number)
                    os.close(fd)
                exec(code)
    except SystemExit:
        pass  # the program has ended
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
