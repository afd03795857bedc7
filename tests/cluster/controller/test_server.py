import base64
import http.client
import json
import random
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.cluster.backends.base import PartState, PartStatus
from resilin.cluster.controller import server as server_module
from resilin.cluster.controller.api import Api
from resilin.cluster.controller.client import Client, Refused
from resilin.cluster.controller.journal import Journal
from resilin.cluster.controller.launch import Face, job_token
from resilin.cluster.controller.loop import Controller
from resilin.cluster.controller.meeting import OutsideStore
from resilin.cluster.controller.records import Opened
from resilin.cluster.controller.rules import Rules
from resilin.cluster.controller.server import Server
from resilin.cluster.policies.by_name import by_name
from resilin.core.hints import JobHints
from resilin.core.plan import BatchBounds
from tests.cli.live.certificates import Signer
from tests.cluster.controller.made import Even, node
from tests.examples import examples

TOKEN = "0123456789abcdef"
TABLE = {"sizes": [1, 2], "hosts": [1, 1], "goodput": [1.0, 1.9], "spread": [0.1, 0.1]}
LAUNCH = {"script": ["train.py", "<b>"], "directory": "/work"}


class Memory:
    """A backend whose parts are entries of a dict: the requests are tested here, not processes."""

    def __init__(self):
        self.parts: dict[str, PartStatus] = {}

    def detect(self):
        return None

    def nodes(self):
        return (node("a", 2), node("b", 4))

    def start(self, part):
        self.parts[part.name] = PartStatus(name=part.name, state=PartState.RUNNING, node=part.node)

    def stop(self, name, grace):
        self.parts[name] = replace(self.parts[name], state=PartState.ENDED, code=138)

    def list(self):
        return tuple(self.parts.values())


@contextmanager
def serving(tmp_path, certificate=None, policy=None):
    """A server, and the controller behind it, which takes a step when it is told to."""
    journal = Journal(tmp_path / "state")
    journal.append([Opened(time=time.time(), cluster="c1")])
    face = Face(url="http://x", token=TOKEN)
    rules = Rules(lead=0.0, interval=0.0)
    store, policy = OutsideStore("127.0.0.1:1"), policy or Even()
    controller = Controller(journal, Memory(), store, policy, rules, face, tell=str)
    controller.turn()
    server = Server(("127.0.0.1", 0), certificate)
    server.api = Api(controller)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server, controller
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        journal.close()


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path) as (server, controller):
        yield server, controller, Client(f"http://127.0.0.1:{server.server_address[1]}", TOKEN)


def ask(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def bearer(token=TOKEN):
    return {"Authorization": f"Bearer {token}"}


def hints(job="one", generation=1, when=None, **changes):
    made = JobHints(
        job=job,
        generation=generation,
        time=time.time() if when is None else when,
        hosts=1,
        replicas=1,
        reference=32,
        batch_size=32,
        bounds=BatchBounds(max_batch_size=64),
        steps=10,
        samples=320,
        progress=10.0,
        total=None,
        noise=None,
        throughput=None,
    ).to_json()
    return {**made, **changes}


def test_a_job_from_its_submission_to_its_end(served):
    _, controller, client = served
    assert client.submit({"launch": LAUNCH}) == "train-1"
    assert client.submit({"launch": LAUNCH, "name": "one", "max": 2}) == "one"
    with pytest.raises(Refused, match="name 'one' is taken") as refused:
        client.submit({"launch": LAUNCH, "name": "one"})
    assert refused.value.status == 409
    controller.turn()
    controller.turn()
    jobs = {job["id"]: job for job in client.jobs()}
    assert jobs["one"]["replicas"] == jobs["one"]["wanted"] == 2
    assert client.why("one")["text"] == "its share."
    assert (client.why("one")["value"], client.why("one")["price"]) == (1.0, 2.0)
    client.cancel("one")
    controller.turn()
    controller.turn()
    assert client.job("one")["phase"] == "cancelled"
    with pytest.raises(Refused, match="one has cancelled already"):
        client.cancel("one")
    for call in (client.job, client.why, client.cancel):
        with pytest.raises(Refused, match="there is no job nobody") as refused:
            call("nobody")
        assert refused.value.status == 404


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({}, r"Launch \(None\) must be an object"),
        ({"launch": {"script": [], "directory": "/"}}, "launch must have a script"),
        ({"launch": {"script": ["x"], "directory": "rel"}}, "absolute directory"),
        ({"launch": {**LAUNCH, "options": ["--live"]}}, "option '--live' of resilin run must be"),
        ({"launch": {**LAUNCH, "options": ["--nnodes=2"]}}, "option '--nnodes=2' of resilin run"),
        ({"launch": {"script": "x", "directory": "/"}}, "must be a list"),
        ({"launch": LAUNCH, "name": "../x"}, "lower-case letters"),
        ({"launch": LAUNCH, "name": 3}, "must be a text"),
        ({"launch": LAUNCH, "min": 0}, "must be at least 1"),
        ({"launch": LAUNCH, "min": 4, "max": 2}, "max_replicas"),
        ({"launch": LAUNCH, "priority": "high"}, "priority"),
        ({"launch": LAUNCH, "preemptible": "no"}, "preemptible"),
        ({"launch": LAUNCH, "tenant": "A B"}, "tenant"),
        ({"launch": LAUNCH, "gpus": 2}, "'gpus' must be one of"),
    ],
)
def test_a_wrong_submission_is_refused_with_a_sentence(served, told, error):
    _, controller, client = served
    with pytest.raises(Refused, match=error) as refused:
        client.submit(told)
    assert refused.value.status == 400
    assert not controller.state.jobs


def test_only_the_token_opens_anything(served):
    server, _, client = served
    client.submit({"launch": LAUNCH, "name": "one"})
    wrong = [{}, bearer("x"), bearer(""), bearer("\xe9"), {"Authorization": TOKEN}]
    wrong += [{"Authorization": f"Basic {base64.b64encode(b'x:wrong').decode()}"}]
    wrong += [{"Authorization": "Basic !!!"}]
    paths = [("GET", "/"), ("GET", "/jobs"), ("POST", "/jobs"), ("DELETE", "/jobs/one")]
    paths += [("GET", "/metrics"), ("GET", "/nodes"), ("POST", "/nodes/a/drain"), ("GET", "/x")]
    for method, path in paths:
        for headers in wrong:
            assert ask(server, method, path, "{}", **headers)[0] == 401
    assert ask(server, "GET", "/health")[0] == 200
    basic = {"Authorization": f"Basic {base64.b64encode(f'x:{TOKEN}'.encode()).decode()}"}
    assert ask(server, "GET", "/", **basic)[0] == 200
    # A browser would send it along with what another site makes it post.
    assert ask(server, "POST", "/jobs", "{}", **basic)[0] == 401


def test_the_token_of_a_job_is_good_for_its_hints_alone(served):
    server, _, client = served
    for name in ("one", "two"):
        client.submit({"launch": LAUNCH, "name": name})
    mine = bearer(job_token(TOKEN, "one"))
    body = json.dumps(hints())
    assert ask(server, "PUT", "/jobs/one/hints", body, **mine)[0] == 200
    assert ask(server, "PUT", "/jobs/two/hints", body, **mine)[0] == 401
    for method, path in [("GET", "/jobs"), ("DELETE", "/jobs/one"), ("GET", "/jobs/one/hints")]:
        assert ask(server, method, path, **mine)[0] == 401


def test_hints_are_answered_with_the_size_the_menu_and_the_deadline(served):
    _, controller, client = served
    client.submit({"launch": LAUNCH, "name": "one", "max": 6})
    controller.turn()
    controller.turn()
    answer = client.hint("one", hints())
    assert answer["replicas"] == 6
    assert answer["leaves"] is None
    assert [4, 1] in answer["menu"]["cpu"]
    at = time.time() + 5000
    client.drain("b", at)
    assert client.hint("one", hints())["leaves"] == at
    client.undrain("b")
    assert client.hint("one", hints())["leaves"] is None
    assert client.job("one")["progress"] == 10.0


def test_hints_that_are_wrong_or_old_leave_the_last_good_ones(served):
    _, controller, client = served
    client.submit({"launch": LAUNCH, "name": "one"})
    now = time.time()
    client.hint("one", hints(generation=3, when=now))
    good = controller.state.jobs["one"].hints
    wrong = [
        ({"version": 99}, "version"),
        ({"placement": None}, "placement"),
        ({"batch": {}}, "batch"),
    ]
    for changes, error in wrong:
        with pytest.raises(Refused, match=error) as refused:
            client.hint("one", hints(**changes))
        assert refused.value.status == 400
    huge = hints()
    huge["progress"]["progress"] = 1e300
    for told, error in (
        (huge, r"progress.progress \(3.2e\+301 samples\) must be at most 1e\+18"),
        (hints(goodput={"cpu": {**TABLE, "goodput": [1.0, 1e300]}}), "goodput.cpu"),
    ):
        with pytest.raises(Refused, match=error):
            client.hint("one", told)
    with pytest.raises(Refused, match="must be one, whose address was used"):
        client.hint("one", hints(job="two"))
    with pytest.raises(Refused, match="must not be after the present"):
        client.hint("one", hints(when=now + 1e6))
    for old in (hints(generation=2, when=now), hints(generation=3, when=now - 1)):
        with pytest.raises(Refused, match="must be at least") as refused:
            client.hint("one", old)
        assert refused.value.status == 409
    assert controller.state.jobs["one"].hints == good
    client.hint("one", hints(generation=3, when=now + 1))
    # It has lost all its state and begun anew.
    client.hint("one", hints(generation=0, when=now + 2))
    assert controller.state.jobs["one"].hints["job"]["generation"] == 0
    with pytest.raises(Refused, match="there is no job two"):
        client.hint("two", hints(job="two"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("ours"), policy=by_name("ours")) as (server, controller):
        for name in ("one", "two"):
            server.api.submit({"launch": LAUNCH, "name": name})
        yield server, controller


@examples(300)
@given(data=st.data())
def test_garbage_is_refused_or_does_no_harm(ours, data):
    server, controller = ours
    whole = hints(when=0.0, generation=0, goodput={"cpu": dict(TABLE)})
    kind = data.draw(st.sampled_from(["bytes", "json", "changed"]))
    if kind == "bytes":
        body = data.draw(st.binary(max_size=200))
    elif kind == "json":
        body = json.dumps(data.draw(values)).encode()
    else:
        *path, last = data.draw(st.sampled_from(_paths(whole)))
        target = whole
        for each in path:
            target = target[each]
        target[last] = data.draw(values)
        body = json.dumps(whole).encode()
    status, answer, _ = ask(server, "PUT", "/jobs/one/hints", body, **bearer())
    assert status in (200, 400, 409), answer
    assert isinstance(json.loads(answer), dict)
    controller.turn()
    assert not controller.troubles
    assert set(controller.state.wanted) == {"one", "two"}


def _paths(told):
    """The way to each field, also within others."""
    found = []
    for name, each in told.items():
        found.append((name,))
        if isinstance(each, dict):
            found += [(name, *inner) for inner in _paths(each)]
    return found


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../etc/passwd", 404),
        ("/jobs/..%2f..%2fetc%2fpasswd", 404),
        ("/jobs/one/../../token", 404),
        ("//etc/passwd", 404),
        ("/jobs/%00", 404),
        ("/static/x", 404),
        ("/jobs//", 200),
    ],
)
def test_no_path_leads_to_a_file(served, path, status):
    server, _, _ = served
    got, answer, _ = ask(server, "GET", path, **bearer())
    assert got == status
    assert b"root:" not in answer


def test_requests_are_limited_in_size_and_time(served, monkeypatch):
    server, _, _ = served
    port = server.server_address[1]
    large = {**bearer(), "Content-Length": str(server_module.LARGEST + 1)}
    assert ask(server, "POST", "/jobs", None, **large)[0] == 413
    assert ask(server, "POST", "/jobs", None, **bearer(), **{"Content-Length": "-1"})[0] == 400
    chunked = {**bearer(), "Transfer-Encoding": "chunked"}
    assert ask(server, "POST", "/jobs", None, **chunked)[0] == 400
    assert ask(server, "POST", "/jobs", "[" * 100_000, **bearer())[0] == 400
    monkeypatch.setattr(server_module, "TIMEOUT", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        silent.sendall(b"POST /jobs HTTP/1.1\r\nContent-Length: 10\r\n")
        assert silent.recv(1000) == b""  # it was closed
    assert ask(server, "GET", "/health")[0] == 200


def test_the_server_survives_noise(served):
    server, _, _ = served
    dice = random.Random(0)
    for _ in range(30):
        with socket.create_connection(server.server_address, timeout=20) as noisy:
            noisy.sendall(dice.randbytes(dice.randrange(1, 300)) + b"\r\n\r\n")
            noisy.shutdown(socket.SHUT_WR)
            while noisy.recv(4096):
                pass
    assert ask(server, "GET", "/health")[0] == 200


def test_the_page_and_the_metrics_show_who_has_what(served):
    server, controller, client = served
    client.submit({"launch": LAUNCH, "name": "one", "max": 3})
    controller.turn()
    controller.turn()
    controller.troubles = frozenset({"<script>alert(1)</script>"})
    status, page, headers = ask(server, "GET", "/", **bearer())
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    text = page.decode()
    assert "its share" in text
    assert "<svg" in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    metrics = ask(server, "GET", "/metrics", **bearer())[1].decode()
    assert 'resilin_scheduler_jobs{phase="running"} 1' in metrics
    assert 'resilin_scheduler_job_replicas{job="one"} 3' in metrics
    assert 'resilin_scheduler_node_accelerators_used{node="a",kind="cpu"} 2' in metrics
    assert "resilin_scheduler_troubles 1" in metrics
    for line in metrics.splitlines():
        assert line.startswith("#") or len(line.rsplit(" ", 1)) == 2


def test_prometheus_reads_the_metrics(served):
    parser = pytest.importorskip("prometheus_client.parser")
    server, controller, client = served
    client.submit({"launch": LAUNCH, "name": "one"})
    controller.turn()
    text = ask(server, "GET", "/metrics", **bearer())[1].decode()
    names = {family.name for family in parser.text_string_to_metric_families(text)}
    assert {"resilin_scheduler_jobs", "resilin_scheduler_job_restarts"} <= names


def test_drains_of_unknown_nodes_and_wrong_times_are_refused(served):
    server, _, client = served
    with pytest.raises(Refused, match="node x must be one of a, b"):
        client.drain("x")
    with pytest.raises(Refused, match="node a is not drained"):
        client.undrain("a")
    with pytest.raises(Refused, match="must be within a year"):
        client.drain("a", 1e18)
    for body in ('{"at": "soon"}', '{"at": NaN}', "[]", '{"when": 1}', "{"):
        assert ask(server, "POST", "/nodes/a/drain", body, **bearer())[0] == 400
    client.drain("a")
    assert [each["drained"] for each in client.nodes()] == [True, False]


def test_tls(tmp_path):
    signer = Signer(tmp_path, "signer")
    pair = signer.sign("server")
    with serving(tmp_path, (str(pair.certificate), str(pair.key))) as (server, _):
        host, port = server.server_address
        client = Client(f"https://{host}:{port}", TOKEN, ca=str(signer.ca))
        assert client.jobs() == []
        with pytest.raises(OSError, match="no controller answers"):
            Client(f"https://{host}:{port}", TOKEN).jobs()
        # One that says nothing holds up nobody.
        with socket.create_connection((host, port), timeout=20):
            assert client.jobs() == []
        with pytest.raises(OSError, match="no controller answers"):
            Client(f"http://{host}:{port}", TOKEN).jobs()
    context = ssl.create_default_context(cafile=str(signer.ca))
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_a_submission_is_on_disk_before_it_is_answered(served, tmp_path):
    _, _, client = served
    client.submit({"launch": LAUNCH, "name": "one"})
    assert b'"Submitted"' in (tmp_path / "state" / "journal.jsonl").read_bytes()
