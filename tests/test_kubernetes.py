"""Bases of launch/kubernetes: commands, probes, ports and limits that fit the program, and valid objects."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sam3_node.addresses import split_address
from sam3_node.errors import SettingsError
from sam3_node.processes.signals import INTERRUPTED
from sam3_node.settings import load_settings
from sam3_node.transport.security import KeyFolder
from tests.support.command_line import command_parser
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.refuses import refuses

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "launch" / "kubernetes"
BASES = ("node", "replay")
SPOT_NOTICE_S = 30
"""Seconds between the notice and the end of a spot machine, of the provider that gives the least."""
USER = 10001


def read(base: str) -> dict[str, Any]:
    """Return the objects of a base by kind, as they are in its files."""
    files = yaml.safe_load((FOLDER / base / "kustomization.yaml").read_text())["resources"]
    texts = [(FOLDER / base / file).read_text() for file in files]
    return {each["kind"]: each for text in texts for each in yaml.safe_load_all(text)}


def merge(base: Any, patch: Any) -> Any:
    """Return a base with a patch on it, as kustomize merges where no list of the patch has a merge key."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    return base | {name: merge(base.get(name), value) for name, value in patch.items()}


def read_spot_job() -> dict[str, Any]:
    """Return the Job of the overlay for spot machines."""
    overlay = yaml.safe_load((FOLDER / "replay-spot" / "kustomization.yaml").read_text())
    assert overlay["resources"] == ["../replay"]
    (patch,) = overlay["patches"]
    job: dict[str, Any] = merge(
        REPLAY["Job"], yaml.safe_load((FOLDER / "replay-spot" / patch["path"]).read_text())
    )
    return job


NODE = read("node")
TRITON = read("triton")
REPLAY = read("replay")
PODS = {
    "node": NODE["Deployment"]["spec"]["template"]["spec"],
    "replay": REPLAY["Job"]["spec"]["template"]["spec"],
}


@pytest.mark.parametrize("base", BASES)
def test_pods_have_no_privileges_and_bounds(base: str) -> None:
    pod = PODS[base]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == USER
    assert f"USER {USER}" in (ROOT / "launch" / "container" / "Containerfile").read_text()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys() & resources["limits"].keys()


@pytest.mark.parametrize("base", BASES)
def test_pods_mount_what_they_declare(base: str) -> None:
    pod = PODS[base]
    declared = {volume["name"] for volume in pod["volumes"]}
    containers = (*pod["containers"], *pod.get("initContainers", ()))
    assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == declared


@pytest.mark.parametrize("base", BASES)
def test_the_policy_of_the_network_and_the_claim_are_of_the_pods(base: str) -> None:
    objects = read(base)
    pod = PODS[base]
    template = objects["Deployment" if base == "node" else "Job"]["spec"]["template"]
    policy = objects["NetworkPolicy"]["spec"]
    claim = objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert policy["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = {port["name"] for port in pod["containers"][0].get("ports", ())}
    assert {port["port"] for rule in policy.get("ingress", ()) for port in rule["ports"]} == ports
    cameras = load_settings(FOLDER / "node/profile.toml").transport.frames if base == "node" else ()
    allowed = [rule for rule in policy["egress"] if "to" in rule]
    assert [
        f"tcp://{rule['to'][0]['ipBlock']['cidr'][:-3]}:{rule['ports'][0]['port']}" for rule in allowed
    ] == [*cameras]
    assert claim in [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]


@pytest.mark.parametrize("base", BASES)
def test_the_main_container_runs_a_real_command_on_one_gpu(base: str) -> None:
    (container,) = PODS[base]["containers"]
    assert command_parser().parse_args(container["args"]).run
    resources = container["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1


def test_ports_and_probes_are_those_of_the_profile() -> None:
    (container,) = PODS["node"]["containers"]
    settings = load_settings(FOLDER / "node" / "profile.toml")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    transport = settings.transport
    found = {"masks": transport.masks, "control": transport.control, "health": settings.health.bind}
    assert ports == {name: int(endpoint.rpartition(":")[2]) for name, endpoint in found.items()}
    health, token = container["env"]
    assert token["valueFrom"]["secretKeyRef"]["optional"], "weights that are not gated need none"
    assert (health["name"], health["value"]) == ("SAM3_HEALTH__BIND", settings.health.bind)
    address = split_address(settings.health.bind)
    assert address
    assert address.host == "0.0.0.0", "the kubelet asks the address of the pod"
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {"health"}
    assert [probes[name]["path"] for name in probes] == ["/healthz", "/healthz", "/readyz"]
    assert {port["targetPort"] for port in NODE["Service"]["spec"]["ports"]} == {"masks", "control"}


def test_the_triton_server_has_the_ports_probes_and_bounds_of_its_compose_file() -> None:
    pod = TRITON["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    compose = yaml.safe_load((ROOT / "launch" / "container" / "compose.triton.yaml").read_text())
    service = compose["services"]["triton"]
    assert container["image"] == service["image"]
    assert [*container["command"], *container["args"]] == service["command"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [f"127.0.0.1:{port}:{port}" for port in ports.values()] == service["ports"], "no key is asked for"
    for each in (pod, service):
        assert not each.get("automountServiceAccountToken")
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert service["read_only"]
    assert container["securityContext"]["capabilities"]["drop"] == service["cap_drop"] == ["ALL"]
    assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert {probe["port"] for probe in probes} == {"http"}
    assert probes[2]["path"] in service["healthcheck"]["test"][-1]
    declared = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == declared
    labels = TRITON["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert TRITON["Service"]["spec"]["selector"] == labels
    assert TRITON["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert TRITON["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert TRITON["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"


def test_the_snapshot_outlives_the_container() -> None:
    (container,) = PODS["node"]["containers"]
    settings = load_settings(FOLDER / "node" / "profile.toml")
    assert settings.snapshot.path
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volume = mounts[str(Path(settings.snapshot.path).parent)]
    assert next(each for each in PODS["node"]["volumes"] if each["name"] == volume)["emptyDir"]


@pytest.mark.skipif(shutil.which("install") is None, reason="coreutils are not there")
def test_the_node_takes_the_keys_that_the_first_container_copies(tmp_path: Path) -> None:
    made = KeyFolder(tmp_path / "made")
    made.create("node", "node")
    made.create("cam0", "camera")
    (tmp_path / "secret").mkdir()
    shutil.copy(made.path / "node.secret", tmp_path / "secret")
    (tmp_path / "secret" / "node.secret").chmod(0o644)  # as in a volume
    shutil.copytree(made.path / "authorised", tmp_path / "authorised")
    (container,) = PODS["node"]["initContainers"]
    (script,) = container["args"]
    script = script.replace("/mnt", str(tmp_path)).replace("/run/sam3-node", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    subprocess.run([*container["command"], script], check=True, timeout=PATIENCE_S)
    copied = KeyFolder(tmp_path / "run" / "keys")
    assert copied.find_own(("node",)).key.role == "node"
    assert copied.find_server("camera", "cam0").name == "cam0"
    assert load_settings(FOLDER / "node" / "profile.toml").transport.keys == Path("/run/sam3-node/keys")


def test_no_service_gives_variables_that_the_program_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes gives each pod NAME_PORT and NAME_SERVICE_HOST of each Service, unless enableServiceLinks is false."""
    assert not NODE["Service"]["metadata"]["name"].startswith("sam3")
    assert not any(pod["enableServiceLinks"] for pod in PODS.values())
    monkeypatch.setenv("SAM3_NODE_PORT", "tcp://10.96.0.7:5551")
    with refuses(SettingsError, field="SAM3_NODE_PORT"):
        load_settings()


def test_an_interrupted_replay_is_continued_and_not_counted() -> None:
    job = REPLAY["Job"]["spec"]
    assert PODS["replay"]["restartPolicy"] == "Never", "a policy of failures needs it"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"]) == ("Ignore", [{"type": "DisruptionTarget"}])


def test_a_spot_machine_that_goes_is_no_failure_and_leaves_time_to_write() -> None:
    job = read_spot_job()["spec"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    disruption, interruption = job["podFailurePolicy"]["rules"]
    assert [disruption] == REPLAY["Job"]["spec"]["podFailurePolicy"]["rules"]
    codes = interruption["onExitCodes"]
    assert interruption["action"] == "Ignore"
    assert (codes["containerName"], codes["operator"], codes["values"]) == ("replay", "In", [INTERRUPTED])
    assert pod["containers"][0]["name"] == "replay"
    assert job["backoffLimit"] > REPLAY["Job"]["spec"]["backoffLimit"], "machines may go without a notice"
    assert 0 < pod["terminationGracePeriodSeconds"] < SPOT_NOTICE_S


def test_a_replay_on_spot_machines_tolerates_the_taints_of_the_labels_that_it_wants() -> None:
    pod = read_spot_job()["spec"]["template"]["spec"]
    wanted = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    # terms are alternatives, and a machine has the label of one provider
    expressions = [term["matchExpressions"] for term in wanted["nodeSelectorTerms"]]
    assert all(len(each) == 1 and len(each[0]["values"]) == 1 for each in expressions)
    labels = {each[0]["key"]: each[0]["values"][0] for each in expressions}
    taints = {each["key"]: each.get("value") for each in pod["tolerations"]}
    assert "nvidia.com/gpu" in taints
    assert {key: value for key, value in taints.items() if value}.items() <= labels.items()
    assert "nodeSelector" not in pod


def test_the_job_on_spot_machines_is_valid_by_the_schemas_of_kubernetes() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(read_spot_job(), schemas.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_job_on_spot_machines() -> None:
    command = ["kubectl", "kustomize", FOLDER / "replay-spot"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    objects = {each["kind"]: each for each in yaml.safe_load_all(text)}
    assert set(objects) == {"NetworkPolicy", "PersistentVolumeClaim", "Job"}
    job = read_spot_job()
    job["spec"]["template"]["spec"]["containers"][0]["image"] = "sam3-node:gpu"
    assert objects["Job"] == job


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("base", BASES)
def test_kustomize_renders_valid_objects(base: str) -> None:
    command = ["kubectl", "kustomize", FOLDER / base]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    objects = {each["kind"]: each for each in yaml.safe_load_all(text)}
    both = {"NetworkPolicy", "PersistentVolumeClaim"}
    assert set(objects) == both | {"node": {"ConfigMap", "Deployment", "Service"}, "replay": {"Job"}}[base]
    assert len(re.findall(r"image: sam3-node:gpu$", text, re.MULTILINE)) == (2 if base == "node" else 1)


@pytest.mark.parametrize("base", [*BASES, "triton"])
def test_objects_are_valid_by_the_schemas_of_kubernetes(base: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for kind, each in read(base).items():
        # of the Prometheus Operator, which brings its own schema
        if kind == "PodMonitor":
            continue
        schemas.validate(each, schemas.latest_version(), strict=True)


def test_the_monitor_scrapes_the_pods_of_the_node_as_the_alerts_expect() -> None:
    overlay = yaml.safe_load((FOLDER / "node-monitor" / "kustomization.yaml").read_text())
    assert overlay["resources"] == ["../node", "monitor.yaml"]
    monitor = yaml.safe_load((FOLDER / "node-monitor" / "monitor.yaml").read_text())["spec"]
    template = NODE["Deployment"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"] == template["metadata"]["labels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert endpoint["port"] in ports
    asked = set(re.findall(r'job="([^"]+)"', (ROOT / "launch/monitoring/alerts.yml").read_text()))
    assert {rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"} == asked


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_monitor_with_the_node() -> None:
    command = ["kubectl", "kustomize", FOLDER / "node-monitor"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    assert {"Deployment", "PodMonitor"} <= {each["kind"] for each in yaml.safe_load_all(text)}


def test_the_service_leads_to_the_pods_of_the_deployment() -> None:
    deployment = NODE["Deployment"]["spec"]
    service = NODE["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
