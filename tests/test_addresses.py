"""Addresses, and the header Host by which a server on loopback knows pages of other sites."""

from sam3_node.addresses import is_loopback_header, read_host_header
from tests.support.tables import each_row

HOSTS = {
    "127.0.0.1": "127.0.0.1",
    "127.0.0.1:8460": "127.0.0.1",
    "localhost:65535": "localhost",
    "LocalHost:8460": "localhost",
    "[::1]": "::1",
    "[::1]:8460": "::1",
    "[::FFFF:127.0.0.1]:80": "::ffff:127.0.0.1",
    "evil.example:80": "evil.example",
}
MALFORMED = (
    "",
    ":80",
    "127.0.0.1:",
    "127.0.0.1:80@x",
    "x@127.0.0.1:80",
    "x:y@127.0.0.1:80",
    "127.0.0.1:80:80",
    "127.0.0.1:65536",
    "127.0.0.1:+80",
    "127.0.0.1:٨٠",
    "127.0.0.1 :80",
    " 127.0.0.1:80",
    "127.0.0.1:80 ",
    "127.0.0.1:80\n",
    "127.0.0.1:80, evil.example",
    "127.0.0.1/x",
    "127.0.0.1\\x:80",
    "127.0.0.1#x:80",
    "http://127.0.0.1:80",
    "::1",
    "::1:8460",
    "[::1",
    "[",
    "[]:80",
    "[::1]x:80",
    "[::1]80",
    "x[::1]:80",
    "[[::1]]:80",
    "[127.0.0.1]:80",
    "[localhost]:80",
    "[::1%25lo]:80",
    "127.0.0.1\0:80",
    "löcalhost:80",
)
OTHERS = (
    "evil.example",
    "127.0.0.1.evil.example:80",
    "localhost.evil.example",
    "localhost.",
    "127.0.0.1.",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0.0.0.0",
    "[::]",
    "[::2]:80",
    "[:]:80",
    "192.168.0.1",
)


@each_row("text", HOSTS)
def test_a_host_is_read_without_brackets_and_port(text: str) -> None:
    assert read_host_header(text) == HOSTS[text]


@each_row("text", MALFORMED)
def test_anything_beside_host_and_port_is_refused(text: str) -> None:
    assert read_host_header(text) is None
    assert not is_loopback_header([text])


@each_row("text", OTHERS)
def test_another_name_is_not_this_machine(text: str) -> None:
    assert not is_loopback_header([text])


def test_one_header_names_the_host() -> None:
    assert is_loopback_header(["127.0.0.1:80"])
    assert not is_loopback_header([])
    assert not is_loopback_header(["127.0.0.1:80", "127.0.0.1:80"])
