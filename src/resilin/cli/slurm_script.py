"""The batch scripts of `resilin slurm`: plain shell, for users to read and change.

There are two. Each element of a job array runs one agent on one node. Agents join when Slurm starts
their element and leave when Slurm takes its node: nothing but Slurm decides how many there are. One
small job beside them runs the store through which they find each other, since no node of the array
stays. They share a directory:

- `endpoint`: host and port of the store while it runs;
- `array`: id of the job array;
- `finished`: exists when the training has finished.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATIENCE = 600
"""Seconds for which an element waits for a store that does not answer."""
PART = """\
directory={directory}
finished() {{ [ -e "$directory/finished" ]; }}
answers() {{
    endpoint=$(cat {endpoint} 2>/dev/null) || return 1
    timeout 10 bash -c ": < /dev/tcp/${{endpoint%:*}}/${{endpoint##*:}}" 2>/dev/null
}}
again() {{ # not $SLURM_JOB_ID: that of one of the elements is also that of the whole array
    exec scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
}}

# Slurm sends SIGUSR1 to this shell alone, and SIGTERM to all processes of the job.
agent=
asked=
trap 'asked=1; [ -z "$agent" ] || kill -USR1 "$agent"' USR1

# An element that starts late has nothing to do.
finished && exit 0
until answers; do
    finished && exit 0
    [ -z "$asked" ] || again
    [ "$SECONDS" -lt {patience} ] || {{ echo "no answer from the store"; exit 1; }}
    sleep 2
done

trap : TERM
{command} &
agent=$!
[ -z "$asked" ] || kill -USR1 "$agent"
while wait "$agent"; code=$?; [ "$code" -gt 128 ] && kill -0 "$agent" 2>/dev/null; do :; done
wait "$agent" 2>/dev/null  # its own code, if a signal has ended the wait
last=$?; [ "$last" = 127 ] || code=$last

if [ "$code" = 0 ]; then
    touch "$directory/finished"
    scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
    exit 0
fi
# Asked to leave: by its time limit, or for a job of a higher priority. 143: by scancel.
if [ "$asked" ] || {{ [ "$code" != 143 ] && ! answers; }}; then
    again
fi
for _ in 1 2 3 4 5; do
    finished && exit 0  # another element may just be writing it down
    sleep 1
done
exit "$code"
"""
STORE = """\
directory={directory}
cd "$directory" || exit 1
rm -f endpoint store.log
{command} > store.log 2>&1 &
store=$!
trap leave=1 USR1
trap 'rm -f endpoint; kill "$store"; exit 143' TERM
until port=$(sed -n 's/.* port \\([0-9]*\\)$/\\1/p' store.log 2>/dev/null) && [ "$port" ]; do
    kill -0 "$store" || exit 1
    sleep 0.2
done
echo "$(hostname):$port" > endpoint.new && mv endpoint.new endpoint

empty() {{ # whether the array is gone; a Slurm that does not answer is no sign of it
    [ -e array ] || {{ [ "$SECONDS" -gt 600 ]; return; }} # nobody has submitted it
    queue=$(squeue --noheader --jobs="$(cat array)" 2>&1)
    [[ -z $queue || $queue == *"nvalid job id"* ]]
}}
rounds=0
while kill -0 "$store" 2>/dev/null; do
    sleep 5 & wait $!
    rounds=$((rounds + 1))
    if [ -e finished ] || [ $((rounds % 6)) = 0 ]; then
        empty && {{ rm -f endpoint; kill "$store"; exit 0; }}
    fi
    if [ "$leave" ]; then # the time limit is near: all save, and meet again at the next store
        rm -f endpoint
        scancel --signal=USR1 --batch "$(cat array)"
        sleep 20
        kill "$store"
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
done
rm -f endpoint
exit 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """Batch scripts of one job."""

    name: str
    """Name of the job in Slurm."""
    directory: str
    """Absolute path of the directory that the jobs share."""
    nodes: tuple[int, int]
    """Fewest and most nodes."""
    run: Sequence[str]
    """The command of an agent, up to the options of the rendezvous."""
    script: Sequence[str]
    """The training script and its arguments."""
    part_options: Mapping[str, str]
    """Options of `sbatch` for the array."""
    part_more: Sequence[str] = ()
    """More arguments of `sbatch` for the array."""
    store: Sequence[str] = ()
    """The command of the store; empty if there is one already."""
    store_options: Mapping[str, str]
    """Options of `sbatch` for the store."""
    endpoint: str | None = None
    """Host and port of a store that runs already."""

    def part(self) -> str:
        """The script of each element of the array."""
        least, most = self.nodes
        options = {
            "job-name": self.name,
            "array": f"1-{most}",
            "nodes": "1",
            "ntasks": "1",
            "output": f"{self.directory}/part-%a.log",
            "open-mode": "append",
            **self.part_options,
        }
        endpoint = '"$directory/endpoint"'
        if self.endpoint is not None:
            endpoint = f"<(echo {shlex.quote(self.endpoint)})"
        rendezvous = [
            *("--nnodes", f"{least}:{most}"),
            *("--rdzv-id", self.directory.rpartition("/")[2]),
            *("--rdzv-conf", "is_host=0"),
        ]
        command = (
            f"{shlex.join([*self.run, *rendezvous])} --rdzv-endpoint "
            f'"$endpoint" {shlex.join(self.script)}'
        )
        body = PART.format(
            directory=shlex.quote(self.directory),
            endpoint=endpoint,
            patience=PATIENCE,
            command=command,
        )
        return _headed(options, ["--requeue", *self.part_more], body)

    def meeting(self) -> str | None:
        """The script of the store; None if there is one already."""
        if not self.store:
            return None
        options = {
            "job-name": f"{self.name}-store",
            "nodes": "1",
            "ntasks": "1",
            "output": f"{self.directory}/store-job.log",
            "open-mode": "append",
            **self.store_options,
        }
        body = STORE.format(directory=shlex.quote(self.directory), command=shlex.join(self.store))
        return _headed(options, ["--requeue"], body)


def _headed(options: Mapping[str, str], more: Sequence[str], body: str) -> str:
    # sbatch splits its comments as a shell does.
    arguments = [f"--{name}={value}" for name, value in options.items()]
    lines = [f"#SBATCH {shlex.quote(each)}" for each in [*arguments, *more]]
    return "\n".join(["#!/bin/bash", *lines, "", body])
