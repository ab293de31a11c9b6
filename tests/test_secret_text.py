"""Keys are read from files of any editor, or refused at once; no message shows them."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from quire.errors import ArgumentError
from quire.secret_text import check_key, key_lines, key_of_environment, resolve_secret
from quire.server.api_keys import ANYBODY, ApiKey
from quire.server.settings import load_config

KEYS = ["key-one", "key two"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ],
)
def test_whatever_wrote_the_file(tmp_path: Path, end: str, last: bool, mark: bytes, encoding: str) -> None:
    lines = ["# the café's", "", "  key-one\t", "\u00a0key two\u200b ", "   # no key"]
    path = tmp_path / "keys"
    path.write_bytes(mark + (end.join(lines) + end * last).encode(encoding))
    assert key_lines(path) == KEYS
    settings, _ = load_config(None, {"api_key_file": str(path)})
    assert settings.keys.find("key-one") == ApiKey(ANYBODY, "1")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"caf\xe9-key\n", "byte 3 is not UTF-8"),
        ("caf\u00e9-key\n".encode(), "U\\+00E9 - in line 1"),
        ("key\n".encode("utf-16-le"), "U\\+0000"),  # without its mark
        ("a\nk\ufeffey\n".encode(), "U\\+FEFF - in line 2"),
        (b"key\x1b\n", "U\\+001B"),
        (codecs.BOM_UTF16_LE + b"k", "byte 0 is not UTF-16"),
        (b"# none\r\n\r\n", "at least one"),
        (codecs.BOM_UTF8, "at least one"),
    ],
)
def test_what_no_client_could_send(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(ArgumentError, match=said) as caught:
        key_lines(path)
    assert "key" not in str(caught.value).lower().replace("api key", "").replace("a key", "").replace(
        str(path), ""
    )


@pytest.mark.parametrize("around", ["", "\r\n", "\n", " ", "\ufeff"])
def test_of_the_environment(monkeypatch: pytest.MonkeyPatch, around: str) -> None:
    monkeypatch.setenv("QUIRE_TEST_KEY", f"{around}a-key{around}")
    assert resolve_secret("env:QUIRE_TEST_KEY", "a test") == "a-key"
    assert key_of_environment("QUIRE_TEST_KEY") == "a-key"
    monkeypatch.setenv("QUIRE_TEST_KEY", around)
    assert key_of_environment("QUIRE_TEST_KEY") is None
    with pytest.raises(ArgumentError, match="QUIRE_TEST_KEY, got none - in a test"):
        resolve_secret("env:QUIRE_TEST_KEY", "a test")


def test_of_an_environment_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TEST_KEY", "a-key\udcff")
    with pytest.raises(ArgumentError, match="text in the environment variable QUIRE_TEST_KEY"):
        resolve_secret("env:QUIRE_TEST_KEY", "a test")
    with pytest.raises(ArgumentError, match="U\\+DCFF - in the environment variable QUIRE_TEST_KEY"):
        key_of_environment("QUIRE_TEST_KEY")


def test_in_a_servers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TEST_KEY", "env-key\r\n")
    monkeypatch.setenv("QUIRE_TEST_SECRET", "sixteen bytes and more\r\n")
    text = (
        '[server]\r\ntenant_secret = "env:QUIRE_TEST_SECRET"\r\n[[tenants]]\r\nname = "caf\u00e9"\r\n'
        'keys = ["env:QUIRE_TEST_KEY", " clear-key\u00a0"]\r\n'
    )
    path = tmp_path / "quire.toml"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_bytes(text.encode(encoding))
        settings, _ = load_config(str(path), {})
        for key in ("env-key", "clear-key"):
            found = settings.keys.find(key)
            assert found is not None
            assert found.tenant.name == "caf\u00e9"
        assert settings.tenant_secret == b"sixteen bytes and more"
    with pytest.raises(ArgumentError, match="U\\+00E9"):
        check_key("cl\u00e9", "a test")


def test_files_that_everybody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TEST_KEY", "env-key")
    keys, config = tmp_path / "keys", tmp_path / "quire.toml"
    keys.write_text("a-key\n")
    tenant = '[[tenants]]\nname = "a"\nkeys = ["env:QUIRE_TEST_KEY"]\n'
    url = '[model]\nremote_cache = "redis://:pass@host"\n'

    def warnings(text: str, mode: int) -> list[str]:
        config.write_text(text)
        for path in (keys, config):
            path.chmod(mode)
        return list(load_config(str(config), {"api_key_file": str(keys)})[0].warnings)

    assert warnings(tenant + url, 0o640) == []
    (one,) = warnings(tenant, 0o644)  # nothing to hide in the config
    assert f"chmod o-r {keys}" in one
    for secret in (url, '[server]\nadmin_key = "clear"\n', tenant.replace("env:QUIRE_TEST_KEY", "clear")):
        first, second = warnings(secret, 0o644)
        assert str(config) in first
        assert str(keys) in second
        assert "\n" not in first + second
