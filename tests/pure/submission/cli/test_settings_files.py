from __future__ import annotations

import dataclasses
import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strangers import STRANGER, as_stranger, folder_of_all, needs_a_stranger

from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.submission.cli import settings_files, settings_keys
from cluster_ddp.submission.cli.settings_files import Settings, load
from cluster_ddp.submission.cli.settings_keys import SUBMISSION_KEYS
from cluster_ddp.submission.spec import JobSpec

EXAMPLES = sorted((Path(__file__).parents[4] / "examples" / "profiles").glob("*.toml"))


class Site:
    """A project's folder and a user's home, as the tests write them."""

    def __init__(self, root: Path) -> None:
        self.folder, self.home = root / "project", root / "home"
        self.project = self.folder / "cluster.toml"
        self.user = self.home / ".config" / "cluster_ddp" / "cluster.toml"
        for path in (self.project, self.user):
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # whatever the umask is

    def load(self, name: str | None = None, *, accept: bool = False, **env: str) -> Settings:
        return load(name, folder=self.folder, env={"HOME": str(self.home), **env}, accept=accept)

    def error(self, name: str | None = None) -> SpecError:
        with pytest.raises(SpecError) as caught:
            self.load(name)
        return caught.value


@pytest.fixture(params=["plain", "with blanks, a 'quote' and a \"quote\""])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path / request.param)


def test_the_keys_are_those_of_a_job_and_of_its_submission() -> None:
    fields = {field.name for field in dataclasses.fields(JobSpec)}
    assert set(settings_keys.kinds()) == fields - {"command", "description", "grid", "max_nodes"} | {
        "runs_dir",
        "accept",
    }
    assert len(settings_keys.kinds()) == len(set(settings_keys.kinds()))


def test_no_file_sets_nothing(site: Site) -> None:
    assert site.load() == Settings(values={}, origins={})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nodes = 2", 2),
        ('name = "mine"', "mine"),
        ('launcher = "fork"', "fork"),
        ("requeue = false", False),
        ("time = 90", "90"),
        ('time = "2-12"', "2-12"),
        ('modules = ["cuda/12.8", "gcc"]', ("cuda/12.8", "gcc")),
        ("modules = []", ()),
        ("setup = [\"export A='b c'\"]", ("export A='b c'",)),
        ('container_overlays = ["/a b.img"]', ("/a b.img",)),
        ('runs_dir = "/scratch/größe"', "/scratch/größe"),
        ("hang_restart_s = 30", 30),
        ('accept = ["cluster", "modules"]', ("cluster", "modules")),
    ],
)
def test_values_are_as_a_job_takes_them(site: Site, text: str, value: Any) -> None:
    site.project.write_text(text, encoding="utf-8")
    key = text.split()[0]
    settings = site.load()
    assert settings == Settings(values={key: value}, origins={key: str(site.project)})
    assert type(settings.values[key]) is type(value)
    if key not in SUBMISSION_KEYS and key not in ("container_overlays", "hang_restart_s"):
        JobSpec(**{"name": "x", "command": ("true",), **settings.values})


def test_a_pack_for_arrays_of_the_command_line(site: Site) -> None:
    site.project.write_text("pack = 4\njobs = 2\n")
    assert site.load().values == {"pack": 4, "jobs": 2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, {"account": "user", "qos": "project", "partition": "user", "name": "project"}),
        ("both", {"account": "user", "qos": "user [both]", "partition": "user [both]", "name": "project [both]"}),
        ("users", {"account": "user", "qos": "project", "partition": "user", "name": "user [users]"}),
        ("projects", {"account": "project [projects]", "qos": "project", "partition": "user", "name": "project"}),
    ],
)
def test_layers(site: Site, name: str | None, expected: dict[str, str]) -> None:
    # Each value says which layer it is of.
    site.user.write_text(
        'account = "U"\nqos = "U"\npartition = "U"\nname = "U"\n'
        '[both]\nqos = "U-both"\npartition = "U-both"\nname = "U-both"\n'
        '[users]\nname = "U-users"\n'
    )
    site.project.write_text(
        'qos = "P"\nname = "P"\n[both]\nname = "P-both"\n[projects]\naccount = "P-projects"\n',
    )
    settings = site.load(name)
    files = {"user": ("U", site.user), "project": ("P", site.project)}
    assert set(settings.values) == set(settings.origins) == set(expected)
    for key, layer in expected.items():
        owner, _, table = layer.partition(" ")
        letter, path = files[owner]
        assert settings.values[key] == letter + (f"-{table[1:-1]}" if table else "")
        assert settings.origins[key] == f"{path} {table}".rstrip()


def test_a_profile_beats_a_nearer_top_level_and_says_where_from(site: Site) -> None:
    site.user.write_text('qos = "a"\ntime = 1\n[long]\nqos = "b"\n')
    site.project.write_text('qos = "c"\n')
    assert site.load().origins == {"qos": str(site.project), "time": str(site.user)}
    settings = site.load("long")
    assert settings.values == {"qos": "b", "time": "1"}
    assert settings.origins == {"qos": f"{site.user} [long]", "time": str(site.user)}


def test_the_nearest_project_file_counts(site: Site) -> None:
    below = site.folder / "src" / "deep"
    below.mkdir(parents=True)
    site.project.write_text("nodes = 1")
    settings = load(None, folder=below, env={})
    assert (settings.values, settings.origins) == ({"nodes": 1}, {"nodes": str(site.project)})
    (site.folder / "src" / "cluster.toml").write_text("time = 5")
    assert load(None, folder=below, env={}).values == {"time": "5"}


@pytest.mark.parametrize("config", ["", "relative", "./a", "~/x"])
def test_xdg_config_home_that_is_empty_or_relative_is_unset(site: Site, config: str) -> None:
    site.user.write_text("nodes = 3")
    assert site.load(XDG_CONFIG_HOME=config).values == {"nodes": 3}


def test_xdg_config_home(site: Site, tmp_path: Path) -> None:
    site.user.write_text("nodes = 3")
    assert site.load(XDG_CONFIG_HOME=str(tmp_path / "other")).values == {}
    other = tmp_path / "other" / "cluster_ddp" / "cluster.toml"
    other.parent.mkdir(parents=True)
    other.write_text("nodes = 4")
    assert site.load(XDG_CONFIG_HOME=str(tmp_path / "other")).origins == {"nodes": str(other)}


@pytest.mark.parametrize("env", [{}, {"HOME": ""}])
def test_without_a_home_there_is_no_file_of_the_user(
    site: Site, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.user.write_text("nodes = 3")
    monkeypatch.setenv("HOME", str(site.home))
    assert load(None, folder=site.folder, env=env).values == {}


def test_a_byte_order_mark_and_other_line_ends_are_read(site: Site) -> None:
    site.project.write_bytes("\ufeffnodes = 2\r\ntime = 5\r\n".encode())
    assert site.load().values == {"nodes": 2, "time": "5"}


def test_a_range_of_nodes_is_one_key_and_two_fields(site: Site) -> None:
    site.project.write_text('nodes = "2-8"')
    assert site.load().values == {"nodes": "2-8"}
    assert settings_keys.fields(site.load().values) == {"nodes": 2, "max_nodes": 8}
    assert settings_keys.fields({"nodes": 3}) == {"nodes": 3, "max_nodes": None}


@pytest.mark.parametrize(
    ("text", "found", "hint"),
    [
        ("nodes = 2\npartition = gpu", "it is not TOML: Invalid value (at line 2, column 13)", 'partition = "gpu"'),
        ("nodes = 1\nnodes = 2", "it is not TOML: Cannot overwrite a value", "nodes = 2"),
        ("time = 2024-13-45", "it is not TOML", "nodes = 2"),
        (
            "gpus-per-node = 4",
            "no key 'gpus-per-node'. Did you mean gpus_per_node?",
            "nodes, gpus_per_node, gpu_type, cpus_per_task",
        ),
        ('Partition = "gpu"', "no key 'Partition'. Did you mean partition?", "runs_dir, accept"),
        ('track = ["tensorbord"]', "track must be one of tensorboard, wandb", 'write track = ["tensorboard"]'),
        ("xyzzy = 1", "no key 'xyzzy'.", "the keys are name, nodes"),
        ('[[long]]\nqos = "x"', "no key 'long'.", "a profile is a table, [NAME]"),
        ('command = ["python"]', "command belongs to one job", "command line"),
        ('grid = "seed=0..3"', "grid belongs to one job", "command line"),
        ('nodes = "2:8"', "such as 2-8. It is '2:8'.", 'write nodes = "2-8"'),
        ("max_nodes = 8", "there is no key 'max_nodes'.", "the keys are"),
        ("nodes = true", "nodes must be an integer. It is True.", "write nodes = 2"),
        ('restarts = "2"', "restarts must be an integer.", "write restarts = 2"),
        ("restarts = -1", "restarts must be a whole number", "change restarts"),
        ("nodes = 2.0", "nodes must be an integer. It is 2.0.", "write nodes = 2"),
        ('requeue = "yes"', "requeue must be true or false. It is 'yes'.", "write requeue = true"),
        ("requeue = 1", "requeue must be true or false. It is 1.", "write requeue = true"),
        ("partition = 5", "partition must be a string. It is 5.", 'write partition = "5"'),
        ('partition = ["a", "b"]', "partition must be a string. It is ['a', 'b'].", 'write partition = "…"'),
        ("time = 02:00:00", "time must be a string or an integer of minutes.", 'write time = "02:00:00"'),
        ("time = true", "time must be a string or an integer of minutes. It is True.", 'write time = "…"'),
        ("time = 1.5", "time must be a string or an integer of minutes. It is 1.5.", 'write time = "1.5"'),
        ('modules = "cuda"', "modules must be an array of strings. It is 'cuda'.", 'write modules = ["cuda"]'),
        ('accept = "cluster"', "accept must be an array of strings.", 'write accept = ["cluster"]'),
        ("modules = [1]", "modules must be an array of strings. It is [1].", 'write modules = ["…", "…"]'),
        ("nodes = 0", "nodes must be a whole number of 1 or more. It is 0.", "change nodes"),
        ("time = 0", "time must be longer than 0", "change time"),
        ("time = -5", "It is -5.", "change time"),
        ('time = "soon"', "time must be 30 (minutes)", "change time"),
        ('qos = ""', "qos must be a name that sacctmgr show qos shows. It is ''.", "change qos"),
        ('qos = "a\\n#SBATCH --nodes=9"', "qos must be", "change qos"),
        (
            'launcher = "mpirun"',
            "launcher must be one of srun, fork. It is 'mpirun'.",
            'write launcher = "srun"',
        ),
        ('launcher = "x"', "launcher must be one of srun, fork. It is 'x'.", "change launcher in that file"),
        ('time = "2h"', "time must be 30 (minutes)", 'write time = "2:00:00"'),
        ('mem = "32GB"', "mem must be a size such as 32G", 'write mem = "32G"'),
        ('modules = ["cuda/12 gcc"]', "modules must be names", 'write modules = ["cuda/12", "gcc"]'),
        ('modules = ["cuda; rm"]', "modules must be names that module avail shows", "change modules"),
        ('container_overlays = ["a\\nb"]', "container_overlays must be a path", "change container_overlays"),
        (
            'sbatch_options = ["--nodes=2"]',
            "sbatch_options must be an option that cluster-ddp does not set itself",
            "change sbatch_options",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_file(site: Site, text: str, found: str, hint: str) -> None:
    for path in (site.user, site.project):
        path.write_text(text)
        error = site.error()
        assert error.asked == f"Reading the settings in {path}:"
        assert found in error.found
        assert hint in error.hint
        path.unlink()
    # The same in a profile that was not chosen.
    if "TOML" not in found and "[[" not in text:
        site.project.write_text(f"[good]\nmem = '1G'\n[bad]\n{text}\n")
        error = site.error("good")
        assert error.asked == f"Reading the settings in {site.project} [bad]:"
        assert found in error.found


@pytest.mark.parametrize(
    ("text", "found", "hint"),
    [
        ("[time]\nlimit = 5", "the table [time] has the name of a key", "rename [time]"),
        ("time = {limit = 5}", "the table [time] has the name of a key", "rename [time]"),
        ("[accept]", "the table [accept] has the name of a key", "rename [accept]"),
        ("[grid]\nseed = 1", "the table [grid] has the name of a key", "rename [grid]"),
        ('[long.debug]\nqos = "x"', "'debug' is a table in a profile", "write [debug] on its own"),
        ("[long]\ntime = {limit = 5}", "'time' is a table in a profile", "write [time] on its own"),
    ],
)
def test_tables_that_are_no_profiles(site: Site, text: str, found: str, hint: str) -> None:
    site.project.write_text(text)
    error = site.error()
    assert str(site.project) in error.asked
    assert found in error.found
    assert hint in error.hint


def test_a_file_that_is_not_utf_8(site: Site) -> None:
    site.project.write_bytes(b'nodes = 2\nname = "gr\xf6\xdfe"\n')
    error = site.error()
    assert str(site.project) in error.asked
    assert error.found == "it is not UTF-8: invalid start byte in line 2."
    assert error.hint == "save it as UTF-8"


def _as_folder(path: Path) -> None:
    path.mkdir()


def _as_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _as_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_as_folder, "Is a directory."),
        (_as_dangling_link, "No such file or directory."),
        (_as_loop, "Too many levels of symbolic links."),
    ],
)
def test_a_file_that_can_not_be_read(site: Site, make: Callable[[Path], None], found: str) -> None:
    for path in (site.user, site.project):
        make(path)
        error = site.error()
        assert (error.asked, error.found) == (f"Reading the settings in {path}:", found)
        assert error.hint.startswith("see what it is: ls -ld ")
        path.rmdir() if path.is_dir() else path.unlink()


def test_an_unknown_profile_gets_the_nearest_and_all(site: Site) -> None:
    site.user.write_text("[long]\n[debug]\n")
    site.project.write_text("[long]\n")
    error = site.error("lnog")
    assert error.asked == "Using the profile 'lnog':"
    assert error.found == (
        "there is no such profile. Did you mean long? "
        f"There are: long (in {site.user}), debug (in {site.user}), long (in {site.project})."
    )


@pytest.mark.parametrize("name", ["time", "default", "", "long.debug"])
def test_without_any_profile_the_files_are_named(site: Site, name: str) -> None:
    error = site.error(name)
    assert error.found == f"there is no cluster.toml in {site.folder} or a parent of it, and no {site.user}."
    site.project.write_text("nodes = 2")
    error = site.error(name)
    assert error.found == f"there is no profile in {site.project}."
    assert f"write a table [{name}]" in error.hint
    with pytest.raises(SpecError, match=r"or a parent of it\.\n"):
        load(name, folder=site.home, env={})


def test_examples_are_there() -> None:
    assert [path.stem for path in EXAMPLES] == ["account_required", "pyxis", "typed_gres"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_profile_of_every_example_makes_a_job(site: Site, path: Path) -> None:
    site.project.write_bytes(path.read_bytes())
    names = [line[1:].split("]")[0] for line in path.read_text().splitlines() if line.startswith("[")]
    assert names
    for name in (None, *names):
        values = dict(site.load(name).values)
        assert values
        for key in SUBMISSION_KEYS:
            values.pop(key, None)
        JobSpec(**{"name": "x", "command": ("true",), **values})


def test_an_alternative_replaces_the_other(site: Site) -> None:
    site.user.write_text('conda_env = "site"\ncontainer_image = "a"\n[mine]\nvenv = "/v"\n')
    assert site.load("mine").values == {"container_image": "a", "venv": "/v"}
    assert "conda_env" not in site.load("mine").origins
    assert settings_files.overlay(site.load().values, {"container": "/c.sif"}) == {
        "conda_env": "site",
        "container": "/c.sif",
    }


@needs_a_stranger
@pytest.mark.parametrize("how", ["owner", "mode", "group", "folder", "link"])
def test_a_file_that_others_could_have_written_must_be_accepted(site: Site, how: str) -> None:
    with folder_of_all(0o755) as shared:
        project = shared / "project"
        project.mkdir(mode=0o755)
        site.folder, path = project, project / "cluster.toml"
        path.write_text("nodes = 2")
        assert site.load().values == {"nodes": 2}
        if how == "owner":  # a colleague's, in a folder of ours
            os.chown(path, STRANGER, STRANGER)
        elif how == "mode":
            path.chmod(0o666)
        elif how == "group":
            os.chown(path, -1, STRANGER)
            path.chmod(0o664)
        elif how == "folder":
            os.chown(project, STRANGER, STRANGER)
        else:
            project.chmod(0o777)
            path.unlink()
            assert as_stranger("sh", "-c", f"cd {project}; echo nodes = 2 >x; ln -s x cluster.toml").returncode == 0
            project.chmod(0o755)
        error = site.error()
        words = {"owner": f"{path} belongs to user {STRANGER}, mode 0644", "group": "user root (0), mode 0664"}
        words |= {"mode": f"{path} may be written by others: user root (0), mode 0666"}
        words |= {"folder": f"{project} belongs to user {STRANGER}, mode 0755", "link": f"belongs to user {STRANGER}"}
        assert words[how] in error.found and "would run as you" in error.found
        assert "--accept cluster-toml" in error.hint

        assert site.load(accept=True).values == site.load().values == {"nodes": 2}
        (path if how != "link" else project / "x").write_text('nodes = 2\nsetup = ["touch /tmp/owned"]')
        assert "--accept cluster-toml" in site.error().hint  # it is another content


@needs_a_stranger
def test_a_strangers_pipe_is_not_waited_for(site: Site) -> None:
    with folder_of_all() as site.folder:
        assert as_stranger("mkfifo", site.folder / "cluster.toml").returncode == 0
        assert "is no regular file" in site.error().found


def test_a_file_cannot_accept_itself(site: Site) -> None:
    site.project.write_text('accept = ["cluster-toml"]')
    site.project.chmod(0o666)
    assert "would run as you" in site.error().found


def test_contents_are_accepted_in_a_place_of_the_users_alone(site: Site) -> None:
    site.project.write_text("nodes = 2")
    site.project.chmod(0o666)
    site.load(accept=True)
    accepted = site.user.with_name("accepted")
    assert accepted.stat().st_mode & 0o777 == 0o600
    accepted.chmod(0o666)
    with pytest.raises(RunDirError, match="may be written by others"):
        site.load()
    assert site.load(XDG_CONFIG_HOME="", HOME="", accept=True).values == {"nodes": 2}  # it is not noted anywhere


def test_a_users_private_group_is_nobody_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """With umask 002, as in many distributions; the group has the user's name and no other member."""
    user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(os.getegid())
    site.project.write_text("nodes = 2")
    site.project.chmod(0o664)
    for path in (site.folder, site.project):
        os.chown(path, -1, group.gr_gid)
    own = user.pw_name
    other = f"not-{own}"
    for members, name, is_private in (([], own, True), ([own], own, True), ([other], own, False), ([], other, False)):
        found = grp.struct_group((name, "x", group.gr_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda _, found=found: found)
        if is_private:
            assert site.load().values == {"nodes": 2}
        else:
            assert "may be written by others" in site.error().found


def test_a_number_that_needs_another_option_may_be_large() -> None:
    """It is checked alone: beside one task at a time, jobs may be many."""
    assert settings_keys.value_of("cluster.toml", "jobs", 5000) == 5000
    assert settings_keys.value_of("cluster.toml", "pack", 5000) == 5000
