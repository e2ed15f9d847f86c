"""The Slurm script on two nodes of Ray, in namespaces of its own: `srun` starts the second node on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runtime.deployment import REPO

ALONE = ("unshare", "--pid", "--net", "--fork", "--mount-proc")
"""The script ends every process of Ray that it sees, and uses fixed ports."""

SRUN = """#!/bin/sh
while [ "$1" != ray ]; do shift; done
exec "$@"
"""
JOB = """
ip link set lo up
ip link add d0 type veth peer name d1
ip address add 10.9.9.1/24 dev d0
ip link set d0 up
ip link set d1 up
bash "$SCRIPT" orpheus:mini --device cpu --replicas 2 --set ray.spread=true --set ray.ports=20000-20099 &
job=$!
until mstarctl call orpheus --text "Hello there." --out answer.wav; do
    kill -0 $job || exit 1
    sleep 1
done
mstarctl hosts -o json > hosts.json
kill -TERM $job
wait $job
echo $? > status
ps -e -o pid=,args= | awk '$1 != 1' | grep "[r]aylet\\|[g]cs_server\\|[m]star_core" > left
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path, because it contains sockets."""
    path = Path(tempfile.mkdtemp(prefix="mb-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_it_serves_over_the_nodes_of_an_allocation_until_it_is_told_to_end(folder: Path) -> None:
    if subprocess.run([*ALONE, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, namespaces and iproute2")
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MSTAR", "XDG", "RAY"))},
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SCRIPT": str(REPO / "deploy" / "slurm.sh"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURMD_NODENAME": "10.9.9.1",
        "RAY_TMPDIR": str(folder / "ray"),
        "MSTAR_RUNTIME_DIR": str(folder / "run"),
    }
    result = subprocess.run(
        [*ALONE, "bash", "-c", JOB], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert (folder / "status").exists(), result.stdout[-3000:] + result.stderr[-3000:]
    assert (folder / "status").read_text().strip() == "0"
    assert (folder / "left").read_text() == "", "a process is left"
    assert (folder / "answer.wav").stat().st_size > 10_000
    hosts = json.loads((folder / "hosts.json").read_text())["items"]
    assert [host["state"] for host in hosts] == ["ready", "ready"]
    assert [path.name for path in (folder / "run").iterdir()] == [".state"]
