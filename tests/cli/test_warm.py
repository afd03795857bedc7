"""Workers that are forked from a process with torch in it behave like any others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import atexit, multiprocessing, os, sys
from pathlib import Path
import numpy as np
import neighbour

def child(number):
    os._exit(number)

if __name__ == "__main__":
    out = Path(sys.argv[1])
    rank = os.environ["RANK"]
    assert Path(__file__).name == "script.py"
    assert sys.modules["__main__"].__dict__ is globals()
    assert sys.argv[2:] == ["--lr", "0.1"]
    (out / f"random-{rank}").write_text(str(np.random.rand()))
    atexit.register((out / f"atexit-{rank}").touch)
    process = multiprocessing.get_context("spawn").Process(target=child, args=(7,))
    process.start()
    process.join(60)
    assert process.exitcode == 7
    print("the torch of", rank, "was there:", neighbour.was_there)
    sys.exit(0)
"""
NEIGHBOUR = "import sys; was_there = 'torch' in sys.modules"


def resilin_run(*arguments):
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_MEMORY_DIR": "off"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


def test_a_script_runs_as_by_itself(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    done = resilin_run("--nproc", 2, tmp_path / "script.py", tmp_path, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"the torch of {rank} was there: True" in done.stdout
        assert (tmp_path / f"atexit-{rank}").exists()
    assert (tmp_path / "random-0").read_text() != (tmp_path / "random-1").read_text()


def test_children_of_a_script_without_a_guard_start_by_the_usual_method(tmp_path):
    """As without `--warm`: workers of a DataLoader do not run the script once more."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "print('script runs')\n"
        "data = list(range(6))\n"
        "batches = list(DataLoader(data, 2, num_workers=1, collate_fn=lambda batch: sum(batch)))\n"
        "print(f'sums {batches}')\n"
    )
    done = resilin_run("--max-restarts", 0, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("script runs") == 1
    assert "sums [1, 5, 9]" in done.stdout


@pytest.mark.parametrize(
    ("body", "told"),
    [("raise ValueError('wrong')", "ValueError: wrong"), ("import sys; sys.exit(3)", "code 3")],
)
def test_a_script_that_fails_says_so(tmp_path, body, told):
    script = tmp_path / "script.py"
    script.write_text(body)
    done = resilin_run("--max-restarts", 0, script)
    assert done.returncode == 1
    assert told in done.stderr


FORKING = """
import atexit, os, signal, sys, time
from pathlib import Path
out = Path(sys.argv[1])
codes = {}
if os.environ["RANK"] == "0":
    # A child of rank 1 that returned into the agent's code would wait there for the end of rank 0.
    while not (out / "codes").exists():
        time.sleep(0.05)
    sys.exit()
for how in ("leaves", "says", "fails", "ends"):
    child = os.fork()
    if child == 0:
        (out / how).write_text("")
        atexit.register((out / f"{how}-atexit").touch)
        if how == "leaves":
            sys.exit(7)
        if how == "says":
            sys.exit("the child says so")
        if how == "fails":
            raise ValueError("the child fails")
        break
    late = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > late:
            os.kill(child, signal.SIGKILL)
            sys.exit(f"the child that {how} does not end")
        time.sleep(0.01)
    codes[how] = os.waitstatus_to_exitcode(ended[1])
else:
    (out / "codes").write_text(repr(codes))
"""


def test_a_process_that_a_script_forks_ends_with_its_part_of_the_script(tmp_path):
    """It would return into what has started the worker, and wait there."""
    script = tmp_path / "script.py"
    script.write_text(FORKING)
    done = resilin_run("--nproc", 2, "--max-restarts", 0, script, tmp_path)
    assert done.returncode == 0, done.stderr
    codes = "{'leaves': 7, 'says': 1, 'fails': 1, 'ends': 0}"
    assert (tmp_path / "codes").read_text() == codes
    assert all((tmp_path / f"{how}-atexit").exists() for how in ("leaves", "says", "fails", "ends"))
    assert "the child says so" in done.stderr
    assert "ValueError: the child fails" in done.stderr


def test_what_does_not_go_with_it_is_an_error():
    done = resilin_run("-m", "timeit")
    assert done.returncode == 2
    assert "--warm needs a Python script" in done.stderr


def test_nothing_is_preloaded_that_does_not_exist():
    from resilin.cli.warm import PRELOAD

    code = f"import importlib; [importlib.import_module(name) for name in {PRELOAD!r}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent)
