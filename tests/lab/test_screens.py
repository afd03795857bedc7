"""The pictures of the documentation, from a real job that really loses a worker."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from resilin.lab.summary import summarise
from resilin.telemetry.run import Run

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.mark.nightly(part="docs")
@pytest.mark.timeout(240)
def test_top_and_report_of_a_real_run_are_pictures(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FIGURES))
    import screens

    run = screens.make_run(tmp_path, epochs=3, kill_at=40, stop_at=80)
    summary = summarise(Run.load(run))
    assert summary.faults >= 1
    assert summary.replicas == (1, 2)
    assert (summary.generations, summary.rescales) == (3, 2)
    assert summary.progress >= 3 * 94
    assert summary.paused_seconds > 0
    assert summary.metrics["accuracy"] > 0.1
    screens.picture_of_top(run, tmp_path / "top.png")
    screens.picture_of_report(run, tmp_path / "report.png")
    for name, least in (("top.png", (1200, 700)), ("report.png", (1500, 1500))):
        with Image.open(tmp_path / name) as image:
            assert image.width >= least[0]
            assert image.height >= least[1]
            grey = np.asarray(image.convert("L"), dtype=float)
        # Not blank, and neither is any third of it from top to bottom.
        assert all(part.std() > 5 for part in np.array_split(grey, 3))
    del sys.modules["screens"]
