"""Two coding agents from npm, of exact versions: installs each, configures it for a test server, and runs a turn.

They live in a folder of their own and see no other home, no other tools and no network but the server: their own
settings turn off all other downloads (updates, lists of models, telemetry, language servers).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

OPENCODE = "opencode-ai@1.18.33"
QWEN_CODE = "@qwen-code/qwen-code@0.24.4"
NODE = "22.23.3"  # for qwen-code, where the machine's own is older than it wants
CONTEXT, OUTPUT = 131072, 1024  # tokens that an agent is told of: of a sequence at most, of an answer at most
TURN_LIMIT_S = 120
TOOL_SERVER = Path(__file__).with_name("agents_tools.py")

__all__ = ["AGENTS", "CONTEXT", "OUTPUT", "Agent", "install", "lacking"]


def lacking() -> str | None:
    """Why the agents cannot be installed here; None where they can."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    return f"expected node and npm in PATH, found no {' and no '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Modules:
    """Installed packages. node: the folder of the one that runs them; ripgrep: of that of qwen-code;
    opencode would fetch its own."""

    folder: Path
    node: Path
    ripgrep: Path


def install(folder: Path) -> Modules:
    """The packages, fetched from npm unless `folder` has them."""
    asked = ["node", "-p", "[process.versions.node, process.platform, process.arch].join(' ')"]
    version, platform, arch = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    packages = [OPENCODE, QWEN_CODE]
    is_old = int(version.partition(".")[0]) < int(NODE.partition(".")[0])
    if is_old:
        packages.append(f"node-{platform}-{arch}@{NODE}")
    folder.mkdir(parents=True, exist_ok=True)
    modules, done = folder / "node_modules", folder / "installed.json"
    ripgrep = modules / "@qwen-code" / "qwen-code" / "vendor" / "ripgrep" / f"{arch}-{platform}" / "rg"
    if not done.exists() or json.loads(done.read_text()) != packages:
        done.unlink(missing_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        fetch = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *packages]
        subprocess.run(fetch, check=True, cwd=folder, stdout=sys.stderr)
        # Puts the binary of this processor in its place; npm may be set up to leave that out.
        subprocess.run(
            ["node", "postinstall.mjs"], check=True, cwd=modules / "opencode-ai", stdout=sys.stderr
        )
        ripgrep.chmod(0o755)  # packed without
        done.write_text(json.dumps(packages))
    node = modules / f"node-{platform}-{arch}" / "bin" / "node" if is_old else shutil.which("node")
    assert node is not None
    return Modules(modules, Path(node).parent, ripgrep.parent)


class Session(AbstractContextManager["Session"]):
    """One conversation with an agent, in a folder of its own; its context ends whatever of it still runs."""

    @abstractmethod
    def ask(self, text: str) -> None:
        """A turn, to its end. *raises:* RuntimeError: the agent failed, or did not come to an end."""


@dataclass
class Agent(ABC):
    """One agent, set up in a home of its own for the server at `url`, the address of its API."""

    modules: Modules
    home: Path
    url: str
    model: str
    context: int = CONTEXT
    output: int = OUTPUT
    turn_limit_s: float = TURN_LIMIT_S

    name: ClassVar[str]
    package: ClassVar[str]
    keeps_prompts: ClassVar[bool] = True  # whether a turn's prompt goes on with the one before
    tools: ClassVar[dict[str, str]]  # what each of the script's tools is called here
    arguments: ClassVar[dict[str, str]]  # and the arguments whose names differ

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Writes the agent's settings to its home."""

    @abstractmethod
    def session(self, folder: Path) -> Session: ...

    @classmethod
    def call(cls, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A call of one of the script's tools, in this agent's names."""
        named = {cls.arguments.get(name, name): value for name, value in arguments.items()}
        return {"name": cls.tools[tool], "arguments": named}

    def variables(self) -> dict[str, str]:
        """Those of the environment that its processes get, and no others."""
        path = os.pathsep.join([str(self.modules.node), str(self.modules.ripgrep), os.environ["PATH"]])
        return {"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8"}


class TurnByTurn(Session):
    """A process a turn, as in a shell. command: of a text and the session's id, None for a new one."""

    def __init__(
        self,
        agent: Agent,
        folder: Path,
        command: Callable[[str, str | None], list[Any]],
        id_of: Callable[[dict[str, Any]], str],
    ) -> None:
        self._agent = agent
        self._folder = folder
        self._command = command
        self._id_of = id_of  # from the first event of the output
        self._id: str | None = None

    def ask(self, text: str) -> None:
        try:
            done = subprocess.run(
                [*map(str, self._command(text, self._id))],
                cwd=self._folder,
                env=self._agent.variables(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._agent.turn_limit_s,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"expected the turn's end within {self._agent.turn_limit_s} s") from error
        if done.returncode or not done.stdout:
            raise RuntimeError(f"exit status {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
        self._id = self._id or self._id_of(json.loads(done.stdout.splitlines()[0]))

    def __exit__(self, *error: object) -> None:
        """No process outlives its turn."""


class InOneProcess(Session):
    """A process a session, as behind an editor: qwen-code's stream-json on both sides."""

    def __init__(self, agent: Agent, folder: Path, command: list[Any]) -> None:
        self._limit_s = agent.turn_limit_s
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the session
        self._process = subprocess.Popen(
            [*map(str, command)],
            cwd=folder,
            env=agent.variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, text: str) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(self._limit_s, self._process.kill)
        timer.start()
        try:
            stdin.write(json.dumps({"type": "user", "message": {"role": "user", "content": text}}) + "\n")
            stdin.flush()
            for line in stdout:
                event = json.loads(line)
                if event["type"] == "result":
                    if event["is_error"]:
                        raise RuntimeError(f"expected a result, got {event}")
                    return
        finally:
            timer.cancel()
        self._errors.seek(0)
        raise RuntimeError(f"expected the turn's end within {self._limit_s} s: {self._errors.read()[-1500:]}")

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class OpenCode(Agent):
    name = "opencode"
    package = OPENCODE
    tools: ClassVar = {
        "shell": "bash",
        "write": "write",
        "read": "read",
        "edit": "edit",
        "nothing": "quire_nothing",
        "echo": "quire_echo",
    }
    arguments: ClassVar = {"path": "filePath", "old": "oldString", "new": "newString"}
    provider: ClassVar[str] = "@ai-sdk/openai-compatible"

    def set_up(self) -> None:
        known = {
            "name": self.model,
            "tool_call": True,
            "limit": {"context": self.context, "output": self.output},
        }
        provider = {
            "npm": self.provider,
            "name": "Quire",
            "options": {"baseURL": self.url, "apiKey": "none"},
            "models": {self.model: known},
        }
        settings = {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "enabled_providers": ["quire"],
            "provider": {"quire": provider},
            "model": f"quire/{self.model}",
            "mcp": {"quire": {"type": "local", "command": [sys.executable, str(TOOL_SERVER)]}},
        }
        (self.home / "opencode.json").write_text(json.dumps(settings))

    def variables(self) -> dict[str, str]:
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return {
            **super().variables(),
            "OPENCODE_CONFIG": str(self.home / "opencode.json"),
            "npm_config_offline": "true",  # it looks for @opencode-ai/plugin at npm otherwise
            **{f"OPENCODE_DISABLE_{name}": "1" for name in off},
        }

    def session(self, folder: Path) -> Session:
        def command(text: str, which: str | None) -> list[Any]:
            going_on = [] if which is None else ["--session", which]
            one = self.modules.folder / ".bin" / "opencode"
            return [one, "run", "--format", "json", "--auto", *going_on, text]

        return TurnByTurn(self, folder, command, lambda event: event["sessionID"])


class MessagesOpenCode(OpenCode):
    """The same by Anthropic's API."""

    name = "opencode, messages"
    provider: ClassVar[str] = "@ai-sdk/anthropic"


class QwenCode(Agent):
    name = "qwen-code"
    package = QWEN_CODE
    tools: ClassVar = {
        "shell": "run_shell_command",
        "write": "write_file",
        "read": "read_file",
        "edit": "edit",
        "nothing": "mcp__quire__nothing",
        "echo": "mcp__quire__echo",
    }
    arguments: ClassVar = {"path": "file_path", "old": "old_string", "new": "new_string"}
    more: ClassVar[dict[str, Any]] = {}  # settings

    def set_up(self) -> None:
        server = {
            "command": sys.executable,
            "args": [str(TOOL_SERVER)],
            "trust": True,
            "alwaysLoadTools": True,
        }
        settings = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": "openai"}},
            # These ask the model more, by prompts of their own, after each turn.
            "memory": {
                "enableManagedAutoMemory": False,
                "enableManagedAutoDream": False,
                "enableAutoSkill": False,
            },
            "mcpServers": {"quire": server},
            **self.more,
        }
        (self.home / ".qwen").mkdir()
        (self.home / ".qwen" / "settings.json").write_text(json.dumps(settings))

    def variables(self) -> dict[str, str]:
        return {
            **super().variables(),
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": self.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(self.output),
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        }

    @property
    def command(self) -> list[Any]:
        return [self.modules.folder / ".bin" / "qwen", "--yolo", "--output-format", "stream-json"]

    def session(self, folder: Path) -> Session:
        return InOneProcess(self, folder, [*self.command, "--input-format", "stream-json"])


class ResumedQwenCode(QwenCode):
    """A process a turn. What it says of the date with a question is not there when the session is resumed, so that all
    behind the first question is another prompt; and so were the list of the folder's files, if it were told."""

    name = "qwen-code, resumed"
    keeps_prompts = False
    more: ClassVar = {"model": {"skipStartupContext": True}}

    def session(self, folder: Path) -> Session:
        def command(text: str, which: str | None) -> list[Any]:
            going_on = [] if which is None else ["--resume", which]
            return [*self.command, *going_on, "--prompt", text]

        return TurnByTurn(self, folder, command, lambda event: event["session_id"])


AGENTS: list[type[Agent]] = [OpenCode, MessagesOpenCode, QwenCode, ResumedQwenCode]
