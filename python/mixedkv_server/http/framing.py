"""Reads requests as h11 does, and refuses those whose length two programs could read in two ways.

Behind a proxy that understands such a request otherwise, what it takes for a body would run here as a
request: https://www.rfc-editor.org/rfc/rfc9112#section-11.2.
"""

from __future__ import annotations

import h11


class StrictConnection(h11.Connection):
    """A connection whose requests have one length.

    Attributes:
        problem: what is wrong with the request that was refused; "" if h11 refused it, or none was.
    """

    problem = ""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, as h11 does.

        Raises:
            h11.RemoteProtocolError: the client does not speak HTTP, or gives a body's length in two ways.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.problem = _problem(event)
            if self.problem:
                raise h11.RemoteProtocolError(self.problem)
        return event


def _problem(request: h11.Request) -> str:
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return ""
    if b"content-length" in names:
        return "Content-Length and Transfer-Encoding do not go together: send one of them"
    if request.http_version < b"1.1":
        return "Transfer-Encoding needs HTTP/1.1: send Content-Length"
    return ""
