"""The environment of a job: there must be such modules, environments and images, and its Python the packages it needs.

No package is imported for that.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cluster_ddp.agent.command_program import interpreter, interpreter_words, program_words, target
from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.waiting_notice import named_if_slow

_NO_MODULES = 99
_ANSWER = "cluster_ddp asks:"  # comes before an answer
_TIMEOUT_S = 60
_OURS = "cluster-ddp"
# A folder that only has the package's name is no package: it has no origin. Modules in a package are looked for without
# importing the package.
_MISSING = """
import glob, importlib.util, os, sys
print(sys.prefix)
for name in sys.argv[1:]:
    first, *parts = name.split(".")
    found = importlib.util.find_spec(first)
    there = found is not None and (found.origin is not None or bool(parts))
    places = list(found.submodule_search_locations or []) if there and parts else []
    for part in parts:
        places = [path for place in places for path in glob.glob(os.path.join(glob.escape(place), part + "*"))]
        places = [path for path in places if os.path.basename(path).split(".")[0] == part]
    if not (places if parts else there):
        print(name)
"""


def check(spec: JobSpec) -> list[Advice]:
    """Check that there is what a job names. Returns warnings of what can't be known here.

    Raises:
        SpecError: something is not there.
    """
    if spec.venv is not None and not Path(spec.venv, "bin", "activate").is_file():
        made = next((str(path) for path in Path(spec.venv).parents if (path / "bin" / "activate").is_file()), None)
        hint = f"make it: python -m venv {shlex.quote(spec.venv)}; or name another: --venv PATH"
        raise SpecError(
            f"Activating the virtual environment {spec.venv}:",
            "there is no bin/activate in it." if Path(spec.venv).exists() else "there is no such folder.",
            hint if made is None else f"--venv {shlex.quote(made)}",
        ).about("venv")
    if spec.container is not None and "://" not in spec.container and not Path(spec.container).exists():
        hint = f"make one: apptainer pull {spec.container} docker://IMAGE"
        raise SpecError(f"Running in the container {spec.container}:", "there is no such file.", hint).about(
            "container"
        )
    for bind in spec.container_binds:
        if not Path(bind.split(":")[0]).exists():
            asked = f"Binding {bind} into the container:"
            raise SpecError(asked, "there is no such folder here.", "change --container-binds")
    for overlay in spec.container_overlays:
        if not Path(overlay).exists():
            raise SpecError(f"Overlaying {overlay}:", "there is no such file here.", "change --container-overlays")
    if spec.conda_env is not None:
        _check_conda(spec.conda_env)
    return _check_modules(spec.modules) if spec.modules else []


def _check_conda(name: str) -> None:
    asked = f"Activating the conda environment {name}:"
    if shutil.which("conda") is None:
        hint = "load conda's module in your shell first, or use --venv"
        raise SpecError(asked, "there is no conda on the PATH.", hint).about("conda_env")
    if (listing := answer("conda", ["conda", "env", "list"])) is None:
        raise SpecError(
            "Running conda env list:", f"it can't be run, or takes over {_TIMEOUT_S} s.", "try it in your shell"
        )
    lines = [line for line in listing.stdout.splitlines() if not line.startswith("#")]
    known = {word for line in lines for word in line.split()} - {"*"}
    if not {name, str(Path(name).expanduser().absolute())} & known and not (Path(name) / "conda-meta").is_dir():
        found = f"there is no such environment; conda env list shows: {', '.join(sorted(known)) or 'none'}."
        hint = f"make it: conda create {'--prefix' if '/' in name else '--name'} {name} python"
        raise SpecError(asked, found, hint).about("conda_env")


def _check_modules(modules: Sequence[str]) -> list[Advice]:
    names = " ".join(modules)
    load = f"type module >/dev/null 2>&1 || exit {_NO_MODULES}; module load {names}"
    if (done := answer("module load", ["bash", "-lc", load])) is None:
        text = f"The modules {names} were not checked: bash can't be run, or took over {_TIMEOUT_S} s."
        return [Advice("modules", text)]
    if done.returncode == _NO_MODULES:
        text = "There is no module command here. Whether the nodes have these modules was not checked."
        return [Advice("modules", text)]
    # Environment Modules before 5 always ends with status 0.
    if done.returncode != 0 or "unable to locate" in done.stderr.lower():
        raise SpecError(f"Loading the modules {names}:", done.stderr.strip(), "look at what there is: module avail")
    return []


def check_packages(spec: JobSpec) -> None:
    """Ask the job's Python for the packages that the command and the options need, if that Python can be known.

    Args:
        spec: the job. Without a command it runs a function, with the present Python.

    Raises:
        SpecError: a package is missing.
    """
    needs = list(_needs(spec))
    prefix, *missing = (ask_python(spec, _MISSING, [name for name, *_ in needs]) if needs else None) or [""]
    for name, project, asked, instead, field in needs:
        if name in missing and project:
            pip = f"{shlex.quote(f'{prefix}/bin/python')} -m pip install {shlex.quote(project)}{instead}"
            raise SpecError(asked, f"there is no Python package {name!r} in {prefix}.", pip).about(field)
        if name in missing:
            hint = "check its name; a module of your own must be in the folder where you submit, or be installed"
            raise SpecError(asked, f"there is no Python module {name!r} in {prefix}.", hint)


def _needs(spec: JobSpec) -> Iterator[tuple[str, str, str, str, str]]:
    """Packages: name, what pip installs it by ("" for a module of the user's), who asks, what else helps, the field."""
    if spec.launcher == "fork":
        by_srun = "; or leave it to srun: --launcher srun"
        yield "cluster_ddp", _OURS, "Starting the ranks by --launcher fork:", by_srun, "launcher"
    if spec.doctor:
        yield "cluster_ddp", _OURS, "Running the doctor before the ranks:", "; or leave --doctor out", ""
    run = target(spec.command)
    if run.kind == "module" and run.words and "{" not in run.words[0]:
        yield run.words[0], "", f"Running {shlex.join(spec.command)}:", "", ""
    for name in spec.track:
        yield name, f"{_OURS}[{name}]", f"Tracking with {name}:", "", ""


def runs_here(spec: JobSpec) -> bool:
    """Return whether a job finds the programs that this process finds: no container, module or setup changes that."""
    return not (spec.container or spec.container_image or spec.conda_env or spec.modules or spec.setup)


def ask_python(spec: JobSpec, code: str, words: Sequence[str]) -> list[str] | None:
    """Run code by the job's Python. It must not import what the job imports: that would take long.

    Returns:
        The lines that it prints, without those of its sitecustomize; None if that Python can't be known, is not here,
        or does not answer.
    """
    if not runs_here(spec):
        return None
    program_at = len(spec.command) - len(program_words(spec.command))  # after env and its variables
    if spec.launcher == "fork":
        python = list(spec.command[: interpreter_words(spec.command)])
    else:
        python = [*spec.command[:program_at], interpreter(spec.command)]
    path = search_path(spec)
    if (program := shutil.which(python[0], path=path)) is None:
        return None  # another check says so
    code = f"print({_ANSWER!r})\n{code}"
    done = answer(program, [program, *python[1:], "-c", code, *words], env=os.environ | {"PATH": path})
    if done is None or done.returncode != 0 or f"{_ANSWER}\n" not in done.stdout:
        return None
    return done.stdout.rpartition(f"{_ANSWER}\n")[2].splitlines()


def search_path(spec: JobSpec) -> str:
    """Return the PATH on which a job's programs are looked for here: that of its environment comes first."""
    return os.pathsep.join([*([f"{spec.venv}/bin"] if spec.venv else []), os.environ.get("PATH", os.defpath)])


def answer(
    what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a command without input; say on a terminal `what` is slow. None if it can't be run, or takes over 60 s."""
    try:
        with named_if_slow(f"{what} to answer"):
            return subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, env=env
            )
    except (OSError, subprocess.TimeoutExpired):
        return None
