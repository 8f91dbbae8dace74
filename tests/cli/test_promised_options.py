"""Commands and options that users' scripts rely on: none is renamed or lost unnoticed."""

from __future__ import annotations

import inspect
from dataclasses import fields

import click
import pytest

import tailrace
import tailrace.spark
from tailrace.cli.main import cli
from tailrace.server.settings import Settings
from tailrace.spark.source.options import OPTIONS

PROMISED = {
    "serve": "--host --port --data --memory --bucket --vbuckets --user --users-file --tls-cert --tls-key"
    " --tls-port --web-port --http-port --memory-quota --ready-file --set --accept-loss",
    "load": "--docs --size --deletes --expiry --rate --seed --from --json",
    "get": "--json",
    "set": "--json",
    "delete": "--json",
    "tail": "--from --to --dialect --state --json --retry-for --changes-only --group --group-store"
    " --persisted-only",
    "dump": "--out",
    "stats": "--json",
    "decode": "--dialect --json",
    "mirror": "--once --collection --keep-deletes --changes --changes-keep --trigger --schema"
    " --no-value-column --undo --undo-size --no-maintenance --storage-option --persisted-only --http-port"
    " --json --master --conf --config",
    "plan": "--json",
    "verify": "--json --repair",
    "rewind": "--vbucket --to-seqno --lose",
    "cluster start": "--nodes",
    "cluster status": "--json",
    "cluster failover": "",
    "cluster rebalance": "",
    "cluster stop": "",
    "record": "",
    "replay": "",
    "bench": "",
    "maintain": "--dry-run --undo --undo-size",
    "vacuum": "--keep-hours",
    "query": "--json",
    "export": "",
    "wait": "--token --timeout",
    "doctor": "--json",
    "config": "--json",
    "demo": "",
}
SERVE_SETTINGS = (
    "idle_timeout slow_backfill_timeout max_frame max_value max_connections checkpoint_share tombstone_age"
    " expiry_pager_interval flush_interval auth_timeout tap_keepalive tap_ack_grace"
)
SPARK_OPTIONS = (
    "connectionString username password bucket scope collections startingOffsets endingOffsets"
    " maxOffsetsPerTrigger minPartitions failOnDataLoss onRollback includeXattrs noValue flowControlBuffer"
    " compression tlsCaFile"
)


def _command(words: str) -> tuple[click.Command, click.Context]:
    command: click.Command = cli
    ctx = click.Context(cli, info_name="tailrace", help_option_names=["-h", "--help"])
    for word in words.split():
        assert isinstance(command, click.Group)
        member = command.get_command(ctx, word)
        assert member is not None, f"there is no command {words!r}"
        command, ctx = member, click.Context(member, parent=ctx, info_name=word)
    return command, ctx


@pytest.mark.parametrize("words", PROMISED)
def test_commands_and_their_options(words: str) -> None:
    command, ctx = _command(words)
    options = {
        name for parameter in command.get_params(ctx) for name in parameter.opts + parameter.secondary_opts
    }
    assert options >= set(PROMISED[words].split()) | {"--help", "--debug"}


def test_settings_of_a_node() -> None:
    assert set(SERVE_SETTINGS.split()) <= {field.name for field in fields(Settings)}


def test_options_of_the_spark_source() -> None:
    assert set(SPARK_OPTIONS.split()) <= {option.name for option in OPTIONS}


def test_python_calls() -> None:
    def names(function: object) -> list[str]:
        assert callable(function)
        return list(inspect.signature(function).parameters)

    assert names(tailrace.read_table)[:5] == ["path", "version", "at", "columns", "filter"]
    assert names(tailrace.spark.table)[:4] == ["spark", "path", "version", "at"]
    assert names(tailrace.spark.wait_for)[:3] == ["path", "tokens", "timeout_s"]
    tailrace.connect("couchbase://127.0.0.1", group=None, persisted_only=False)  # connects when it is used
