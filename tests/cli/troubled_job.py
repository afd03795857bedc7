"""A small job that does to itself, in one life after the other, what its command line says.

`2:hang:1` is: at step 2 rank 1 hangs. The first argument is for the first life, the next one for
the first life after that has happened, and so on; a life without one goes on to the end. Each
happens once, which a file in the working directory remembers; with a star before it, in each life.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import resilin


def happened(number):
    return Path(f"happened-{number}")


def trouble(kind):
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        while True:
            time.sleep(0.1)  # here it hangs
    elif kind == "exit":
        sys.exit(0)
    elif kind == "fail":
        raise ValueError("a fault\nof the \x1b[2Jscript")


def main():
    # Not by the number of the life: a busy machine may be taken for one that hangs.
    plans = enumerate(sys.argv[1:])
    number, plan = next((it for it in plans if not happened(it[0]).exists()), (0, "*0:none:0"))
    at, kind, rank = plan.strip("*").split(":")
    torch.set_num_threads(1)
    resilin.init_process_group()
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    loader = resilin.AdaptiveDataLoader(
        torch.utils.data.TensorDataset(torch.randn(400, 1)), batch_size=8
    )
    mine = os.environ["RANK"] == rank
    resilin.checkpoint_to(None, memory_every=1)
    for _ in resilin.remaining_epochs_until(1):
        for (x,) in loader:
            if mine and model.clock.steps == int(at):
                if not plan.startswith("*"):
                    happened(number).touch()
                trouble(kind)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
