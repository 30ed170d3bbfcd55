"""`qflow metrics`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import options


@click.command()
@options.existing_spool
@click.option(
    "--named",
    metavar="NUMBER",
    type=click.IntRange(0, 10_000),
    default=100,
    show_default=True,
    help="As many queues, and subscriptions, have series of their own; the others are summed as `other`.",
)
def metrics(spool: Path, named: int) -> None:
    """Print the metrics of SPOOL once, in the text format of Prometheus: for a textfile collector.

    Its owner is asked, if there is one. Without an owner, `qflow_up` is 0, and the log tells how much waits.

    \b
    Examples:
      qflow metrics spool > spool.prom.new && mv spool.prom.new /var/lib/node_exporter/spool.prom
    """
    from qflow.serving.extras import load

    of_spools = load("qflow.metrics.spools", needs="prometheus_client", what="qflow metrics")
    collecting = load("qflow.metrics.collecting", needs="prometheus_client", what="qflow metrics")
    collector = collecting.SpoolCollector(of_spools.source_of_spool(spool), named=named, strict=True)
    click.echo(collecting.Exposition(collector).text(), nl=False)
