"""The pure core of resilin: numbers in, values out.

Nothing here imports torch, opens a file, reads a clock or draws a random number without an explicit
seed. Live training, trace replay, simulators and tests all run these same functions.
"""

from resilin.core.batch_schedule import BatchSchedule
from resilin.core.clock import Budget, Clock, Reference, Schedule, scheduler_steps, step_scale
from resilin.core.noise import Noise, NoiseAverage, NoiseSample
from resilin.core.plan import BatchBounds, BatchPlan, PlanError
from resilin.core.ramp import NoiseRamp
from resilin.core.rules import LEGW, Factors, PowerRule, Scaling, ScalingRule
from resilin.core.stream import Ownership, SampleStream
from resilin.core.trace import BatchTrace, CapacityTrace, TraceError

__all__ = [
    "LEGW",
    "BatchBounds",
    "BatchPlan",
    "BatchSchedule",
    "BatchTrace",
    "Budget",
    "CapacityTrace",
    "Clock",
    "Factors",
    "Noise",
    "NoiseAverage",
    "NoiseRamp",
    "NoiseSample",
    "Ownership",
    "PlanError",
    "PowerRule",
    "Reference",
    "SampleStream",
    "Scaling",
    "ScalingRule",
    "Schedule",
    "TraceError",
    "scheduler_steps",
    "step_scale",
]
