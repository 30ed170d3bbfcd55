"""`qflow schedules`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qflow.cli import facts, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.spool import asked_if_there, reached_if_there

if TYPE_CHECKING:
    from qflow.periodic import Schedule


@click.command()
@options.existing_spool
@click.option("--add", metavar="NAME", help="Have a message put again and again, under this name.")
@click.option("--queue", metavar="QUEUE", help="Where it goes.")
@click.option("--every", "every_s", metavar="TIME", type=options.Seconds(min=1), help="As 90s, 1h30m or 7d.")
@click.option("--cron", metavar="FIELDS", help="As crontab has it: '0 3 * * *' is at three each night.")
@click.option("--time-zone", metavar="ZONE", help="Of --cron, such as Europe/Berlin.  [default: UTC]")
@click.option("--body", metavar="TEXT", help="What each message carries.  [default: nothing]")
@click.option("--cancel", metavar="NAME", help="Put no more messages under this name.")
@options.capacity
@options.as_json
def schedules(spool: Path, add: str | None, cancel: str | None, capacity: int, as_json: bool, **given: Any) -> int:
    """Show what is put again and again, and when it is next due; add a schedule, or cancel one.

    Another process may own the spool: it is asked. The list only reads; if no owner answers, it is that of the log,
    which does not tell of trouble. A schedule that exists with the same terms stays as it is; with others, it is
    replaced. Exits with 1 if a record is damaged.

    \b
        qflow schedules SPOOL --add nightly --queue jobs --cron '0 3 * * *' --body report
        qflow schedules SPOOL --cancel nightly
    """
    options_given = {name: value for name, value in given.items() if value is not None}
    if add is not None and cancel is not None:
        raise click.UsageError("--add and --cancel do not go together")
    if add is None and options_given:
        option = min(options_given).removesuffix("_s").replace("_", "-")
        raise click.UsageError(f"--{option} goes with --add NAME")
    if add is not None and "queue" not in options_given:
        raise click.UsageError("--add needs --queue QUEUE")
    problems: list[str] = []
    if add is None and cancel is None:
        found, problems = _look(spool)
    else:
        with reached_if_there(spool, capacity) as broker:
            if add is not None:
                queue, body = options_given.pop("queue"), options_given.pop("body", "")
                broker.schedule(add, queue, body.encode(errors="surrogateescape"), **options_given)
            elif cancel is not None:
                broker.cancel_schedule(cancel)
            found = broker.schedules()
    if as_json:
        from qflow.periodic import plain

        facts.print_json([plain(one) for one in found])
    else:
        facts.print_table(["schedule", "queue", "when", "next", "last", "trouble"], map(_row, found))
    return tell_of_examination(spool, problems)


def _look(spool: Path) -> tuple[list[Schedule], list[str]]:
    """Return the schedules, and what is wrong: of the owner, or if none answers of the log, which is only read."""
    from qflow import inspect
    from qflow.periodic import ROOM, read_schedules

    with asked_if_there(spool) as owner:
        if owner is not None:
            return owner.schedules(), []
    kept, problems = inspect.read_rooms(spool, lambda rooms: (dict(rooms.facts(ROOM)), rooms.problems))
    found = read_schedules(kept, problems.append)
    return sorted(found.values(), key=lambda one: one.name), problems


def _row(one: Schedule) -> list[Any]:
    when = f"{one.cron} {one.time_zone}" if one.every_s is None else f"every {one.every_s:g} s"
    moments = [_moment(one.next_s), _moment(one.last_s)]
    return [
        facts.readable(one.name),
        facts.readable(one.queue),
        facts.readable(when),
        *moments,
        facts.readable(one.trouble) if one.trouble else None,
    ]


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%SZ}"
