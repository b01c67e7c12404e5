"""`flowcheck switch` as people call it: plan with LLDP, dry run, apply and remove on tc, show, verify."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowcheck.cli import app
from flowcheck.errors import FlowcheckError
from flowcheck.switch import cli
from flowcheck.switch.credentials import find
from flowcheck.switch.delivery import at_ports, judge
from switch_configs.documents import read_document, validated
from switch_configs.errors import PlanError
from switch_configs.planning.lldp import fill, neighbours
from switch_configs.planning.planner import make_plan
from switch_configs.schema import MirrorPlan, MirrorSession, Topology

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, status: int = 0) -> str:
    """In this process: a start costs a second. Errors are worded by main(), which adds only the prefix."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            found = app(["switch", *words], standalone_mode=False) or 0
        except FlowcheckError as error:
            found = error.exit_code
            out.write(error.message())
    assert found == status, out.getvalue()
    return out.getvalue()


def run_apart(*words: str, status: int | None = 0, netns: str = "") -> str:
    """In a process of its own: DPDK starts once per process."""
    prefix = ["ip", "netns", "exec", netns] if netns else []
    done = subprocess.run(
        [*prefix, sys.executable, "-P", "-m", "flowcheck", *words], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=280, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


TOPOLOGY = """
path_mtu: 1024
leaves:
  - name: leaf1
    vendor: tc
    netns: {netns}
    ports:
      - {{port: va, rank: 0, host: gpu0, speed_gbps: 10, address: 10.0.0.1}}
      - {{port: vb, rank: 1, host: gpu1, speed_gbps: 10, address: 10.0.0.2}}
    monitor_ports: [{{port: vm, node: ck0, speed_gbps: 100, mtu: 9000}}]
groups: [{{name: dp, ranks: [0, 1]}}]
"""


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGY.format(netns="none"))
    return path


def test_what_apply_did_to_the_port_is_remembered_beside_the_plan(tmp_path: Path) -> None:
    """The command's own file: kept over a second apply, dropped by remove, checked when read."""
    plan = tmp_path / "plan.json"
    session = MirrorSession.model_validate(
        {"leaf": "leaf1", "vendor": "eos", "destination": "Ethernet48", "destination_gbps": 400,
         "sources": [{"port": "Ethernet1", "rank": 0, "speed_gbps": 100}]}
    )
    cli._remember(plan, session, ("configure", "no mtu"))
    cli._remember(plan, session, ("configure", "mtu 9214"))  # a second apply finds what the first one set
    assert cli._port_lines(plan) == {"leaf1 Ethernet48": ["configure", "no mtu"]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json.undo"]
    cli._forget(plan, session)
    assert cli._port_lines(plan) == {} and not list(tmp_path.iterdir())
    for wrong in ("{", "[]", '{"a": "b"}', '{"a": ["x\\nreload"]}'):
        (tmp_path / "plan.json.undo").write_text(wrong)
        with pytest.raises(FlowcheckError, match="delete it"):
            cli._port_lines(plan)


@pytest.mark.root
def test_plan_dry_run_apply_show_diff_remove(bridged, tmp_path: Path, topology: Path) -> None:
    topology.write_text(TOPOLOGY.format(netns=bridged.netns))
    plan = str(tmp_path / "plan.json")
    said = run("plan", str(topology), "--out", plan, "--text", str(tmp_path / "text"))
    assert "group dp: ranks 0, 1, both" in said and "Gb/s" in said
    assert "-- rollback" in (tmp_path / "text" / "leaf1-flowcheck.txt").read_text()
    dry = run("apply", plan)
    assert "dry run" in dry and "tc filter add dev va" in dry
    assert "absent" in run("show", plan, status=1)
    assert "+ source va both" in run("diff", plan, status=1)
    assert "active: 2 sources to vm" in run("apply", plan, "--commit", "--yes")
    assert "as planned" in run("diff", plan)
    document = json.loads(run("show", plan, "--json"))
    assert document["sessions"][0]["session"]["active"] is True
    assert len(bridged.send()) == 20
    bridged.ip("link", "set", "vm", "down")
    assert "NOT active" in run("show", plan, status=1)
    assert "dry run" in run("remove", plan)
    assert "removed" in run("remove", plan, "--commit", "--yes")
    assert "absent" in run("remove", plan)


def test_errors_are_sentences(tmp_path: Path, topology: Path) -> None:
    topology.write_text(topology.read_text().replace("speed_gbps: 100", "speed_gbps: 1"))
    assert "cannot carry" in run("plan", str(topology), "--out", str(tmp_path / "p"), status=2)
    assert "cannot read" in run("show", str(tmp_path / "none"), status=2)
    (tmp_path / "bad").write_text("{}")
    assert "sessions" in run("show", str(tmp_path / "bad"), status=2)


# -- verify -----------------------------------------------------------------------------------------------


def plan_for(survey: dict) -> MirrorPlan:
    """A plan that mirrors the first connection's source, both ways."""
    connection = survey["connections"][0]
    session = {
        "leaf": "leaf1", "vendor": "eos", "destination": "Ethernet48", "destination_gbps": 400,
        "sources": [{"port": "Ethernet1", "rank": 0, "speed_gbps": 100, "address": connection["source"]}],
    }
    return MirrorPlan.model_validate({"sessions": [session], "groups": [], "nodes_per_leaf": {"leaf1": 1}})


@pytest.fixture(scope="module")
def survey() -> dict:
    captures = [str(ROOT / "pcaps" / "ring2-ll.pcap")]
    return json.loads(run_apart("inspect", "--json", *captures))


def bad(survey: dict, plan: MirrorPlan) -> list[str]:
    return [check.name for check in judge(survey, plan) if not check.good and check.remedy]


def test_a_whole_mirror_is_good(survey: dict, tmp_path: Path) -> None:
    plan = plan_for(survey)
    assert bad(survey, plan) == []
    (tmp_path / "plan.json").write_text(plan.to_json())
    capture = survey["captures"][0]["path"]
    assert "delivers" in run_apart("switch", "verify", str(tmp_path / "plan.json"), capture)
    assert json.loads(run_apart("switch", "verify", str(tmp_path / "plan.json"), capture, "--json"))["good"] is True


def plan_of_several(survey: dict) -> MirrorPlan:
    """Beside it a second monitor port of the same leaf, and one of the same name at another leaf."""
    plan = plan_for(survey)
    one = plan.sessions[0]
    other = one.model_copy(update={"destination": "Ethernet47", "number": 2, "sources": [
        one.sources[0].model_copy(update={"port": "Ethernet2", "rank": 5, "address": "10.9.9.9"})]})
    return plan.model_copy(update={"sessions": [one, other, other.model_copy(update={"leaf": "leaf2"})]})


def test_of_several_monitor_ports_one_is_judged(survey: dict, tmp_path: Path) -> None:
    """What ends at another one does not lack here."""
    plan = plan_of_several(survey)
    assert bad(survey, plan) == ["ranks and directions"]
    for name in ("Ethernet48", "leaf1:Ethernet48"):
        assert at_ports(plan, [name]) == plan_for(survey) and bad(survey, at_ports(plan, [name])) == []
    assert bad(survey, at_ports(plan, ["leaf2:Ethernet47"])) == ["ranks and directions"]
    assert len(at_ports(plan, ["leaf1:Ethernet47", "Ethernet48"]).sessions) == 2, "a bond of two"
    assert at_ports(plan_for(survey), []) == plan_for(survey)


@pytest.mark.parametrize(("ports", "why"), [
    ([], "has 3 monitor ports: leaf1:Ethernet47, leaf1:Ethernet48, leaf2:Ethernet47"),
    (["Ethernet47"], "'Ethernet47' is more than one monitor port"), (["Ethernet1"], "'Ethernet1' is no monitor port"),
])
def test_which_of_several_monitor_ports_has_to_be_said(
    survey: dict, tmp_path: Path, ports: list[str], why: str
) -> None:
    (tmp_path / "plan.json").write_text(plan_of_several(survey).to_json())
    options = [part for name in ports for part in ("--port", name)]
    said = run("verify", str(tmp_path / "plan.json"), "--interface", "lo", *options, status=2)
    assert why in said and "--port with the one that the interface is cabled to" in said


@pytest.mark.root
def test_verify_live_at_the_mirror_port(bridged, survey: dict, tmp_path: Path) -> None:
    """The capture's packets cross a real tc mirror while verify looks at the far end of the mirror port."""
    plan = plan_for(survey)
    plan.sessions[0].vendor, plan.sessions[0].netns = "tc", bridged.netns
    plan.sessions[0].sources[0].port, plan.sessions[0].destination = "va", "vm"
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    bridged.socket("va0")  # opened before anything is sent
    looking = ("switch", "verify", str(path), "--interface", "vm0", "--seconds", "1.5", "--json")
    document = json.loads(run_apart(*looking, status=1, netns=bridged.netns))
    assert document["checks"][0] == {
        "name": "packets", "good": False, "found": "0 RoCEv2 packets of 0", "remedy": document["remedy"]
    }
    run("apply", str(path), "--commit", "--yes")
    frames = frames_of(survey["captures"][0]["path"])
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():  # again and again: verify takes a moment to start
            for frame in frames:
                bridged.socket("va0").send(frame)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        seen = json.loads(run_apart(*looking, status=None, netns=bridged.netns))
    finally:
        stop.set()
        sender.join()
    checks = {check["name"]: check["good"] for check in seen["checks"]}
    # Gaps and duplicates say how often the sender was through with its frames, so nothing is asked of them.
    assert checks["packets"] and checks["whole frames"] and checks["checksums"] and checks["ranks and directions"]


def frames_of(path: str) -> list[bytes]:
    from scapy.utils import RawPcapReader

    with RawPcapReader(str(ROOT / path)) as reader:
        return [frame for frame, _ in reader]


def test_each_fault_is_named(survey: dict) -> None:
    def broken(change) -> dict:
        copy = json.loads(json.dumps(survey))
        change(copy)
        return copy

    plan = plan_for(survey)
    source = survey["connections"][0]["source"]
    assert bad(broken(lambda s: s["packets"].update(roce=0)), plan)[0] == "packets"
    assert bad(broken(lambda s: s["packets"].update(truncated=5)), plan) == ["whole frames"]
    assert bad(broken(lambda s: s["encapsulated"].update(GENEVE=3)), plan) == ["no unknown wrapping"]
    assert bad(broken(lambda s: s["icrc"].update(wrong=s["icrc"]["ok"])), plan) == ["checksums"]
    one_way = broken(lambda s: s.update(flows=[f for f in s["flows"] if f["dst"] != source], connections=[]))
    checks = [c for c in judge(one_way, plan) if not c.good]
    assert "no egress" in checks[0].found and "rank 0" in checks[0].remedy
    requests = next(i for i, f in enumerate(survey["flows"]) if f["requests"] and f["requests"]["packets"])
    assert bad(broken(lambda s: s["flows"][requests]["requests"].update(missing=4)), plan) == ["no gaps"]
    twice = broken(lambda s: s["flows"][requests]["requests"].update(duplicates=s["flows"][requests]["packets"]))
    assert bad(twice, plan) == ["duplicates"]
    assert bad(broken(lambda s: s["flows"][requests].update(mtu=4096)), plan.model_copy(update={"path_mtu": 256})) == [
        "path MTU"
    ]


def test_directions_that_go_to_two_monitor_ports_are_judged_together(survey: dict) -> None:
    """No session of the plan copies both, and both are promised: also where the plan has no addresses."""
    plan = plan_for(survey)
    whole = plan.sessions[0]
    plan.sessions = [
        whole.model_copy(update={"name": way, "direction": way, "destination": port})
        for way, port in (("ingress", "Ethernet48"), ("egress", "Ethernet49"))
    ]
    assert bad(survey, plan) == []
    assert "complete: 0" in [check.found for check in judge(survey, plan)]
    for session in plan.sessions:
        session.sources = [source.model_copy(update={"address": None}) for source in session.sources]
    assert bad(survey, plan) == []
    source = survey["connections"][0]["source"]
    one_way = survey | {"flows": [f for f in survey["flows"] if f["dst"] != source], "connections": []}
    assert "both directions" in bad(one_way, plan)


# -- LLDP and credentials ---------------------------------------------------------------------------------


def dump(interface: str, switch: str, port: str, kind: str = "ifname") -> dict:
    body = {
        "via": "LLDP", "rid": "1", "age": "0 day, 00:10:00",
        "chassis": {switch: {"id": {"type": "mac", "value": "0c:c4:7a:00:00:01"}, "descr": "switch"}},
        "port": {"id": {"type": kind, "value": port if kind == "ifname" else "0c:c4:7a:00:00:02"}, "descr": port},
    }
    return {"lldp": {"interface": [{interface: body}]}}


def test_lldp_fills_in_the_ports(tmp_path: Path) -> None:
    data = {
        "leaves": [{"name": "leaf1", "vendor": "eos"}], "groups": [{"name": "dp", "ranks": [0, 1]}],
        "nics": [{"host": f"gpu{r}", "interface": "eth1", "rank": r, "speed_gbps": 100} for r in (0, 1)],
        "node_nics": [{"node": "ck0", "interface": "eth9", "speed_gbps": 400}],
    }
    (tmp_path / "topology.json").write_text(json.dumps(data))
    (tmp_path / "0.json").write_text(json.dumps(dump("eth1", "leaf1", "Ethernet1")))
    (tmp_path / "1.json").write_text(json.dumps(dump("eth1", "leaf1", "Ethernet2", "mac")))
    one = dump("eth9", "leaf1", "Ethernet48")
    one["lldp"]["interface"] = one["lldp"]["interface"][0]  # a single neighbour is no list
    (tmp_path / "c.json").write_text(json.dumps(one))
    options = [w for host, file in (("gpu0", "0"), ("gpu1", "1"), ("ck0", "c")) for w in
               ("--lldp", f"{host}={tmp_path / file}.json")]
    run("plan", str(tmp_path / "topology.json"), "--out", str(tmp_path / "plan.json"), *options)
    plan = MirrorPlan.load(tmp_path / "plan.json")
    assert plan.sessions[0].ports == ["Ethernet1", "Ethernet2"] and plan.sessions[0].destination == "Ethernet48"


def test_lldp_dumps_that_are_incomplete_or_ambiguous() -> None:
    """Every value of both dump formats replaced or gone: a sentence or a topology, never a traceback."""
    zero = {"lldp": [{"interface": [{
        "name": "eth1", "chassis": [{"id": [{"type": "mac", "value": "0c"}], "name": [{"value": "leaf1"}]}],
        "port": [{"id": [{"type": "ifname", "value": "swp1"}], "descr": [{"value": "swp1"}]}]}]}]}
    topology = Topology.model_validate(
        {"leaves": [{"name": "leaf1", "vendor": "eos"}], "groups": [{"name": "dp", "ranks": [0, 1]}],
         "nics": [{"host": "gpu0", "interface": "eth1", "rank": 0, "speed_gbps": 100}]}
    )
    tried = 0
    for document in (dump("eth1", "leaf1", "Ethernet1"), zero):
        for path in paths(document):
            for value in (None, 1, "x", "$(reboot)", [], {}, [[]], True, ABSENT):
                tried += 1
                with contextlib.suppress(PlanError):
                    filled = fill(topology, {"gpu0": neighbours(changed(document, path, value))})
                    assert filled.leaves[0].ports[0].rank == 0
    assert tried > 300
    two = dump("eth1", "leaf1", "Ethernet1")
    two["lldp"]["interface"] += dump("eth1", "phone", "1")["lldp"]["interface"]
    with pytest.raises(PlanError, match="two neighbours, leaf1 and phone"):
        neighbours(two)


def test_no_value_in_a_topology_makes_a_traceback() -> None:
    text = (ROOT / "docs" / "use" / "switch.md").read_text().split("```yaml\n")[1].split("```")[0]
    import yaml

    document = yaml.safe_load(text)
    values = (None, -1, 0, "x", [], {}, True, float("nan"), float("inf"), 10**30, "-x", "$(x)", "\u202e", ABSENT)
    planned = 0
    for path in paths(document):
        for value in values:
            with contextlib.suppress(PlanError):
                plan = make_plan(validated(Topology, changed(document, path, value), "topology"))
                assert MirrorPlan.model_validate_json(plan.to_json()) == plan
                planned += 1
    assert planned > 50


ABSENT = object()


def paths(node: object, at: tuple = ()) -> Iterator[tuple]:
    if at:
        yield at
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from paths(inner, (*at, key))


def changed(document: object, path: tuple, value: object) -> object:
    copy = json.loads(json.dumps(document))
    node = copy
    for key in path[:-1]:
        node = node[key]
    if value is ABSENT:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return copy


def test_lldp_json0_and_what_is_wrong() -> None:
    zero = {"lldp": [{"interface": [{
        "name": "eth1", "chassis": [{"id": [{"type": "mac", "value": "0c"}], "name": [{"value": "leaf1"}]}],
        "port": [{"id": [{"type": "ifname", "value": "swp1"}], "descr": [{"value": "swp1"}]}]}]}]}
    assert neighbours(zero) == {"eth1": ("leaf1", "swp1")}
    for wrong in ([], {"lldp": 1}, {"lldp": {"interface": [{"eth1": {}}]}}):
        with pytest.raises(PlanError, match="lldpctl"):
            neighbours(wrong)
    topology = Topology.model_validate(
        {"leaves": [{"name": "leaf2", "vendor": "eos"}], "groups": [{"name": "dp", "ranks": [0, 1]}],
         "nics": [{"host": "gpu0", "interface": "eth1", "rank": 0, "speed_gbps": 100}]}
    )
    with pytest.raises(PlanError, match="no LLDP dump"):
        fill(topology, {})
    with pytest.raises(PlanError, match="no neighbour"):
        fill(topology, {"gpu0": {}})
    with pytest.raises(PlanError, match="switch leaf1"):
        fill(topology, {"gpu0": neighbours(zero)})


def test_what_cannot_be_written_has_the_name_that_was_given(tmp_path: Path) -> None:
    """Plans are written aside and renamed; nobody knows the name that they have until then."""
    text = (ROOT / "docs" / "use" / "switch.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "t.yaml").write_text(text)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    too_long = tmp_path / f"{'p' * 246}.json"  # with what is put before and after it
    for out in (too_long, tmp_path / "folder", tmp_path / "file" / "plan.json"):
        said = run("plan", str(tmp_path / "t.yaml"), "--out", str(out), status=3)
        assert str(out) in said and "partial" not in said and "remedy" in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "t.yaml"]


@pytest.mark.parametrize(
    ("path", "key", "said"),
    [
        ((), "group", "group: is not a key: did you mean groups?"),
        (("leaves", 0), "monitor_port", "leaves.0.monitor_port: is not a key: did you mean monitor_ports?"),
        (("leaves", 0, "ports", 1), "speed_gpbs", "ports.1.speed_gpbs: is not a key: did you mean speed_gbps?"),
        (("groups", 0), "peers", "groups.0.peers: is not a key here, but of the top level"),
        (("groups", 0), "mtu", "is not a key here, but of leaves.monitor_ports and of node_nics"),
        (("leaves", 0), "colour", "leaves.0.colour: is not a key;"),
    ],
)
def test_a_misspelt_key_is_told_which_one_is_meant(path: tuple, key: str, said: str) -> None:
    import yaml

    text = (ROOT / "docs" / "use" / "switch.md").read_text().split("```yaml\n")[1].split("```")[0]
    document = node = yaml.safe_load(text)
    for step in path:
        node = node[step]
    node[key] = 1
    with pytest.raises(PlanError) as refused:
        validated(Topology, document, "topology")
    assert said.rstrip(";") in str(refused.value)
    assert not said.endswith(";") or str(refused.value).endswith(said.rstrip(";"))


def test_a_key_that_is_missing_and_misspelt_is_misspelt() -> None:
    data = {"leaves": [{"name": "a", "vendor": "eos"}], "grups": [{"name": "dp", "ranks": [0]}]}
    with pytest.raises(PlanError, match=r"topology: grups: is not a key: did you mean groups\? \(and 1 more\)"):
        validated(Topology, data, "topology")


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ([["ck0", "ck7"]], "peers names node ck7, which has no monitor port"),
        ([["ck0", "ck1"], ["ck1", "ck2"]], "peers names node ck1 twice: nodes that count together are one set"),
        ([["ck0"]], "peers.0"), ([["ck0", "ck 1"]], "peers.0.1"),
    ],
)
def test_peers_are_nodes_of_the_topology_and_each_is_in_one_set(peers: list, said: str) -> None:
    ends = [{"port": f"Ethernet{n}", "node": f"ck{n}", "speed_gbps": 100} for n in range(3)]
    data = {"leaves": [{"name": "a", "vendor": "eos", "monitor_ports": ends}], "groups": [{"name": "dp", "ranks": [0]}]}
    with pytest.raises(PlanError, match=said):
        validated(Topology, data | {"peers": peers}, "topology")
    assert validated(Topology, data | {"peers": [["ck0", "ck2"]]}, "topology").peers == [["ck0", "ck2"]]


def test_credentials_per_leaf_before_general_and_never_shown() -> None:
    general = {"FLOWCHECK_SWITCH_USER": "ops", "FLOWCHECK_SWITCH_PASSWORD": "one"}
    env = general | {"FLOWCHECK_SWITCH_PASSWORD_LEAF_1": "two"}
    found = find("leaf-1", None, None, None, env)
    assert (found.username, found.password) == ("ops", "two") and "two" not in repr(found)
    assert find("leaf9", "me", None, None, env).password == "one"
    assert find("leaf9", "me", None, Path("key"), {}).password is None


def test_password_from_the_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package with a store in memory, behind the variables and before the agent."""
    keyring = pytest.importorskip("keyring", reason="keyring (extra `dev`) is not installed")
    from keyring.backend import KeyringBackend
    from keyring.errors import KeyringLocked

    class Memory(KeyringBackend):
        priority = 1  # type: ignore[assignment]
        stored = {("flowcheck-switch", "ops@leaf-1"): "fr0m-ring"}
        locked = False

        def get_password(self, service: str, username: str) -> str | None:
            if self.locked:
                raise KeyringLocked("no password for the ring")
            return self.stored.get((service, username))

        def set_password(self, service: str, username: str, password: str) -> None:
            self.stored[service, username] = password

        def delete_password(self, service: str, username: str) -> None:
            del self.stored[service, username]

    before, store = keyring.get_keyring(), Memory()
    keyring.set_keyring(store)
    try:
        found = find("leaf-1", "ops", None, None, {})
        assert found.password == "fr0m-ring" and "fr0m-ring" not in repr(found)
        assert find("leaf-1", "ops", None, None, {"FLOWCHECK_SWITCH_PASSWORD": "variable"}).password == "variable"
        assert find("leaf-2", "ops", None, None, {}).password is None  # the agent's turn
        assert find("leaf-1", "ops", None, Path("key"), {}).password is None  # a key was named: nothing else is tried
        store.locked = True
        assert find("leaf-1", "ops", None, None, {}).password is None
    finally:
        keyring.set_keyring(before)


def test_an_account_without_a_name_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user has no entry in passwd."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987654)
    with pytest.raises(FlowcheckError, match="--user"):
        find("leaf-1", None, None, Path("key"), {})


def test_the_example_in_the_manual_makes_a_plan(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "use" / "switch.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "t.yaml").write_text(text)
    assert read_document(tmp_path / "t.yaml")["leaves"]
    run("plan", str(tmp_path / "t.yaml"), "--out", str(tmp_path / "plan.json"))
