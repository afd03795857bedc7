"""A live job on a Ray cluster whose nodes come and go: `python ray_live_job.py DIRECTORY`.

The job begins with two workers on one node. One of them kills itself in the middle of a step, and
another actor replaces it. Then a node is added, whose worker joins, and taken away with that worker
while all three are in the middle of a step. Files tell the workers and this process of each other.

The model counts how often each sample was in a committed step: `seen` has the gradient 1/B for each
sample of a step, and a learning rate of 1.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

N, BATCH, EPOCHS = 120, 12, 3
KILL, REPLACED, ADDED, LOST = 4, 6, 9, 13
"""Steps before or in which these things happen."""


class Net(nn.Module):
    """A small network that counts its samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        self.seen = nn.Parameter(torch.zeros(N))
        self.double()

    def forward(self, x, y, indices):
        return F.cross_entropy(self.net(x), y) + self.seen[indices].mean()


def wait_until(what, seconds=150):
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not true within {seconds} s")
        time.sleep(0.01)


def meet(config, step):
    """What happens to this worker in the middle of this step, on Ray."""
    directory, engine = Path(config["directory"]), resilin.current_job().engine

    def joined(number):
        return engine.membership.num_replicas >= number or engine.changes.sees_change

    if step == KILL and os.environ["RESILIN_MEMBER"].endswith("-1"):
        (directory / "killed").write_text(json.dumps([os.getpid(), time.time()]))
        os.kill(os.getpid(), signal.SIGKILL)
    if step == REPLACED:
        wait_until(lambda: joined(2))
    if step == ADDED:
        (directory / "add").touch()
        wait_until(lambda: joined(3))
    if step == LOST:
        (directory / f"waits-{os.getpid()}").touch()
        wait_until((directory / "taken").exists)


def train(config):
    """The user's loop; with an empty configuration, that of an undisturbed run."""
    torch.set_num_threads(1)
    resilin.init_process_group()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (N,), generator=generator)
    net = Net()
    optimizer = torch.optim.SGD(
        [
            {"params": net.net.parameters(), "lr": 0.05, "momentum": 0.9},
            {"params": [net.seen], "lr": 1.0},
        ]
    )
    model = resilin.AdaptiveDataParallel(net, optimizer)
    data = TensorDataset(x, y, torch.arange(N))
    loader = resilin.AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True)
    job = resilin.current_job()
    steps = []
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        for x, y, indices in loader:
            step = job.clock.steps
            if config:
                meet(config, step)
            model(x, y, indices).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append([epoch, step, job.engine.membership.num_replicas, time.time()])
    return {
        "weights": torch.cat([p.detach().flatten() for p in net.net.parameters()]).tolist(),
        "seen": (-BATCH * net.seen.detach()).tolist(),
        "pid": os.getpid(),
        "steps": steps,
    }


def train_through_the_loss_of_the_authority(config):
    """Trains with a checkpoint after each step; in its first life, kills the authority."""
    import ray

    directory = Path(config["directory"])
    torch.set_num_threads(1)
    resilin.init_process_group()
    resilin.checkpoint_to(str(directory / "checkpoints"), every=1)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(TensorDataset(torch.ones(40, 4)), batch_size=4)
    job, steps = resilin.current_job(), []
    for _ in resilin.remaining_epochs_until(1):
        for (x,) in loader:
            steps.append(job.clock.steps)
            if steps[-1] == 6 and not (directory / "authority").exists():
                (directory / "authority").touch()
                status = ray.get(ray.get_actor("second", namespace="test").status.remote())
                os.kill(status["pid"], signal.SIGKILL)
                time.sleep(150)  # until this process is ended
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return steps


def fail(config):
    raise ValueError(f"not on {config['day']}")


# The cluster -----------------------------------------------------------------------------------


def conduct(cluster, directory, status):
    """Adds a node to the job that runs, and takes it away with its worker."""
    wait_until((directory / "add").exists)
    known = {each["NodeID"] for each in cluster.global_state.node_table()}
    node = cluster.add_node(num_cpus=1)
    (mine,) = {each["NodeID"] for each in cluster.global_state.node_table()} - known
    wait_until(lambda: len(list(directory.glob("waits-*"))) == 3)
    before = status()
    (directory / "before.json").write_text(json.dumps(before))
    (victim,) = [each["pid"] for each in before["members"] if each["node"] == mine]
    cluster.remove_node(node, allow_graceful=False)
    # Workers see only later that their node is gone. On another machine they would be, too.
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{victim}").exists())
    (directory / "taken").touch()
    return victim


def main():
    import ray
    from ray.cluster_utils import Cluster

    from resilin.integrations.ray_live import run_live

    directory = Path(sys.argv[1])
    began = time.time()
    head = {"num_cpus": 2, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, namespace="test")

        def status():
            return ray.get(ray.get_actor("job", namespace="test").status.remote())

        running = ThreadPoolExecutor().submit(
            run_live,
            train,
            {"directory": str(directory)},
            min_workers=2,
            max_workers=3,
            name="job",
        )
        up = time.time()
        try:
            victim = conduct(cluster, directory, status)
        except TimeoutError:
            print(status(), file=sys.stderr)
            raise
        results = running.result(timeout=150)
        report = {"victim": victim, "results": results, "up": up - began, "job": time.time() - up}
        one = {"min_workers": 1, "max_workers": 1, "name": "second"}
        try:
            run_live(fail, {"day": "monday"}, **one)
        except Exception as error:
            report["error"] = [isinstance(error, ValueError), str(error)]
        again = train_through_the_loss_of_the_authority
        (report["again"],) = run_live(again, {"directory": str(directory)}, **one)
        (directory / "report.json").write_text(json.dumps(report))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
