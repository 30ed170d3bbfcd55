"""What is wrong with a spool, and what to do about it: findings as values, worst first.

`examine` looks at a spool from outside, whatever state it is in. `judge` has the same eyes for what somebody has at
hand, such as the statistics of a broker.
"""

from qflow.doctor.finding import Finding, Severity
from qflow.doctor.judging import KINDS, examine, judge
from qflow.doctor.look import Letters, Look

__all__ = ["KINDS", "Finding", "Letters", "Look", "Severity", "examine", "judge"]
