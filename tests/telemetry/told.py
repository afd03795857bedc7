"""A run that was never trained: events in the form that a job writes them."""

from __future__ import annotations

import math

from resilin.core import events

REFERENCE = 100
TOTAL = 400.0


def told_run(num_steps=120, *, began=1000.0, seed=0, fault_at=60, total=TOTAL):
    """A job whose batch doubles at a third, and that loses a replica at `fault_at`."""
    told = []
    time, progress, samples = began, 0.0, 0
    generation, replicas, batch = 0, 2, REFERENCE

    def stamp(step):
        return {"time": time, "step": step, "generation": generation}

    def start(step, resumed):
        told.append(
            events.StartEvent(
                **stamp(step),
                reference=REFERENCE,
                replicas=replicas,
                hosts=1,
                rule="adascale",
                optimizer="SGD",
                total_steps=total,
                steps_per_epoch=total and total / 4,
                resumed=resumed,
                script="train.py --epochs 4",
            )
        )

    start(0, False)
    for step in range(1, num_steps + 1):
        if step == num_steps // 3:
            told.append(
                events.DecisionEvent(
                    **stamp(step - 1),
                    batch_size_before=batch,
                    batch_size=2 * batch,
                    reason="it learns faster",
                )
            )
            batch *= 2
        scale = batch / REFERENCE
        gain = 1 + (scale - 1) * 0.5
        time, progress, samples = time + 1.0, progress + gain, samples + batch
        told.append(
            events.StepEvent(
                **stamp(step),
                epoch=int(progress // 100),
                replicas=replicas,
                batch_size=batch,
                local_bsz=50,
                accumulation_steps=batch // replicas // 50,
                samples=samples,
                progress=progress,
                scale=scale,
                gain=gain,
                lr_factor=gain,
                lr=0.1,
                sqr_norm=2.0,
                trace=500.0,
                seconds=0.9,
                loss=2 * math.exp(-progress / 100) + 0.01 * ((7 * step + seed) % 5),
            )
        )
        if step == fault_at:
            told.append(
                events.FaultEvent(
                    **stamp(step), kind="worker_lost", detail="killed by SIGKILL", replica=1
                )
            )
            time += 10.0
            generation, replicas = generation + 1, 1
            told.append(
                events.RescaleEvent(
                    **stamp(step),
                    replicas_before=2,
                    replicas=1,
                    reason="resumed from memory",
                    seconds=10.0,
                )
            )
            start(step, True)
    told.append(events.MetricsEvent(**stamp(num_steps), values={"accuracy": 0.75}))
    saved = {"action": "saved", "path": "/ckpt/9", "num_bytes": 5_000_000, "seconds": 0.5}
    told.append(events.CheckpointEvent(**stamp(num_steps), **saved))
    return told
