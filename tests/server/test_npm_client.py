"""The `openai` package of npm against our server: `make npm-client` installs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from loopback import RunningServer

FOLDER = Path(__file__).resolve().parents[1] / "npm"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    NODE is None or not (FOLDER / "node_modules" / "openai").exists(), reason="needs node, and make npm-client"
)


def test_npm_client(server: RunningServer) -> None:
    command = [str(NODE), str(FOLDER / "client.mjs"), f"{server.url}/v1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["models"] == ["fake-model"]
    assert (found["chat"]["text"], found["chat"]["reason"]) == ("Hello, world!", "stop")
    assert "".join(found["chunks"]) == "Hello, world!" and found["helper"] == "Hello, world!"
    assert found["streamUsage"] == found["chat"]["usage"] and found["streamUsage"]["completion_tokens"] == 14
    assert found["completions"] == ["Hel", "Hel"]
    assert (found["response"]["text"], found["response"]["status"]) == ("Hello, world!", "completed")
    assert found["response"]["usage"]["output_tokens"] == 14
    assert found["events"][0] == "response.created" and found["events"][-1] == "response.completed"
    assert found["events"].count("response.output_text.delta") > 1
    assert found["responseHelper"] == found["retrieved"] == "Hello, world!" and found["previous"] is True
    assert found["embeddings"] == [pytest.approx([0.8, 0.6]), pytest.approx([0.7071, 0.7071], abs=1e-4)]
    assert found["errors"] == {
        "unknownField": ["BadRequestError", 400, "nonsense"],
        "wrongModel": ["NotFoundError", 404, "model"],
        "gone": ["NotFoundError", 404, "response_id"],
    }
    server.wait_until(lambda: not server.engine.live)
