"""Keras 3: a model whose global batch does not depend on the number of processes.

`Model` wraps a Keras model and has a `fit` of its own, which trains in optimizer steps instead of
batches; everything else is still done by the Keras model. With the torch backend a
step may have any size, on any number of processes, and both may change while it trains. JAX and
TensorFlow compile their step once, in one process: there the batch is planned before the first
step, and a setting that would change it later is rejected.
"""

from __future__ import annotations

from resilin.telemetry import extras
from resilin.training.bridge.home import refuse_live_framework

refuse_live_framework()

extras.load("keras", "keras", "resilin.keras")

from resilin.integrations.keras.callback import ReadOut  # noqa: E402
from resilin.integrations.keras.compiled import accumulate  # noqa: E402
from resilin.integrations.keras.model import Model  # noqa: E402

__all__ = ["Model", "ReadOut", "accumulate"]
