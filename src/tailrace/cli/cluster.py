"""``tailrace cluster``: several nodes on one machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ..errors import ClusterError, ConnectError, UsageError
from ..files import open_log, remove_file
from .common import DIRECTORY, DURATION, Integer, JsonLines, json_option, note
from .common import command as make_command
from .common import group as make_group

if TYPE_CHECKING:
    from ..cluster.state import ClusterState

F = TypeVar("F", bound=Callable[..., Any])

_START_S = 120.0
_EXAMPLE = """
tailrace cluster start --nodes 3
tailrace cluster status
tailrace cluster failover n2
tailrace cluster add n2
tailrace cluster rebalance
tailrace cluster stop
"""


@make_group("cluster", example=_EXAMPLE)
def command() -> None:
    """Run several nodes on one machine: replicas, failover, rebalance.

    A coordinator in the background holds the vbucket map. All data is in the cluster's directory, which
    'start' uses again after a stop.
    """


def directory_option(function: F) -> F:
    """The option ``--dir``."""
    return click.option(
        "--dir",
        "directory",
        type=DIRECTORY,
        default=Path("tailrace-cluster"),
        show_default=True,
        help="Directory of the cluster.",
    )(function)


@make_command("start", example="tailrace cluster start --nodes 3 --replicas 1 --auto-failover 5s")
@click.option(
    "--nodes", type=Integer(1, 32), default=3, show_default=True, help="Number of nodes of a new cluster."
)
@click.option("--bucket", default="default", show_default=True, help="Bucket of a new cluster.")
@click.option(
    "--vbuckets",
    type=Integer(1, 1024),
    default=64,
    show_default=True,
    help="Number of vbuckets of a new cluster, a power of two.",
)
@click.option(
    "--replicas",
    type=Integer(0, 3),
    default=1,
    show_default=True,
    help="Copies besides the active one; each needs a node of its own.",
)
@click.option(
    "--port", type=Integer(0, 65503), default=0, help="Port of the first node.  [default: free ones]"
)
@click.option(
    "--auto-failover",
    type=DURATION,
    default=0.0,
    metavar="TIME",
    help="Fail over a node after this much silence, if most nodes still answer.  [default: never]",
)
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A setting for every node, see 'serve'."
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground until Ctrl-C.")
@directory_option
@json_option("Write the status as JSON.")
def start(
    nodes: int,
    bucket: str,
    vbuckets: int,
    replicas: int,
    port: int,
    auto_failover: float,
    assignments: tuple[str, ...],
    foreground: bool,
    directory: Path,
    as_json: bool,
) -> None:
    """Start a new cluster, or the one in the directory."""
    from ..cluster.coordinator import Coordinator
    from ..cluster.service import DOOR_FILE, Service, call
    from ..server.settings import Settings

    if vbuckets & (vbuckets - 1):
        raise UsageError(f"--vbuckets {vbuckets} is not a power of two, write one from 1 to 1024")
    Settings.parse(assignments)
    if _runs(directory):
        raise ClusterError(f"the cluster in {str(directory)!r} is running; see 'tailrace cluster status'")
    remove_file(directory / DOOR_FILE)  # left by a coordinator that was killed
    coordinator = Coordinator(directory)
    if coordinator.load():
        _tell_what_stays(coordinator)
    else:
        coordinator.create(
            nodes=nodes,
            bucket=bucket,
            vbuckets=vbuckets,
            replicas=replicas,
            ports=[port + number if port else 0 for number in range(nodes)],
            settings=list(assignments),
        )
        _tell_what_is_missing(coordinator)
    if foreground:
        coordinator.auto_failover_s = auto_failover
        Service(coordinator).run()
        return
    _start_in_background(directory, auto_failover)
    _show(call(directory, "status"), as_json)


def _tell_what_stays(cluster: ClusterState) -> None:
    """Report the options of the command line that have no effect because the cluster already exists."""
    context = click.get_current_context()
    is_now = {
        "nodes": len(cluster.ports),
        "bucket": cluster.bucket,
        "vbuckets": cluster.vbuckets,
        "replicas": cluster.replicas,
    }
    ignored = [
        f"--{name} stays {value}"
        for name, value in is_now.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and context.params[name] != value
    ]
    if ignored:
        note(f"the cluster in {str(cluster.directory)!r} already exists: {', '.join(ignored)}")


def _tell_what_is_missing(cluster: ClusterState) -> None:
    """Report how many replicas are missing until nodes are added."""
    nodes, replicas = len(cluster.ports), cluster.replicas
    if nodes > replicas:
        return
    note(
        f"{nodes} node{'s' if nodes > 1 else ''} can keep {nodes - 1} of {replicas} "
        f"replica{'s' if replicas > 1 else ''}; run 'tailrace cluster add' and 'rebalance' for the others"
    )


def _runs(directory: Path) -> bool:
    from ..cluster.service import call

    try:
        call(directory, "status")
    except ConnectError:
        return False
    return True


def _start_in_background(directory: Path, auto_failover_s: float) -> None:
    from ..cluster.service import wait_until_ready

    arguments = [sys.executable, "-m", "tailrace", "cluster", "start", "--foreground"]
    arguments += ["--dir", str(directory), "--auto-failover", f"{auto_failover_s:g}s"]
    with open_log(directory / "log") as log:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    wait_until_ready(directory, lambda: process.poll() is not None, _START_S)
    process.returncode = 0  # it keeps running: Popen must not warn about that


@make_command("status", example="tailrace cluster status --json")
@directory_option
@json_option("Write the status as JSON.")
def status(directory: Path, as_json: bool) -> None:
    """Show the nodes, and where the vbuckets are."""
    _show(_call(directory, "status"), as_json)


@make_command("add", example="tailrace cluster add")
@click.argument("node", required=False)
@directory_option
@json_option("Write the node's name as JSON.")
def add(node: str | None, directory: Path, as_json: bool) -> None:
    """Add a new node, or bring NODE back if it is down or was failed over.

    It gets active vbuckets at the next rebalance.
    """
    added = _call(directory, "add", node=node)
    if as_json:
        JsonLines().write(added)
    else:
        click.echo(f"node {added['node']} is running; 'tailrace cluster rebalance' gives it vbuckets")


@make_command("remove", example="tailrace cluster remove n3")
@click.argument("node")
@directory_option
@json_option("Write the status as JSON.")
def remove(node: str, directory: Path, as_json: bool) -> None:
    """Move everything off NODE and stop it; nothing is lost."""
    _show(_call(directory, "remove", node=node), as_json)


@make_command("failover", example="tailrace cluster failover n2")
@click.argument("node")
@click.option("--force", is_flag=True, help="Take it out even if vbuckets are lost with it.")
@directory_option
@json_option("Write what was promoted and lost as JSON.")
def failover(node: str, force: bool, directory: Path, as_json: bool) -> None:
    """Take NODE out at once: its process is killed, and replicas take over with what they have.

    Changes that had not reached a replica are lost: readers are told to roll them back.
    """
    outcome = _call(directory, "failover", node=node, force=force)
    if as_json:
        JsonLines().write(outcome)
        return
    click.echo(f"node {outcome['node']} is out, {outcome['promoted']} replicas are active now")
    if outcome["lost"]:
        note(f"{len(outcome['lost'])} vbuckets had no other copy")


@make_command("rebalance", example="tailrace cluster rebalance")
@directory_option
@json_option("Write the status as JSON.")
def rebalance(directory: Path, as_json: bool) -> None:
    """Spread the vbuckets evenly over all running nodes; readers and writers go on."""
    _show(_call(directory, "rebalance"), as_json)


@make_command("stop", example="tailrace cluster stop")
@directory_option
def stop(directory: Path) -> None:
    """Stop all nodes cleanly; 'start' starts them again."""
    _call(directory, "stop")


for _one in (start, status, add, remove, failover, rebalance, stop):
    command.add_command(_one)


def _call(directory: Path, what: str, **arguments: Any) -> Any:
    from ..cluster.service import call

    return call(directory, what, **arguments)


def _show(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        JsonLines().write(status)
        return
    click.echo(f"{status['url']}  ({status['vbuckets']} vbuckets, map {status['rev']})")
    click.echo(f"{'node':<6} {'port':>5} {'pid':>8}  {'state':<8} {'active':>6} {'replica':>7} {'items':>9}")
    for node in status["nodes"]:
        click.echo(
            f"{node['name']:<6} {node['port']:>5} {node['pid'] or '-':>8}  {node['state']:<8} "
            f"{node['active']:>6} {node['replica']:>7} {node['items']:>9}"
        )
    if status["unserved"]:
        note(f"{len(status['unserved'])} vbuckets have no active node")
