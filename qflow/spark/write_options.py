"""The options of `format("qflow")` for writing: Kafka's names, and a few more. An error is one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs
from xxhash import xxh3_64_hexdigest

from qflow.arrow.handover import LONGEST_S
from qflow.errors import InvalidArgument
from qflow.spark.options import OF_KAFKA
from qflow.spark.places.local import LocalPlace
from qflow.spark.places.parse import OF_PLACES, SAME, parse_flag, parse_known, parse_places, parse_seconds, where
from qflow.spark.places.place import Place
from qflow.storage.inbox.batches import Target
from qflow.storage.inbox.stages import Batch, check_batch
from qflow.streams.topic_filter import check_topic

NAMES = ("topic", "stream", "commitTimeout", "txnAppId", "txnVersion", *OF_PLACES)
_OF_OTHERS = re.compile(f"{OF_KAFKA.pattern}|checkpointlocation|queryname|includeheaders")
"""Ignored: options that Spark passes on, and Kafka's, such as `includeHeaders`: headers are always written."""
COMMIT_TIMEOUT_S = 60.0
_APP = re.compile(r"[A-Za-z0-9_-]{1,96}")


@attrs.frozen(kw_only=True)
class WriteOptions:
    """The options of a writer."""

    places: tuple[Place, ...]
    topic: str | None
    """The topic of all rows, whatever a column says."""
    stream: str | None
    """A stream that must take every row; others may take it, too."""
    commit_timeout_s: float
    batch: Batch | None
    """The batch that `txnAppId` and `txnVersion` name, which is written once; None = the data frame has no name."""
    checkpoint: str | None
    """Path of a streaming query's checkpoint, if it is given as an option of the query."""
    same_on_every_host: bool

    @property
    def path(self) -> str:
        """The paths and URLs, for errors."""
        return where(self.places)


def parse_for_writing(options: Mapping[str, str], *, streaming: bool = False) -> WriteOptions:
    """Return the options of a writer. Raises InvalidArgument: an option makes no sense."""
    values = parse_known(options, NAMES, _OF_OTHERS, "writing")
    topic = values.get("topic")
    if topic is not None:
        try:
            check_topic(topic)
        except InvalidArgument as error:
            raise InvalidArgument(f"option 'topic': {error}") from error
    stream = values.get("stream")
    if stream is not None and not stream:
        raise InvalidArgument("option 'stream' is empty: name a stream, or leave it out")
    app, version = values.get("txnAppId"), values.get("txnVersion")
    if streaming and (app is not None or version is not None):
        raise InvalidArgument(
            "options 'txnAppId' and 'txnVersion' are for df.write: what a streaming query has written is known by its "
            "checkpoint"
        )
    if (app is None) is not (version is None):
        raise InvalidArgument("options 'txnAppId' and 'txnVersion' go together: give both, or neither")
    places = parse_places(values)
    timeout_s = parse_seconds(values, "commitTimeout", COMMIT_TIMEOUT_S)
    if timeout_s > LONGEST_S and not all(isinstance(place, LocalPlace) for place in places):
        raise InvalidArgument(
            f"option 'commitTimeout' is {values['commitTimeout']!r}: the owner of a spool behind a URL waits "
            f"{LONGEST_S:g} s at most"
        )
    return WriteOptions(
        places=places,
        topic=topic,
        stream=stream,
        commit_timeout_s=timeout_s,
        batch=None if app is None or version is None else batch_of(app, version),
        checkpoint=next((value for name, value in options.items() if name.lower() == "checkpointlocation"), None),
        same_on_every_host=parse_flag(values, SAME, default=False),
    )


def batch_of(app: str, version: str) -> Batch:
    """Return the batch of an application's version; its name differs from all those of streaming queries.

    Raises:
        InvalidArgument: a name or version is not valid.
    """
    if not _APP.fullmatch(app):
        raise InvalidArgument(f"option 'txnAppId' is {app!r:.120}: give 1 to 96 letters, digits, '-' and '_'")
    if not re.fullmatch(r"[0-9]{1,19}", version) or int(version) >= 2**63:
        raise InvalidArgument(
            f"option 'txnVersion' is {version!r:.120}: give a number from 0 on, each higher than before"
        )
    return check_batch(f"app-{app}", int(version))


def target_of(app: Batch, kind: str, name: str, owner: int, topic: str | None) -> Target:
    """Return one of the targets of a batch of an application.

    Args:
        kind, name, owner: of a stream or queue that takes some of the rows.
        topic: of all rows, by the option; None = it is in a column.
    """
    what = xxh3_64_hexdigest(repr((owner, topic)).encode())
    return Target(f"{app.query}@{what}", f"{kind} {name!r}")


def stage_of(app: Batch, targets: Iterable[Target]) -> Batch:
    """Return the batch of an application under a name that it has for these targets alone."""
    what = xxh3_64_hexdigest(repr(sorted(target.record for target in targets)).encode())
    return check_batch(f"{what}-{app.query}", app.batch)
