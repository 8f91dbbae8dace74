"""What is in deploy/ fits the program: metrics and files exist, and options are accepted."""

from __future__ import annotations

import json
import operator
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from tailrace.cli.main import cli
from tailrace.client import kv
from tailrace.client.options import SourceOptions
from tailrace.client.retry import MOST_S
from tailrace.cluster import steering, takeover
from tailrace.server import background, replication
from tailrace.spark.rounds import housekeeping, mirror
from tailrace.web import figures

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
METRICS = (
    *(*figures.NODE, *figures.VBUCKETS, *figures.READER, *figures.READER_VBUCKETS),
    *(*figures.MIRROR, *figures.MIRROR_VBUCKETS),
)
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "tailrace.json"
NAME = operator.attrgetter("name")


def exported() -> dict[str, set[str]]:
    """Every series and its labels."""
    series = {metric.name: set(metric.labels) for metric in METRICS if metric.kind != "histogram"}
    for metric in METRICS:
        if metric.kind == "histogram":
            series |= {f"{metric.name}_{end}": {*metric.labels, "le"} for end in ("bucket", "sum", "count")}
    return series


@pytest.mark.parametrize(
    "path", [ALERTS, ALERTS.with_name("alerts_test.yml"), DASHBOARD], ids=lambda p: p.name
)
def test_every_metric_exists(path: Path) -> None:
    used = set(re.findall(r"\btailrace_[a-z_]+", path.read_text())) - {"tailrace_password"}
    assert used and used - set(exported()) - {metric.name for metric in METRICS} == set()


def test_labels_that_are_shown_exist() -> None:
    expressions = [
        (target["expr"], target["legendFormat"])
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
    ]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert {"summary", "action"} == set(rule["annotations"]), rule["alert"]
            expressions.append((rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")))
    assert len(expressions) > 30
    for expression, shown in expressions:
        labels = {"instance", "job"}
        for name in re.findall(r"\btailrace_[a-z_]+", expression):
            labels |= exported()[name]
        assert set(re.findall(r"\{\{ *(\w+) *\}\}", shown)) <= labels, expression


def test_a_figure_at_the_top_says_by_its_colour_whether_it_is_well() -> None:
    """Without steps of our own Grafana uses its defaults: green up to 80, even for lost changes."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = {panel["title"]: panel["fieldConfig"]["defaults"] for panel in panels if panel["type"] == "stat"}
    steps = {
        title: [(step["color"], step["value"]) for step in shown[title]["thresholds"]["steps"]]
        for title in shown
        if "color" not in shown[title]
    }
    assert set(shown) - set(steps) == {"Changes behind"}, "how many are too many depends on the bucket"
    assert all(colours[0] == ("green", None) for colours in steps.values())
    assert steps["Changes lost in 15 minutes"][-1] == ("red", 0.5)
    assert steps["Rows taken back in 15 minutes"][-1] == ("orange", 0.5)
    (alert,) = re.findall(r"tailrace_mirror_lag_seconds > (\d+)", ALERTS.read_text())
    assert steps["Lag of tables"][-1] == ("red", int(alert))


def commands_in(text: str) -> list[list[str]]:
    """The command lines of our program."""
    joined = " ".join(text.split())
    ends = " #", " secrets:", " healthcheck:", " Restart", "$"
    return [shlex.split(line) for line in re.findall(rf"bin/tailrace (.*?)(?={'|'.join(ends)})", joined)]


@pytest.mark.parametrize(
    "path",
    [*DEPLOY.glob("systemd/*.service"), DEPLOY / "compose.yml"],
    ids=lambda path: path.name,
)
def test_commands_are_taken(path: Path) -> None:
    lines = commands_in(path.read_text())
    assert lines
    for words in lines:
        if words[0] == "--config":
            words = words[2:]
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(
    "path", [*DEPLOY.glob("systemd/*.service"), DEPLOY / "compose.yml"], ids=lambda path: path.name
)
def test_options_in_the_environment_exist(path: Path) -> None:
    known = {
        f"TAILRACE_{name}_{option.lstrip('-').replace('-', '_')}".upper()
        for name in cli.list_commands(click.Context(cli))
        if (command := cli.get_command(click.Context(cli), name)) is not None
        for parameter in command.params
        for option in parameter.opts
    }
    named = set(re.findall(r"TAILRACE_[A-Z_]+(?==)", path.read_text()))
    assert named - known <= {"TAILRACE_USERNAME", "TAILRACE_PASSWORD"}


def test_a_service_is_asked_for_its_health_where_it_listens() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]
    text = (DEPLOY / "container" / "Containerfile").read_text()
    (of_image,) = re.findall(r"http://127.0.0.1:(\d+)/", text)
    for name in ("node", "mirror"):
        (command,) = services[name]["command"]
        (port,) = re.findall(r"--http-port (\d+)", command)
        asked = re.findall(r"http://127.0.0.1:(\d+)/", str(services[name].get("healthcheck", of_image)))
        assert {port} == {*asked} or (not asked and port == of_image)
        assert f"127.0.0.1:{port}:{port}" in services[name]["ports"]
        assert f"{name}:{port}" in (DEPLOY / "prometheus" / "prometheus.yml").read_text()


def test_no_password_is_on_a_command_line_of_a_service() -> None:
    """Where everybody on the machine can see it."""
    for path in (*DEPLOY.glob("systemd/*.service"), DEPLOY / "compose.yml"):
        for words in commands_in(path.read_text()):
            assert not {"--user", "--http-user", "--storage-option"} & {*words}, path.name


def test_mirrors_do_not_want_the_same_port() -> None:
    """Each instance of the unit may set its own; an option on the command line would win."""
    (words,) = commands_in((DEPLOY / "systemd" / "tailrace-mirror@.service").read_text())
    assert "--http-port" not in words


def test_what_an_image_needs_is_sent_to_its_builder() -> None:
    sent = re.findall(r"^!(.+)$", (DEPLOY.parent / ".dockerignore").read_text(), re.M)
    text = (DEPLOY / "container" / "Containerfile").read_text()
    copied = [name for names in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M) for name in names.split()]
    assert sorted(sent) == sorted(copied)


def test_files_that_are_named_are_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    assert set(compose["services"]) == {"node", "mirror", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            place = volume.partition(":")[0]
            assert place in compose["volumes"] or (DEPLOY / place).exists()
        if "build" in service:
            assert (DEPLOY.parent / service["build"]["dockerfile"]).exists()
    text = (DEPLOY / "container" / "Containerfile").read_text()
    for source in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M):
        assert all((DEPLOY.parent / name).exists() for name in source.split())
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("unit", ["tailrace-node.service", "tailrace-mirror@people.service"])
def test_systemd_understands_the_units(unit: str, tmp_path: Path) -> None:
    template = re.sub("@.*[.]", "@.", unit)
    text = (DEPLOY / "systemd" / template).read_text()
    (tmp_path / unit).write_text(text.replace("/opt/tailrace/bin/tailrace", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", f"./{unit}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


NUMBERS = {3: "three", 5: "five"}
RETRIES = {
    "a reader's connection": [f"{SourceOptions().retry_for_s:g} s"],
    "a key-value command": [
        f"after {kv._RETRY_FIRST_S:g} to {kv._RETRY_MOST_S:g} s",
        f"{kv.DEFAULT_TIMEOUT_S:g} s",
    ],
    "writes of `load`": [f"{kv.DEFAULT_PATIENCE_S:g} s without any"],
    "a task of a round": [f"{mirror._TASK_RETRY_S:g} s"],
    "a round of the mirror": [
        f"less than {mirror._RETRY_FIRST_S:g} s to {MOST_S:g} s",
        f"{NUMBERS[mirror._ATTEMPTS]} failures in a row",
    ],
    "a compaction step": [f"{NUMBERS[housekeeping._ATTEMPTS]} in a row"],
    "a node's commit": ["every second"] if background._RETRY_S == 1 else [],
    "replication between nodes": [f"after {replication._RETRY_S:g} s"],
    "a step of the coordinator": [f"{steering.RETRY_FOR_S:g} s"],
    "a takeover without progress": [f"{takeover.PATIENCE_S:g} s"],
}
"""Rows of the table of retries, and what the code has for each."""


def test_the_table_of_retries_says_what_the_code_does() -> None:
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    rows = re.findall(r"^\| (.*) \|$", page.split("## Retries")[1], re.M)
    for beginning, numbers in RETRIES.items():
        (row,) = (row for row in rows if row.startswith(beginning))
        assert numbers and all(number in row for number in numbers), row
