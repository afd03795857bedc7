"""A run with TensorBoard: the script's own writer, and the events of the job on it.

    python examples/telemetry.py --logdir runs/digits
    tensorboard --logdir runs

The batch size doubles half-way, so that there is something to see: scale, gain and learning rate
follow it, and the loss continues.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import resilin
from resilin.telemetry.tensorboard import TensorBoard

parser = argparse.ArgumentParser()
parser.add_argument("--logdir", default=None, help="Default: a new directory for temporary files.")
args = parser.parse_args()
logdir = args.logdir or tempfile.mkdtemp(prefix="resilin-")

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
images, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

resilin.init_process_group()
model = resilin.AdaptiveDataParallel(net, optimizer)
train = TensorDataset(images[:1500], targets[:1500])
loader = resilin.AdaptiveDataLoader(train, batch_size=32, shuffle=True)
loader.set_batch_size(resilin.BatchTrace.parse("step,batchsize\n0,32\n94,64\n"))
# Called on the process that reports, with its first event; after a restart it hides old points.
resilin.listen(TensorBoard(lambda step: SummaryWriter(logdir, purge_step=step)))

for epoch in resilin.remaining_epochs_until(4):
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resilin.record(loss=loss)
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == targets[1500:]).float().mean().item()
    resilin.record({"validation/accuracy": accuracy})
    if resilin.current_job().engine.membership.is_first:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")

if resilin.current_job().engine.membership.is_first:
    print(f"tensorboard --logdir {logdir}")
