"""A page for browsers and a JSON API on a spool; it needs the extra `serve`.

async with qflow.aio.open("spool") as broker, await qflow.web.serve(broker, port=7480) as server:
    ...                       # http://127.0.0.1:7480 shows what the program has in its queues
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.web.door import Server, serve

__all__ = ["Server", "serve"]
_NEEDS = ("starlette", "uvicorn", "jinja2")


def __getattr__(name: str) -> object:
    """Import the server when it is asked for.

    Raises:
        NotFound: a package of the extra `serve` is not installed, or qflow was imported from a zip file.
    """
    if name in __all__:
        from qflow.children import check_there
        from qflow.serving.extras import load

        check_there(f"{__path__[0]}/static", "the page needs")
        for package in _NEEDS:
            load(package, needs=package, what="the page", install=" ".join(_NEEDS))
        return getattr(load("qflow.web.door", needs="starlette", what="the page"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
