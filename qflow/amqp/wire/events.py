"""What a `Connection` tells of the bytes it received: plain values."""

from __future__ import annotations

from pamqp import base
from pamqp.common import FieldTable

from qflow.named_tuples import NamedTuple


class Login(NamedTuple):
    """The client names itself; answered by `accept_login` or `refuse_login`."""

    mechanism: str
    response: bytes
    client_properties: FieldTable
    locale: str


class VhostAsked(NamedTuple):
    """The client asks for a virtual host; answered by `open_ok` or `refuse_vhost`."""

    vhost: str


class ChannelOpened(NamedTuple):
    """A channel was opened; the client has its answer."""

    channel: int


class ChannelClosed(NamedTuple):
    """The client closed a channel and has its answer; `code` and `text` are the client's reason."""

    channel: int
    code: int
    text: str


class ChannelReleased(NamedTuple):
    """The client confirmed that a channel is closed which this side had closed: its number is free."""

    channel: int


class ChannelFailed(NamedTuple):
    """The machine closed a channel because of what the client sent, as a message above the limit."""

    channel: int
    code: int
    text: str


class Method(NamedTuple):
    """Any other method, on a channel that is open or, with channel 0, on the connection."""

    channel: int
    method: base.Frame


class Published(NamedTuple):
    """A message, whole.

    `properties` are the property flags and the property list of the content header as they came, checked to be well
    formed.
    """

    channel: int
    exchange: str
    routing_key: str
    mandatory: bool
    immediate: bool
    properties: bytes
    body: bytes


class ConnectionClosed(NamedTuple):
    """The client closed the connection; its answer is among the bytes to send, and nothing follows."""

    code: int
    text: str


class ConnectionReleased(NamedTuple):
    """The client confirmed that the connection is closed which this side had closed, or sent no frames meanwhile.

    Nothing follows.
    """


class Failed(NamedTuple):
    """The machine ended the connection because of what the client sent.

    Once the bytes to send are sent: in the state `OVER` nothing that the client could send would be read, in `CLOSING`
    its `close-ok` is waited for.
    """

    code: int
    text: str


Event = (
    Login
    | VhostAsked
    | ChannelOpened
    | ChannelClosed
    | ChannelReleased
    | ChannelFailed
    | Method
    | Published
    | ConnectionClosed
    | ConnectionReleased
    | Failed
)
