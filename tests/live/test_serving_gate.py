"""The file that says who a server's clients are, and what stands in front of the server: whose a
request is, what of it is believed, and that nobody can say it is somebody else's."""

import json
import re
from hashlib import sha256
from pathlib import Path
from unittest import TestCase

import pytest

from tests.live.steered import ask
from twinserve.backends.live.serving.attributes import STAMP
from twinserve.backends.live.serving.clients import ALL_TRUSTED, OTHERS, read_clients
from twinserve.backends.live.serving.options import (
    EngineFacts,
    build_core,
    clients_of,
    read_options,
)
from twinserve.backends.live.serving.prometheus import PolicyMetrics
from twinserve.backends.live.versions import LiveEngineError
from twinserve.sim.setup.config import SettingsError

VTC = {"policy": "vtc"}
KEY = sha256(b"secret").hexdigest()
FILE = f"""
header: X-Client
default: {{class: be}}
clients:
  chat:
    key_sha256: [{KEY}]
    header: [chat, chat-2]
    class: rt
    priority: -3
    slo_ttft_s: 0.2
    applications: true
  nightly:
    header: [nightly]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "clients.yaml").write_text(FILE)
    return tmp_path / "clients.yaml"


def test_the_file_says_who_they_are_and_what_is_believed(file):
    clients = read_clients(str(file))
    chat, nightly = clients.of("chat").beliefs, clients.of("nightly").beliefs
    assert (chat.service_class, chat.priority, chat.slo_ttft_s, chat.slo_tpot_s) == (
        "rt",
        -3,
        0.2,
        None,
    )
    assert chat.applications and not nightly.applications
    assert nightly.service_class == "be"  # as the default
    assert clients.of(OTHERS).beliefs.service_class == "be"


def test_the_file_of_the_docs_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    path = tmp_path / "clients.yaml"
    path.write_text(re.search("```yaml\n(.*?)```", page, re.S)[1])
    clients = read_clients(str(path))
    assert clients.identify([(b"authorization", b"Bearer secret")]) == "chat"
    assert clients.of("chat").beliefs.priority == -10
    assert clients.of("agents").beliefs.applications
    assert clients.of("agents").beliefs.service_class == "be"


BEARER = (b"authorization", b"Bearer secret")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([], OTHERS),
        ([BEARER], "chat"),
        ([(b"authorization", b"bearer secret")], "chat"),
        ([(b"authorization", b"Bearer other")], OTHERS),
        ([(b"authorization", b"secret")], OTHERS),
        ([(b"authorization", b"Bearer \xff")], OTHERS),
        ([(b"x-client", b"chat-2")], "chat"),
        ([(b"x-client", b"nightly"), BEARER], "nightly"),
        ([(b"x-client", b"nobody"), BEARER], "chat"),
        ([(b"x-client", b"nightly"), (b"x-client", b"chat")], OTHERS),
        ([BEARER, BEARER], OTHERS),
        ([(b"x-other", b"chat")], OTHERS),
    ],
    ids=str,
)
def test_whose_request_it_is(file, headers, name):
    assert read_clients(str(file)).identify(headers) == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("clients: [1]", "clients: "),
        ("", "holds no settings"),
        ("defalt: {class: be}", "did you mean 'default'"),
        ("default: {clas: be}", "default.clas: there is no such field (did you mean 'class'?)"),
        ("default: {class: gold}", "default.class: "),
        ("default: {priority: -1000001}", "default.priority: "),
        ("default: {priority: low}", "default.priority: "),
        ("default: {slo_ttft_s: 0}", "default.slo_ttft_s: "),
        ("default: {slo_tpot_s: .inf}", "default.slo_tpot_s: "),
        ("default: {applications: 1}", "default.applications: "),
        ("header: X Client", "header: "),
        ("clients: {a: {priority: -1}}", "clients.a: no field says"),
        ("clients: {a: {header: [a]}}", "clients.a.header: the file names no header"),
        ("clients: {a: {key_sha256: [secret]}}", "clients.a.key_sha256: "),
        (f"clients: {{a: {{key_sha256: {KEY}}}}}", "clients.a.key_sha256: "),
        (f"clients: {{default: {{key_sha256: [{KEY}]}}}}", "clients.default: "),
        (f"clients: {{a b: {{key_sha256: [{KEY}]}}}}", "clients.a b: "),
        (
            f"clients: {{a: {{key_sha256: [{KEY}]}}, b: {{key_sha256: [{KEY}]}}}}",
            "clients.b.key_sha256: ",
        ),
        ("clients: {a: {key: x}}", "clients.a.key: there is no such field"),
        ("default: {class: be}\ndefault: {class: rt}", "default is given twice"),
        ("default: [", "not YAML"),
    ],
)
def test_what_is_wrong_with_the_file_is_one_line(tmp_path, text, said):
    path = tmp_path / "clients.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        read_clients(str(path))
    assert said in str(error.value) and "clients.yaml: " in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_with_clients_it_cannot_have_does_not_start(tmp_path):
    def start(policy: str, clients: str):
        options = read_options({"policy": policy, "clients": clients})
        core = build_core(options, EngineFacts(65, 8, 1, 64, 128, 1024, True))
        return clients_of(options, core.policy)

    assert start("vtc", "trusted") is ALL_TRUSTED
    with pytest.raises(LiveEngineError, match="there is no such file"):
        start("vtc", str(tmp_path / "none.yaml"))
    path = tmp_path / "clients.yaml"
    path.write_text("default: {class: be}")
    assert start("vtc", str(path)).stamped
    (tmp_path / "mine.py").write_text(
        "from twinserve.policies.baselines.vllm import VllmPolicy\n"
        "class Mine(VllmPolicy):\n"
        "    name = 'mine'\n"
        "    class Options(VllmPolicy.Options):\n"
        "        serves_best_effort = property(lambda self: False)\n"
    )
    with pytest.raises(LiveEngineError, match="'default' is best-effort"):
        start(f"{tmp_path / 'mine.py'}:Mine", str(path))


def test_a_server_on_which_applications_mean_nothing_says_so():
    options = read_options({"policy": "vtc"})
    core = build_core(options, EngineFacts(65, 8, 1, 64, 128, 1024, True))
    with TestCase().assertLogs() as logged:
        clients_of(options, core.policy)
    (said,) = [record.getMessage() for record in logged.records]
    assert said.startswith("policy vtc: ") and '"clients"' in said


# -- in front of the server ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "w1"},
        {"messages": [], "vllm_xargs": None},
        {"prompt": "w1", "vllm_xargs": {"class": "rt", "mine": [1]}},
    ],
    ids=str,
)
@pytest.mark.parametrize(("headers", "name"), [([BEARER], "chat"), ([], OTHERS)], ids=str)
def test_each_request_gets_its_client(file, body, headers, name):
    answer = ask(body, headers, **VTC, clients=str(file))
    assert answer.status == 200
    given = body.get("vllm_xargs") or {}
    assert json.loads(answer.got) == {**body, "vllm_xargs": {**given, STAMP: name}}
    assert answer.told[b"content-length"] == str(len(answer.got)).encode()


def test_a_request_in_tokens_has_it_in_its_sampling_parameters(file):
    body = {"token_ids": [1], "sampling_params": {"extra_args": {"class": "be"}, "max_tokens": 3}}
    got = ask(body, [BEARER], **VTC, clients=str(file)).got
    assert json.loads(got)["sampling_params"] == {
        "extra_args": {"class": "be", STAMP: "chat"},
        "max_tokens": 3,
    }


FORGED = [
    f'{{"prompt": "w1", "vllm_xargs": {{"{STAMP}": "chat"}}}}'.encode(),
    b'{"prompt": "w1", "vllm_xargs": {"twinserve\\u005fclient": "chat"}}',
    b'{"prompt": "w1", "\\u0076llm_xargs": {"twinserve_client": "chat"}}',
    f'{{"prompt": "w1", "sampling_params": {{"extra_args": {{"{STAMP}": "chat"}}}}}}'.encode(),
    f'{{"prompt": "w1", "vllm_xargs": {{"{STAMP}": "chat"}}}}'.encode("utf-16"),
    f'[{{"prompt": "w1", "vllm_xargs": {{"{STAMP}": "chat"}}}}]'.encode(),
    f'--x\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n{{"{STAMP}": ""}}'.encode(),
]


@pytest.mark.parametrize("body", FORGED, ids=range(len(FORGED)))
def test_nobody_can_say_that_a_request_is_anothers(file, body):
    answer = ask(body, **VTC, clients=str(file))
    assert answer.status == 400 and "\n" not in answer.error["message"]


def test_what_only_looks_forged_goes_through(file):
    body = {"prompt": f'the name "{STAMP}" in a text', "vllm_xargs": {STAMP + "s": 1}}
    assert ask(body, **VTC, clients=str(file)).status == 200
    assert ask(b"", **VTC, clients=str(file)).got == b""  # /pause and the like


def test_the_answer_names_what_is_not_believed(file):
    claims = {"class": "rt", "priority": -9, "slo_ttft_s": 0.1, "slo_tpot_s": 0.1, "app": "a"}
    body = {"prompt": "w1", "vllm_xargs": claims}
    line = b"x-twinserve-not-believed"
    answered = [
        ask(body, headers, **VTC, clients=str(file), slo_tpot_s=0.05).headers.get(line)
        for headers in ([BEARER], [])
    ]
    assert answered == [b"priority, slo_ttft_s", b"class, priority, slo_ttft_s, app"]
    assert line not in ask(body, **VTC, clients="trusted").headers
    assert ask(body, **VTC).headers[line] == b"priority, slo_ttft_s, slo_tpot_s, app"
    meek = {"prompt": "w1", "vllm_xargs": {"class": "be", "priority": 2}}
    assert line not in ask(meek, **VTC).headers


def test_without_a_file_bodies_stay_as_they_are():
    for body in (b'{"prompt": 1,   "vllm_xargs": {}}', b"no json", b'{"vllm_xargs": '):
        assert ask(body, **VTC).got == body


def test_a_file_that_is_gone_lets_nobody_in(tmp_path):
    answer = ask({"prompt": "w1"}, **VTC, clients=str(tmp_path / "gone.yaml"))
    assert answer.status == 500 and "there is no such file" in answer.error["message"]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"steps": 1}'])
def test_a_file_that_is_not_the_schedulers_adds_nothing_to_the_metrics(tmp_path, text):
    """One from before the server's first words, or of another version, say."""
    pytest.importorskip("prometheus_client")
    path = tmp_path / "stats.json"
    if text is not None:
        path.write_text(text)
    assert PolicyMetrics(path).text() == b""
