"""A cluster's arguments: options reach every replica, or are refused by name; the YAML says the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cluster.cluster_settings import ClusterSettings, cluster_help
from quire.cluster.scaling import replicas_for
from quire.cluster.serve_control import APPLICATION, deploy_yaml
from quire.errors import ArgumentError

SECRET = b"sixteen bytes at least"
APART: dict[str, Any] = {"prefill_replicas": 1, "decode_replicas": 1}


def test_options_settings_and_the_file_reach_a_replica(tmp_path: Path) -> None:
    path = tmp_path / "quire.toml"
    path.write_text(
        '[model]\nkv_memory = "1GiB"\n[server]\nmax_waiting = 7\ntenant_secret = "sixteen bytes at least"\n'
    )
    settings = ClusterSettings.from_arguments(
        {
            "replicas": 3,
            "config": str(path),
            "engine": {"kv_memory": "2GiB", "storage": "paged:32"},
            "server": {"port": 9000, "served_model_name": "coder"},
        },
        b"not used: the file has one",
    )
    assert (settings.engine.kv_memory, settings.engine.block_size) == ("2GiB", 32)
    assert (settings.server.port, settings.server.served_model_name) == (9000, "coder")
    assert settings.server.limits.max_waiting == 7
    assert settings.server.tenant_secret == settings.engine.tenant_secret == b"sixteen bytes at least"
    assert settings.most_replicas == 3


def test_prefill_replicas_give_and_the_others_ask() -> None:
    settings = ClusterSettings.from_arguments(
        {"prefill_replicas": 2, "decode_replicas": 3, "engine": {"host_cache": "1GiB"}}
    )
    assert (settings.num_engines, settings.most_replicas) == (3, 5)
    engine, prefill = settings.config_of_engine(SECRET), settings.config_of_prefill(SECRET, "fd00::1")
    assert engine.asks_peers
    assert engine.peer_listen is None
    assert not prefill.asks_peers
    assert prefill.peer_listen == "[fd00::1]:0"
    assert engine.peer_secret == prefill.peer_secret != settings.config_of_engine(SECRET[1:]).peer_secret
    assert engine.peer_secret != SECRET  # the tenants'
    alone = ClusterSettings.from_arguments({"replicas": 2})
    assert alone.config_of_engine(SECRET) == alone.engine


def test_a_secret_is_given_where_the_file_has_none() -> None:
    assert ClusterSettings.from_arguments({}, SECRET).engine.tenant_secret == SECRET


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"replicas": 0}, "`replicas`"),
        ({"replicas": 1.5}, "`replicas`"),
        ({"replicas": True}, "`replicas`"),
        ({"min_replicas": 2}, "`min_replicas`"),
        ({"min_replicas": 3, "max_replicas": 2}, "`min_replicas`"),
        ({"replicas": 2, "max_replicas": 2}, "`replicas`"),
        ({"cpus": 0}, "`cpus`"),
        ({"cpus": "many"}, "`cpus`"),
        ({"gpus": -1}, "`gpus`"),
        ({"target_requests": float("nan")}, "`target_requests`"),
        ({"target_kv_use": 1.5}, "`target_kv_use`"),
        ({"digest_seconds": 0}, "`digest_seconds`"),
        ({"hang_seconds": 0}, "`hang_seconds`"),
        ({"prefill_replicas": -1}, "`prefill_replicas`"),
        ({"prefill_min_tokens": 0}, "`prefill_min_tokens`"),
        ({"decode_replicas": 2}, "`decode_replicas`"),
        ({"prefill_replicas": 1}, "`decode_replicas`"),
        ({**APART, "replicas": 2}, "`decode_replicas`"),
        ({**APART, "max_replicas": 2}, "`decode_replicas`"),
        (APART, "`host_cache`"),
        ({**APART, "engine": {"host_cache": "1GiB", "peers": "unix:/x"}}, "`peers`"),
        (
            {"engine": {"host_cache": "1GiB", "cache_write": "through", "peer_listen": "unix:/x"}},
            "`peer_listen`",
        ),
        ({"replica": 2}, "got replica"),
        ({"engine": {"kv_events": "tcp://127.0.0.1:5557"}}, "`kv_events`"),
        ({"engine": {"profile": True}}, "`profile`"),
        ({"engine": {"models": "x"}}, "got models"),
        ({"engine": {"tenant_secret": "sixteen bytes at least"}}, "got tenant_secret"),
        ({"server": {"max_waiting": 3}}, "got max_waiting"),
        ({"server": {"port": 99999}}, "port"),
        ({"server": {"host": "0.0.0.0"}}, "API keys"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        ClusterSettings.from_arguments(arguments)
    assert named in str(refused.value)


@pytest.mark.parametrize("name", ["max_connections", "max_header_seconds", "max_send_seconds"])
def test_limits_of_connections_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "quire.toml"
    path.write_text(f"[server]\n{name} = 3\n")
    with pytest.raises(ArgumentError, match=f"expected no {name} for replicas, got 3"):
        ClusterSettings.from_arguments({"config": str(path)})


def test_the_yaml_has_the_arguments_and_the_address() -> None:
    arguments = {"replicas": 2, "engine": {"model": "./m", "kv_memory": "1GiB"}, "server": {"port": 9000}}
    made = yaml.safe_load(deploy_yaml(arguments))
    assert made["http_options"] == {"host": "127.0.0.1", "port": 9000}
    (application,) = made["applications"]
    assert application == {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "quire.cluster.serve_app:build",
        "args": arguments,
    }


def test_the_command_prints_the_yaml_of_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.cli import main

    words = "cluster yaml ./m --max-replicas 4 --cpus 2 --kv-memory 1GiB --port 9000 --allowed-origins https://a.example"
    monkeypatch.setattr(sys, "argv", ["quire", *words.split(), "--no-trust-loopback"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    (application,) = yaml.safe_load(capsys.readouterr().out)["applications"]
    assert application["args"] == {
        "max_replicas": 4,
        "cpus": 2.0,
        "folder": os.getcwd(),
        "engine": {"kv_memory": "1GiB", "model": "./m"},
        "server": {"port": 9000, "trust_loopback": False, "allowed_origins": ["https://a.example"]},
    }


@pytest.mark.parametrize(
    "word", ["--replicas=0", "--replicas=two", "--kv-events=tcp://127.0.0.1:5557", "--cpus=no"]
)
def test_a_wrong_flag_is_one_line_and_status_2(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.cli import main

    monkeypatch.setattr(sys, "argv", ["quire", "cluster", "serve", word])
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert word.partition("=")[0] in printed
    assert printed.count("\n") == 1


def test_every_setting_is_documented() -> None:
    assert all(text.endswith(".") for text in cluster_help().values())
    assert len(cluster_help()) == 14


@pytest.mark.parametrize(
    ("num_requests", "kv_loads", "wanted"),
    [(0, [0.0, 0.0], 0), (16, [0.1], 2), (17, [], 2.125), (1, [1.25, 1.0], 2.25)],
)
def test_replicas_follow_requests_and_kv_memory(
    num_requests: float, kv_loads: list[float], wanted: float
) -> None:
    assert replicas_for(num_requests, 8, kv_loads) == wanted
