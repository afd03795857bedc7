import io

import pytest

import resilin
from resilin.telemetry.progress import Display
from resilin.telemetry.wording import amount, extent, span


class Terminal(io.StringIO):
    """Says that it is a terminal, and keeps what was shown."""

    def isatty(self):
        return True

    @property
    def pictures(self):
        return [text.rstrip() for text in self.getvalue().replace("\n", "\r").split("\r") if text]


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_fraction_is_progress_over_total_and_never_goes_back_or_beyond():
    clock, screen = Time(), Terminal()
    display = Display(200.0, stream=screen, clock=clock)
    shown = []
    for progress in [0, 10, 50, 40, 120, 199.5, 203.7]:
        clock.now += 1
        display.update(progress=progress)
        shown.append(display.fraction)
    assert shown == [0, 0.05, 0.25, 0.25, 0.6, 0.9975, 1]
    assert "100% [######" in screen.pictures[-1]
    assert "#] 203.7/200 steps" in screen.pictures[-1]
    assert " 99% [" in screen.pictures[-2]


def test_the_time_left_follows_the_recent_rate():
    clock = Time()
    display = Display(1000.0, stream=Terminal(), clock=clock)
    progress = 0.0
    for rate in [1.0] * 100 + [4.0] * 100:
        clock.now += 1
        progress += rate
        display.update(progress=progress)
    assert display.rate == pytest.approx(4.0)
    assert display.seconds_left == pytest.approx(500 / 4)
    assert "2 min 05 s left" in display.text(100)


@pytest.mark.parametrize("total", [None, 1e7])
def test_the_line_fits_any_width(total):
    display = Display(total, stream=Terminal(), clock=(clock := Time()))
    for progress in (1e6, 2e6):
        clock.now += 3600
        display.update(progress=progress, epoch="3/90", batch_size=65536, replicas=128, gain=31.4)
    for width in range(5, 140):
        assert len(display.text(width)) <= width
    whole = display.text(120)
    for fact in ("epoch 3/90", "batch 65,536", "128 replicas", "gain 31.4", "278/s"):
        assert fact in whole


def test_a_file_gets_a_line_a_minute_and_nothing_else():
    clock, file = Time(), io.StringIO()
    display = Display(100.0, stream=file, clock=clock)
    for progress in range(100):
        clock.now += 2
        if display.due():
            display.update(progress=progress)
    display.close()
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["30%", "60%", "90%"]
    assert "\r" not in file.getvalue()


def test_closing_ends_the_line_once():
    screen = Terminal()
    display = Display(10.0, stream=screen)
    display.close()
    assert screen.getvalue() == ""
    display.update(progress=3)
    display.close()
    display.close()
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().endswith("\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (float("inf"), "-"),
        (0, "0.0 s"),
        (0.0234, "23 ms"),
        (0.44, "0.4 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (11220, "3 h 07 min"),
        (363600, "4 d 5 h"),
        (-90, "-1 min 30 s"),
    ],
)
def test_durations_in_words(seconds, text):
    assert span(seconds) == text


def test_amounts_in_words():
    values = [None, float("nan"), float("inf"), 0, 0.5, 12.3456, 999.96, 1234.5, 1234567, 2.5e10]
    expected = ["-", "-", "inf", "0", "0.5", "12.35", "1000", "1,234", "1.235M", "25G"]
    assert [amount(value) for value in values] == expected
    assert [amount(1e300), amount(-1e300)] == ["1.000e+300", "-1.000e+300"]
    assert [extent([]), extent([3.0, 3.0]), extent([2.0, float("nan"), 8.0])] == [
        "-",
        "3",
        "2 to 8",
    ]


# In a loop ---------------------------------------------------------------------------------------


@pytest.fixture
def job():
    resilin.reset_job()
    yield resilin.current_job()
    resilin.reset_job()


class Watch(Terminal):
    """Notes how far the job has come whenever something is shown."""

    def __init__(self, job):
        super().__init__()
        self.job, self.progress = job, []

    def write(self, text):
        self.progress.append(self.job.clock.progress)
        return super().write(text)


def train(watch, rule, *, epochs, double_at):
    import torch
    from torch.utils.data import TensorDataset

    from resilin.training.script.progress_bar import progress_bar

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule=rule, stats_every=1)
    loader = resilin.AdaptiveDataLoader(data, batch_size=8, shuffle=True)
    steps = 0
    for _ in resilin.remaining_epochs_until(epochs):
        for x, y in progress_bar(loader, stream=watch):
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == double_at:
                loader.set_batch_size(16)
    return model


@pytest.mark.parametrize("rule", ["adascale", "linear"])
def test_the_bar_tells_the_truth_when_the_batch_size_doubles(job, monkeypatch, rule):
    monkeypatch.setattr("resilin.telemetry.progress.REDRAW", 0.0)
    watch = Watch(job)
    train(watch, rule, epochs=2, double_at=5)
    percents = [int(text.split("%")[0].split()[-1]) for text in watch.pictures]
    assert percents == sorted(percents)
    assert percents[0] == 0
    assert percents[-1] == 100
    assert "batch 8" in watch.pictures[1]
    assert "epoch 2/2" in watch.pictures[-1]
    assert "batch 16" in watch.pictures[-1]
    if rule == "adascale":
        # 12 reference steps in an epoch. Each picture is one write, and none is a step behind.
        expected = [min(100, int(100 * done / 24)) for done in watch.progress]
        assert percents == expected


def test_an_evaluation_is_one_pass_over_its_data(job, monkeypatch):
    from resilin.training.script.progress_bar import progress_bar

    monkeypatch.setattr("resilin.telemetry.progress.REDRAW", 0.0)
    screen = Terminal()
    loader = resilin.AdaptiveDataLoader(list(range(20)), batch_size=8)
    assert [len(batch) for batch in progress_bar(loader, stream=screen)] == [8, 8, 4]
    assert [text.split("%")[0].strip() for text in screen.pictures[:-1]] == ["0", "33", "66", "83"]


@pytest.mark.world_size(2)
def test_only_replica_0_shows_a_bar():
    from resilin.training.script.progress_bar import progress_bar

    screen = Terminal()
    loader = resilin.AdaptiveDataLoader(list(range(20)), batch_size=8)
    seen = [int(i) for batch in progress_bar(loader, stream=screen) for i in batch]
    assert len(seen) == 10
    assert bool(screen.getvalue()) == (resilin.current_job().engine.membership.replica == 0)
