"""The RayJob manifest: its fields are KubeRay's, its parts fit each other, its script ends as it should."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests import ROOT

CONFIG_MAP, JOB = yaml.safe_load_all((ROOT / "recipes" / "kuberay" / "rayjob.yaml").read_text(encoding="utf-8"))
SPEC = JOB["spec"]
HEAD = SPEC["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
(GROUP,) = SPEC["rayClusterSpec"]["workerGroupSpecs"]
WORKER = GROUP["template"]["spec"]
ENVIRONMENT = yaml.safe_load(SPEC["runtimeEnvYAML"])["env_vars"]


def strict(node):
    """An OpenAPI schema of Kubernetes as JSON schema that refuses fields which it does not name."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: strict(value) for key, value in node.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def schema() -> dict:
    crd = yaml.safe_load(Path(os.environ["RAYJOB_CRD"]).read_text(encoding="utf-8"))
    group, _, version = JOB["apiVersion"].partition("/")
    assert crd["spec"]["group"] == group and crd["spec"]["names"]["kind"] == JOB["kind"]
    (found,) = (served for served in crd["spec"]["versions"] if served["name"] == version)
    made = strict(found["schema"]["openAPIV3Schema"])
    made["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, which no CRD describes
    return made


# KubeRay's schema is its own, 1.4 MB. A file of it: `kubectl get crd rayjobs.ray.io -o yaml`, or KubeRay's
# ray-operator/config/crd/bases/ray.io_rayjobs.yaml.
needs_schema = pytest.mark.skipif("RAYJOB_CRD" not in os.environ, reason="RAYJOB_CRD names no file of KubeRay's schema")


@needs_schema
def test_the_manifest_passes_kuberays_schema():
    jsonschema.validate(JOB, schema())


def test_the_entrypoint_composes_and_the_workers_have_its_gpus(compose):
    command, script, *overrides = shlex.split(SPEC["entrypoint"])
    assert (command, script) == ("bash", "/etc/verl_ext/run.sh")
    trainer = compose(*overrides).trainer
    assert trainer.nnodes == GROUP["replicas"] == GROUP["minReplicas"] == GROUP["maxReplicas"]
    (container,) = WORKER["containers"]
    assert trainer.n_gpus_per_node == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert trainer.save_freq > 0, "a retry resumes"


def test_names_paths_and_versions_fit_each_other():
    for pod in (HEAD, WORKER):
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert mounts["shared"] == "/shared"
    assert all(path.startswith("/shared/runs/") for path in ENVIRONMENT.values())
    (script,) = (volume["configMap"]["name"] for volume in HEAD["volumes"] if "configMap" in volume)
    assert script == CONFIG_MAP["metadata"]["name"]
    pinned = re.search(r"^ray==(\S+)", (ROOT / "requirements" / "gpu-fsdp.txt").read_text(), flags=re.MULTILINE)
    assert pinned and SPEC["rayClusterSpec"]["rayVersion"] == pinned[1]


@pytest.fixture
def run(tmp_path):
    """run(exit code of the training) -> (exit code of run.sh, what the training was started with)."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\necho "$*" >>"$RUN_DIR/started"\nexit "$CODE"\n')
    python.chmod(0o755)

    def run(code: int) -> tuple[int, list[str]]:
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "RUN_DIR": str(tmp_path / "run"), "CODE": str(code)}
        command = ["bash", "-c", CONFIG_MAP["data"]["run.sh"], "run.sh", "recipe=cpu_smoke"]
        ended = subprocess.run(command, env=environment)
        return ended.returncode, (tmp_path / "run" / "started").read_text().splitlines()

    return run


def test_a_retry_starts_the_same_run_again(run, tmp_path):
    assert run(1)[0] == 1
    code, started = run(0)
    assert code == 0 and len(started) == 2 and started[0] == started[1]
    assert started[0] == (
        f"-m verl_ext.main_ppo trainer.resume_mode=auto trainer.default_local_dir={tmp_path}/run/checkpoints "
        f"hydra.run.dir={tmp_path}/run/hydra recipe=cpu_smoke"
    )


def test_a_run_that_the_guard_stopped_is_not_started_again(run):
    assert run(3)[0] == 3
    code, started = run(0)
    assert code == 3 and len(started) == 1
