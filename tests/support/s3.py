"""A server of S3 on loopback, by moto in this process, that can do something in the midst of a request."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

EXTRA = "a package of the extra 'dev' is not installed: moto[s3], flask and flask-cors, or s3fs and ray of 'cloud'"
VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    # nobody is asked for other keys
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    # nor is loopback reached through a proxy
    "no_proxy": "127.0.0.1",
}
"""Environment of a client of the server, beside its address. moto takes any keys."""
BUCKET = "lab"


class S3Server:
    """The server, with one bucket that is empty. `serve_s3` starts it.

    stored: the keys that were stored, in their order, as often as they were. `on_stored`: called with each of them
    before the client gets its answer.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self.endpoint = ""
        self.stored: list[str] = []
        self.on_stored: Callable[[str], None] = lambda key: None

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that lead AWS's clients here."""
        return {**VARIABLES, "AWS_ENDPOINT_URL": self.endpoint}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a request, as a WSGI application."""
        answer = self._application(environ, start_response)
        key = environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        if environ["REQUEST_METHOD"] == "PUT" and key != environ["PATH_INFO"]:
            self.stored.append(key)
            self.on_stored(key)
        return answer

    def read_all(self) -> dict[str, bytes]:
        """Return the contents of the bucket by their keys."""
        import fsspec

        system = fsspec.filesystem("s3", endpoint_url=self.endpoint, key="testing", secret="testing")
        system.invalidate_cache()
        return {path.removeprefix(f"{BUCKET}/"): system.cat_file(path) for path in system.find(BUCKET)}


@contextmanager
def serve_s3() -> Iterator[S3Server]:
    """Serve S3 with the bucket BUCKET. Skips the test if a package is missing."""
    pytest.importorskip("s3fs", reason=EXTRA)
    pytest.importorskip("moto.server", reason=EXTRA)
    import fsspec
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    class QuietHandler(MotoRequestHandler):  # type: ignore[misc]
        def log_request(self, *_: object) -> None:
            pass

    # what another test of this process has stored is gone
    get_backend("s3").reset()
    server = S3Server(DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=QuietHandler)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        fsspec.filesystem("s3", endpoint_url=server.endpoint, key="testing", secret="testing").mkdir(BUCKET)
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
