"""Work in a thread that ends with a block."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.support.patience import PATIENCE_S

Running = tuple[threading.Thread, threading.Event]


@contextmanager
def in_thread(work: Callable[[threading.Event], object]) -> Iterator[Running]:
    """Call `work(stop)` in a thread. At the end of the block, set `stop` and wait until it returns."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield thread, stop
    finally:
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def repeating(call: Callable[[], object]) -> AbstractContextManager[Running]:
    """Call again and again in a thread until the block ends."""

    def repeat(stop: threading.Event) -> None:
        while not stop.is_set():
            call()

    return in_thread(repeat)
