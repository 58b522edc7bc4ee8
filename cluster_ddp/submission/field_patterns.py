"""What the text fields of a job may hold: sbatch(1)'s own syntax, without what a shell or an #SBATCH line reads."""

from __future__ import annotations

_DEPENDENCY = r"(singleton|(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer|expand):[\w:+]+)"
_PATH = (r"[^\x00-\x1f\x7f]+", "a path without line breaks")

# What each text field may hold: sbatch's own syntax (sbatch(1)), without characters that a shell or an #SBATCH line
# interprets: blanks, quotes, '$', '`', '\\', '#', line breaks. Paths, images and environments may have most of them, as
# the templates quote these. So may the description, which stands in a comment.
PATTERNS: dict[str, tuple[str, str]] = {
    "name": (r"[\w.+@=-]{1,128}", "letters, digits and . _ + - @ ="),
    "gpu_type": (r"[\w.-]+", "a type that sinfo -o %G shows, such as a100"),
    "mem": (r"\d+[KMGT]?", "a size such as 32G (per node; units K, M, G, T)"),
    "partition": (r"[\w.+@-]+(,[\w.+@-]+)*", "names that sinfo shows, separated by commas"),
    "account": (r"[\w.+@/-]+", "a name that sacctmgr show associations shows"),
    "qos": (r"[\w.+@-]+", "a name that sacctmgr show qos shows"),
    "constraint": (r"[\w.+@=:&|!*,()\[\]-]+", "features that sinfo -o %f shows, such as a100&nvlink"),
    "array": (
        r"{0}(,{0})*(%[1-9]\d{{0,17}})?".format(r"\d{1,18}(-\d{1,18}(:[1-9]\d{0,17})?)?"),
        "task numbers such as 0-7, 1,3,5 or 0-99%4",
    ),
    "signal": (
        r"(R:)?[A-Z0-9]+(@\d+)?",
        "a signal and seconds before the end, such as USR1@120 (not B:…, which would end the batch script and the job)",
    ),
    "exclude": (r"[\w.,\[\]-]+", "nodes that sinfo -N shows, such as node[3-4]"),
    "begin": (
        r"\d[\w:./-]*|now([+-]\d+[a-z]*)?|today|tomorrow|midnight|noon|teatime|fika|elevenses",
        "a time such as 16:00, tomorrow, now+2hours or 2030-01-31T12:00",
    ),
    "after": (
        r"{0}(:{0})*|{1}([,?]{1})*".format(r"\d+(_\d+)?", _DEPENDENCY),
        "a job id, such as 12, or a dependency, afterany:12",
    ),
    "venv": _PATH,
    "conda_env": (r"[^\x00-\x1f\x7f]+", "a name or path without line breaks"),
    "container": _PATH,
    "template": _PATH,
    "container_image": (r"[^\x00-\x20\x7f]+", "an image as Enroot names it, such as nvcr.io#nvidia/pytorch:25.10-py3"),
    "description": (r"[^\x00-\x1f\x7f]*", "one line"),
    "restart_args": (r"[^\x00-\x1f\x7f]*", "words in one line"),
}  # fmt: skip

# The same for each word of a field that holds several words.
WORD_PATTERNS: dict[str, tuple[str, str]] = {
    "modules": (r"[\w.+/][\w.+/-]*", "names that module avail shows, such as cuda/12.8"),
    "container_binds": (r"[^\x00-\x1f\x7f,]+", "paths such as /data or /scratch/me:/data, without commas"),
    "container_overlays": _PATH,
    "track": (r"[\w-]+", "names of trackers"),
    "sbatch_options": (r"--[a-z][a-z-]*(=[^\x00-\x20\x7f\"'`$\\#]+)?", "options such as --reservation=course"),
    "srun_options": (r"--[a-z][a-z-]*(=[^\x00-\x20\x7f\"'`$\\#]+)?", "options such as --cpu-bind=verbose"),
    "setup": (r"[^\x00]*", "lines of bash"),
}  # fmt: skip

# Options of sbatch that other fields, the template or the submission set. Also --wait, --help, --usage, --version and
# --quiet: with them, sbatch does not simply submit a job and print its id.
SET_ELSEWHERE = frozenset(
    [
        *(
            "account",
            "array",
            "begin",
            "chdir",
            "constraint",
            "cpus-per-task",
            "dependency",
            "error",
            "exclude",
            "gpus",
            "gpus-per-node",
        ),
        *("gpus-per-task", "gres", "hold", "job-name", "mem", "no-requeue", "nodes", "ntasks", "ntasks-per-core"),
        *("ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output", "parsable", "partition"),
        *("qos", "requeue", "signal", "test-only", "time", "wrap", "wait", "help", "usage", "version", "quiet"),
    ]
)
