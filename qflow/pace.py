"""How often somebody looks at a broker again and again: as often as it may cost."""

SHARE = 50
"""A pause is so many times as long as a look: 2 % of a processor go to looks."""
SHORTEST_S = 1.0
LONGEST_S = 10.0


def pause_s(cost_s: float) -> float:
    """Return how long to wait after a look that took so long."""
    return min(LONGEST_S, max(SHORTEST_S, SHARE * cost_s))
