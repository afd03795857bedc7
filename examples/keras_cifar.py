"""A small conv net on images of CIFAR's shape, with Keras, on any number of processes.

    python examples/keras_cifar.py
    resilin run --nproc 2 examples/keras_cifar.py

The images are made on the spot: ten patterns, each behind as much noise. The global batch is 256,
and a process runs at most 64 samples at once; the plan says how often it accumulates.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import resilin
import resilin.keras


def make_images(num, seed):
    patterns = np.random.default_rng(0).normal(size=(10, 32, 32, 3))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, size=num)
    images = patterns[labels] + 3 * generator.normal(size=(num, 32, 32, 3))
    return images.astype("float32"), labels


keras.utils.set_random_seed(0)
net = keras.Sequential(
    [
        keras.Input((32, 32, 3)),
        keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)
net.compile(
    optimizer=keras.optimizers.Adam(0.003),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

model = resilin.keras.Model(net, batch_size=256, max_local_bsz=64)
plan = model.plan
if plan.master:
    print(f"{plan.gpus} processes x {plan.steps} micro-batches of at most {plan.batch_size}")

images, labels = make_images(2048, seed=1)
model.fit(images, labels, epochs=3, verbose=0)
loss, accuracy = model.evaluate(*make_images(512, seed=2), verbose=0)
if plan.master:
    print(f"{resilin.current_job().clock.steps} steps, test accuracy {accuracy:.3f}")
