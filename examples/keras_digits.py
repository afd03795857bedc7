"""Digits with Keras, on any number of processes.

    python examples/keras_digits.py
    resilin run --nproc 2 examples/keras_digits.py

One line is resilin's: the Model, whose batch size is the global one. Whatever launches it, each
optimizer step has the same samples; with `--max-batch-size` the batch grows while it trains, and
the learning rate follows.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from sklearn.datasets import load_digits

import resilin
import resilin.keras

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--max-batch-size", type=int, default=256)
args = parser.parse_args()

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype("float32")

keras.utils.set_random_seed(0)
net = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
# In reference steps: right for whatever batch sizes the run will have.
rate = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=args.epochs * 40)
net.compile(
    optimizer=keras.optimizers.SGD(rate, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

model = resilin.keras.Model(net, batch_size=32, max_local_bsz=64)
model.autoscale_batch_size(args.max_batch_size)
model.fit(
    pixels[:1280],
    labels[:1280],
    epochs=args.epochs,
    validation_data=(pixels[1280:], labels[1280:]),
    verbose=0,
)

engine = resilin.current_job().engine
if engine.membership.replica == 0:
    logs = {name: values[-1] for name, values in model.history.history.items()}
    print(
        f"{engine.membership.num_replicas} replicas, {resilin.current_job().clock.steps} steps, "
        f"progress {logs['resilin/progress']:.0f}, batch {logs['resilin/batch_size']:.0f}, "
        f"accuracy {logs['val_accuracy']:.3f}"
    )
