"""Checks of the machine: packages, process groups, host name, ports and limits.

A check is a function from the options to one finding. Where possible it tries the real thing: two
processes form a group, a port is bound, the host name is resolved.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
from typing import Literal

from resilin.cli.finding import Finding, Options, installed
from resilin.compat.names import MissingNameError

MIN_VERSIONS = {"torch": (2, 8), "numpy": (1, 26)}
"""Required packages and the lowest versions that are tested."""
MIN_OPEN_FILES = 4096
"""Open files below which a limit is worth a warning: workers of data loaders pass tensors as open
files, a few for each batch in flight."""
PAIR_TIMEOUT = 60
"""Seconds for two processes to import torch and form a group."""
PAIR = """
import sys, datetime, torch, torch.distributed as dist
url, rank = sys.argv[1:]
timeout = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", init_method=url, rank=int(rank), world_size=2, timeout=timeout)
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == 2, ones
dist.destroy_process_group()
"""
"""Program of each of the two processes."""


def python(options: Options) -> Finding:
    """The interpreter."""
    return Finding(verdict="ok", found=sys.version.split()[0])


def packages(options: Options) -> Finding:
    """The packages that resilin is built on, and the names of torch that every job needs."""
    found, old = [], []
    for name, minimum in MIN_VERSIONS.items():
        version = installed(name)
        found.append(f"{name} {version or 'missing'}")
        numbers = tuple(int(number) for number in re.findall(r"\d+", version or "0")[:2])
        if numbers < minimum:
            old.append(f"{name}>={'.'.join(map(str, minimum))}")
    found.append(f"fsspec {installed('fsspec') or 'missing (only for checkpoints in a URL)'}")
    # An older number alone stops no job: a missing package or name does.
    verdict: Literal["ok", "warn", "fail"] = "warn" if old else "ok"
    try:
        from resilin.compat.torch_names import TORCH
    except (ImportError, MissingNameError) as error:
        verdict = "fail"
        found.append(str(error))
    else:
        found[0] += f" (tested: {TORCH.tested[0]} to {TORCH.tested[-1]})"
    if not all(map(installed, MIN_VERSIONS)):
        verdict = "fail"
    advice = f"pip install {' '.join(map(shlex.quote, old))}" if old else ""
    return Finding(verdict=verdict, found=", ".join(found), advice=advice)


def backends(options: Options) -> Finding:
    """Backends of this build of torch.distributed, and accelerators."""
    import torch
    import torch.distributed as dist

    built = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    gpus = torch.cuda.device_count()
    present = [name for name, is_present in built.items() if is_present]
    found = f"{', '.join(present) or 'none'}; CUDA devices: {gpus}"
    if not built["gloo"]:
        advice = "install a build of torch with gloo: without it, CPU processes cannot form a group"
        return Finding(verdict="fail", found=found, advice=advice)
    if gpus and not built["nccl"]:
        advice = "install a build of torch with NCCL: gloo moves gradients through the host"
        return Finding(verdict="warn", found=found, advice=advice)
    return Finding(verdict="ok", found=found)


def group(options: Options) -> Finding:
    """Two processes on this machine that sum a tensor."""
    with tempfile.TemporaryDirectory() as scratch:
        url = f"file://{scratch}/store"
        pair = [
            subprocess.Popen(
                [sys.executable, "-c", PAIR, url, str(rank)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            errors = [process.communicate(timeout=PAIR_TIMEOUT)[1] for process in pair]
        except subprocess.TimeoutExpired:
            errors = [f"no answer within {PAIR_TIMEOUT} s"]
        finally:
            for process in pair:
                process.kill()
                process.communicate()
    if all(process.returncode == 0 for process in pair):
        return Finding(verdict="ok", found="two processes formed a gloo group")
    lines = [line for error in errors for line in error.strip().splitlines()[-1:]]
    return Finding(
        verdict="fail",
        found=f"two processes formed no gloo group: {lines[0] if lines else 'no reason given'}",
        advice="set GLOO_SOCKET_IFNAME to a network interface of this machine (ip addr names them)",
    )


def ports(options: Options) -> Finding:
    """Free ports, which the rendezvous of a job needs."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("", 0))
            listener.listen()
        found = f"free ports are available, such as {first.getsockname()[1]}"
    return Finding(verdict="ok", found=found)


def hostname(options: Options) -> Finding:
    """The host name given to other machines, which must resolve to this one."""
    name = socket.gethostname()
    advice = f"give {name} this machine's address in /etc/hosts, or use --local-addr ADDRESS"
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.bind(address)
    except OSError as error:
        found = f"{name} is not an address of this machine: {error.strerror}"
        return Finding(verdict="fail", found=found, advice=advice)
    found = f"{name} is {address[0]}"
    if str(address[0]).startswith(("127.", "::1")):
        found += ", a loopback address that other machines cannot reach"
        return Finding(verdict="warn", found=found, advice=f"for several machines, {advice}")
    return Finding(verdict="ok", found=found)


def store(options: Options) -> Finding:
    """The torch setting without which a job cannot grow."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    value = os.environ.get(name)
    if value in {None, "1"}:
        said = "unset: resilin run sets it" if value is None else "1"
        return Finding(verdict="ok", found=f"{name} is {said}")
    return Finding(
        verdict="fail",
        found=f"{name} is {value}: the job ends when a machine joins (torch {installed('torch')})",
        advice=f"unset {name}",
    )


def open_files(options: Options) -> Finding:
    """The limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Finding(verdict="ok", found=f"at most {soft}")
    advice = f"ulimit -n {MIN_OPEN_FILES if hard < 0 else min(hard, 65536)}"
    found = f"at most {soft}: data loaders with many workers need more"
    return Finding(verdict="warn", found=found, advice=advice)
