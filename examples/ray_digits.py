"""Digits on Ray Train, on any number of workers that may change while it trains.

    python examples/ray_digits.py
    python examples/ray_digits.py --workers 1 8 --address auto --storage /mnt/shared

`train` is a plain loop with resilin's five lines. Ray starts its workers, and restarts them when
nodes come or go; the job resumes in the middle of the epoch, from the memory of a node that stayed,
and each optimizer step has the same samples as before. Here there is one machine and one worker,
unless `--workers` says otherwise.
"""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin


def train(config):
    from sklearn.datasets import load_digits

    from resilin.integrations.ray import report, storage

    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    data, test = TensorDataset(inputs[order[:1280]], targets[order[:1280]]), order[1280:]

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    resilin.init_process_group()
    resilin.checkpoint_to(storage())
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(data, batch_size=32, shuffle=True)
    loader.autoscale_batch_size(256, local_bsz_bounds=(8, 64))
    for epoch in resilin.remaining_epochs_until(config["epochs"]):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        report({"epoch": epoch})
    accuracy = (net(inputs[test]).argmax(dim=1) == targets[test]).float().mean().item()
    job = resilin.current_job()
    return {
        "replicas": job.engine.membership.num_replicas,
        "steps": job.clock.steps,
        "accuracy": accuracy,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 1), metavar=("MIN", "MAX"))
    parser.add_argument("--address", help="a cluster that runs, such as auto")
    parser.add_argument("--storage", help="a directory or URL that all nodes reach")
    args = parser.parse_args()

    # How soon Ray looks at its workers, and how long it waits for a node that is gone.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    if args.address:
        ray.init(address=args.address)
    else:
        # One machine that goes takes all with it: nothing to watch for.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        ray.init(num_cpus=args.workers[1], include_dashboard=False, log_to_driver=False)
    low, high = args.workers
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=low if low == high else (low, high)),
        run_config=RunConfig(
            name="digits",
            storage_path=args.storage or tempfile.mkdtemp(),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit().return_value
    print("{replicas} replicas, {steps} steps, accuracy {accuracy:.3f}".format(**result))
    ray.shutdown()
