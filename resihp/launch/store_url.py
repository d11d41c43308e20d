"""URLs of stores that no node of the job hosts, and addresses of servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import parse_qsl

_PORTS = {
    **dict.fromkeys(("redis", "rediss", "redis+cluster", "rediss+cluster", "unix"), 6379),
    **dict.fromkeys(("redis+sentinel", "rediss+sentinel"), 26379),
    **dict.fromkeys(("etcd", "etcds"), 2379),
}
ETCD_FILES = ("ca_certs", "cert_file", "key_file")
"""Options of an etcd URL: files for TLS, as urllib3 names them."""
_HIGHEST_PORT = 65535
_URL = re.compile(r"(?P<scheme>[^:]+)://(?:(?P<user>[^/?]*)@)?([^/?]*)(?P<path>[^?]*)\??(.*)", re.S)
_PATHS = {  # what may follow the servers, and how it is written
    "redis+sentinel": (r"/[^/]+(/\d*)?", "redis+sentinel://HOST:PORT,.../MASTER/DB"),
    "redis+cluster": (r"/?0?", "redis+cluster://HOST:PORT,..., without a database"),
    "etcd": (r"/?", "etcd://HOST:PORT,..., without a path"),
}


@dataclass(frozen=True)
class StoreUrl:
    """URL of a store: SCHEME://USER@SERVER,SERVER/PATH?OPTIONS.

    text     the whole of it
    scheme   redis, redis+sentinel, redis+cluster, etcd, or one of them over TLS; unix
    user     of the servers, NAME:PASSWORD in percent-encoding; "" for none
    servers  host and port of each; that of a socket is this machine
    path     from its slash on
    options  as in a query
    """

    text: str
    scheme: str
    user: str
    servers: tuple[tuple[str, int], ...]
    path: str
    options: str

    @property
    def is_tls(self) -> bool:
        """True for rediss, rediss+sentinel, rediss+cluster and etcds."""
        return self.scheme != _plain(self.scheme)

    @property
    def kind(self) -> str:
        """The scheme, without TLS."""
        return _plain(self.scheme)

    @property
    def shown(self) -> str:
        """The URL without user and options, which may hold passwords.

        >>> StoreUrl.parse("redis+cluster://me:secret@a,b:5?ssl_password=secret").shown
        'redis+cluster://a,b:5'
        """
        return re.sub(r"(?<=://)[^/]*@", "", self.text.partition("?")[0])

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Read a URL. Raises `ValueError` if it is no such.

        >>> url = StoreUrl.parse("rediss+sentinel://:secret@a,[::1]:5/main/2")
        >>> url.kind, url.is_tls, url.user, url.servers, url.path
        ('redis+sentinel', True, ':secret', (('a', 26379), ('::1', 5)), '/main/2')
        """
        found = _URL.fullmatch(text)
        if found is None or found["scheme"] not in _PORTS:
            raise ValueError(f"a store's URL begins with one of {', '.join(_PORTS)}")
        scheme, user, servers, path, options = found.groups()
        kind = _plain(scheme)
        pattern, form = _PATHS.get(kind, (".*", "redis://HOST:PORT/DB"))
        if not re.fullmatch(pattern, path) or ("," in servers and kind not in _PATHS):
            raise ValueError(f"the URL of the store must be {form}")
        if kind == "etcd" and (unknown := dict(parse_qsl(options)).keys() - set(ETCD_FILES)):
            raise ValueError(f"etcd has the options {', '.join(ETCD_FILES)}, not {unknown.pop()}")
        if kind not in _PATHS and servers[:1] in ("", ":"):
            servers = f"127.0.0.1{servers}"
        addresses = [parse_address(server, _PORTS[scheme]) for server in servers.split(",")]
        return cls(text, scheme, user or "", tuple(addresses), path, options)


def is_store_url(endpoint: str) -> bool:
    """Return whether an endpoint is the URL of a store, perhaps one with mistakes.

    >>> [is_store_url(each) for each in ("redis://store/0", "node-0:29500", "[::1]:29500")]
    [True, False, False]
    """
    return endpoint.partition("://")[0] in _PORTS and "://" in endpoint


def parse_address(text: str, default_port: int | str) -> tuple[str, int]:
    """Read an address; returns its host, without brackets, and its port.

    Raises `ValueError` for what can be neither a name nor an address.

    >>> parse_address("[::1]", 29500), parse_address("node-0:80", 29500)
    (('::1', 29500), ('node-0', 80))
    """
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):  # no port, perhaps after an address of IPv6 in brackets
        host, port = text, ""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_valid = bare and not set(bare) & set("[]/@,") and not any(map(str.isspace, bare))
    if is_valid and (":" in bare or bare != host):
        try:
            ip_address(bare)
        except ValueError:
            is_valid = False
    if not is_valid:
        forms = "HOST, HOST:PORT, [IPV6]:PORT or the URL of a store in Redis or etcd"
        raise ValueError(f"--rdzv-endpoint must be {forms}, not {text.rpartition('@')[2]!r}")
    port = port or str(default_port)
    if not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise ValueError(f"the store's port must be at most {_HIGHEST_PORT}, not {port}")
    return bare, int(port)


def _plain(scheme: str) -> str:
    return scheme.replace("rediss", "redis").replace("etcds", "etcd")
