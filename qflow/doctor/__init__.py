"""What is wrong with a spool, and what to do about it: findings as values, worst first.

`examine` looks at a spool from outside, whatever state it is in. `judge` has the same eyes for what somebody has at
hand, such as the statistics of a broker; `look_inside` and `seen_in` add what log and disk tell. `look_at` is the look
of `examine`.
"""

from qflow.doctor.finding import Finding, Severity
from qflow.doctor.judging import KINDS, examine, gathered, judge, judge_each
from qflow.doctor.look import Letters, Look
from qflow.doctor.looking import is_stopped, look_at, look_inside, seen_in

__all__ = [
    "KINDS", "Finding", "Letters", "Look", "Severity", "examine", "gathered", "is_stopped", "judge", "judge_each",
    "look_at", "look_inside", "seen_in",
]  # fmt: skip
