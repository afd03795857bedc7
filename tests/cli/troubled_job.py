"""A small job that does to itself, in each life, what its command line says.

`2:hang:1` is: at step 2 rank 1 hangs. The first argument is for the first life, and so on; a life
without one goes on to the end.
"""

import os
import signal
import sys
import time

import torch

import resilin


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
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    plans = sys.argv[1:]
    plan = (
        plans[min(life, len(plans) - 1)] if plans[-1].startswith("*") else (plans + [""] * 99)[life]
    )
    at, kind, rank = (plan.strip("*") or "0:none:0").split(":")
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
                trouble(kind)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        if mine and at == "-1":
            trouble(kind)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        model.train()
    if mine and at == "-2":
        trouble(kind)


if __name__ == "__main__":
    main()
