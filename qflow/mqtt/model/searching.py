"""The topics that a filter matches, found among many that are sorted: what lies between is passed over."""

from __future__ import annotations

from qflow.streams.topic_filter import compile_filter

WILDCARDS = ("+", "#")


class Search:
    """A filter, as `facts_page` asks it about one topic after the other, in the order of their UTF-8."""

    __slots__ = ("_levels", "_matches", "prefix")

    def __init__(self, topic_filter: str) -> None:
        self._matches = compile_filter(topic_filter)
        self._levels = topic_filter.split("/")
        literal: list[str] = []
        for level in self._levels:
            if level in WILDCARDS:
                break
            literal.append(level)
        self.prefix = "/".join(literal)
        """All topics that match begin so."""
        if len(literal) < len(self._levels) and self._levels[-1:] != ["#"]:
            self.prefix += "/" if literal else ""

    def wanted(self, topic: str) -> bool | str:
        """Tell whether a topic matches; text: no, nor does any other before that one."""
        if self._matches(topic):
            return True
        levels = topic.split("/")
        for index, level in enumerate(levels):
            if index == len(self._levels):
                return _behind_all_below(levels[:index])
            wish = self._levels[index]
            if wish == "#":
                return False  # at the first level, of a topic that begins with $
            if wish in ("+", level):
                continue
            before = "".join(one + "/" for one in levels[:index])
            for place in (before + wish, before + wish + "/"):
                if topic.encode() < place.encode():
                    return place
            return _behind_all_below(levels[:index])
        return False


def _behind_all_below(levels: list[str]) -> str | bool:
    """Return the first text behind all topics below some levels; False where all there are would be below them."""
    return "/".join(levels) + chr(ord("/") + 1) if levels else False
