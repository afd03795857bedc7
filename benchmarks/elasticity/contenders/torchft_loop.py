"""torchft: its README and train_ddp.py.

Each host is a replica group of one worker. Survivors continue with a smaller global batch. As its
documentation says, the position of each group's loader is saved in each step; the rest is saved
for the case that all groups are lost.
"""

import os
from datetime import timedelta

import task
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import PGTransport


def save(state: object, path: os.PathLike[str]) -> None:
    temporary = f"{path}.{task.HOST}"
    torch.save(state, temporary)
    os.replace(temporary, path)


def place() -> task.Place:
    return str(manager._quorum_id), task.HOST, manager.num_participants()


def state_dict() -> dict[str, object]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def load_state_dict(state: dict[str, dict[str, object]]) -> None:
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


net, optimizer, dataset = task.make()
ledger = task.Ledger(net, place)
pg = ProcessGroupGloo(timeout=timedelta(seconds=5))
manager = Manager(
    pg=pg,
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"host_{task.HOST}",
    timeout=timedelta(seconds=30),
    checkpoint_transport=PGTransport(pg, timeout=timedelta(seconds=10), device="cpu"),
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, optimizer)
groups = task.NUM_HOSTS
sampler = DistributedSampler(
    dataset, replica_rank=task.HOST, num_replica_groups=groups, group_rank=0, num_replicas=1
)
loader = StatefulDataLoader(dataset, batch_size=task.BATCH // groups, sampler=sampler)
path, position = task.FOLDER / "checkpoint.pt", task.FOLDER / f"position-{task.HOST}.pt"
epoch = 0
if path.exists():
    state = torch.load(path, weights_only=True)
    load_state_dict(state)
    manager.load_state_dict(state["manager"])
if position.exists():
    state = torch.load(position, weights_only=False)
    epoch = state["epoch"]
    loader.load_state_dict(state["loader"])
total = task.EPOCHS * len(loader)
task.await_hosts()
while manager.current_step() < total:
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        if manager.is_participating():
            ledger.begin(epoch, manager.current_step() + 1)
        optimizer.step()
        ledger.done(manager.current_step())
        net.seen.clear()  # of a step that was not committed, too: the loader goes on
        save({"epoch": epoch, "loader": loader.state_dict()}, position)
        if manager.current_step() % task.SAVE_EVERY == 0:
            save({**state_dict(), "manager": manager.state_dict()}, path)
        if manager.current_step() >= total:
            break
    epoch += 1
if manager.participating_rank() == 0:
    task.finish(net)
manager.shutdown()
