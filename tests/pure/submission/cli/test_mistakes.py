"""What newcomers type, and the whole message that they get: cause and cure."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest
from slow_commands import until_named
from stand_ins import FakeSlurm, fake_slurm

import cluster_ddp
from cluster_ddp import JobSpec, train
from cluster_ddp.__main__ import VERBS, main, module_of
from cluster_ddp.argument_parser import field_texts
from cluster_ddp.cli import submit as door
from cluster_ddp.errors import SpecError
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.submission.checks import command_mistakes
from cluster_ddp.submission.checks.job_warnings import CODES, OTHER_CODES
from cluster_ddp.submission.cli import settings_files

__all__ = ["fake_slurm"]

SINFO = """cat <<'X'
gpu*|up|idle|4|16|64000|1-00:00:00|gpu:a100:4
cpu|up|idle|8|32|128000|infinite|(null)
X"""
HELP = "cluster-ddp submit --help-all"
NO_HET = "heterogeneous jobs are not possible here: all ranks of a job have the same GPUs, CPUs and memory."
SBATCHS = "it is an option of sbatch; --sbatch-options passes it on."
HERE = "that is sbatch's name; here it is called otherwise."
GPUS = "use --gpus-per-node (and --gpu-type)"
TASKS = "use --nodes and --gpus-per-node instead: the tasks follow from the GPUs"
QUOTED = "it is a whole command line in quotes."
NO_QUOTES = "leave out the quotes; or use a shell: -- bash -c 'COMMAND'"
NO_PROGRAM = "there is no such program here."
SPELLING = "check its spelling, or activate its environment first"
NOT_ON_PATH = "it is a file here, but no program on the PATH, or it is not executable."
MADE = "-- ./PROGRAM, after chmod +x PROGRAM; for a script of a shell: -- bash SCRIPT"
NUMBERS = "{0} is plain text. For a range of numbers: {1}=FIRST..LAST; for a list: {1}=VALUE,VALUE"
A_SHELL = "The command gets {} as plain text; no shell reads it. To use a shell: -- bash -o pipefail -c 'COMMAND'"
PASSED_ON = "--sbatch-options={0}, or --sbatch-options={0}=VALUE, without blanks"
READING = "Reading the command line"
BY_HAND = "for two nodes: --nodes 2; for two to eight: --nodes 2-8; in Python: nodes=2, max_nodes=8"
MEANT = "--nodes 2-8"
LEFT = "after the loss of a node, the job continues with those that are left"
RANGE = "a whole number of 1 or more, or a range of them, MIN-MAX, such as 2-8"
FORMS = "time must be 30 (minutes), 30:00 (minutes and seconds), 1:30:00, 2-12 (days-hours) or 2-12:30:00."
SIZES = "mem must be a size such as 32G (per node; units K, M, G, T)."
BEGINS = "begin must be a time such as 16:00, tomorrow, now+2hours or 2030-01-31T12:00."
ALL_CODES = (*CODES, *OTHER_CODES)
NO_VENV = "there is no bin/activate in it."
NO_SCRIPT = "it names no script, and a job has no terminal to read commands from."
SCRIPT = "-- python SCRIPT, or -- bash SCRIPT"
ANYWAY = "to submit it anyway: --accept nested"
WITHOUT = "-- COMMAND (such as python SCRIPT), without {} and its options"
RELATIVE = "paths are relative to where you submit"
NAMES = "--partition gpu"
PARTITIONS = "there is no such partition; there are gpu, cpu. Did you mean gpu?"
EQUAL = "use equal nodes for all ranks: --nodes and --gpus-per-node; or submit independent jobs"
TRAIN_HELP = "cluster-ddp submit --help-all; for the training: cluster-ddp train --help"

# The command line, then what was asked, what was found, and the hint.
ERRORS: list[tuple[str, str, str, str]] = [
    # Chains
    (
        "--chain --array 0-3 -- true",
        "A job with chain True",
        "chain must be left out with an array.",
        "submit one job for each task, or --no-chain: each task is requeued",
    ),
    (
        "--chain --requeue -- true",
        "A job with chain True",
        "chain must be left out with requeue: Slurm would start the same job twice.",
        "--requeue, where jobs may be requeued; else --chain --no-requeue",
    ),
    (
        "--chain --local -- true",
        "Running this job on this machine (--local)",
        "it sets chain=True, and only Slurm supports chains of jobs.",
        "submit it where Slurm is, with --no-local",
    ),
    # Options of sbatch
    ("--mail-type=END -- true", "Submitting with --mail-type", SBATCHS, PASSED_ON.format("--mail-type")),
    ("--mail-type END -- true", "Submitting with --mail-type", SBATCHS, PASSED_ON.format("--mail-type")),
    ("--nodelist=n[1-2] -- true", "Submitting with --nodelist", SBATCHS, PASSED_ON.format("--nodelist")),
    ("--exclusive -- true", "Submitting with --exclusive", SBATCHS, PASSED_ON.format("--exclusive")),
    (
        "--comment 'my job' -- true",
        "Submitting with --comment",
        SBATCHS,
        PASSED_ON.format("--comment"),
    ),
    (
        "--error x.err -- true",
        "Submitting with --error",
        "cluster-ddp submit sets it itself, or has no use for it.",
        "leave it out; to read the logs: cluster-ddp logs JOB",
    ),
    (
        "--job-name 'my job' -- true",
        "A job with name 'my job'",
        "name must be letters, digits and . _ + - @ =.",
        "--name my_job",
    ),
    ("-J -x -- true", "Reading the command line", "--name expected one argument.", "cluster-ddp submit --help-all"),
    (
        "--name 'my job' -- true",
        "A job with name 'my job'",
        "name must be letters, digits and . _ + - @ =.",
        "--name my_job",
    ),
    ("--name -x -- true", READING, "--name expected one argument.", HELP),
    (
        "--epochs 1 -- python t.py",
        READING,
        "there is no option --epochs.",
        "if your command takes it: -- python t.py --epochs 1; the options here: cluster-ddp submit --help-all",
    ),
    (
        "--node 2 -- python t.py",
        READING,
        "there is no option --node. Did you mean --nodes?",
        f"--nodes 2; all options: {HELP}",
    ),
    (
        "--gpu 2 -- true",
        READING,
        "there is no option --gpu. Did you mean --gpus-per-node or --gpu-type or --gpus-per-task?",
        f"--gpus-per-node 2; all options: {HELP}",
    ),
    (
        "--gpu a100 -- true",
        READING,
        "there is no option --gpu. Did you mean --gpus-per-node or --gpu-type or --gpus-per-task?",
        HELP,
    ),
    ("2 -- true", READING, "'2' is one word too many.", HELP),
    (
        "--sbatch-options='--exclusive --mail-type=END' -- true",
        "A job with sbatch_options '--exclusive --mail-type=END'",
        "sbatch_options must be options such as --reservation=course, not several in one pair of quotes.",
        "--sbatch-options=--exclusive --sbatch-options=--mail-type=END",
    ),
    (
        "--sbatch-options=--time=2 -- true",
        "A job with sbatch_options '--time=2'",
        "sbatch_options must be an option that cluster-ddp does not set itself.",
        "--time 2, without --sbatch-options",
    ),
    (
        "--modules 'cuda/12 gcc' -- true",
        "A job with modules 'cuda/12 gcc'",
        "modules must be names that module avail shows, such as cuda/12.8, not several in one pair of quotes.",
        "--modules cuda/12 gcc",
    ),
    (
        "--launcher mpirun -- true",
        "A job with launcher 'mpirun'",
        "launcher must be one of srun, fork.",
        "--launcher srun",
    ),
    (
        "--launcher slurm -- true",
        "A job with launcher 'slurm'",
        "launcher must be one of srun, fork.",
        "leave it out, or --launcher srun",
    ),
    (
        "--venv env --conda-env x -- true",
        "A job with conda_env 'x'",
        "conda_env must be left out when venv is given.",
        "leave out --venv or --conda-env",
    ),
    (
        "--accept nestd -- true",
        "Accepting 'nestd'",
        "there is no warning with this code. Did you mean nested?",
        f"the codes are {', '.join(sorted(ALL_CODES))}",
    ),
    (
        "-o x.log -- true",
        "Submitting with -o",
        "cluster-ddp submit sets it itself, or has no use for it.",
        "leave it out; to read the logs: cluster-ddp logs JOB",
    ),
    *(
        (
            f"--gres={typed} -- true",
            "Submitting with --gres",
            f"it is {typed!r}, and must be gpu:N or gpu:TYPE:N: the GPUs of each node.",
            "--gres=gpu:2, or --gpus-per-node 2 --gpu-type a100",
        )
        for typed in ("gpu:2,tmp:1", "tmp:1", "gpu:", "gpu:a100:2:3")
    ),
    ("-G 3 -- true", "Submitting with -G", HERE, GPUS),
    (
        "--gpus 4 -- true",
        "Submitting with --gpus",
        HERE,
        GPUS,
    ),
    (
        "--ntasks 3 -- true",
        "Submitting with --ntasks 3",
        "one task drives 1 GPU, so it is 1 here.",
        TASKS,
    ),
    (
        "--nodes 2 --ntasks 3 -- true",
        "Submitting with --ntasks 3",
        "one task drives 1 GPU, so it is 2 here.",
        TASKS,
    ),
    (
        "--nodes 2 --ntasks-per-node 4 -- true",
        "Submitting with --ntasks-per-node 4",
        "one task drives 1 GPU, so it is 1 here.",
        TASKS,
    ),
    ("--het-group=0 -- true", "Submitting with --het-group", NO_HET, EQUAL),
    ("--nodes 1 : --nodes 2 -- true", "Submitting with :", NO_HET, EQUAL),
    # Times, sizes, numbers
    ("--time 2h -- true", "A job with time '2h'", FORMS, "--time 2:00:00"),
    ("--time 90m -- true", "A job with time '90m'", FORMS, "--time 1:30:00"),
    ("--time 1d12h -- true", "A job with time '1d12h'", FORMS, "--time 36:00:00"),
    ("--time soon -- true", "A job with time 'soon'", FORMS, "for one hour: --time 1:00:00"),
    ("--mem 32GB -- true", "A job with mem '32GB'", SIZES, "--mem 32G"),
    ("--mem 500MiB -- true", "A job with mem '500MiB'", SIZES, "--mem 500M"),
    (
        "--venv env/bin/activate -- true",
        "Activating the virtual environment {here}/env/bin/activate",
        NO_VENV,
        "--venv '{here}/env'",
    ),
    ("--venv env/bin -- true", "Activating the virtual environment {here}/env/bin", NO_VENV, "--venv '{here}/env'"),
    (
        "--venv nosuch -- true",
        "Activating the virtual environment {here}/nosuch",
        "there is no such folder.",
        "make it: python -m venv '{here}/nosuch'; or name another: --venv PATH",
    ),
    ("--mem much -- true", "A job with mem 'much'", SIZES, "for 32 GiB: --mem 32G"),
    ("--nodes two -- true", "A job with nodes 'two'", f"nodes must be {RANGE}.", BY_HAND),
    ("--nodes 2- -- true", "A job with nodes '2-'", f"nodes must be {RANGE}.", BY_HAND),
    *[
        (f"--nodes '{word}' -- true", f"A job with nodes '{word}'", f"nodes must be {RANGE}.", meant)
        for word, meant in (("2:8", MEANT), ("2 - 8", MEANT), ("8-2", MEANT), ("0-4", "--nodes 1-4"), ("0", BY_HAND))
    ],
    (
        "--nodes 2-8 --restarts 3 --spare-nodes 1 -- true",
        "A job with spare_nodes 1",
        f"spare_nodes must be 0 with a range of nodes: {LEFT}.",
        "leave out --spare-nodes; for fewer nodes than 2, lower MIN",
    ),
    (
        "--gpus-per-node a100:2 -- true",
        READING,
        "--gpus-per-node is a whole number, not 'a100:2'.",
        "such as --gpus-per-node 2; the type of the GPUs: --gpu-type a100",
    ),
    ("--begin tomorow -- true", "A job with begin 'tomorow'", BEGINS, "--begin tomorrow"),
    ("--begin 'in 5 min' -- true", "A job with begin 'in 5 min'", BEGINS, "in two hours: --begin now+2hours"),
    (
        "--after abc -- true",
        "A job with after 'abc'",
        "after must be a job id, such as 12, or a dependency, afterany:12.",
        "after job 12 has succeeded: --after 12; whatever became of it: --after afterany:12",
    ),
    # Grids
    (
        "--array lr=1,2 -- echo {seed}",
        "A command with {seed}",
        "--array gives values for lr only.",
        "write {lr} in the command; or give values for seed instead: --array seed=…",
    ),
    (
        "--array lr=1,2 -- echo {lr} {seed}",
        "A command with {seed}",
        "--array gives values for lr only.",
        "give values for seed, too: --array lr=… seed=…",
    ),
    (
        "--array seed=1,2 -- echo {sed}",
        "A command with {sed}",
        "--array gives values for seed only. Did you mean seed?",
        "write {seed} in the command; or give values for sed instead: --array sed=…",
    ),
    (
        "--array lr=1,2 -- true",
        "An array with lr",
        "the command has no {lr}, so no task would get its value.",
        "add it to the command, for example: --lr {lr}",
    ),
    # Commands
    (
        "t.py --lr 1",
        "Submitting t.py --lr 1",
        "a command comes after two dashes.",
        "cluster-ddp submit [OPTIONS] -- python t.py --lr 1",
    ),
    (
        "torchrun t.py",
        "Submitting torchrun t.py",
        "a command comes after two dashes.",
        "cluster-ddp submit [OPTIONS] -- torchrun t.py",
    ),
    (
        "-- t.py --lr 1",
        "Running 't.py'",
        "it is a Python script, which an interpreter must run.",
        "-- python SCRIPT",
    ),
    ("-- run.sh a", "Running 'run.sh'", NOT_ON_PATH, MADE),
    ("-- ./run.sh a", "Running './run.sh'", NOT_ON_PATH, MADE),
    (
        "-- -N 2 python t.py",
        "Running '-N'",
        "it is an option, not a program.",
        "options go before the two dashes",
    ),
    (
        "-- 'cd d; python t.py'",
        "Running 'cd d; python t.py'",
        QUOTED,
        NO_QUOTES,
    ),
    (
        "-- 'python t.py; rm x'",
        "Running 'python t.py; rm x'",
        QUOTED,
        NO_QUOTES,
    ),
    (
        "-- 'python t.py' --lr 1",
        "Running 'python t.py'",
        QUOTED,
        NO_QUOTES,
    ),
    (
        "-- FOO=1 python t.py",
        "Running 'FOO=1'",
        "it is the value of a variable, not a program.",
        "-- env NAME=VALUE COMMAND",
    ),
    (
        "-- nosuch t.py",
        "Running 'nosuch'",
        NO_PROGRAM,
        SPELLING,
    ),
    ("-- python -u tt.py", "Running 'tt.py'", "there is no such file in {here}. Did you mean t.py?", RELATIVE),
    ("-- env A=1 python sub/x.py", "Running 'sub/x.py'", "there is no such file in {here}.", RELATIVE),
    ("-- bash rnu.sh", "Running 'rnu.sh'", "there is no such file in {here}. Did you mean run.sh?", RELATIVE),
    (
        "-- python t.ipynb",
        "Running 't.ipynb'",
        "it is a notebook, which Python can't run.",
        "jupyter nbconvert --to script NOTEBOOK; then: -- python SCRIPT",
    ),
    (
        "-- python -m nosuch.mod --lr 1",
        "Running python -m nosuch.mod --lr 1",
        f"there is no Python module 'nosuch.mod' in {sys.prefix}.",
        "check its name; a module of your own must be in the folder where you submit, or be installed",
    ),
    ("-- python", "Running python", NO_SCRIPT, SCRIPT),
    ("-- python -u", "Running python -u", NO_SCRIPT, SCRIPT),
    ("-- bash", "Running bash", NO_SCRIPT, SCRIPT),
    ("-- bash -e rnu.sh", "Running 'rnu.sh'", "there is no such file in {here}. Did you mean run.sh?", RELATIVE),
    (
        "-- 'python t.py --lr 1'",
        "Running 'python t.py --lr 1'",
        QUOTED,
        NO_QUOTES,
    ),
    (
        "--gpus-per-node 2 -- torchrun --nproc-per-node 2 t.py",
        "Running torchrun --nproc-per-node 2 t.py",
        "torchrun starts ranks itself. Each of the 2 ranks of this job would start them again.",
        f"{WITHOUT.format('torchrun')}; {ANYWAY}",
    ),
    (
        "-- srun python t.py",
        "Running srun python t.py",
        "srun asks Slurm for tasks. The job starts this command in each of its tasks already.",
        f"{WITHOUT.format('srun')}; {ANYWAY}",
    ),
    (
        "-- srun --ntasks 2 ls -l",
        "Running srun --ntasks 2 ls -l",
        "srun asks Slurm for tasks. The job starts this command in each of its tasks already.",
        f"--gpus-per-node 2 {WITHOUT.format('srun')}; {ANYWAY}",
    ),
    (
        "-- sbatch job.sh",
        "Running sbatch job.sh",
        "sbatch asks for a job of its own, so this job would only submit another.",
        f"run sbatch without cluster-ddp; {ANYWAY}",
    ),
    (
        "--gpus-per-node 2 -- accelerate launch --num_processes 2 --mixed_precision bf16 t.py --lr 1",
        "Running accelerate launch --num_processes 2 --mixed_precision bf16 t.py --lr 1",
        "accelerate starts ranks itself. Each of the 2 ranks of this job would start them again.",
        f"{WITHOUT.format('accelerate')}; {ANYWAY}",
    ),
    *(
        (
            f"--gpus-per-node 2 -- {typed}",
            f"Running {typed}",
            f"{launcher} starts ranks itself. Each of the 2 ranks of this job would start them again.",
            f"{WITHOUT.format(launcher)}; {ANYWAY}",
        )
        for typed, launcher in (
            ("python -m torch.distributed.run t.py", "torch.distributed.run"),
            ("python -mtorch.distributed.run t.py", "torch.distributed.run"),
            ("python /opt/bin/torchrun t.py", "torchrun"),
            ("env -u X torchrun t.py", "torchrun"),
            ("env -i torchrun t.py", "torchrun"),
            ("time torchrun t.py", "torchrun"),
            ("nohup torchrun t.py", "torchrun"),
            ("uv run torchrun t.py", "torchrun"),
            ("bash -c 'torchrun t.py'", "torchrun"),
            ("bash -c 'cd d; torchrun t.py'", "torchrun"),
            ("time bash -c 'cd d && A=1 torchrun t.py >$X'", "torchrun"),
        )
    ),
    (
        "--gpus-per-node 2 -- deepspeed t.py",
        "Running deepspeed t.py",
        "deepspeed starts ranks itself. Each of the 2 ranks of this job would start them again.",
        f"{WITHOUT.format('deepspeed')}; {ANYWAY}",
    ),
    (
        "--gpus-per-node 2 -- mpirun -np 2 python t.py",
        "Running mpirun -np 2 python t.py",
        "mpirun starts ranks itself. Each of the 2 ranks of this job would start them again.",
        f"{WITHOUT.format('mpirun')}; {ANYWAY}",
    ),
    (
        "-- torchrun --nproc-per-node 4 t.py",
        "Running torchrun --nproc-per-node 4 t.py",
        "torchrun starts 4 ranks, and this job has 1 GPU.",
        f"--gpus-per-node 4 {WITHOUT.format('torchrun')}; {ANYWAY}",
    ),
    # What the cluster lacks
    ("--partition gpus -- true", "A job in the partition gpus", PARTITIONS, NAMES),
    (
        "--gpus-per-node 8 -- true",
        "A job of 1 node with 8 GPUs in the default partition, gpu",
        "the nodes of partition gpu have at most 4 GPUs. GPUs per node: gpu: 4 a100; cpu: no GPUs.",
        "--nodes 2 --gpus-per-node 4",
    ),
    (
        "--time 25:00:00 -- true",
        "A job of 1 node with 1 GPU in the default partition, gpu",
        "the time limit of partition gpu is 1-00:00:00; the job asks for 1-01:00:00.",
        "--time 1-00:00:00",
    ),
    (
        "--gpu-type h100 -- true",
        "A job with GPUs of type h100",
        "the cluster has a100.",
        "--gpu-type a100",
    ),
    # Options of the training
    ("--epochs two", READING, "--epochs is a whole number, not 'two'.", TRAIN_HELP),
    (
        "--epochz 3",
        READING,
        "there is no option --epochz. Did you mean --epochs?",
        f"--epochs 3; all options: {TRAIN_HELP}",
    ),
    (
        "--gpu-per-node 2",
        READING,
        "there is no option --gpu-per-node. Did you mean --gpus-per-node?",
        f"--gpus-per-node 2; all options: {TRAIN_HELP}",
    ),
    (
        "--model resnet",
        READING,
        "--model must be one of cnn, convnet; it is 'resnet'.",
        TRAIN_HELP,
    ),
]

# The same for words that a verb's parser does not know: the verb is the first word. The hint is the option that was
# meant, if there is one, and the verb's --help.
UNKNOWN_WORDS: list[tuple[str, str, str]] = [
    ("init --partiton gpu", "there is no option --partiton. Did you mean --partition?", "--partition gpu"),
    ("init t.py run.sh", "'run.sh' is one word too many.", ""),
    ("env --jsn", "there is no option --jsn. Did you mean --json?", "--json"),
    ("status --o nohost.invalid", "there is no option --o. Did you mean --on?", "--on nohost.invalid"),
    ("status --runs x", "there is no option --runs. Did you mean --runs-dir?", "--runs-dir x"),
    ("status --json --watch", "--watch not allowed with argument --json.", ""),
    ("status --json=1", "--json ignored explicit argument '1'.", ""),
    ("logs 12 --rank one", "--rank is a whole number, not 'one'.", ""),
    ("logs 12 --rank", "--rank expected one argument.", ""),
    ("logs 12 --follw", "there is no option --follw. Did you mean --follow?", "--follow"),
    ("cancel --o h 5", "there is no option --o. Did you mean --on?", "--on h"),
    ("report 12 --htm x", "there is no option --htm. Did you mean --html?", "--html x"),
    ("fetch --checkpoint 12", "there is no option --checkpoint. Did you mean --checkpoints?", "--checkpoints 12"),
    ("doctor --wait-s soon", "--wait-s is a number, not 'soon'.", ""),
    ("scaling", "the following arguments are required: --gpus.", ""),
    ("scaling --gpu 1", "the following arguments are required: --gpus.", ""),
    ("completion fish", "shell must be one of bash, zsh; it is 'fish'.", ""),
    ("sandbox dwon", "VERB must be one of up, down, status, shell, run; it is 'dwon'. Did you mean down?", ""),
    ("sandbox down --nam x", "there is no option --nam. Did you mean --name?", "--name x"),
    (
        "sandbox run --install -- sinfo",
        "--install is an option of cluster-ddp sandbox up, not of cluster-ddp sandbox run.",
        "cluster-ddp sandbox up --install",
    ),
    (
        "sandbox down --nodes=2",
        "--nodes is an option of cluster-ddp sandbox up, not of cluster-ddp sandbox down.",
        "cluster-ddp sandbox up --nodes 2",
    ),
    ("sandbox down --nods 2", "there is no option --nods.", ""),
]

# The same for what verbs refuse that submit: the verb is the first word.
OF_OTHER_VERBS: list[tuple[str, str, str, str]] = [
    (
        "doctor --jsn",
        READING,
        "there is no option --jsn. Did you mean --json?",
        "--json; all options: cluster-ddp doctor --help",
    ),
    ("doctor --zzz", READING, "there is no option --zzz.", "cluster-ddp doctor --help"),
    (
        "scaling --gpus 1 --reapets 2 -- true",
        READING,
        "there is no option --reapets. Did you mean --repeats?",
        "--repeats 2; all options: cluster-ddp scaling --help",
    ),
    (
        "scaling --gpus 1 --reapets 2",
        READING,
        "there is no option --reapets. Did you mean --repeats?",
        f"--repeats 2; all options: {TRAIN_HELP}",
    ),
    (
        "scaling --gpus 1 -- python t.py --batch {batch}",
        "A command with {batch}",
        "only --global-batch gives it a value: the samples of a step on all GPUs.",
        "--global-batch 256",
    ),
]

# The command line, the code of the warning, and its text.
WARNINGS = [
    (
        "--array seed=0-3 -- echo {seed}",
        "range",
        NUMBERS.format("seed=0-3", "seed"),
    ),
    (
        "--array seed=0:3 -- echo {seed}",
        "range",
        NUMBERS.format("seed=0:3", "seed"),
    ),
    (
        "--array 'seed=range(3)' -- echo {seed}",
        "range",
        NUMBERS.format("seed=range(3)", "seed"),
    ),
    (
        "--array 'lr=[0.1, 0.2]' -- echo {lr}",
        "range",
        NUMBERS.format("lr=[0.1, 0.2]", "lr"),
    ),
    (
        "-- python t.py --lr {lr} --seed={seed}",
        "placeholder",
        "The command gets {lr} and {seed} as plain text. To give values: --array lr=… seed=…",
    ),
    ("--time 1:30 -- true", "short", "--time 1:30 means minutes and seconds. For hours and minutes: --time 1:30:00"),
    ("--mem 32 -- true", "short", "--mem 32 means MiB. For GiB: --mem 32G"),
    (
        "-- python t.py '|' tee log",
        "shell",
        A_SHELL.format("|"),
    ),
    (
        "-- python t.py '>' log",
        "shell",
        A_SHELL.format(">"),
    ),
    (
        "-- python t.py '&&' rm x",
        "shell",
        A_SHELL.format("&&"),
    ),
    ("--partition gpus -- true", "cluster", f"A job in the partition gpus: {PARTITIONS} Hint: {NAMES}"),
    (
        "--gpus-per-node 8 -- true",
        "cluster",
        "A job of 1 node with 8 GPUs in the default partition, gpu: the nodes of partition gpu have at most 4 GPUs. "
        "GPUs per node: gpu: 4 a100; cpu: no GPUs. Hint: --nodes 2 --gpus-per-node 4",
    ),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    path = tmp_path / "a folder"
    path.mkdir()
    (path / "t.py").touch()
    (path / "run.sh").touch()
    (path / "env/bin").mkdir(parents=True)
    (path / "env/bin/activate").touch()
    monkeypatch.chdir(path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:{Path(sys.executable).parent}:/usr/bin:/bin")
    fake_slurm.command("sinfo", SINFO)
    return path


def words(line: str) -> list[str]:
    return shlex.split(line)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    try:
        status = door.main(argv)
    except SystemExit as error:
        status = int(error.code or 0)
    return status, capsys.readouterr().err


@pytest.mark.parametrize(("line", "asked", "found", "hint"), ERRORS, ids=[line for line, *_ in ERRORS])
def test_a_mistake_gets_its_cause_and_its_cure(
    capsys, fake_slurm: FakeSlurm, folder: Path, line: str, asked: str, found: str, hint: str
) -> None:
    expected = f"cluster-ddp submit: error: {asked}:\n  {found}\n  Hint: {hint}\n"
    assert said(capsys, *words(line)) == (2, expected.replace("{here}", str(folder)))
    assert fake_slurm.calls("sbatch") == []
    assert {path.name for path in folder.iterdir()} == {"t.py", "run.sh", "env"}


@pytest.mark.parametrize(("line", "found", "meant"), UNKNOWN_WORDS, ids=[line for line, *_ in UNKNOWN_WORDS])
def test_a_word_that_a_verb_does_not_know(capsys, fake_slurm: FakeSlurm, line: str, found: str, meant: str) -> None:
    verb, *argv = words(line)
    with pytest.raises(SystemExit) as ended:
        import_module(module_of(verb)).main(argv)
    program = f"cluster-ddp {verb}"
    expected = f"{program}: error: Reading the command line:\n  {found}\n  Hint: {meant and f'{meant}; all options: '}"
    expected += f"{program} --help\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, expected)
    assert fake_slurm.calls("squeue") == fake_slurm.calls("scancel") == []


def test_a_verb_that_there_is_not(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster-ddp", "stauts"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        "cluster-ddp: error: Reading the command line:\n  there is no verb 'stauts'. Did you mean status?\n"
        f"  Hint: the verbs are {', '.join(VERBS)}\n",
    )


@pytest.mark.parametrize(("line", "asked", "found", "hint"), OF_OTHER_VERBS, ids=[line for line, *_ in OF_OTHER_VERBS])
def test_a_mistake_with_a_verb_that_submits(
    capsys, fake_slurm: FakeSlurm, line: str, asked: str, found: str, hint: str
) -> None:
    verb, *argv = words(line)
    with pytest.raises(SystemExit) as ended:
        import_module(module_of(verb)).main(argv)
    expected = f"cluster-ddp {verb}: error: {asked}:\n  {found}\n  Hint: {hint}\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, expected)
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize(("line", "code", "text"), WARNINGS, ids=[line for line, *_ in WARNINGS])
def test_a_doubt_is_a_warning_that_can_be_silenced(capsys, line: str, code: str, text: str) -> None:
    argv = ("--dry-run", "--accept", "node-local-path")
    assert said(capsys, *argv, *words(line)) == (0, f"warning: {text} (silence: --accept {code})\n")
    assert said(capsys, *argv, code, *words(line)) == (0, "")


def test_the_codes_are_those_of_all_warnings() -> None:
    """--accept refuses others."""
    package = Path(cluster_ddp.__file__).parent / "submission"
    found = {code for path in package.rglob("*.py") for code in re.findall(r'Advice\(\s*"([\w-]+)"', path.read_text())}
    assert sorted({*found, command_mistakes.CODE, settings_files.CODE}) == sorted(OTHER_CODES)


NO_SLURM = """echo 'sinfo: error: fetch_config: DNS SRV lookup failed' >&2
echo 'sinfo: fatal: Could not establish a configuration source' >&2
exit 1"""


def test_a_cluster_that_does_not_answer_is_one_line(capsys, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("sinfo", NO_SLURM)
    text = "sinfo: fatal: Could not establish a configuration source"
    expected = f"warning: It was not checked whether the cluster can run the job: {text} (silence: --accept cluster)\n"
    assert said(capsys, "--dry-run", "--accept", "node-local-path", "--", "true") == (0, expected)


def test_lines_of_other_programs_stay_in_the_block(capsys, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("bash", "echo 'Lmod has detected an error:\n\nno such module: cuda' >&2; exit 1")
    assert said(capsys, "--modules", "cuda", "--", "true") == (
        2,
        "cluster-ddp submit: error: Loading the modules cuda:\n"
        "  Lmod has detected an error:\n"
        "  no such module: cuda\n"
        "  Hint: look at what there is: module avail\n",
    )


@pytest.mark.parametrize(
    ("program", "options", "what"),
    [
        ("bash", ("--modules", "cuda"), "module load"),
        ("conda", ("--conda-env", "mine"), "conda"),
        ("sinfo", (), "sinfo"),
    ],
)
def test_a_wait_says_what_for(
    capsys,
    monkeypatch: pytest.MonkeyPatch,
    fake_slurm: FakeSlurm,
    tmp_path: Path,
    program: str,
    options: tuple[str, ...],
    what: str,
) -> None:
    wait = until_named(monkeypatch, tmp_path, on_terminal=True)
    fake_slurm.command(program, f"{wait}; echo mine; exit 0")
    assert f"Waiting for {what} to answer …\n" in said(capsys, "--dry-run", *options, "--", "true")[1]


def test_a_syntax_error_is_found_before_the_job_waits_for_it(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    (folder / "t.py").write_text("def f(:\n")
    code, text = said(capsys, "--", "python", "t.py")
    assert code == 2
    assert text.startswith("cluster-ddp submit: error: Running 't.py':\n  SyntaxError: ")
    assert "line 1" in text
    assert text.endswith("\n  Hint: mend it, and submit it again\n")
    assert fake_slurm.calls("sbatch") == []


def test_a_variable_without_a_value_is_a_warning(capsys, folder: Path) -> None:
    (folder / "t.py").write_text('import os\nos.environ["SLURM_CPUS_PER_TASK"]\n')
    argv = ("--dry-run", "--accept", "node-local-path")
    code, text = said(capsys, *argv, "--", "python", "t.py")
    assert code == 0
    assert "--cpus-per-task N sets it. (silence: --accept slurm-variable)" in text
    assert said(capsys, *argv, "--cpus-per-task", "2", "--", "python", "t.py") == (0, "")


def test_an_option_of_sbatch_may_stand_behind_a_blank(capsys) -> None:
    argv = (
        "--dry-run",
        "--accept",
        "node-local-path",
        "--sbatch-options",
        "--mail-type=END",
        "--nodes",
        "2",
        "--",
        "true",
    )
    assert door.main(argv) == 0
    script = capsys.readouterr().out.splitlines()
    assert {"#SBATCH --mail-type=END", "#SBATCH --nodes=2"} <= set(script)


def test_a_setting_from_a_file_is_named_with_its_line(capsys, folder: Path) -> None:
    (folder / "cluster.toml").write_text('# ours\nnodes = 1\npartition = "gpus"\n\n[long]\npartition = "cpus"\n')
    error = "cluster-ddp submit: error: A job in the partition {}:\n  there is no such partition; there are gpu, cpu. "
    error += "Did you mean {}?{}\n  Hint: --partition {}\n"
    place = f" (partition is set in {folder}/cluster.toml, line {{}})"
    assert said(capsys, "--", "true") == (2, error.format("gpus", "gpu", place.format(3), "gpu"))
    assert said(capsys, "--profile", "long", "--", "true") == (2, error.format("cpus", "cpu", place.format(6), "cpu"))
    assert said(capsys, "--partition", "gpux", "--", "true") == (2, error.format("gpux", "gpu", "", "gpu"))


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ('gpu_type = "a1000"', "A job with GPUs of type a1000:"),
        ('venv = "nowhere"', "Activating the virtual environment {folder}/nowhere:"),
        ('conda_env = "nowhere"', "Activating the conda environment nowhere:"),
        ('container = "no.sif"', "Running in the container {folder}/no.sif:"),
    ],
)
def test_each_setting_that_does_not_fit_is_named_with_its_line(capsys, folder: Path, line: str, asked: str) -> None:
    """Of a path, too, although the error has it absolute; but of no setting that only has a word of the error."""
    (folder / "cluster.toml").write_text(f'account = "with"\nname = "job"\n{line}\n')
    status, error = said(capsys, "--", "true")
    key = line.partition(" ")[0]
    assert status == 2
    assert error.startswith(f"cluster-ddp submit: error: {asked.format(folder=folder)}\n")
    assert error.count(" is set in ") == 1
    assert f"({key} is set in {folder}/cluster.toml, line 3)\n" in error
    option = "--" + key.replace("_", "-")
    assert " is set in " not in said(capsys, option, "else", "--", "true")[1]


def test_a_setting_in_a_file_gets_the_legal_form(capsys, folder: Path) -> None:
    (folder / "cluster.toml").write_text('time = "2h"\n')
    assert said(capsys, "--", "true") == (
        2,
        f"cluster-ddp submit: error: Reading the settings in {folder}/cluster.toml:\n"
        f"  {FORMS} It is '2h'.\n"
        '  Hint: write time = "2:00:00"\n',
    )


def test_a_function_that_cannot_be_called_or_copied(folder: Path) -> None:
    def lonely() -> None: ...

    lock = threading.Lock()

    def locked(world: object) -> None:
        lock.acquire()

    with pytest.raises(SpecError) as error:
        cluster_ddp.submit(JobSpec(name="f"), lonely, check=False)
    assert str(error.value) == (
        "Submitting the function lonely:\n"
        "  each rank calls lonely(world), which does not fit: too many positional arguments.\n"
        "  Hint: def lonely(world): …"
    )
    with pytest.raises(SpecError) as error:
        cluster_ddp.submit(JobSpec(name="f"), locked, check=False)
    assert str(error.value) == (
        "Submitting the function test_a_function_that_cannot_be_called_or_copied.<locals>.locked:\n"
        "  each rank gets a copy of it, and what it uses can't be pickled: lock (lock): "
        "cannot pickle '_thread.lock' object.\n"
        "  Hint: make that inside the function, or give the name of a file to open there"
    )
    assert {path.name for path in folder.iterdir()} == {"t.py", "run.sh", "env"}


@pytest.mark.parametrize("columns", ["60", "120"])
def test_the_help_of_the_training_looks_like_that_of_other_verbs(capsys, monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        train.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith("usage: cluster-ddp train [OPTIONS]\n\n`cluster-ddp train`: ")
    assert not re.search("[│╭╰─]|None", said)
    options = said.partition("options:\n")[2]
    whole = re.sub(r"\s+", "", options)
    for field, text in field_texts(TrainConfig).items():
        assert f"--{field.replace('_', '-')}" in options
        assert text.replace(" ", "") in whole
    assert "Numberofbatchesofoneupdate.(default:1)" in whole
    indent = " " * 24
    for line, after in itertools.pairwise(options.splitlines()):
        if line.startswith(indent) and after.startswith(indent):  # the text continues
            assert len(f"{line} {after.split()[0]}") > int(columns) - 2, line  # the next word did not fit


TRAINING = [
    ("--epochs 3 --lr=0.5 --run-dir r", {"epochs": 3, "lr": 0.5, "run_dir": Path("r")}),
    ("--amp bf16 --no-cuda --deterministic", {"amp": "bf16", "cuda": False, "deterministic": True}),
    ("--stop-signals USR1 TERM --keep-checkpoints 2", {"stop_signals": ("USR1", "TERM"), "keep_checkpoints": 2}),
    ("--hang-warning-s 0 --seed 0", {"hang_warning_s": 0.0, "seed": 0}),
    ("--dataset folder:a=b", {"dataset": "folder:a=b"}),
]


@pytest.mark.parametrize(("line", "values"), TRAINING, ids=[line for line, _ in TRAINING])
def test_the_options_of_the_training_are_its_configuration(line: str, values: dict[str, object]) -> None:
    assert train.parse(words(line)) == TrainConfig(**values)  # type: ignore[arg-type]


def test_slurms_options_behind_the_script_of_a_job(capsys) -> None:
    """sbatch jobs/mnist_2node.sbatch --nodes 4"""
    with pytest.raises(SystemExit) as ended:
        train.main(["--nodes", "4"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "cluster-ddp train: error: Training with --nodes 4:\n"
        "  that is an option of sbatch, not of the training.\n"
        "  Hint: Slurm's options go before the script: sbatch --nodes … jobs/NAME.sbatch. "
        "The training's options: cluster-ddp train --help\n"
    )


def test_the_folder_of_env_is_where_the_script_is(capsys, folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "there.py").touch()
    argv = ("--dry-run", "--accept", "node-local-path")
    assert said(capsys, *argv, "--", "env", "--chdir=src", "python", "there.py") == (0, "")
