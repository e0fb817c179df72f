"""The examples in `launch/`: the Slurm script with stand-ins for Slurm, the watchdog, hostfile, manifest."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hybrid.cli.main import main
from hybrid.launch.hosts import Host, read_hostfile

from ...processes import SECONDS, started, wait_for_steps

LAUNCH = Path(__file__).parents[3] / "launch"
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "1",
}
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' "$HOSTS"
[ "$1" = requeue ] && echo "requeue $2" >> "$SAID"
exit 0
"""
SRUN = """#!/usr/bin/env bash
# A task a process of this machine; passes SIGTERM on and ends with the highest code, as Slurm's does.
echo "srun $*" | head -n 1 >> "$SAID"
echo "$MASTER_ADDR $MASTER_PORT $WORLD_SIZE" >> "$SAID"
while [[ $1 == --* ]]; do shift; done
trap 'kill -TERM $(jobs -p)' TERM
for ((task = 0; task < WORLD_SIZE; task++)); do
    node=$((task < NODES ? task : NODES - 1))
    SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$node MASTER_ADDR=127.0.0.1 "$@" &
done
code=0
for pid in $(jobs -p); do
    while wait "$pid"; one=$?; [ "$one" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do :; done
    [ "$one" -gt "$code" ] && code=$one
done
exit "$code"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands, first on PATH; returns the file with what they were told."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    variables = SLURM | {"SAID": str(tmp_path / "said"), "HOSTS": "node3\nnode4", "NODES": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "said"


@pytest.fixture
def told(tmp_path):
    """A stand-in for hybrid that notes what a task is told."""
    hybrid = tmp_path / "bin" / "hybrid"
    hybrid.write_text(
        "#!/usr/bin/env bash\n"
        'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $*" >> "$SAID"\nexit "$CODE"\n'
    )
    hybrid.chmod(0o755)


@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({"SLURM_NTASKS_PER_NODE": "8"}, [8] * 2),
        ({"SLURM_NTASKS_PER_NODE": "", "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "3(x2)"}, [3] * 2),
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1"}, [3, 1]),
        (
            {"SLURM_NTASKS_PER_NODE": "3", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_NUM_NODES": "3"},
            [2, 2, 1],
        ),
        ({"SLURM_NTASKS_PER_NODE": ""}, [1, 1]),
    ],
)
def test_the_slurm_script_starts_the_tasks_that_were_granted(slurm, told, monkeypatch, variables, sizes):
    """On `--ntasks` alone, and where nodes have unequal numbers of tasks."""
    monkeypatch.setenv("CODE", "0")
    monkeypatch.setenv("NODES", str(len(sizes)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    subprocess.run([LAUNCH / "slurm.sbatch", "r.yaml"], timeout=SECONDS, check=True)
    first, meeting, *tasks = slurm.read_text().splitlines()
    assert first.startswith(f"srun --ntasks={sum(sizes)} ")
    assert meeting.split()[-1] == str(sum(sizes))
    assert {task.split()[0] for task in tasks} == {f"{rank}/{sum(sizes)}" for rank in range(sum(sizes))}
    assert {int(task.split()[1].partition("/")[2]) for task in tasks} == set(sizes)


def test_the_slurm_script_by_itself_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    done = subprocess.run(
        [LAUNCH / "slurm.sbatch", "r.yaml"], timeout=SECONDS, capture_output=True, text=True
    )
    assert done.returncode
    assert done.stderr.endswith("SLURM_JOB_ID: is not set: submit this with sbatch\n")


def test_the_slurm_script_hands_the_cores_of_a_task_on(slurm, told, monkeypatch):
    monkeypatch.setenv("CODE", "0")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    subprocess.run([LAUNCH / "slurm.sbatch", "r.yaml"], timeout=SECONDS, check=True)
    assert " --cpus-per-task=12 bash -c " in slurm.read_text().splitlines()[0]


def test_the_slurm_script_tells_every_task_its_place(slurm, told, monkeypatch):

    def run(code: int, restarts: int = 0) -> list[str]:
        slurm.unlink(missing_ok=True)
        monkeypatch.setenv("CODE", str(code))
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        done = subprocess.run([LAUNCH / "slurm.sbatch", "my recipe.yaml", "train.steps=2"], timeout=SECONDS)
        assert done.returncode == code
        return slurm.read_text().splitlines()

    first, meeting, *rest = run(0)
    assert first.startswith("srun --ntasks=2 --kill-on-bad-exit=0 --wait=60 bash -c ")
    assert meeting == "node3 24711 2"
    rest = [line for line in rest if line[0].isdigit()]
    assert sorted(rest) == [f"{rank}/2 0/1 train my recipe.yaml train.steps=2" for rank in range(2)]
    assert run(2)[-1] != "requeue 4711"
    assert run(75, restarts=50)[-1] == "requeue 4711"
    assert run(69)[-1] == "requeue 4711"
    assert run(137)[-1] == "requeue 4711"
    assert run(137, restarts=3)[-1] != "requeue 4711"


@pytest.mark.launcher
@pytest.mark.slow
def test_a_pre_empted_slurm_job_saves_and_goes_back_to_the_queue(slurm, tiny_recipe, tmp_path):
    log, output = tmp_path / "log", tmp_path / "run"
    command = [str(LAUNCH / "slurm.sbatch"), str(tiny_recipe), f"train.output={output}", "train.steps=100000"]
    with started(command, log, PATH=os.environ["PATH"]) as process:
        wait_for_steps(process, output, 5, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 75, log.read_text()
    assert "stopped by SIGTERM after step" in log.read_text()
    assert slurm.read_text().splitlines()[-1] == "requeue 4711"
    assert len(list((output / "checkpoints").glob("step_*"))) == 1


def test_the_submitted_options_are_the_scripts_own():
    options = [
        line for line in (LAUNCH / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert "#SBATCH --requeue" in options
    assert "#SBATCH --signal=TERM@180" in options


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="the watchdog needs pgrep")
class TestWatchdog:
    def run(self, tmp_path: Path, script: str, **variables: str) -> subprocess.CompletedProcess:
        environment = os.environ | variables | {"COUNT": str(tmp_path / "count")}
        command = [LAUNCH / "watchdog.sh", tmp_path / "run", sys.executable, "-c", script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)

    DIE = "import os; open(os.environ['COUNT'], 'a').write('.'); os._exit({code})"

    @pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 1), (75, 1), (69, 3), (137, 3)])
    def test_what_may_go_on_is_started_again(self, tmp_path, code, starts):
        done = self.run(tmp_path, self.DIE.format(code=code), RESTARTS="2")
        assert done.returncode == code
        assert len((tmp_path / "count").read_text()) == starts

    def test_a_clock_that_is_set_is_no_hang(self, tmp_path):
        """A machine's clock put forward by an hour, in a run that logs every half second."""
        fake = tmp_path / "bin" / "date"
        fake.parent.mkdir()
        fake.write_text("#!/usr/bin/env bash\necho $(($(/usr/bin/date +%s) + 3600 * (RANDOM % 2)))\n")
        fake.chmod(0o755)
        (tmp_path / "run").mkdir()
        script = (
            "import os, time\n"
            "path = os.path.join(os.path.dirname(os.environ['COUNT']), 'run', 'metrics.jsonl')\n"
            "for i in range(8):\n"
            "    open(path, 'a').write('.')\n"
            "    os.utime(path, (i, 9e9 * (i % 2)))\n"
            "    time.sleep(0.5)\n"
            "print('finished')"
        )
        path = f"{fake.parent}:{os.environ['PATH']}"
        done = self.run(tmp_path, script, RESTARTS="0", SILENCE="3", PATH=path)
        assert (done.returncode, done.stdout) == (0, "finished\n")

    def test_a_hang_is_ended_with_every_process_stack(self, tmp_path):
        script = (
            "import subprocess, sys\n"
            "code = 'def waits_for_ever():\\n    import time; time.sleep(1000)\\nwaits_for_ever()'\n"
            "ranks = [subprocess.Popen([sys.executable, '-c', code]) for _ in range(2)]\n"
            "sys.exit([rank.wait() for rank in ranks][0] and 9)"
        )
        begin = time.monotonic()
        done = self.run(tmp_path, script, RESTARTS="0", SILENCE="3")
        assert time.monotonic() - begin < 60
        assert done.returncode not in (0, 2, 75)
        assert "nothing new in" in done.stderr
        assert done.stderr.count("in waits_for_ever") == 2
        assert "after 0 restarts" in done.stderr


def test_the_example_hostfile():
    slots = tuple(range(8))
    assert read_hostfile(LAUNCH / "hostfile") == [Host("worker-0", slots), Host("worker-1", slots)]


def test_the_kubernetes_manifest_starts_what_it_says(capsys, monkeypatch):
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    name = service["metadata"]["name"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["template"]["spec"]["subdomain"] == name
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"]]
    assert f"--nodes={job['spec']['completions']}" in words
    assert f"--gpus={container['resources']['limits']['nvidia.com/gpu']}" in words
    assert f"--master-addr={job['metadata']['name']}-0.{name}" in words
    monkeypatch.chdir(LAUNCH.parent)
    assert main([*words[1:], "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "--nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr hybrid-0.hybrid" in said
    assert "16 data-parallel" in said


@pytest.mark.parametrize("name", ["slurm.sbatch", "watchdog.sh"])
def test_scripts_are_whole(name):
    path = LAUNCH / name
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)
