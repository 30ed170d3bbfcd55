"""What a workload ends with that cannot run."""


class CannotRun(Exception):
    """Why a workload cannot run here; the report says so, and the others go on."""
