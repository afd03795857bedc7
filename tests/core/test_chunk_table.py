"""What a process says of its pieces is what others read, and lists of names are told once."""

import json
import random

from resilin.core.chunk_table import Chunk, Summary, order, runs, runs_told, shapes_told
from resilin.core.mesh_spread import Spread


def test_pieces_of_all_processes_are_told():
    rng = random.Random(0)
    shapes = {f"t{i}": rng.choice([(8, 3), (8,), (2, 5)]) for i in range(30)} | {"none": (0, 4)}
    kinds = {name: rng.choice(["float32", "int64"]) for name in shapes}
    spread = Spread((4,), (0,))
    offers = []
    for process in range(4):
        chunks = [Chunk(n, spread.placement(s, process), kinds[n]) for n, s in shapes.items()]
        offers.append(sorted((c for c in chunks if c.placement.num_elements), key=order))
    # Process 3 has no tensor of two rows, and lists only every second run.
    told = [Summary(runs(offer)[:: 1 + (i == 3)], shapes) for i, offer in enumerate(offers)]
    everyone = json.loads(json.dumps([each.rows for each in told]))
    each_told = [each.lists(process, everyone) for process, each in enumerate(told)]
    lists = json.loads(json.dumps({k: v for part in each_told for k, v in part.items()}))
    assert sum(map(len, each_told)) == len(lists)
    assert each_told[3] == {}
    assert shapes_told(everyone, lists) == shapes
    for process, offer in enumerate(offers):
        found = runs_told(everyone[process], lists)
        numbers = {}
        for run in found:
            for number, name in enumerate(run.names, run.first):
                numbers[number] = Chunk(name, run.placement, run.kind)
        assert all(offer[number] == chunk for number, chunk in numbers.items())
        assert (len(numbers) == len(offer)) == (process < 3)
    assert len(everyone[0][1]) == 6


def test_nobody_has_anything():
    nothing = Summary(runs([]), {})
    everyone = [nothing.rows, nothing.rows]
    lists = nothing.lists(0, everyone)
    assert nothing.lists(1, everyone) == {}
    assert shapes_told(everyone, lists) == {}
    assert runs_told(everyone[1], lists) == []
