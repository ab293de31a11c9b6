"""Config files and flags: read whole, or refused in one line that names the place and never a key."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from quire.errors import ArgumentError
from quire.server.api_keys import ADMIN, ANYBODY, ApiKey
from quire.server.settings import ServerSettings, load_config

GOOD = """
[model]
kv_memory = "64MiB"
[server]
port = 9000
tenant_secret = "env:QUIRE_TEST_SECRET"
remote_secret = "env:QUIRE_TEST_REMOTE"
max_waiting = 7
requests_per_minute_per_address = 90
trusted_proxies = ["10.0.0.7"]
admin_key = "env:QUIRE_TEST_ADMIN"
[[tenants]]
name = "alice"
keys = ["clear-key", "sha256:%s"]
quota = "1MiB"
floor = 4096
priority = 2
max_requests = 3
requests_per_minute = 60
""" % hashlib.sha256(b"hashed-key").hexdigest()  # noqa: UP031


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "quire.toml"
    path.write_text(text)
    return str(path)


def test_a_file_and_flags_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TEST_ADMIN", "secret-admin")
    monkeypatch.setenv("QUIRE_TEST_SECRET", "sixteen bytes and more")
    monkeypatch.setenv("QUIRE_TEST_REMOTE", "sixteen bytes of the remote")
    settings, model = load_config(write(tmp_path, GOOD), {"port": 9001, "host": None})
    assert (settings.host, settings.port, settings.limits.max_waiting) == ("127.0.0.1", 9001, 7)
    assert settings.limits.requests_per_minute_per_address == 90
    assert settings.trusted_proxies == ("10.0.0.7",)
    assert settings.proxies.has("10.0.0.7")
    assert model == {"kv_memory": "64MiB"}
    for number, key in enumerate(("clear-key", "hashed-key"), 1):
        found = settings.keys.find(key)
        assert found is not None
        assert found.name == str(number)
        tenant = found.tenant
        assert (tenant.name, tenant.quota_bytes, tenant.floor_bytes, tenant.priority) == (
            "alice",
            1 << 20,
            4096,
            2,
        )
    admin = settings.keys.find("secret-admin")
    assert admin is not None
    assert admin == ApiKey(ADMIN, "1")
    assert settings.keys.find("clear-ke") is None
    assert "clear-key" not in repr(settings)
    assert "secret-admin" not in repr(settings)
    assert settings.tenant_secret == b"sixteen bytes and more"
    assert settings.remote_secret == b"sixteen bytes of the remote"
    assert "sixteen bytes" not in repr(settings)


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n one-key \nother-key\n")
    settings, _ = load_config(None, {"api_key_file": str(path), "host": "0.0.0.0"})
    assert settings.keys.find("one-key") == ApiKey(ANYBODY, "1")
    assert settings.keys.find("other-key") == ApiKey(ANYBODY, "2")
    assert not settings.keys.is_empty


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1", "prot"),
        ("[sever]\nport = 1", "sever"),
        ("[server]\nport = '1'", "a port of 0 to 65535, got '1'"),
        ("[server]\nport = 70000", "65535"),
        ("[server]\nmax_n = 0", "max_n"),
        ("[server]\nmax_n = true", "bool"),
        ("[server]\ntenant_secret = 'short'", "16 bytes"),
        ("[server]\ntenant_secret = 'env:QUIRE_NOT_SET'", "QUIRE_NOT_SET"),
        ("[server]\nremote_secret = 'short'", "in `remote_secret`"),
        ("[server]\nremote_secret = 'env:QUIRE_NOT_SET'", "remote_secret in"),
        ("[[tenants]]\nname = 'a'", "keys"),
        ("[[tenants]]\nname = 'a'\nkeys = ['x']\nquota = 'much'", "quota"),
        ("[[tenants]]\nname = 'a'\nkeys = ['x']\nqouta = 1", "qouta"),
        ("[[tenants]]\nname = 'a'\nkeys = ['sha256:xyz']", "hexadecimal"),
        ("[[tenants]]\nname = 'a'\nkeys = ['env:QUIRE_NOT_SET']", "QUIRE_NOT_SET"),
        ("[[tenants]]\nname = 'a'\nkeys = ['']", "empty"),
        ("[[tenants]]\nname = 'admin'\nkeys = ['x']", "other names"),
        ("[[tenants]]\nname = 'a'\nkeys = ['x']\n[[tenants]]\nname = 'b'\nkeys = ['x']", "two tenants"),
        ("[[tenants]]\nname = 'a'\nkeys = ['x']\n[[tenants]]\nname = 'a'\nkeys = ['y']", "once"),
        ("[server]\nhost = '0.0.0.0'", "API keys"),
        ("nonsense", "TOML"),
    ],
)
def test_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        load_config(write(tmp_path, text), {})
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize("path", ["/nonexistent/file", "/"])
def test_unreadable(path: str) -> None:
    with pytest.raises(ArgumentError):
        load_config(path, {})
    with pytest.raises(ArgumentError):
        load_config(None, {"api_key_file": path})


def test_an_address_as_a_url_has_it() -> None:
    settings, _ = load_config(None, {"host": "[::1]"})
    assert (settings.host, settings.is_loopback) == ("::1", True)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("127.9.9.9", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("x.y", False),
    ],
)
def test_loopback(host: str, is_loopback: bool) -> None:
    assert ServerSettings(host=host, insecure=True).is_loopback == is_loopback
