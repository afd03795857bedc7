"""resilin, with `--live` and with a restart: the guides "Training" and "Live elasticity"."""

import task

import resilin


def place() -> task.Place:
    now = resilin.current_job().engine.membership
    return str(now.generation), now.replica, now.num_replicas


net, optimizer, dataset = task.make()
ledger = task.Ledger(net, place)
resilin.init_process_group()
model = resilin.AdaptiveDataParallel(net, optimizer)
loader = resilin.AdaptiveDataLoader(dataset, batch_size=task.BATCH, shuffle=True)
resilin.checkpoint_to(task.FOLDER / "checkpoints", every=task.SAVE_EVERY, memory_every=1)
for epoch in resilin.remaining_epochs_until(task.EPOCHS):
    for batch in loader:
        loss = model(**batch)["loss"]
        loss.backward()
        ledger.begin(epoch, model.clock.steps + 1)
        optimizer.step()
        optimizer.zero_grad()
        ledger.done(model.clock.steps)
if resilin.current_job().engine.membership.replica == 0:
    task.finish(net)
