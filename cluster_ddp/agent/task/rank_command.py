"""The command of a rank; in containers, too.

Containers are those of Apptainer (or Singularity) and of Pyxis, srun's plugin.

Apptainer runs inside a task, around the command. Pyxis runs the whole task in the container.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.errors import JobError
from cluster_ddp.run.names import Env

FORWARDED = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(Env.SECRET, Env.START, Env.START_ID, Env.RUN_DIR, Env.RESUME, Env.SHARE, Env.NOTES, Env.AGENT, Env.CHANNEL),
    *(Env.JOB_TIMES, Env.LOCAL_JOB_ID, Env.CHAIN, Env.HANG_RESTART_S, Env.MICRO_BATCH),
    *(Env.CPUS_PER_TASK, Env.GPUS_PER_TASK, Env.PRELOAD, Env.TRACK, Env.DUMMY_GPUS),
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"),
    *("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_CPUS_PER_TASK"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "TORCH_DIST_USE_NCCL2"),
)
"""Variables of a rank that it also gets in an Apptainer that passes none on (`--cleanenv`, as sites configure it)."""

FORWARDED_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_")
"""So begin the names of further ones."""

_AMD_DRIVER = Path("/dev/kfd")
# Apptainer is a Go program: what it starts has the signals' defaults.
_IGNORE_WARNINGS = ("sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh")

_FIND_PYTHON = """\
for python in "$1" python3; do
  if "$python" -c "import sys; sys.exit(sys.version_info < (3, 9))" 2>/dev/null; then shift; exec "$python" "$@"; fi
done
while [ "$1" != -- ]; do shift; done; shift
export RANK="${RANK-$SLURM_PROCID}" LOCAL_RANK="${LOCAL_RANK-$SLURM_LOCALID}" NODE_RANK="${NODE_RANK-$SLURM_NODEID}"
exec "$@\""""


def of_start(options: AgentOptions, env: Mapping[str, str]) -> list[str]:
    """Return the command of a rank: the user's, from the second start on with the words of --restart-args."""
    return [*options.command, *(shlex.split(options.restart_args) if env.get(Env.START, "0") != "0" else [])]


def in_container(
    options: AgentOptions, command: Sequence[str], env: Mapping[str, str], ignored: bool
) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return a command of a task, and its environment, in the job's Apptainer container, if it has one.

    The PATH of the task has the runtime: Apptainer before Singularity. `ignored`: it starts with warnings ignored.

    Raises:
        JobError: there is no runtime.
    """
    if options.container is None:
        return command, env
    image, search_path = options.container, env.get("PATH", os.defpath)
    runtime = shutil.which("apptainer", path=search_path) or shutil.which("singularity", path=search_path)
    if runtime is None:
        asked, found = f"Starting the container {image} on {os.uname().nodename}:", "neither apptainer nor singularity"
        raise JobError(asked, f"{found} is on the PATH.", "load the module that has one: --modules apptainer")
    words = ["--rocm" if _AMD_DRIVER.exists() else "--nv", "--pwd", str(Path.cwd())]
    words += [word for bind in (*_folders(env), *options.container_binds) for word in ("--bind", bind)]
    words += [word for overlay in options.container_overlays for word in ("--overlay", f"{overlay}:ro")]
    inside = [*(_IGNORE_WARNINGS if ignored else ()), *command]
    prefix = "APPTAINERENV_" if Path(runtime).name == "apptainer" else "SINGULARITYENV_"
    is_forwarded = {name: name in FORWARDED or name.startswith(FORWARDED_PREFIXES) for name in env}
    variables = {f"{prefix}{name}": value for name, value in env.items() if is_forwarded[name]}
    return [runtime, "exec", *words, image, *inside], {**env, **variables}


def _folders(env: Mapping[str, str]) -> list[str]:
    """What the container has, too, under the same paths: the working folder, and what the rank and its agent need."""
    folders = [str(Path.cwd()), env[Env.NOTES], *([env[Env.RUN_DIR]] if env.get(Env.RUN_DIR) else [])]
    times = Path(env.get(Env.JOB_TIMES, "")).parent
    folders += [str(times)] if Env.JOB_TIMES in env and times.is_dir() else []  # the batch host has it
    return [*dict.fromkeys(folders)]


def in_image(agent: Sequence[str]) -> list[str]:
    """Return an agent's command as it runs inside an image, which may have another Python, an old one, or none.

    Without a Python of 3.9 or later the command runs alone: it has its place, and gets the signals of Slurm itself, but
    nobody says why it failed.
    """
    return ["sh", "-c", _FIND_PYTHON, "sh", *agent]


def pyxis_options(image: str, binds: Iterable[str], *, folders: Sequence[str]) -> list[str]:
    """Return srun's options for tasks in a container of Pyxis', which has folders: the working one first."""
    mounts = [f"{folder}:{folder}" for folder in folders]
    mounts += [bind if ":" in bind else f"{bind}:{bind}" for bind in binds]
    where = f"--container-workdir={folders[0]}"
    return [f"--container-image={image}", where, f"--container-mounts={','.join(mounts)}"]
