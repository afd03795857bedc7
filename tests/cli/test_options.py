import math
import os

import pytest
import torch.distributed.run as torchrun

from resilin.cli import options, run
from resilin.engine import environment


def parsed(*arguments):
    args = options.parser().parse_args([*map(str, arguments), "script.py", "--nnodes", "9"])
    options.complete(args)
    return args


@pytest.fixture(autouse=True)
def no_torchrun_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def test_without_an_endpoint_the_job_is_on_this_machine_alone():
    args = parsed()
    assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint) == (
        "1:1",
        "c10d",
        "localhost:0",
    )
    assert args.training_script_args == ["--nnodes", "9"]
    assert args.rdzv_id != parsed("--standalone").rdzv_id


def test_the_id_of_a_job_is_the_same_on_all_its_machines():
    several = ["--nnodes=1:4", "--rdzv-endpoint=gpu-1:29500"]
    assert parsed(*several).rdzv_id == parsed(*several).rdzv_id == "gpu-1-29500"
    assert parsed(*several, "--rdzv-id=7").rdzv_id == "7"


def test_all_options_of_torchrun_are_taken():
    args = parsed("--nproc_per_node=3", "--role=trainer", "--rdzv-conf=last_call_timeout=9")
    assert args.nproc_per_node == "3"
    assert args.role == "trainer"
    assert parsed("--nproc", "4").nproc_per_node == "4"


def test_a_setting_of_the_rendezvous_replaces_ours_alone():
    args = parsed("--max-restarts=1", "--nproc=1", "--rdzv-conf=last_call_timeout=9,join_timeout=7")
    given = torchrun.config_from_args(args)[0].rdzv_configs
    expected = {**options.RENDEZVOUS, "last_call_timeout": 9, "join_timeout": 7}
    assert {name: int(given[name]) for name in expected} == expected


def test_the_environment_of_torchrun_goes_before_our_defaults(monkeypatch):
    assert parsed().max_restarts is None
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_RDZV_BACKEND", "static")
    args = parsed()
    assert args.max_restarts == 3
    assert args.rdzv_conf == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--nnodes=1:4"], r"--nnodes 1:4 needs --rdzv-endpoint HOST:PORT"),
        (["--rdzv-endpoint=a:1"], r"--rdzv-endpoint \(a:1\) needs --nnodes"),
        (["--standalone", "--rdzv-endpoint=a:1"], r"--standalone is .* \(a:1\)"),
        (["--checkpoint-every=10"], "--checkpoint-every: '10' must be a number of"),
        (["--hang-timeout=never"], "--hang-timeout: 'never' must be a number of seconds above 0"),
        (["--hang-timeout=0"], "--hang-timeout: '0' must be a number"),
        (["--hang-timeout=nan"], "--hang-timeout: 'nan' must be a number"),
        (["--checkpoint-every=0steps"], "--checkpoint-every: '0steps' must be a whole"),
        (["--nproc=0"], r"--nproc \(0\) must be at least 1"),
        (["--nproc=many"], r"--nproc \(many\): "),
        (["--nnodes=1:2", "--rdzv-endpoint=a:99999"], r"\(a:99999\) must end with a port from 0"),
        (["--nnodes=1:2", "--rdzv-endpoint=a:b"], r"\(a:b\) must end with a port from 0"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        parsed(*given)


def test_how_long_a_step_may_hang(monkeypatch):
    monkeypatch.delenv(environment.HANG_TIMEOUT, raising=False)
    assert options.hang_timeout(parsed()) == options.HANG_TIMEOUT
    assert options.hang_timeout(parsed("--hang-timeout", "20")) == 20
    assert options.hang_timeout(parsed("--hang-timeout", "off")) == math.inf
    monkeypatch.setenv(environment.HANG_TIMEOUT, "90")
    assert options.hang_timeout(parsed()) == 90
    assert options.hang_timeout(parsed("--hang-timeout", "20")) == 20
    monkeypatch.setenv(environment.HANG_TIMEOUT, "soon")
    with pytest.raises(ValueError, match="RESILIN_HANG_TIMEOUT: 'soon' must be"):
        parsed()


def test_our_options_are_listed_before_those_of_torchrun():
    text = options.parser().format_help()
    assert text.index("resilin:\n  --nproc") < text.index("torchrun:\n  -h, --help")
    assert text.index("--processes-per-copy") < text.index("--rdzv-endpoint")


def test_an_error_is_one_line_after_a_short_usage(capsys):
    with pytest.raises(SystemExit) as end:
        run.main(["--nnodes=1:4", "script.py"])
    assert end.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: resilin run [options]")
    assert error.startswith("resilin run: error: --nnodes 1:4 needs")


@pytest.mark.parametrize(
    ("endpoint", "here"),
    [
        ("localhost:29500", True),
        ("127.0.0.1:29500", True),
        ("localhost:0", False),
        ("192.0.2.1:29500", False),
        ("no-such-host.invalid:29500", False),
    ],
)
def test_whether_the_others_meet_here(endpoint, here):
    assert run.is_here(endpoint) is here


@pytest.mark.parametrize("every", ["500steps", "90s", "1.5h", "10min"])
def test_intervals(every):
    assert parsed("--checkpoint-every", every).checkpoint_every == every


def test_a_live_job_has_no_rendezvous_and_listens_on_loopback():
    args = parsed("--live", "--nproc", "2")
    assert args.live
    assert args.heartbeat == options.HEARTBEAT
    assert args.address is None
    assert options.meeting(args) == "localhost:0"
    assert parsed("--live", "--heartbeat", "0.5").heartbeat == 0.5
    assert args.processes_per_copy == 1
    assert parsed("--live", "--nproc=4", "--processes-per-copy", "2").processes_per_copy == 2


def test_launchers_of_a_live_job_over_several_machines_have_its_id_in_common():
    several = ["--live", "--membership", "etcd://a:2379,b:2379"]
    assert parsed(*several).rdzv_id == "a-2379"
    assert options.meeting(parsed(*several)) == "a:2379"
    assert parsed(*several, "--rdzv-id", "seven").rdzv_id == "seven"
    assert parsed(*several).lease == 3
    # A worker's launcher counts its silence, and etcd that of a launcher: neither bounds the other.
    assert parsed(*several, "--lease", "2.5", "--heartbeat", "9").lease == 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--live", "--nnodes=1:4"], "cannot be combined with --nnodes"),
        (["--live", "--nnodes=1:4", "--rdzv-endpoint=a:1"], "--live has no rendezvous"),
        (["--live", "--rdzv-backend=static"], "--rdzv-backend"),
        (["--live", "--rdzv-conf=last_call_timeout=1"], "--rdzv-conf"),
        (["--live", "--run-path"], "--run-path"),
        (["--live", "--tee=3"], "--tee"),
        (["--live", "--heartbeat=0"], "above 0"),
        (["--live", "--heartbeat=soon"], "above 0"),
        (["--live", "--membership=host:2379"], "etcd://HOST:PORT"),
        (["--membership=etcd://a:1"], "--membership belongs to live jobs: it needs --live"),
        (["--heartbeat=3"], "it needs --live"),
        (["--address=10.0.0.1"], "it needs --live"),
        (["--lease=3"], "it needs --live"),
        (["--live", "--lease=3"], "needs --membership"),
        (["--live", "--membership=etcd://a:1", "--lease=1.9"], r"\(1.9\) must be at least 2"),
        (["--live", "--membership=etcd://a:1", "--lease=inf"], "above 0"),
        (["--processes-per-copy=2"], "--processes-per-copy belongs to live jobs"),
        (["--live", "--processes-per-copy=0"], r"\(0\) must be a whole number above 0"),
        (["--live", "--nproc=4", "--processes-per-copy=3"], r"\(3\) must divide .* \(4\)"),
        (
            ["--live", "--nproc=4", "--processes-per-copy=2", "--membership=etcd://a:1"],
            r"--processes-per-copy \(2\) cannot be combined with --membership",
        ),
    ],
)
def test_options_that_make_no_sense_with_or_without_live_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parsed(*arguments)
