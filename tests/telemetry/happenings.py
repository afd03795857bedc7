"""One event of each kind, with every number that it can have: what the sinks are shown."""

from resilin.core.events import (
    Candidate,
    CheckpointEvent,
    DecisionEvent,
    EpochEvent,
    Event,
    FaultEvent,
    MetricsEvent,
    RescaleEvent,
    RiskEvent,
    StartEvent,
    StepEvent,
    UnknownEvent,
)

BEGAN = 1_700_000_000.0


def step(number: int, **changes: object) -> StepEvent:
    values = {
        "time": BEGAN + number,
        "step": number,
        "generation": 1,
        "epoch": 0,
        "replicas": 4,
        "batch_size": 128,
        "local_bsz": 16,
        "accumulation_steps": 2,
        "samples": 128 * number,
        "progress": 1.5 * number,
        "scale": 2.0,
        "gain": 1.5,
        "lr_factor": 1.5,
        "lr": 0.1,
        "sqr_norm": 0.5,
        "trace": 40.0,
        "seconds": 0.25,
        "loss": 2.0 / number,
        "metrics": {"accuracy": 0.75, "top@5": 0.9},
    }
    return StepEvent(**{**values, **changes})


RESCALE = RescaleEvent(
    time=BEGAN,
    step=0,
    generation=1,
    replicas_before=2,
    replicas=4,
    reason="two machines came",
    seconds=9.5,
)
START = StartEvent(
    time=BEGAN,
    step=0,
    generation=1,
    reference=64,
    replicas=4,
    hosts=2,
    rule="adascale",
    optimizer="SGD",
    total_steps=300.0,
)
DECISION = DecisionEvent(
    time=BEGAN + 2,
    step=2,
    generation=1,
    batch_size_before=64,
    batch_size=128,
    reason="a better goodput",
    candidates=(
        Candidate(batch_size=64, local_bsz=16, accumulation_steps=1, goodput=900.0),
        Candidate(batch_size=128, local_bsz=16, accumulation_steps=2, goodput=1100.0),
    ),
)
FAULT = FaultEvent(
    time=BEGAN + 3, step=3, generation=1, kind="out_of_memory", detail="16 did not fit", replica=1
)
RISK = RiskEvent(time=BEGAN + 3, step=3, generation=1, steps=7)
METRICS = MetricsEvent(time=BEGAN + 3, step=3, generation=1, values={"validation/accuracy": 0.8})
SAVED = CheckpointEvent(
    time=BEGAN + 4, step=4, action="saved", path="/ckpt/4", num_bytes=4096, seconds=0.5
)
LOADED = CheckpointEvent(time=BEGAN, step=0, action="loaded", path="/ckpt/0", seconds=0.75)
FAILED = CheckpointEvent(time=BEGAN, step=0, action="failed", path="/ckpt/1", detail="disk full")
EPOCH = EpochEvent(time=BEGAN + 4, step=4, generation=1, epoch=0, samples=512, progress=6.0)
UNKNOWN = UnknownEvent(time=BEGAN + 4, step=4, kind="comet", fields={"tail": 3})

ALL: tuple[Event, ...] = (
    RESCALE,
    START,
    LOADED,
    step(1),
    step(2),
    DECISION,
    FAULT,
    RISK,
    METRICS,
    step(4),
    SAVED,
    FAILED,
    EPOCH,
    UNKNOWN,
)
"""A short run. Step 3 is not told of."""
