"""A job on a Ray cluster whose nodes come and go: `python ray_job.py DIRECTORY`.

The cluster has one node with one processor. A second one is added while the first worker waits in
the middle of the first epoch, and killed, with all that it had in memory, while both workers wait
in the middle of the second. Each worker writes down the samples of each step that it has made.

What Ray does alone is seen in the same run, which saves a second one: before they train with
resilin, the first worker and the two that follow it train with the loop of Ray's guides.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resilin

NUM, EPOCHS, REFERENCE = 103, 2, 10
LR, DECAY = 0.1, 0.97
TRACE = resilin.BatchTrace((0, 2, 3, 5, 6, 8), (8, 32, 7, 8, 32, 10), end="repeat")
"""With micro-batches of 4, two workers run 1 of them in step 5, and 4 in step 6."""
GATES = {1: 4, 2: 11}
"""The step before which so many workers wait for what happens to them."""


class Net(nn.Module):
    """Each sample adds 1 to the gradient of `unit`, whose mean shows what a step has weighed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        self.unit = nn.Parameter(torch.zeros(()))
        self.double()

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y) + self.unit


def make_parts():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM, 6, generator=generator, dtype=torch.float64)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: DECAY**step)
    return TensorDataset(x, x[:, :3].argmax(dim=1), torch.arange(NUM)), net, optimizer, scheduler


def wait_for(path, seconds=100):
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has not come within {seconds} s")
        time.sleep(0.05)


def wait_at_gate(directory, replica):
    (directory / f"waiting-{replica}").touch()
    wait_for(directory / "go")


class Ledger:
    """What this worker has trained on, one line for each step."""

    def __init__(self, directory, replica):
        directory.mkdir(exist_ok=True)
        self.path = directory / f"{replica}-{os.getpid()}.jsonl"

    def write(self, **line):
        line = {**line, "pid": os.getpid(), "time": time.time()}
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)


def lines_of(directory):
    """All lines of all ledgers."""
    files = sorted(directory.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# With resilin ----------------------------------------------------------------------------------


def train(directory, node=""):
    """The user's loop, the same with and without Ray."""
    data, net, optimizer, scheduler = make_parts()
    resilin.init_process_group()
    model = resilin.AdaptiveDataParallel(
        net, optimizer, scheduler, rule="constant", schedule_by="samples", stats_every=1
    )
    loader = resilin.AdaptiveDataLoader(data, batch_size=REFERENCE, shuffle=True, max_local_bsz=4)
    loader.set_batch_size(TRACE)
    job = resilin.current_job()
    engine = job.engine
    ledger, samples = Ledger(directory / "resilin", engine.membership.replica), []
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        for x, y, index in loader:
            micro_batch, step = job.micro_batch, job.clock.steps
            if (
                node
                and GATES.get(engine.membership.num_replicas) == step
                and micro_batch.index == 0
            ):
                wait_at_gate(
                    directory / f"{engine.membership.num_replicas}", engine.membership.replica
                )
            model(x, y).backward()
            weight, lr = net.unit.grad.item(), optimizer.param_groups[0]["lr"]
            optimizer.step()
            optimizer.zero_grad()
            if micro_batch.weight:
                samples += index.tolist()
            if micro_batch.last:
                ledger.write(
                    generation=engine.membership.generation,
                    replicas=engine.membership.num_replicas,
                    hosts=engine.membership.num_hosts,
                    node=node,
                    epoch=epoch,
                    step=step,
                    samples=samples,
                    accumulation=loader.accumulation_steps,
                    weight=weight,
                    lr=lr,
                    model=hashlib.sha256(weights_of(net).numpy().tobytes()).hexdigest(),
                )
                samples = []
        if node:
            from resilin.integrations.ray import report

            report({"epoch": epoch})
    return {"weights": weights_of(net).tolist(), "steps": job.clock.steps}


def weights_of(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train_on_ray(config):
    import ray

    from resilin.integrations.ray import storage

    directory = Path(config["directory"])
    if not (directory / "2" / "waiting-0").exists():
        train_stock(directory)
    node = ray.get_runtime_context().get_node_id()
    # All nodes are on one machine: as on many, none of them sees the memory of another.
    os.environ["RESILIN_MEMORY_DIR"] = str(directory / "memory" / node)
    resilin.checkpoint_to(storage(), every=None, memory_every=1)
    return {**train(directory, node), "name": resilin.current_job().engine.memory_name}


# Without ---------------------------------------------------------------------------------------


def train_stock(directory):
    """As Ray's guides have it, with a checkpoint in the middle of the epoch."""
    import ray.train
    from ray.train.torch import prepare_data_loader, prepare_model

    context = ray.train.get_context()
    data, net, optimizer, _ = make_parts()
    model, first, done = prepare_model(net), 0, 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as place:
            state = torch.load(Path(place) / "state.pt")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, done = state["epoch"], state["step"]
    loader = prepare_data_loader(DataLoader(data, batch_size=REFERENCE, shuffle=True))
    ledger, step = Ledger(directory / "stock", context.get_world_rank()), done
    for epoch in range(first, 1):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y, index in loader:
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
            ledger.write(done=done, step=step, samples=index.tolist())
            step += 1
            if not done and step == GATES[1]:
                with tempfile.TemporaryDirectory() as place:
                    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "epoch": epoch, "step": step}, Path(place) / "state.pt")
                    saved = ray.train.Checkpoint.from_directory(place)
                    ray.train.report({}, checkpoint=saved)
                return


# The cluster -----------------------------------------------------------------------------------


def look_often():
    """Ray looks for nodes every 20 s, which no setting changes: one that looks twice a second."""
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as ray_side

    class Coordinator(ray_side._AutoscalingCoordinatorActor):
        TICK_INTERVAL_S = 0.5

    ray_side._AutoscalingCoordinatorActor = Coordinator
    # It has a name in the cluster, by which the job finds it.
    ray_side.get_or_create_autoscaling_coordinator()


def fit(directory):
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchTrainer

    class Told(UserCallback):
        def after_report(self, run_context, metrics, checkpoint):
            with (directory / "metrics.txt").open("a") as file:
                print(json.dumps(metrics[0]), file=file)

    trainer = TorchTrainer(
        train_on_ray,
        train_loop_config={"directory": str(directory)},
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=0.5),
        run_config=RunConfig(
            name="job",
            storage_path=str(directory / "storage"),
            failure_config=FailureConfig(max_failures=2),
            callbacks=[Told()],
        ),
    )
    return trainer.fit().return_value


def conduct(cluster, directory, times):
    """Adds a node to the job that runs, and kills it."""
    wait_for(directory / "1" / "waiting-0")
    before = {node["NodeID"] for node in cluster.global_state.node_table()}
    times["added"] = time.time()
    node = cluster.add_node(num_cpus=1)
    (mine,) = {node["NodeID"] for node in cluster.global_state.node_table()} - before
    for replica in (0, 1):
        wait_for(directory / "2" / f"waiting-{replica}")
    times["killed"] = time.time()
    cluster.remove_node(node, allow_graceful=False)
    for line in lines_of(directory / "resilin"):
        if line["node"] == mine:
            # Workers see only later that their node is gone. On another machine they would be, too.
            with suppress(ProcessLookupError):
                os.kill(line["pid"], signal.SIGKILL)
    shutil.rmtree(directory / "memory" / mine)
    (directory / "2" / "go").touch()


def when_first(lines, replicas, after=0.0):
    return min(x["time"] for x in lines if x["replicas"] == replicas and x["time"] > after)


def main():
    import ray
    from ray.cluster_utils import Cluster

    directory = Path(sys.argv[1])
    for name in ("1", "2"):
        (directory / name).mkdir(parents=True)
    system = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 5000,
        "health_check_failure_threshold": 3,
    }
    began = time.time()
    head = {"num_cpus": 1, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": system})
    try:
        ray.init(address=cluster.address)
        look_often()
        times = {"up": time.time()}
        # Not waited for if this fails: without a cluster it ends. The main thread makes the nodes,
        # which want its signals.
        fitting = ThreadPoolExecutor().submit(fit, directory)
        conduct(cluster, directory, times)
        result = fitting.result()
        lines = lines_of(directory / "resilin")
        seconds = {
            "cluster up": times["up"] - began,
            "job begun to first step": when_first(lines, 1) - times["up"],
            "node added to first step of 2 workers": when_first(lines, 2) - times["added"],
            "node killed to first step of 1 worker": when_first(lines, 1, times["killed"])
            - times["killed"],
            "job": time.time() - times["up"],
        }
        # Not printed: Ray prints what its workers say, at any time.
        report = {"result": result, "seconds": seconds}
        (directory / "report.json").write_text(json.dumps(report))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
